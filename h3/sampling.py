"""Noise, schedules and the two-stream Euler sampler (DiT spec, sections 5 and 6).

Video and audio share a clock, the base noise amount from 1 to 0, and each bends it by a shift of its own into its noise level
sigma. The network is asked at the clean-times t = 1 - sigma of both. Latents are normalised fp32; all state is in the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .config import STEREO
from .dit import DiT, Request
from .geometry import LatentSize
from .packing import TEXT_TAG, pack, pack_audio, patchify, unpack_audio, unpatchify, whole_patches

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
COMFY_TABLE_LENGTH = 1000


class Latents(NamedTuple):
    """Video [1, C, T, H, W] and audio [1, C, 2, T_a], fp32; also their noises and velocities."""

    video: Tensor
    audio: Tensor

    @property
    def size(self) -> LatentSize:
        return LatentSize(*self.video.shape[2:], self.audio.shape[-1])

    def to(self, device: torch.device) -> Latents:
        return Latents(self.video.to(device, torch.float32), self.audio.to(device, torch.float32))


OnStep = Callable[[int, int, Latents], None]


def shifted(base: Tensor, shift: float) -> Tensor:
    """Noise level sigma of the base amount ``base`` in [0, 1]."""
    return shift * base / (1 + (shift - 1) * base)


def unshifted(sigma: Tensor, shift: float) -> Tensor:
    """The base amount behind the noise level ``sigma``."""
    return sigma / (shift + sigma * (1 - shift))


def audio_sigmas(video_sigmas: Tensor, video_shift: float = VIDEO_SHIFT, audio_shift: float = AUDIO_SHIFT) -> Tensor:
    """Noise levels of the audio stream at the moments when the video stream has ``video_sigmas``."""
    return shifted(unshifted(video_sigmas, video_shift), audio_shift)


def official_sigmas(num_points: int, shift: float) -> Tensor:
    """The official grid of ``num_points`` with both ends: one network evaluation fewer."""
    return shifted(torch.linspace(1, 0, num_points), shift)


def ladder_sigmas(rungs: Sequence[int], shift: float) -> Tensor:
    """Explicit rungs of a few-step student, thousandths of the base amount in (0, 1000], with the final 0."""
    return shifted(torch.tensor([*rungs, 0], dtype=torch.float32) / 1000, shift)


def comfy_simple_sigmas(num_steps: int, shift: float) -> Tensor:
    """ComfyUI's "simple" scheduler: every n-th entry of a table of 1000 levels, and 0."""
    table = shifted(torch.arange(1, COMFY_TABLE_LENGTH + 1) / COMFY_TABLE_LENGTH, shift)
    stride = COMFY_TABLE_LENGTH / num_steps
    return torch.cat([table[[-1 - int(step * stride) for step in range(num_steps)]], torch.zeros(1)])


@dataclass(frozen=True)
class Schedule:
    """Noise levels of both streams, one more than there are network evaluations.

    Raises ValueError unless both fall strictly, have the same number of levels and end at exactly 0.
    """

    video: tuple[float, ...]
    audio: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.video) != len(self.audio):
            raise ValueError(f"The schedule has {len(self.video)} video but {len(self.audio)} audio noise levels; give as many.")
        for stream, sigmas in (("video", self.video), ("audio", self.audio)):
            if len(sigmas) < 2 or sigmas[-1] != 0:
                raise ValueError(f"The {stream} schedule {list(sigmas)} must have a step and end at noise level 0.")
            for before, after in pairwise(sigmas):
                if after >= before:
                    raise ValueError(f"The {stream} noise level goes from {before} to {after}; it must fall at every step.")

    @classmethod
    def of(cls, video: Tensor, audio: Tensor) -> Schedule:
        return cls(tuple(video.float().tolist()), tuple(audio.float().tolist()))

    @classmethod
    def falling(cls, video: Tensor, audio: Tensor, last: int | None = None) -> Schedule:
        """The ``last`` steps (default: all), without those in which a stream stays at its level, where fp32 is too coarse."""
        pairs = list(zip(video.float().tolist(), audio.float().tolist(), strict=True))[-1 - (last or len(video)) :]
        kept = pairs[:1]
        for pair in pairs[1:]:
            if pair[0] != kept[-1][0] and pair[1] != kept[-1][1]:
                kept.append(pair)
        return cls(*zip(*kept, strict=True))

    @classmethod
    def official(
        cls, num_steps: int, video_shift: float = VIDEO_SHIFT, audio_shift: float = AUDIO_SHIFT, last: int | None = None
    ) -> Schedule:
        """The official schedule of ``num_steps`` network evaluations, which its own pipeline calls num_steps + 1.

        ``last``: these steps alone, to start from a latent that is not all noise.
        """
        video, audio = (official_sigmas(num_steps + 1, shift) for shift in (video_shift, audio_shift))
        return cls.falling(video, audio, last)

    @classmethod
    def ladder(cls, rungs: Sequence[int], video_shift: float = VIDEO_SHIFT, audio_shift: float = AUDIO_SHIFT) -> Schedule:
        return cls.of(ladder_sigmas(rungs, video_shift), ladder_sigmas(rungs, audio_shift))

    @classmethod
    def comfy_simple(
        cls, num_steps: int, video_shift: float = VIDEO_SHIFT, audio_shift: float = AUDIO_SHIFT, last: int | None = None
    ) -> Schedule:
        sigmas = comfy_simple_sigmas(num_steps, video_shift)
        return cls.falling(sigmas, audio_sigmas(sigmas, video_shift, audio_shift), last)

    @classmethod
    def of_video(cls, sigmas: Tensor, video_shift: float = VIDEO_SHIFT, audio_shift: float = AUDIO_SHIFT) -> Schedule:
        """A video schedule, however it was made, with the audio levels that belong to it."""
        return cls.of(sigmas, audio_sigmas(sigmas.float(), video_shift, audio_shift))

    @property
    def num_steps(self) -> int:
        return len(self.video) - 1

    @property
    def times(self) -> tuple[tuple[float, float], ...]:
        """Clean-times (video, audio) of every network evaluation, rounded to fp32 as the network sees them."""
        video, audio = (1 - torch.tensor(sigmas[:-1]) for sigmas in (self.video, self.audio))
        return tuple(zip(video.tolist(), audio.tolist(), strict=True))

    @property
    def clean_times(self) -> tuple[float, ...]:
        """All that the network will be asked at, both streams, ascending."""
        return tuple(sorted({time for times in self.times for time in times}))


