"""One request as one sequence of rows: latents to rows and back, order, positions and tags (DiT spec, sections 2 and 3).

    [ text | keyframes and guides | references | target audio | target video ]

A layout is a list of segments. What a segment is (its kind) decides its modality tag and whose clock its rows follow; the network
needs to know nothing else about conditions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .config import AUDIO_LATENTS_PER_SECOND, FPS, STEREO
from .geometry import FRAMES_PER_LATENT, LATENTS_PER_CHUNK, PATCH, LatentSize

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = range(3)
NUM_TAGS = 3
TIME_PER_FRAME = AUDIO_LATENTS_PER_SECOND / FPS  # one unit of time is one audio latent
SPATIAL_EXTENT = 32.0
VISUAL_CONDITION_TIME = 0.999
AUDIO_CONDITION_TIME = 1.0


def patchify(video: Tensor) -> Tensor:
    """[B, C, T, H, W] with even H and W to rows [B*T*H/2*W/2, C*4], features ordered (channel, row, column)."""
    batch, channels, frames, height, width = video.shape
    patches = video.reshape(batch, channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(-1, channels * PATCH * PATCH)


def unpatchify(rows: Tensor, size: LatentSize) -> Tensor:
    """The inverse for one clip of even ``size``: rows [T*H/2*W/2, C*4] to [1, C, T, H, W]."""
    patches = rows.reshape(1, size.frames, size.height // PATCH, size.width // PATCH, -1, PATCH, PATCH)
    return patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(1, -1, size.frames, size.height, size.width)


def whole_patches(video: Tensor) -> Tensor:
    """Odd height and width made even: the first row and column come again after the last."""
    height, width = video.shape[-2:]
    return pad(video, (0, width % PATCH, 0, height % PATCH, 0, 0), mode="circular") if height % PATCH or width % PATCH else video


def pack_audio(audio: Tensor) -> Tensor:
    """[1, C, 2, T] to rows [2*T, C], all of the left channel first."""
    return audio[0].permute(1, 2, 0).reshape(-1, audio.shape[1])


def unpack_audio(rows: Tensor) -> Tensor:
    """Rows [2*T, C] to [1, C, 2, T]."""
    return rows.reshape(STEREO, -1, rows.shape[-1]).permute(2, 0, 1)[None]


class Kind(Enum):
    """What the rows of a segment are."""

    TEXT = "text"
    CONDITION = "cond"
    CONDITION_AUDIO = "cond_audio"
    REFERENCE = "ref_img"
    REFERENCE_AUDIO = "ref_audio"
    AUDIO = "audio"
    VIDEO = "video"

    @property
    def is_visual(self) -> bool:
        return self in (Kind.CONDITION, Kind.REFERENCE, Kind.VIDEO)

    @property
    def is_audio(self) -> bool:
        return self in (Kind.CONDITION_AUDIO, Kind.REFERENCE_AUDIO, Kind.AUDIO)

    @property
    def tag(self) -> int:
        """Modality of the rows, unless the text encoder says otherwise of a text row."""
        return VIDEO_TAG if self.is_visual else AUDIO_TAG if self.is_audio else TEXT_TAG


class Segment(NamedTuple):
    """Rows ``start : stop`` of the sequence, all of one kind."""

    kind: Kind
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class Run(NamedTuple):
    """Consecutive rows of one kind and one modality tag: they share every modulation."""

    kind: Kind
    rows: slice
    tag: int


@dataclass(frozen=True)
class Keyframe:
    """A condition on the target's grid at pixel frame ``frame``: an image or clip latent, an audio latent or both."""

    frame: int
    latent_frames: int = 0
    audio_latents: int = 0


@dataclass(frozen=True)
class Reference:
    """A condition with a grid of its own: an image, a clip with or without sound, or (``size.frames == 0``) sound alone."""

    size: LatentSize
    is_image: bool = False

    @property
    def span(self) -> float:
        """Units of time that it takes before the next reference or the target begins."""
        return 1.0 if self.is_image else max(float(self.size.audio), sum(_frame_steps(self.size.frames)))


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Order, positions and tags of the S rows of one request. All tensors are on the CPU.

    ``position_ids`` [S, 3] float64 (t, h, w): angles are formed in float32, but positions grow beyond what bf16 can count.
    ``tags`` [S] int64: 0 video, 1 text, 2 audio. The condition times are the clean-times of noise-augmented condition rows.
    """

    segments: tuple[Segment, ...]
    position_ids: Tensor
    tags: Tensor
    visual_condition_time: float = VISUAL_CONDITION_TIME
    audio_condition_time: float = AUDIO_CONDITION_TIME

    @property
    def num_rows(self) -> int:
        return self.segments[-1].stop

    @property
    def text(self) -> Segment:
        return self.segments[0]

    @cached_property
    def visual(self) -> tuple[Segment, ...]:
        """Segments of video rows: conditions in packed order, then the target."""
        return tuple(segment for segment in self.segments if segment.kind.is_visual)

    @cached_property
    def sound(self) -> tuple[Segment, ...]:
        """Segments of audio rows: conditions in packed order, then the target."""
        return tuple(segment for segment in self.segments if segment.kind.is_audio)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The sequence cut wherever the kind or the tag changes."""
        return tuple(run for segment in self.segments for run in self._runs_of(segment))

    def _runs_of(self, segment: Segment) -> Iterator[Run]:
        tags, counts = torch.unique_consecutive(self.tags[segment.rows], return_counts=True)
        start = segment.start
        for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
            yield Run(segment.kind, slice(start, start + count), tag)
            start += count

    def row_times(self, video_time: float, audio_time: float) -> tuple[Tensor, dict[Kind, int]]:
        """Sorted distinct clean-times [M] fp32 of a step, and for each kind of row which of them it has (spec section 3)."""
        time_of = {segment.kind: self._time_of(segment.kind, video_time, audio_time) for segment in self.segments}
        times, index = torch.unique(torch.tensor(list(time_of.values()), dtype=torch.float32), return_inverse=True)
        return times, dict(zip(time_of, index.tolist(), strict=True))

    def _time_of(self, kind: Kind, video_time: float, audio_time: float) -> float:
        if kind in (Kind.CONDITION, Kind.REFERENCE):
            return max(video_time, self.visual_condition_time)
        if kind in (Kind.CONDITION_AUDIO, Kind.REFERENCE_AUDIO):
            return max(audio_time, self.audio_condition_time)
        return audio_time if kind is Kind.AUDIO else video_time


