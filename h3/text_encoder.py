"""The prompt's encoder: the first layers of Qwen3-VL's language model, and the vision tower that feeds it.

Text encoder spec, section 3. What comes out is the residual stream after the last layer that is kept: no final norm, no head.
One sequence at a time, without padding, so causality is all the masking there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .attention import attention
from .config import TextEncoderConfig
from .rotary import inverse_frequencies, rotated
from .vision import NO_TOWER, Grid, VisionFeatures, VisionTower, blank_embedding

OnLayer = Callable[[int, int], None]


def mrope_axes(sections: tuple[int, int, int], num_frequencies: int) -> Tensor:
    """[num_frequencies] int64: the axis (0 = t, 1 = h, 2 = w) whose position turns each frequency: t h w t h w ... t t."""
    axes = torch.zeros(num_frequencies, dtype=torch.int64, device="cpu")
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rope_angles(position_ids: Tensor, config: TextEncoderConfig) -> Tensor:
    """[3, L] positions -> [L, head_dim / 2] angles, fp32 on the CPU (text encoder spec, section 3)."""
    axes = mrope_axes(config.mrope_section, config.head_dim // 2)
    return position_ids.cpu()[axes].T.float() * inverse_frequencies(config.head_dim, config.rope_theta)


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, rounded to the dtype of x, times the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; q and k are normalised per head before they are rotated."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotated(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        k = rotated(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        v = self._heads(self.v_proj(x))
        out = attention(q, k, v, is_causal=True)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))  # [1, H, L, D] -> [L, H * D]

    def _heads(self, x: Tensor) -> Tensor:
        """[L, H * D] -> [1, H, L, D]: with the batch axis, torch picks a kernel that never forms the L x L scores."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None]


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention, then pre-norm MLP."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    """The embedding table and the layers that are kept."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.embed_tokens = blank_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))

    def embed(self, token_ids: Tensor) -> Tensor:
        """[L] ids -> [L, hidden_size]: the only use of the table, a gather of rows."""
        return self.embed_tokens(token_ids)


class TextEncoder(nn.Module):
    """Token ids and pictures to the hidden states that condition the DiT (text encoder spec, sections 3 and 4).

    ``visual`` is None for a file without a vision tower.
    """

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"language": ("model.",), "vision": ("visual.",)}
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {"forward": ("language",), "encode_vision": ("vision",)}
    REPEATED: ClassVar[tuple[str, ...]] = ("model.layers", "visual.blocks")

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LanguageModel(config)
        self.visual = VisionTower(config.vision) if config.vision else None

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        """Everything is held as it computes: the fp32 islands of this network are activations, not weights."""
        return compute

    def encode_vision(self, patches: Tensor, grids: Sequence[Grid], on_layer: OnLayer | None = None) -> VisionFeatures:
        """Frame blocks in sequence order to what ``forward`` splices in.

        ``patches`` [P, features] float are the patches of one block after the other, ``grids`` the rows and columns of patches of
        each block. Raises ValueError when the checkpoint has no vision tower.
        """
        if self.visual is None:
            raise ValueError(NO_TOWER)
        return self.visual(patches, grids, on_layer)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        vision_rows: Tensor | None = None,
        vision: VisionFeatures | None = None,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """Hidden states [L, hidden_size] in the dtype of the weights.

        ``token_ids`` [L] and ``position_ids`` [3, L] (t, h, w) are int64; ``vision`` replaces the rows ``vision_rows`` [N] of the
        sequence. ``on_layer(done, total)`` is called after every layer and may raise to stop.
        """
        x = self.model.embed(token_ids)
        deepstack: tuple[Tensor, ...] = ()
        if vision is not None and vision_rows is not None:
            vision_rows = vision_rows.to(x.device)
            x = x.index_copy(0, vision_rows, vision.embeds.to(x))
            deepstack = vision.deepstack
        angles = rope_angles(position_ids, self.config)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if index < len(deepstack):
                x = x.index_add(0, vision_rows, deepstack[index].to(x))
            if on_layer is not None:
                on_layer(index + 1, len(self.model.layers))
        return x
