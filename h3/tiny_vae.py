"""TAEH3, the tiny preview autoencoder: 2D convolutions that remember one frame (VAE spec, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import TinyVAEConfig
from .geometry import FRAMES_PER_CHUNK, LATENTS_PER_CHUNK

Memory = dict[nn.Module, Tensor]  # the last input frame of each MemoryBlock
OnChunk = Callable[[int, int], None]  # (chunks done, total); may raise to interrupt

TEMPORAL_RATIO = 4
SPATIAL_RATIO = 16
BLACK_FRAMES = LATENTS_PER_CHUNK * TEMPORAL_RATIO - FRAMES_PER_CHUNK  # before the 17 of a clip, so that they fill 5 latent frames
DROPPED_LATENTS = 3  # at the end of an encoded clip


def conv3x3(in_channels: int, out_channels: int, *, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=bias)


class SoftClamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.tanh(x / 3)


class MemoryBlock(nn.Module):
    """Residual convolutions over each frame and the one before it, which is zero at first."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Sequential(
            conv3x3(2 * channels, channels), nn.ReLU(), conv3x3(channels, channels), nn.ReLU(), conv3x3(channels, channels)
        )

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        before = memory.get(self, torch.zeros_like(x[:1]))
        memory[self] = x[-1:].clone()
        past = torch.cat([before, x[:-1]])
        return F.relu(x + self.conv(torch.cat([x, past], dim=1)))


class Grow(nn.Module):
    """[T, C, h, w] to [factor T, C, h, w]: each frame's channels become those of consecutive frames."""

    def __init__(self, channels: int, factor: int):
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv2d(channels, factor * channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).unflatten(1, (self.factor, -1)).flatten(0, 1)


class Pool(nn.Module):
    """[factor T, C, h, w] to [T, C, h, w]: consecutive frames side by side as channels, the earlier first."""

    def __init__(self, channels: int, factor: int):
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv2d(factor * channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unflatten(0, (-1, self.factor)).flatten(1, 2))


class FrameSequential(nn.Sequential):
    """Layers over frames [T, C, h, w]; what they remember stands in ``memory``."""

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        for layer in self:
            x = layer(x, memory) if isinstance(layer, MemoryBlock) else layer(x)
        return x


def tiny_decoder(config: TinyVAEConfig) -> FrameSequential:
    a, b, c, d = config.decoder_widths
    return FrameSequential(
        *(SoftClamp(), conv3x3(config.latent_channels, a), nn.ReLU()),
        *(*memory_blocks(a), nn.Upsample(scale_factor=2), Grow(a, 1), conv3x3(a, b, bias=False)),
        *(*memory_blocks(b), nn.Upsample(scale_factor=2), Grow(b, 2), conv3x3(b, c, bias=False)),
        *(*memory_blocks(c), nn.Upsample(scale_factor=2), Grow(c, 2), conv3x3(c, d, bias=False)),
        *(nn.ReLU(), conv3x3(d, 3 * config.patch_size**2)),
    )


def tiny_encoder(config: TinyVAEConfig) -> FrameSequential:
    width = config.encoder_width
    return FrameSequential(
        *(conv3x3(3 * config.patch_size**2, width), nn.ReLU()),
        *(Pool(width, 2), conv3x3(width, width, stride=2, bias=False), *memory_blocks(width)),
        *(Pool(width, 2), conv3x3(width, width, stride=2, bias=False), *memory_blocks(width)),
        *(Pool(width, 1), conv3x3(width, width, stride=2, bias=False), *memory_blocks(width)),
        conv3x3(width, config.latent_channels),
    )


def memory_blocks(channels: int) -> list[MemoryBlock]:
    return [MemoryBlock(channels) for _ in range(3)]


class TinyVAE(nn.Module):
    """Latents are normalised as the DiT's, [1, C, T, h, w]; frames are fp32 [F, H, W, 3] in [0, 1]. One half may be missing."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"encoder": ("encoder.",), "decoder": ("decoder.",)}
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "decode": ("decoder",),
        "decode_stream": ("decoder",),
        "encode": ("encoder",),
    }
    REPEATED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: TinyVAEConfig, parts: tuple[str, ...] = ("encoder", "decoder")):
        super().__init__()
        self.config = config
        self.PARTS = {part: type(self).PARTS[part] for part in parts}
        if "encoder" in parts:
            self.encoder = tiny_encoder(config)
        if "decoder" in parts:
            self.decoder = tiny_decoder(config)

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        """Everything as asked for."""
        return compute

    def decode(self, latents: Tensor, *, on_chunk: OnChunk | None = None) -> Tensor:
        """The chunks of ``decode_stream`` in one tensor [F, H, W, 3]."""
        return torch.cat(list(self.decode_stream(latents, on_chunk=on_chunk)))

    def decode_stream(self, latents: Tensor, *, on_chunk: OnChunk | None = None) -> Iterator[Tensor]:
        """Frames of latents [1, C, T, h, w], five latent frames at a time: fp32 [n, H, W, 3] with n = 17, at the end the rest.

        Raises ValueError for latents of another shape.
        """
        channels = self.config.latent_channels
        if latents.dim() != 5 or latents.shape[:2] != (1, channels) or not latents.numel():
            raise ValueError(f"The tiny VAE decodes latents [1, {channels}, T, h, w], not {list(latents.shape)}.")
        return self._decoded_chunks(latents[0].transpose(0, 1).split(LATENTS_PER_CHUNK), on_chunk)

    def encode(self, frames: Tensor) -> Tensor:
        """Frames [F, H, W, 3] to latents [1, C, T, h, w]: T = 1 for F = 1, else 5 ceil(F / 17) - 3.

        Raises ValueError where there is no frame or a side is not a multiple of 16.
        """
        if frames.dim() != 4 or not frames.numel() or any(side % SPATIAL_RATIO for side in frames.shape[1:3]):
            raise ValueError(f"The tiny VAE encodes frames [F, H, W, 3] in steps of {SPATIAL_RATIO}, not {list(frames.shape)}.")
        if len(frames) == 1:
            return self._encoded_clip(frames).transpose(0, 1)[None]
        clips = list(frames.split(FRAMES_PER_CHUNK))
        clips[-1] = torch.cat([clips[-1], clips[-1][-1:].expand(FRAMES_PER_CHUNK - len(clips[-1]), -1, -1, -1)])
        latents = torch.cat([self._encoded_clip(clip) for clip in clips])
        return latents[:-DROPPED_LATENTS].transpose(0, 1)[None]

    def _decoded_chunks(self, chunks: tuple[Tensor, ...], on_chunk: OnChunk | None) -> Iterator[Tensor]:
        memory: Memory = {}
        for done, chunk in enumerate(chunks, start=1):
            raw = self.decoder(chunk.to(self.decoder[1].weight), memory)[BLACK_FRAMES:]  # [n, 12, H / 2, W / 2]
            if on_chunk is not None:
                on_chunk(done, len(chunks))
            yield F.pixel_shuffle(raw, self.config.patch_size).float().clamp(0, 1).movedim(1, -1).contiguous()

    def _encoded_clip(self, clip: Tensor) -> Tensor:
        """A clip of 17 frames, or a lone picture, to latents [5, C, h, w] or [1, C, h, w]."""
        pixels = F.pixel_unshuffle(clip.to(self.encoder[0].weight).movedim(-1, 1), self.config.patch_size)
        return self.encoder(F.pad(pixels, (0, 0, 0, 0, 0, 0, BLACK_FRAMES, 0)), {})