def pack(
    text_tags: Tensor,
    target: LatentSize,
    keyframes: Sequence[Keyframe] = (),
    references: Sequence[Reference] = (),
    *,
    visual_condition_time: float = VISUAL_CONDITION_TIME,
    audio_condition_time: float = AUDIO_CONDITION_TIME,
) -> PackedLayout:
    """Lay out a request. ``text_tags`` [L] has the modality tag of each text row; ``target`` must have even height and width."""
    num_text = text_tags.shape[0]
    origin = num_text + sum(reference.span for reference in references)
    pieces = [
        (Kind.TEXT, _text_positions(num_text)),
        *(piece for keyframe in keyframes for piece in _keyframe_pieces(keyframe, origin, target)),
        *_reference_pieces(references, float(num_text), target),
        (Kind.AUDIO, _audio_positions(origin, target.audio, target)),
        (Kind.VIDEO, _visual_positions(origin, target.frames, target)),
    ]
    segments = _consecutive([(kind, len(positions)) for kind, positions in pieces])
    position_ids = torch.cat([positions for _, positions in pieces])
    tags = torch.cat([text_tags.cpu().long(), *(torch.full((s.num_rows,), s.kind.tag) for s in segments[1:])])
    return PackedLayout(segments, position_ids, tags, visual_condition_time, audio_condition_time)


def _consecutive(counts: Sequence[tuple[Kind, int]]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for kind, num_rows in counts:
        segments.append(Segment(kind, start, start + num_rows))
        start += num_rows
    return tuple(segments)


def _keyframe_pieces(keyframe: Keyframe, origin: float, target: LatentSize) -> Iterator[tuple[Kind, Tensor]]:
    start = origin + TIME_PER_FRAME * keyframe.frame
    if keyframe.latent_frames:
        yield Kind.CONDITION, _visual_positions(start, keyframe.latent_frames, target)
    if keyframe.audio_latents:
        yield Kind.CONDITION_AUDIO, _audio_positions(start, keyframe.audio_latents, target)


def _reference_pieces(references: Sequence[Reference], start: float, target: LatentSize) -> Iterator[tuple[Kind, Tensor]]:
    for reference in references:
        size = reference.size
        if size.audio:
            yield Kind.REFERENCE_AUDIO, _audio_positions(start, size.audio, size if size.frames else target)
        if size.frames:
            yield Kind.REFERENCE, _visual_positions(start, size.frames, size)
        start += reference.span


def _text_positions(num_rows: int) -> Tensor:
    positions = torch.zeros(num_rows, 3, dtype=torch.float64)
    positions[:, 0] = torch.arange(num_rows)
    return positions


def _visual_positions(start: float, num_frames: int, grid: LatentSize) -> Tensor:
    """[num_frames * tokens_per_frame, 3], w fastest."""
    steps = torch.tensor([0.0, *_frame_steps(num_frames)], dtype=torch.float64)[:num_frames]
    times = start + steps.cumsum(0)
    return torch.cartesian_prod(times, _axis(grid.height, grid), _axis(grid.width, grid))


def _audio_positions(start: float, num_latents: int, frame: LatentSize) -> Tensor:
    """[2 * num_latents, 3]: the left channel at the first column of ``frame``, the right one at the last."""
    times = start + torch.arange(num_latents, dtype=torch.float64)
    columns = _axis(frame.width, frame)
    return torch.cat([torch.stack([times, torch.zeros_like(times), side.expand_as(times)], dim=1) for side in columns[[0, -1]]])


def _axis(length: int, grid: LatentSize) -> Tensor:
    """Patch coordinates of an axis: equidistant, centred by length over geometric mean, without the end point."""
    extent = length / sqrt(grid.height * grid.width)
    points = length // PATCH
    return ((1 - extent) / 2 + torch.arange(points, dtype=torch.float64) * (extent / points)) * SPATIAL_EXTENT


def _frame_steps(num_frames: int) -> list[float]:
    """Units of time under each latent frame."""
    return [TIME_PER_FRAME * FRAMES_PER_LATENT[k % LATENTS_PER_CHUNK] for k in range(num_frames)]