def comfy_noise(video_shape: Sequence[int], audio_shape: Sequence[int], generator: torch.Generator) -> Latents:
    """Noise as ComfyUI draws it from a CPU generator: video, then audio in latent order."""
    return Latents(torch.randn(*video_shape, generator=generator), torch.randn(*audio_shape, generator=generator))


def official_noise(video_shape: Sequence[int], audio_shape: Sequence[int], generator: torch.Generator) -> Latents:
    """Noise as the official pipeline draws it: video, then audio as rows [2 * T_a, C]. Condition noise comes before both."""
    _, channels, _, num_latents = audio_shape
    video = torch.randn(*video_shape, generator=generator)
    return Latents(video, unpack_audio(torch.randn(STEREO * num_latents, channels, generator=generator)))


def noised(clean: Latents, noise: Latents, schedule: Schedule) -> Latents:
    """Clean latents at the first noise levels of the schedule."""
    video, audio = schedule.video[0], schedule.audio[0]
    return Latents(torch.lerp(clean.video, noise.video, video), torch.lerp(clean.audio, noise.audio, audio))


def velocity(network: DiT, request: Request, latents: Latents, video_time: float, audio_time: float) -> Latents:
    """Data-ward velocity x0 - noise of both streams. Odd heights and widths are padded for the network alone."""
    height, width = latents.video.shape[-2:]
    rows, audio_rows = network(patchify(whole_patches(latents.video)), pack_audio(latents.audio), request, video_time, audio_time)
    return Latents(unpatchify(rows, latents.size.padded)[..., :height, :width], unpack_audio(audio_rows))


def euler_step(x: Tensor, v: Tensor, time: float, sigma: float, next_sigma: float) -> Tensor:
    """From noise level ``sigma`` to ``next_sigma`` without new noise; the last step lands on the predicted clean latent."""
    clean = x + (1 - time) * v
    kept = next_sigma / sigma
    return kept * x + (1 - kept) * clean


def denoise(network: DiT, request: Request, latents: Latents, schedule: Schedule, on_step: OnStep | None = None) -> Latents:
    """Run the schedule from ``latents`` at its first noise level. ``on_step(done, total, latents)`` may raise to interrupt."""
    for step, (video_time, audio_time) in enumerate(schedule.times):
        v = velocity(network, request, latents, video_time, audio_time)
        latents = Latents(
            euler_step(latents.video, v.video, video_time, *schedule.video[step : step + 2]),
            euler_step(latents.audio, v.audio, audio_time, *schedule.audio[step : step + 2]),
        )
        if on_step is not None:
            on_step(step + 1, schedule.num_steps, latents)
    return latents


def sample(
    network: DiT,
    states: Tensor,
    text_tags: Tensor | None,
    noise: Latents,
    schedule: Schedule,
    *,
    start: Latents | None = None,
    on_step: OnStep | None = None,
) -> Latents:
    """Text to video and sound: clean normalised latents, fp32, on the device of ``noise``, whose shapes are the geometry.

    ``states`` [1, L, text_dim] and ``text_tags`` [L] come from the text encoder (no tags: all rows are text). Without ``start``
    the first step sees pure noise whatever its level, as few-step students were trained; with it, ``start`` at that level.
    """
    tags = torch.full(states.shape[1:2], TEXT_TAG) if text_tags is None else text_tags
    request = network.prepare(states, pack(tags, noise.size.padded))
    latents = noise if start is None else noised(start, noise, schedule)
    result = denoise(network, request, latents.to(request.text.device), schedule, on_step)
    return result.to(noise.video.device)
