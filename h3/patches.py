"""Pixels to patches: the encoder's own resize, frames in pairs, the order of the patches (text encoder spec, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, sqrt

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from .config import VisionConfig
from .vision import Grid, in_merge_order

Size = tuple[int, int]  # height, width in pixels
Limits = tuple[int, int]  # fewest and most pixels


@dataclass(frozen=True)
class FrameBlock:
    """One still image or one pair of video frames, cut up: patches [h * w, C * T * p * p] fp32 of the grid (h, w)."""

    patches: Tensor
    grid: Grid


def bicubic_on_bytes(frames: Tensor, size: Size) -> Tensor:
    """[T, C, H, W] to ``size``, values 0..1: rounded to bytes between and after the two passes, as officially."""
    pixels = frames if frames.dtype == torch.uint8 else (frames * 255).round().clamp(0, 255).to(torch.uint8)
    return interpolate(pixels.cpu(), size, mode="bicubic", align_corners=False, antialias=True) / 255


def bilinear(frames: Tensor, size: Size) -> Tensor:
    """[T, C, H, W] to ``size``, values 0..1, without antialiasing, as ComfyUI does."""
    pixels = frames / 255 if frames.dtype == torch.uint8 else frames.float()
    return interpolate(pixels, size, mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class PixelPolicy:
    """Whose rules hold for sizes and filter; ``is_video_joint``: the video limits hold for all sampled frames together."""

    image_limits: Limits
    video_limits: Limits
    is_video_joint: bool
    resize: Callable[[Tensor, Size], Tensor]


OFFICIAL = PixelPolicy((65536, 16777216), (4096, 25165824), True, bicubic_on_bytes)
COMFY = PixelPolicy((3136, 12845056), (3136, 12845056), False, bilinear)


def image_size(size: Size, factor: int, limits: Limits) -> Size:
    """The nearest multiples of ``factor`` whose area is within ``limits``."""
    return _fitted(size, factor, limits, num_frames=1, num_counted=1)


def video_size(num_frames: int, size: Size, factor: int, limits: Limits) -> Size:
    """One size for all ``num_frames`` sampled frames, whose areas together are within ``limits``; frames count in pairs."""
    enlarged = max(1.0, factor / min(size))
    at_least_factor = (int(size[0] * enlarged), int(size[1] * enlarged))
    return _fitted(at_least_factor, factor, limits, num_frames, num_counted=max(2, round(num_frames / 2) * 2))


def image_block(image: Tensor, config: VisionConfig, policy: PixelPolicy = OFFICIAL) -> FrameBlock:
    """[H, W, 3], uint8 or float in 0..1; a still image fills every frame of its block."""
    height, width, _ = image.shape
    size = image_size((height, width), _factor(config), policy.image_limits)
    return _blocks(image[None], size, config, policy)[0]


def video_blocks(frames: Tensor, config: VisionConfig, policy: PixelPolicy = OFFICIAL) -> list[FrameBlock]:
    """Sampled frames [T, H, W, 3], uint8 or float in 0..1, to one block a pair; the last frame is repeated to fill its block."""
    num_frames, height, width, _ = frames.shape
    rules = ((height, width), _factor(config), policy.video_limits)
    size = video_size(num_frames, *rules) if policy.is_video_joint else image_size(*rules)
    return _blocks(frames, size, config, policy)


def _factor(config: VisionConfig) -> int:
    return config.patch_size * config.spatial_merge_size


def _fitted(size: Size, factor: int, limits: Limits, num_frames: int, num_counted: int) -> Size:
    """Rounded sides, or sides scaled by the square root of what is too much or too little."""
    fewest, most = limits
    height, width = (round(side / factor) * factor for side in size)
    area = num_frames * size[0] * size[1]
    if num_counted * height * width > most:
        shrink = sqrt(area / most)
        height, width = (max(factor, floor(side / shrink / factor) * factor) for side in size)
    elif num_counted * height * width < fewest:
        grow = sqrt(fewest / area)
        height, width = (ceil(side * grow / factor) * factor for side in size)
    return height, width


def _blocks(frames: Tensor, size: Size, config: VisionConfig, policy: PixelPolicy) -> list[FrameBlock]:
    values = policy.resize(frames[..., :3].movedim(-1, 1), size) * 2 - 1
    depth = config.temporal_patch_size
    missing = -len(values) % depth
    values = torch.cat([values, values[-1:].expand(missing, -1, -1, -1)])
    return [_cut(block, config) for block in values.split(depth)]


def _cut(block: Tensor, config: VisionConfig) -> FrameBlock:
    """[T, C, H, W] to patches whose features run channel, frame, row, column."""
    num_frames, channels, height, width = block.shape
    side = config.patch_size
    grid = (height // side, width // side)
    cells = block.reshape(num_frames, channels, grid[0], side, grid[1], side).permute(2, 4, 1, 0, 3, 5)  # [h, w, C, T, p, p]
    return FrameBlock(in_merge_order(cells.flatten(2), config.spatial_merge_size), grid)
