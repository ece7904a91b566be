"""Time in the video VAE: clips of the encoder, windows of the decoder and how these join (VAE spec, sections 1.2, 1.4 and 1.6).

Frames come in clips of 17, latent frames in clips of 5. A decoder window covers the 5 of a clip and 2 more, which the next window
decodes again: its last 5 frames, the tail, fade into the first 5 of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from .config import VideoVAEConfig
from .tiling import fade_in_

TIME = 2  # axis of [B, C, T, H, W]


@dataclass(frozen=True)
class DecodePlan:
    """How many windows decode a number of latent frames, after repeating the last one ``num_repeats`` times."""

    num_repeats: int
    num_windows: int
    num_frames: int


def decode_plan(num_latents: int, config: VideoVAEConfig) -> DecodePlan:
    """Windows and frames of ``num_latents`` >= 1 latent frames (VAE spec, section 1.6)."""
    per_clip = config.latents_per_clip
    num_repeats = -(num_latents + config.token_drop) % per_clip
    num_windows = (num_latents + config.token_drop + num_repeats) // per_clip - 1
    if num_windows < 1:
        num_repeats, num_windows = num_repeats + per_clip, 1
    repeats = range(num_latents, num_latents + num_repeats)
    num_frames = num_windows * config.clip_length + config.frame_overlap - sum(frames_of_latent(i, config) for i in repeats)
    return DecodePlan(num_repeats, num_windows, num_frames)


def frames_of_latent(index: int, config: VideoVAEConfig) -> int:
    """Frames that the latent frame ``index`` stands for: 1 at the start of a clip, else 4."""
    return config.temporal_ratio - (config.frame_pre_padding if index % config.latents_per_clip == 0 else 0)


def num_encoded_latents(num_frames: int, config: VideoVAEConfig) -> int:
    """Latent frames of ``num_frames`` >= 1 encoded frames (VAE spec, section 1.2)."""
    if num_frames == 1:
        return 1
    return ceil(num_frames / config.clip_length) * config.latents_per_clip - config.token_drop


def joined(windows: Iterable[Tensor], num_frames: int, config: VideoVAEConfig) -> Iterator[Tensor]:
    """Runs of finished raw frames, ``num_frames`` in all: a clip for each raw window [B, C, 28, H, W], then the last one's tail.

    Changes the windows in place and keeps nothing of them but the few frames that fade into the next one.
    """
    body_start = config.frame_pre_padding
    tail_start = body_start + config.clip_length + config.frame_pre_padding
    tail = None
    for window in windows:
        body = window.narrow(TIME, body_start, config.clip_length)
        if tail is not None:
            fade_in_(body, tail, TIME)
        tail = window.narrow(TIME, tail_start, config.frame_overlap).clone()
        yield body[:, :, :num_frames]
        num_frames -= config.clip_length
        del body, window  # or they would outlive the decoding of the next window
    if tail is not None and num_frames > 0:
        yield tail[:, :, :num_frames]
