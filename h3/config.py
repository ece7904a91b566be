"""Every number of MiniMax-H3's networks, one dataclass a component.

Defaults are the published model (specs: DiT section 1, text encoder sections 3 and 4, VAEs sections 1-3). Checkpoints of
other sizes override them: from a Hugging Face ``config.json``, from the ``config`` entry of a safetensors header, or from tensor shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

FPS = 24
AUDIO_LATENTS_PER_SECOND = 40
STEREO = 2


@dataclass(frozen=True)
class DiTConfig:
    """The joint video and audio diffusion transformer (DiT spec, section 1)."""

    hidden_size: int = 5376
    num_layers: int = 50
    num_refiner_layers: int = 2
    num_attention_heads: int = 56
    attention_head_dim: int = 128
    ffn_dim: int = 14336
    in_channels: int = 24
    audio_in_channels: int = 32
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    freq_dim: int = 256
    time_embed_hidden_dim: int = 5376
    time_embed_dim: int = 2688
    rope_freq_dim: int = 16
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5
    adaln_rank: int | None = None
    adaln_curve: tuple[int, int] | None = None  # (grid points, basis size) of the curve-table variant
    has_gate: bool = False  # attn.to_gate_compress present (FastH3)

    @property
    def inner_dim(self) -> int:
        """Width of q, k and v: larger than hidden_size in the published model."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def video_features(self) -> int:
        return self.in_channels * prod(self.patch_size)


@dataclass(frozen=True)
class VisionConfig:
    """Vision tower of the text encoder (text encoder spec, section 4)."""

    depth: int = 27
    hidden_size: int = 1152
    num_heads: int = 16
    intermediate_size: int = 4304
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    out_hidden_size: int = 5120
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class TextEncoderConfig:
    """Qwen3-VL language model, cut after ``num_hidden_layers`` layers: no final norm, no head (text encoder spec, section 3)."""

    hidden_size: int = 5120
    num_hidden_layers: int = 50
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 25600
    vocab_size: int = 151936
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    vision: VisionConfig | None = field(default_factory=VisionConfig)
    vision_start_token_id: int | None = None  # None: ask the tokenizer
    vision_end_token_id: int | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None


@dataclass(frozen=True)
class VideoVAEConfig:
    """Causal CNN encoder and windowed ViT decoder (VAE spec, section 1)."""

    in_channels: int = 3
    latent_channels: int = 24
    block_out_channels: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)
    layers_per_block: int = 2
    spatial_downsample_factors: tuple[int, ...] = (2, 2, 2, 2, 1, 1)
    temporal_downsample_factors: tuple[int, ...] = (1, 2, 2, 1, 1, 1)
    norm_num_groups: int = 32
    norm_eps: float = 1e-6
    decoder_num_layers: int = 36
    decoder_num_attention_heads: int = 32
    decoder_attention_head_dim: int = 64
    decoder_num_register_tokens: int = 4
    decoder_ffn_mult: int = 4
    decoder_rope_theta: float = 100.0
    decoder_rope_dim_ratio: float = 0.75
    decoder_norm_eps: float = 1e-5
    clip_length: int = 17
    token_drop: int = 3
    tile_size: int = 256
    tile_overlap: int = 64

    @property
    def spatial_ratio(self) -> int:
        return prod(self.spatial_downsample_factors)

    @property
    def temporal_ratio(self) -> int:
        return prod(self.temporal_downsample_factors)

    @property
    def decoder_width(self) -> int:
        return self.decoder_num_attention_heads * self.decoder_attention_head_dim


@dataclass(frozen=True)
class AudioVAEConfig:
    """DAC-style encoder and BigVGAN decoder, mono; stereo is two batch items (VAE spec, section 2)."""

    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 4, 5, 5)
    latent_dim: int = 2048
    latent_channels: int = 32
    num_attention_heads: int = 8
    decoder_dim: int = 1024
    decoder_rates: tuple[int, ...] = (5, 5, 2, 2, 2, 2, 2)
    decoder_kernel_sizes: tuple[int, ...] = (9, 9, 4, 4, 4, 4, 4)
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    sampling_rate: int = 32000

    @property
    def hop_length(self) -> int:
        """Samples of one latent frame."""
        return prod(self.decoder_rates)
