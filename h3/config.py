"""Every number of MiniMax-H3's networks, one dataclass a component.

Defaults are the published model (specs: DiT section 1, text encoder sections 3 and 4, VAEs sections 1-3). Checkpoints of
other sizes override them: from a Hugging Face ``config.json``, from the ``config`` entry of a safetensors header, or from
tensor shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, prod

FPS = 24
AUDIO_LATENTS_PER_SECOND = 40
STEREO = 2

# Statistics of the published video VAE, channel by channel (VAE spec, section 1.1).
# fmt: off
VIDEO_LATENTS_MEAN = (
    0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075,
    -0.2727581858634949, -1.3675414323806763, -0.2553254961967468, -0.26907554268836975,
    -0.5376840829849243, -0.0464097298681736, 0.6657370328903198, 0.19690127670764923,
    -0.5460608005523682, -0.4035342037677765, -0.23683024942874908, 0.25928452610969543,
    -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
    -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
)
VIDEO_LATENTS_STD = (
    1.2223774194717407, 1.2767263650894165, 1.68317747116088865, 1.7549455165863037,
    1.5636216402053833, 2.194143533706665, 0.96531379222869875, 1.05698859691619875,
    0.841948926448822, 0.7729952931404114, 1.8955937623977661, 0.946841835975647,
    0.7996809482574463, 0.44988900423049925, 0.7197399735450745, 0.69362932443618775,
    2.961095094680786, 2.7694199085235595, 3.0496184825897217, 2.1088054180145265,
    3.276226282119751, 3.1627357006073, 2.28168129920959475, 2.6127843856811525,
)
# fmt: on


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
    has_gate: bool = False  # attn.to_gate_compress present: trained for sparse attention

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
    pixel_mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    pixel_std: tuple[float, ...] = (0.229, 0.224, 0.225)
    latents_mean: tuple[float, ...] = VIDEO_LATENTS_MEAN  # for files that have no tensors of these names
    latents_std: tuple[float, ...] = VIDEO_LATENTS_STD

    @property
    def spatial_ratio(self) -> int:
        return prod(self.spatial_downsample_factors)

    @property
    def temporal_ratio(self) -> int:
        return prod(self.temporal_downsample_factors)

    @property
    def decoder_width(self) -> int:
        return self.decoder_num_attention_heads * self.decoder_attention_head_dim

    @property
    def frame_pre_padding(self) -> int:
        """Raw frames before the first real one of a clip: the causal encoder sees the first frame alone."""
        return -self.clip_length % self.temporal_ratio

    @property
    def latents_per_clip(self) -> int:
        return ceil(self.clip_length / self.temporal_ratio)

    @property
    def latent_overlap(self) -> int:
        """Latent frames that two neighbouring decoder windows share."""
        return -self.token_drop % self.latents_per_clip

    @property
    def frame_overlap(self) -> int:
        """Frames of the cross-fade between two decoder windows."""
        return self.latent_overlap * self.temporal_ratio - self.frame_pre_padding

    @property
    def window_length(self) -> int:
        """Latent frames of a decoder window."""
        return self.latents_per_clip + self.latent_overlap


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
    latents_mean: tuple[float, ...] = ()  # no published default: in the file or in config.json
    latents_std: tuple[float, ...] = ()

    @property
    def hop_length(self) -> int:
        """Samples of one latent frame."""
        return prod(self.decoder_rates)


@dataclass(frozen=True)
class TinyVAEConfig:
    """The preview autoencoder TAEH3 (VAE spec, section 4)."""

    latent_channels: int = 24
    decoder_widths: tuple[int, int, int, int] = (256, 128, 64, 64)
    encoder_width: int = 64
    patch_size: int = 2
