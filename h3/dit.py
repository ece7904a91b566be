"""The joint video and audio diffusion transformer (DiT spec, section 4).

One sequence of text, condition, audio and video rows goes through the blocks under full attention. Every block modulates its rows
by clean-time and modality (AdaLN). What depends on the prompt alone is computed once, by ``DiT.prepare``; ``DiT.forward`` is one
evaluation. Parameter names are those of the Comfy-Org single files.

Residuals, rotations and modulations are made in place: at published sizes a copy of the sequence takes 0.4 GB, q, k and v 1.6 GB
and the feed-forward activation 2.1 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import log
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from .attention import attention
from .config import DiTConfig
from .packing import NUM_TAGS, Kind, PackedLayout

TIME_ROWS = 8
SINUSOID_PERIOD = 10000.0
FP32_ISLANDS = (
    "video_patch_proj.",
    "audio_patch_proj.",
    "time_embedder.",
    "rope.",
    "final_layer.video_out.",
    "final_layer.audio_out.",
)


class Rotary(NamedTuple):
    """Cosine and sine of every row's angles: [S, 1, 3 * rope_freq_dim] each, in the compute dtype."""

    cos: Tensor
    sin: Tensor


class ModulatedRows(NamedTuple):
    """Rows that share a modulation: those of time index ``time`` and modality ``tag``."""

    rows: slice
    time: int
    tag: int


