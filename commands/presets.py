"""Configurations of checkpoints with random weights: tiny ones, and replicas that keep the proportions of the real model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..h3.audio_vae import AudioVAE
from ..h3.config import AudioVAEConfig, DiTConfig, TextEncoderConfig, VideoVAEConfig, VisionConfig
from ..h3.dit import DiT, dit_class
from ..h3.text_encoder import TextEncoder
from ..h3.video_vae import VideoVAE

MIB = 1 << 20
FILE_DTYPES = {"text_encoder": torch.bfloat16, "dit": torch.bfloat16, "video_vae": torch.float32, "audio_vae": torch.float32}
BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "text_encoder": TextEncoder,
    "dit": DiT,
    "video_vae": VideoVAE,
    "audio_vae": AudioVAE,
}
SMALLEST_VOCABULARY = 264  # 256 bytes and the special tokens


@dataclass(frozen=True)
class ModelPreset:
    """Configurations of all four components."""

    text_encoder: TextEncoderConfig
    dit: DiTConfig
    video_vae: VideoVAEConfig
    audio_vae: AudioVAEConfig

    video_vae_dtype: torch.dtype = torch.float32

    def components(self) -> dict[str, Any]:
        return {kind: getattr(self, kind) for kind in BUILDERS}

    def dtype_of(self, kind: str) -> torch.dtype:
        """What the file of a component stores, but for what stays fp32 in any case."""
        return self.video_vae_dtype if kind == "video_vae" else FILE_DTYPES[kind]


def _published(**dit: Any) -> ModelPreset:
    return ModelPreset(TextEncoderConfig(), DiTConfig(**dit), VideoVAEConfig(), AudioVAEConfig())


PUBLISHED: dict[str, ModelPreset] = {
    "minimax-h3": _published(),
    "minimax-h3-r16": _published(adaln_rank=16),
    "fasth3": _published(has_gate=True),
    "fasth3-r16": _published(has_gate=True, adaln_rank=16),
}
PUBLISHED |= {f"{name}-fp16-vae": replace(preset, video_vae_dtype=torch.float16) for name, preset in PUBLISHED.items()}


def build(kind: str, config: Any) -> torch.nn.Module:
    """The module of a component, on the present device."""
    return dit_class(config)(config) if kind == "dit" else BUILDERS[kind](config)


def tiny() -> ModelPreset:
    """A model that a test can build in a moment: every mechanism, no size."""
    vision = VisionConfig(
        depth=3,
        hidden_size=16,
        num_heads=2,
        intermediate_size=24,
        num_position_embeddings=16,
        deepstack_visual_indexes=(0, 1, 2),
        out_hidden_size=16,
    )
    text_encoder = TextEncoderConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        vocab_size=SMALLEST_VOCABULARY,
        mrope_section=(2, 1, 1),
        vision=vision,
    )
    dit = DiTConfig(
        hidden_size=40,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        attention_head_dim=32,
        ffn_dim=48,
        text_dim=16,
        freq_dim=32,
        time_embed_hidden_dim=40,
        time_embed_dim=20,
        rope_freq_dim=4,
    )
    video_vae = VideoVAEConfig(
        block_out_channels=(8, 8, 8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        decoder_ffn_mult=2,
    )
    audio_vae = AudioVAEConfig(
        encoder_dim=4,
        encoder_rates=(20, 40),
        latent_dim=32,
        num_attention_heads=4,
        decoder_dim=16,
        decoder_rates=(20, 40),
        decoder_kernel_sizes=(40, 80),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
    )
    return ModelPreset(text_encoder, dit, video_vae, audio_vae)


def replica(scale: float, name: str = "minimax-h3") -> ModelPreset:
    """A published model with all layer counts and 1/``scale`` of the bytes of each part: widths and vocabulary shrink.

    Raises ValueError for a name that is not in PUBLISHED, and for a scale at which a part cannot be built that small.
    """
    if name not in PUBLISHED:
        raise ValueError(f"--model {name}: is not a published model; choose one of {', '.join(PUBLISHED)}.")
    real = small = PUBLISHED[name]
    for kind, part, shrunk in SHRINKING:
        target = num_bytes(kind, getattr(real, kind), part) / scale
        shrunk_by = functools.partial(shrunk, small)
        if num_bytes(kind, shrunk_by(0.0), part) > 1.5 * target:
            what = f"{kind} ({part})" if part else kind
            raise ValueError(
                f"--scale {scale:g} asks for a {what} of {target / MIB:.1f} MiB, less than its layers take at any width."
            )
        small = replace(small, **{kind: _nearest(shrunk_by, lambda config: num_bytes(kind, config, part), target)})  # noqa: B023
    return small


@functools.cache
def num_bytes(kind: str, config: Any, part: str | None = None) -> int:
    """Bytes of a component, or of one of its parts, as its file stores it."""
    with torch.device("meta"):
        module: Any = build(kind, config)
    prefixes = ("",) if part is None else module.PARTS[part]
    stored = {name: tensor for name, tensor in module.state_dict().items() if name.startswith(prefixes)}
    return sum(t.numel() * module.storage_dtype(name, FILE_DTYPES[kind]).itemsize for name, t in stored.items())


def _nearest(config_of: Callable[[float], Any], bytes_of: Callable[[Any], int], target: float) -> Any:
    """The configuration whose bytes are nearest to ``target``, by bisection of the width factor."""
    low, high = 0.0, 1.2
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if bytes_of(config_of(middle)) < target else (low, middle)
    return min(config_of(low), config_of(high), key=lambda config: abs(bytes_of(config) - target))


def _multiple(value: float, step: int) -> int:
    return max(step, round(value / step) * step)


def _language(preset: ModelPreset, width: float) -> TextEncoderConfig:
    real = preset.text_encoder
    kv_heads = max(1, round(real.num_key_value_heads * width))
    hidden = _multiple(real.hidden_size * width, 16)
    return replace(
        real,
        hidden_size=hidden,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * max(1, round(real.num_attention_heads * width / kv_heads)),
        intermediate_size=_multiple(real.intermediate_size * width, 16),
        vocab_size=max(SMALLEST_VOCABULARY, _multiple(real.vocab_size * width, 8)),
        vision=replace(real.vision, out_hidden_size=hidden),
    )


def _vision(preset: ModelPreset, width: float) -> TextEncoderConfig:
    real = preset.text_encoder.vision
    heads = max(1, round(real.num_heads * width))
    vision = replace(
        real,
        hidden_size=real.hidden_size // real.num_heads * heads,
        num_heads=heads,
        intermediate_size=_multiple(real.intermediate_size * width, 16),
        num_position_embeddings=144,
    )
    return replace(preset.text_encoder, vision=vision)


def _dit(preset: ModelPreset, width: float) -> DiTConfig:
    real, text_dim = preset.dit, preset.text_encoder.hidden_size
    hidden = _multiple(real.hidden_size * width, 16)
    return replace(
        real,
        hidden_size=hidden + 16 if hidden == text_dim else hidden,  # equal widths mean "already refined" to ComfyUI
        num_attention_heads=max(1, round(real.num_attention_heads * width)),
        ffn_dim=_multiple(real.ffn_dim * width, 16),
        text_dim=text_dim,
        time_embed_hidden_dim=_multiple(real.time_embed_hidden_dim * width, 16),
        time_embed_dim=_multiple(real.time_embed_dim * width, 8),
    )


def _video_encoder(preset: ModelPreset, width: float) -> VideoVAEConfig:
    channels = tuple(_multiple(c * width, 8) for c in preset.video_vae.block_out_channels)
    return replace(preset.video_vae, block_out_channels=channels, norm_num_groups=8)


def _video_decoder(preset: ModelPreset, width: float) -> VideoVAEConfig:
    heads, head_dim = _heads(preset.video_vae.decoder_width * width)
    return replace(preset.video_vae, decoder_num_attention_heads=heads, decoder_attention_head_dim=head_dim)


def _heads(width: float) -> tuple[int, int]:
    """The number and size of heads that come nearest to ``width``: 64 channels as in the real decoder, or fewer."""
    sizes = range(64, 24, -8)  # rope turns three quarters of a head, in pairs on three axes
    choices = [(max(1, round(width / size)), size) for size in sizes]
    return min(choices, key=lambda choice: abs(math.prod(choice) - width))


def _audio_vae(preset: ModelPreset, width: float) -> AudioVAEConfig:
    real = preset.audio_vae
    heads = max(1, round(real.num_attention_heads * width))
    return replace(
        real,
        encoder_dim=_multiple(real.encoder_dim * width, 2),
        num_attention_heads=heads,
        latent_dim=_multiple(real.latent_dim * width, heads * real.latent_channels),  # pooled to that many
        decoder_dim=_multiple(real.decoder_dim * width, 2 ** len(real.decoder_rates)),
    )


SHRINKING: tuple[tuple[str, str | None, Callable[[ModelPreset, float], Any]], ...] = (
    ("text_encoder", "language", _language),
    ("text_encoder", "vision", _vision),
    ("dit", None, _dit),
    ("video_vae", "encoder", _video_encoder),
    ("video_vae", "decoder", _video_decoder),
    ("audio_vae", None, _audio_vae),
)  # in this order: the transformer's text is as wide as the encoder's
