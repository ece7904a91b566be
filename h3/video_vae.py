"""The video VAE: frames to normalised latents and back, one clip or window and one tile at a time (VAE spec, section 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .config import VideoVAEConfig
from .tiling import CompositionRule, Grid, tile_axis, tiled
from .video_decoder import VideoDecoder
from .video_encoder import VideoEncoder
from .windows import TIME, decode_plan, joined, num_encoded_latents

SingleFrame = Literal["padded", "comfy"]
OnCall = Callable[[int, int], None]  # (network calls done, total); may raise to interrupt
FP32_MODULES = {"encoder", "quant_conv", "norm1", "norm2", "norm_out", "scale1", "scale2", "latents_mean", "latents_std"}
SAMPLE_SEED = 42  # the official pipeline's, for every picture and clip


class VideoVAE(nn.Module):
    """Both halves, or one of them where ``parts`` says so; a part that is not built is not in PARTS either.

    Latents are normalised, fp32 [1, C, T, h, w]; frames are fp32 [F, H, W, 3] in [0, 1].
    """

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "encoder": ("encoder.", "quant_conv.", "latents_"),
        "decoder": ("decoder.", "post_quant_conv.", "latents_"),
    }
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "decode": ("decoder",),
        "decode_stream": ("decoder",),
        "encode": ("encoder",),
        "encode_sampled": ("encoder",),
        "moments": ("encoder",),
    }
    REPEATED: ClassVar[tuple[str, ...]] = ("decoder.transformer_blocks",)

    def __init__(self, config: VideoVAEConfig, parts: tuple[str, ...] = ("encoder", "decoder")):
        super().__init__()
        self.config = config
        self.PARTS = {part: type(self).PARTS[part] for part in parts}
        self.REPEATED = type(self).REPEATED if "decoder" in parts else ()
        channels = config.latent_channels
        if "encoder" in parts:
            self.encoder = VideoEncoder(config)
            self.quant_conv = nn.Conv3d(2 * channels, 2 * channels, 1)
        if "decoder" in parts:
            self.decoder = VideoDecoder(config)
            self.post_quant_conv = nn.Conv3d(channels, channels, 1)
        self.register_buffer("latents_mean", torch.zeros(channels))
        self.register_buffer("latents_std", torch.ones(channels))

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        """fp32 for the encoder, the norms, the residual scales and the statistics; ``compute`` for the rest of the decoder."""
        return torch.float32 if FP32_MODULES.intersection(name.split(".")) else compute

    def decode(
        self,
        latents: Tensor,
        *,
        rule: CompositionRule = "raw",
        single_frame: SingleFrame = "padded",
        on_window: OnCall | None = None,
    ) -> Tensor:
        """The chunks of ``decode_stream`` in one tensor [F, H, W, 3] on the device of the weights."""
        chunks = self.decode_stream(latents, rule=rule, single_frame=single_frame, on_window=on_window)
        height, width = (side * self.config.spatial_ratio for side in latents.shape[3:])
        frames = self.latents_mean.new_empty(decode_plan(latents.shape[TIME], self.config).num_frames, height, width, 3)
        done = 0
        for chunk in chunks:
            frames[done : done + len(chunk)] = chunk
            done += len(chunk)
        return frames

    def decode_stream(
        self,
        latents: Tensor,
        *,
        rule: CompositionRule = "raw",
        single_frame: SingleFrame = "padded",
        on_window: OnCall | None = None,
    ) -> Iterator[Tensor]:
        """Frames of latents [1, C, T, h, w] as they are finished: fp32 [n, H, W, 3] with n = 17 a window, then the tail.

        Only one window's canvas is alive at a time. T = 1 is the first frame of a padded window, or decoded alone where
        ``single_frame`` is "comfy" (VAE spec, section 1.6); ``rule`` says how tiles are blended (section 1.7). ``on_window`` is
        called after each decoder call: windows times tiles in all. Raises ValueError for latents of another shape.
        """
        channels = self.config.latent_channels
        if latents.dim() != 5 or latents.shape[:2] != (1, channels) or not latents.numel():
            raise ValueError(f"The video VAE decodes latents [1, {channels}, T, h, w], not {list(latents.shape)}.")
        mu = self._denormalised(latents.to(self.latents_mean))
        if latents.shape[TIME] == 1 and single_frame == "comfy":
            return (self._frames(raw[:, :, -1:]) for raw in self._raw_windows(mu, 1, rule, on_window))
        plan = decode_plan(mu.shape[TIME], self.config)
        mu = torch.cat([mu, mu[:, :, -1:].expand(-1, -1, plan.num_repeats, -1, -1)], TIME)
        windows = self._raw_windows(mu, self.config.window_length, rule, on_window)
        return map(self._frames, joined(windows, plan.num_frames, self.config))

    def encode(self, frames: Tensor, *, on_clip: OnCall | None = None) -> Tensor:
        """Frames [F, H, W, 3] or [B, F, H, W, 3] in [0, 1] to normalised latents [B, C, T, h, w]: the posterior's mean, fp32.

        T = 1 for F = 1, else 5 ceil(F / 17) - 3 (VAE spec, section 1.4). ``frames`` may lie on another device: one clip at a time
        is moved. ``on_clip`` is called after each encoder call: clips times tiles in all. Raises ValueError where there is no
        frame or a side is not a multiple of the spatial ratio, or less than twice that.
        """
        mean, _ = self.moments(frames, on_clip).chunk(2, dim=1)
        return self._normalised(mean)

    def encode_sampled(self, frames: Tensor, *, seed: int = SAMPLE_SEED, on_clip: OnCall | None = None) -> Tensor:
        """As ``encode``, but a sample of the posterior, rounded through fp16: what the official pipeline conditions on.

        The noise is drawn on the CPU, so that a seed means the same on every device.
        """
        mean, log_variance = self.moments(frames, on_clip).chunk(2, dim=1)
        noise = torch.randn(mean.shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        sample = mean + (log_variance.clamp(-30, 20) / 2).exp() * noise.to(mean)
        return self._normalised(sample.half().float())

    def moments(self, frames: Tensor, on_clip: OnCall | None = None) -> Tensor:
        """Posterior mean and log variance [B, 2 C, T, h, w] of the frames that ``encode`` takes, not normalised."""
        ratio, sides = self.config.spatial_ratio, frames.shape[-3:-1]
        if frames.dim() not in (4, 5) or not frames.numel() or any(side % ratio or side < 2 * ratio for side in sides):
            raise ValueError(
                f"The video VAE encodes frames [F, H, W, 3] with sides in steps of {ratio} from {2 * ratio} on, "
                f"not {list(frames.shape)}."
            )
        grid = self._grid(*sides)
        video = (frames[None] if frames.dim() == 4 else frames).movedim(-1, 1)  # [B, 3, F, H, W]
        clips = video.split(self.config.clip_length, TIME)
        if video.shape[TIME] > 1:  # a lone picture stays alone
            clips = (*clips[:-1], self._filled(clips[-1]))
        network = _reporting(lambda pixels: self.quant_conv(self.encoder(pixels)), on_clip, len(clips) * grid.num_tiles)
        moments = torch.cat([tiled(network, self._pixels(clip), grid, grid // ratio, "raw") for clip in clips], TIME)
        return moments[:, :, : num_encoded_latents(video.shape[TIME], self.config)]

    def _raw_windows(self, mu: Tensor, length: int, rule: CompositionRule, on_window: OnCall | None) -> Iterator[Tensor]:
        """Raw pixels [1, 3, 4 length, H, W] of each window of ``length`` latent frames; windows start one clip apart."""
        starts = range(0, mu.shape[TIME] - length + 1, self.config.latents_per_clip)
        ratio = self.config.spatial_ratio
        grid = self._grid(mu.shape[3] * ratio, mu.shape[4] * ratio)
        network = _reporting(self._raw, on_window, len(starts) * grid.num_tiles)
        return (tiled(network, mu.narrow(TIME, start, length), grid // ratio, grid, rule) for start in starts)

    def _raw(self, mu: Tensor) -> Tensor:
        """One decoder call on de-normalised latents."""
        return self.decoder(self.post_quant_conv(mu.to(self.post_quant_conv.weight.dtype)))

    def _frames(self, raw: Tensor) -> Tensor:
        """Raw pixels [1, 3, n, H, W] to fp32 [n, H, W, 3] in [0, 1]."""
        pixels = raw[0].permute(1, 2, 3, 0)
        frames = torch.empty_like(pixels, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(pixels)
        return frames.mul_(frames.new_tensor(self.config.pixel_std)).add_(frames.new_tensor(self.config.pixel_mean)).clamp_(0, 1)

    def _pixels(self, clip: Tensor) -> Tensor:
        """A clip in [0, 1] to ImageNet-normalised pixels on the device of the encoder."""
        pixels = clip.to(self.encoder.conv_in.weight)
        mean, std = (pixels.new_tensor(values).view(-1, 1, 1, 1) for values in (self.config.pixel_mean, self.config.pixel_std))
        return (pixels - mean) / std

    def _filled(self, clip: Tensor) -> Tensor:
        """A clip brought to full length by repeating its last frame."""
        missing = self.config.clip_length - clip.shape[TIME]
        return torch.cat([clip, clip[:, :, -1:].expand(-1, -1, missing, -1, -1)], TIME)

    def _grid(self, height: int, width: int) -> Grid:
        """Tiles of a canvas, in pixels."""
        size, overlap, ratio = self.config.tile_size, self.config.tile_overlap, self.config.spatial_ratio
        if size % ratio or overlap % ratio:
            raise ValueError(f"Tiles of {size} that overlap by {overlap} must be multiples of {ratio} in both.")
        return Grid(tile_axis(height, size, overlap, ratio), tile_axis(width, size, overlap, ratio))

    def _normalised(self, mean: Tensor) -> Tensor:
        return (mean - self.latents_mean.view(-1, 1, 1, 1)) / self.latents_std.view(-1, 1, 1, 1)

    def _denormalised(self, latents: Tensor) -> Tensor:
        return latents * self.latents_std.view(-1, 1, 1, 1) + self.latents_mean.view(-1, 1, 1, 1)


def _reporting(network: Callable[[Tensor], Tensor], callback: OnCall | None, total: int) -> Callable[[Tensor], Tensor]:
    """``network``, which tells ``callback`` after each of its ``total`` calls."""
    if callback is None:
        return network
    done = count(1)

    def call(x: Tensor) -> Tensor:
        result = network(x)
        callback(next(done), total)
        return result

    return call