class Modulation(NamedTuple):
    """Tables [M, tags, h] of one AdaLN: y = norm(x) * (1 + scale) + shift; x + gate * branch(y)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Request(NamedTuple):
    """What stays the same in every step: refined text [L, h], rope tables and the layout of the sequence."""

    text: Tensor
    rotary: Rotary
    layout: PackedLayout


def in_groups_of_eight(project: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """``project`` applied to [M, k] timestep rows, always eight at a time; the last group is filled up with zeros.

    A matrix product of one row, of two and of many take different kernels and give different bits. Everything that depends on the
    timestep alone goes through here, so that a row has the same bits whether it is computed inside a step, beside other rows or
    ahead of time for the whole schedule.
    """
    num_rows = rows.shape[0]
    groups = pad(rows, (0, 0, 0, -num_rows % TIME_ROWS)).split(TIME_ROWS)
    return torch.cat([project(group) for group in groups])[:num_rows]


def timestep_sinusoid(times: Tensor, width: int) -> Tensor:
    """[M] clean-times in [0, 1] to [M, width] fp32, cosines first."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * (-log(SINUSOID_PERIOD) / half))
    angles = times[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotate_(x: Tensor, rotary: Rotary) -> None:
    """Turn channels i and i + R/2 of rows [S, H, D] by angle i, in place; channels from R on pass through (spec, section 4.3)."""
    half = rotary.cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * rotary.cos - second * rotary.sin
    second.mul_(rotary.cos).addcmul_(first, rotary.sin)
    first.copy_(turned)


def modulate_(x: Tensor, modulation: Modulation, runs: Iterable[ModulatedRows]) -> Tensor:
    """x * (1 + scale) + shift, run by run in place."""
    for rows, time, tag in runs:
        x[rows].mul_(1 + modulation.scale[time, tag]).add_(modulation.shift[time, tag])
    return x


def add_gated_(x: Tensor, branch: Tensor, modulation: Modulation, runs: Iterable[ModulatedRows]) -> Tensor:
    """x + gate * branch, run by run in place."""
    for rows, time, tag in runs:
        x[rows].addcmul_(branch[rows], modulation.gate[time, tag])
    return x


class RotaryEmbedding(nn.Module):
    """Angles of the three position axes, side by side; the frequencies stand in the file."""

    inv_freq: Tensor

    def __init__(self, num_frequencies: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(num_frequencies))

    def forward(self, position_ids: Tensor) -> Tensor:
        """[S, 3] float64 to [S, 3 * num_frequencies] fp32."""
        positions = position_ids.to(self.inv_freq.device, torch.float32)
        return (positions[:, :, None] * self.inv_freq).flatten(1)


class TimeEmbedder(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.proj_in = nn.Linear(config.freq_dim, config.time_embed_hidden_dim)
        self.proj_out = nn.Linear(config.time_embed_hidden_dim, config.time_embed_dim)

    def forward(self, sinusoid: Tensor) -> Tensor:
        return self.proj_out(silu(self.proj_in(sinusoid)))


class AdaLNProjection(nn.Module):
    """Time features [M, k] to modulation vectors [M, num_vectors, h]."""

    def __init__(self, width: int, num_vectors: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.linear = nn.Linear(width, num_vectors * hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        vectors = in_groups_of_eight(self.linear, features.to(self.linear.weight.dtype))
        return vectors.unflatten(1, (-1, self.hidden_size))


class Attention(nn.Module):
    """Full attention with normalised and, in the main blocks, rotated queries and keys (spec, section 4.3)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.inner_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.attention_head_dim, eps=config.qk_norm_eps)
        self.k_norm = nn.RMSNorm(config.attention_head_dim, eps=config.qk_norm_eps)
        self.out_proj = nn.Linear(config.inner_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(1, (3, -1, self.head_dim)).unbind(1)  # [S, H, D] each, views of one buffer
        for heads, norm in ((q, self.q_norm), (k, self.k_norm)):
            heads.copy_(norm(heads))
            if rotary is not None:
                rotate_(heads, rotary)
        mixed = attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))  # [H, S, D]
        return self.out_proj(mixed.transpose(0, 1).flatten(1))


class GatedAttention(Attention):
    """As sparse students store it: with the gate of the branch that dense attention lacks (spec, section 7)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.to_gate_compress = nn.Linear(config.hidden_size, config.inner_dim, bias=False)


class MLP(nn.Module):
    """SwiGLU; the rows of fc1 are [gate; value] (spec, section 4.4)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.ffn_dim, bias=False)
        self.fc2 = nn.Linear(config.ffn_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(silu(gate, inplace=True).mul_(value))


class RefinerBlock(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokenRefiner(nn.Module):
    """Text rows among themselves, without positions or timestep (spec, section 4.2)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RefinerBlock(config) for _ in range(config.num_refiner_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.final_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


class Block(nn.Module):
    """Attention and feed-forward, each modulated by clean-time and modality (spec, section 4.6)."""

    def __init__(self, config: DiTConfig, adaln_width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = GatedAttention(config) if config.has_gate else Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.adaln_proj = AdaLNProjection(adaln_width, NUM_TAGS * 6, config.hidden_size)

    def forward(self, x: Tensor, rotary: Rotary, features: Tensor, runs: Iterable[ModulatedRows]) -> Tensor:
        """Rows x [S, h], overwritten with the result. ``features`` [M, k] belong to the distinct clean-times of the step."""
        vectors = self.adaln_proj(features).to(x.dtype).unflatten(1, (NUM_TAGS, 6)).unbind(2)
        msa, mlp = Modulation(*vectors[:3]), Modulation(*vectors[3:])
        x = add_gated_(x, self.attn(modulate_(self.norm1(x), msa, runs), rotary), msa, runs)
        return add_gated_(x, self.mlp(modulate_(self.norm2(x), mlp, runs)), mlp, runs)


class FinalLayer(nn.Module):
    """Modulation by clean-time alone, then one fp32 head a stream (spec, section 4.7)."""

    def __init__(self, config: DiTConfig, adaln_width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.final_norm_eps)
        self.adaln_proj = AdaLNProjection(adaln_width, 2, config.hidden_size)
        self.video_out = nn.Linear(config.hidden_size, config.video_features)
        self.audio_out = nn.Linear(config.hidden_size, config.audio_in_channels)

    def forward(self, video: Tensor, audio: Tensor, features: Tensor, video_time: int, audio_time: int) -> tuple[Tensor, Tensor]:
        """Target rows [Nv, h] and [Na, h] with the index of their clean-time to velocities [Nv, 4*C] and [Na, C], fp32."""
        shift, scale = self.adaln_proj(features).unbind(1)
        video = self.norm(video) * (1 + scale[video_time]) + shift[video_time]
        audio = self.norm(audio) * (1 + scale[audio_time]) + shift[audio_time]
        return self.video_out(video.float()), self.audio_out(audio.float())


class DiT(nn.Module):
    """The base form. Batch 1; text, video and audio are rows of one sequence (see ``packing``).

    The compute dtype is that of ``condition_proj``; patch projections, time embedder, output heads and rope stay fp32.
    """

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "text": ("condition_proj", "token_refiner", "rope"),
        "denoiser": ("video_patch_proj", "audio_patch_proj", "time_embedder", "adaln_", "blocks", "final_layer"),
    }
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {"prepare": ("text",), "forward": ("denoiser",)}
    REPEATED: ClassVar[tuple[str, ...]] = ("token_refiner.blocks", "blocks")
    FOLDABLE: ClassVar[str] = "adaln_proj"  # sub-modules that depend on the clean-time alone: functions of ``fold_inputs``
    FOLD_INPUTS: ClassVar[tuple[str, ...]] = ("time_embedder", "adaln_basis", "adaln_t_table")  # what that computes with

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.video_patch_proj = nn.Linear(config.video_features, config.hidden_size)
        self.audio_patch_proj = nn.Linear(config.audio_in_channels, config.hidden_size)
        self.condition_proj = nn.Linear(config.text_dim, config.hidden_size)
        self.token_refiner = TokenRefiner(config)
        self.rope = RotaryEmbedding(config.rope_freq_dim)
        width = self.build_time_features(config)
        self.blocks = nn.ModuleList(Block(config, width) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(config, width)

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        return torch.float32 if name.startswith(FP32_ISLANDS) else compute

    def build_time_features(self, config: DiTConfig) -> int:
        """Make the modules behind ``time_features``; returns the width that the AdaLN projections take."""
        self.time_embedder = TimeEmbedder(config)
        return config.time_embed_dim

    def time_features(self, times: Tensor) -> Tensor:
        """Clean-times [M] to what the AdaLN projections take, [M, k] fp32: SiLU included, cast only after it."""
        sinusoid = timestep_sinusoid(times, self.config.freq_dim).to(self.time_embedder.proj_in.weight.device)
        return in_groups_of_eight(lambda rows: silu(self.time_embedder(rows)), sinusoid)

    def fold_inputs(self, times: Tensor) -> Tensor:
        """Features of clean-times [K] fp32 as ``forward`` gives them to every FOLDABLE sub-module, bit for bit."""
        return self.time_features(times)

    def prepare(self, states: Tensor, layout: PackedLayout) -> Request:
        """Everything that no step changes, from text states [1, L, text_dim] of any float dtype.

        Raises ValueError if the states are those of another text encoder, or not as many as the layout has text rows, and for a
        student of sparse attention: run dense, it makes noise.
        """
        if self.config.has_gate:
            raise ValueError(
                "This diffusion model is a student of sparse attention (FastH3), which is not supported yet and without which "
                "its results are noise; use a dense student or the base model."
            )
        expected = (1, layout.text.num_rows, self.config.text_dim)
        if states.shape != expected:
            raise ValueError(
                f"The text states have shape {list(states.shape)} where the diffusion model needs {list(expected)}; "
                "encode the prompt with the text encoder that belongs to it."
            )
        weight = self.condition_proj.weight
        text = self.token_refiner(self.condition_proj(states[0].to(weight.device, weight.dtype)))
        angles = self.rope(layout.position_ids)[:, None]
        return Request(text, Rotary(angles.cos().to(text.dtype), angles.sin().to(text.dtype)), layout)

    def embed(self, video: Tensor, audio: Tensor, request: Request) -> Tensor:
        """Rows of the three kinds put into their segments: [S, h] in the compute dtype."""
        layout = request.layout
        x = request.text.new_empty(layout.num_rows, self.config.hidden_size)
        x[layout.text.rows] = request.text
        for segments, rows in ((layout.visual, self.video_patch_proj(video)), (layout.sound, self.audio_patch_proj(audio))):
            for segment, piece in zip(segments, rows.split([s.num_rows for s in segments]), strict=True):
                x[segment.rows] = piece
        return x

    def forward(
        self, video: Tensor, audio: Tensor, request: Request, video_time: float, audio_time: float
    ) -> tuple[Tensor, Tensor]:
        """One evaluation: data-ward velocities (x0 - noise) of the target rows, fp32, as rows [Nv, 4*C] and [Na, C].

        ``video`` and ``audio`` are fp32 rows on the model's device: conditions first, in packed order, then the target.
        Times are clean-times t = 1 - sigma of the targets.
        """
        layout = request.layout
        times, time_of = layout.row_times(video_time, audio_time)
        runs = [ModulatedRows(run.rows, time_of[run.kind], run.tag) for run in layout.runs]
        features = self.time_features(times)
        x = self.embed(video, audio, request)
        for block in self.blocks:
            x = block(x, request.rotary, features, runs)
        target_video, target_audio = x[layout.visual[-1].rows], x[layout.sound[-1].rows]
        return self.final_layer(target_video, target_audio, features, time_of[Kind.VIDEO], time_of[Kind.AUDIO])


class RankDiT(DiT):
    """AdaLN projections of reduced rank behind a common basis (spec, section 4.9); bf16 is too coarse for them, fp16 is not."""

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        if _is_adaln(name) and compute is not torch.float32:
            return torch.float16
        return DiT.storage_dtype(name, compute)

    def build_time_features(self, config: DiTConfig) -> int:
        self.adaln_basis = nn.Linear(super().build_time_features(config), config.adaln_rank, bias=False)
        return config.adaln_rank

    def time_features(self, times: Tensor) -> Tensor:
        return in_groups_of_eight(self.adaln_basis, super().time_features(times).to(self.adaln_basis.weight.dtype))


class CurveDiT(DiT):
    """A table over clean-time in place of the time embedder (spec, section 4.8): fp32, the SiLU is already in it."""

    adaln_t_table: Tensor

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        return torch.float32 if _is_adaln(name) else DiT.storage_dtype(name, compute)

    def build_time_features(self, config: DiTConfig) -> int:
        self.register_buffer("adaln_t_table", torch.empty(config.adaln_curve))
        return config.adaln_curve[1]

    def time_features(self, times: Tensor) -> Tensor:
        last = self.adaln_t_table.shape[0] - 1
        places = times.to(self.adaln_t_table.device).clamp(0, 1) * last
        lower = places.long().clamp(max=last - 1)
        return torch.lerp(self.adaln_t_table[lower], self.adaln_t_table[lower + 1], (places - lower)[:, None])


def dit_class(config: DiTConfig) -> type[DiT]:
    """The variant that a configuration describes."""
    if config.adaln_curve:
        return CurveDiT
    return RankDiT if config.adaln_rank else DiT


def _is_adaln(name: str) -> bool:
    return "adaln_" in name
