"""From a request to what the text encoder reads: segments, ids, tags and positions (text encoder spec, sections 1, 3.1, 5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .config import FPS, TextEncoderConfig
from .tokenizer import PromptTokenizer, TokenizerError
from .vision import NO_TOWER, Grid

logger = logging.getLogger(__name__)

VIDEO_TAG = 0  # whole vision blocks, their start and end tokens included
TEXT_TAG = 1
SAMPLES_PER_SECOND = 2  # frames of a reference video that the encoder sees
LONG_PROMPT = 1024  # text tokens; what the model was trained with

Run = int | Grid  # this many text tokens, or a vision block of rows x columns of merged patches


@dataclass(frozen=True)
class Text:
    """Tokenized on its own: merges never cross a segment's border."""

    text: str


@dataclass(frozen=True)
class FrameSlot:
    """The place of one frame block: a still image, or a pair of video frames."""

    grid: Grid
    is_video: bool = False


Segment = Text | FrameSlot


@dataclass(frozen=True)
class ImageReference:
    grid: Grid


@dataclass(frozen=True)
class AudioReference:
    """Named in the prompt only: sound never enters the encoder."""


@dataclass(frozen=True)
class VideoReference:
    """``num_samples`` frames at two a second, all of one grid."""

    grid: Grid
    num_samples: int
    has_soundtrack: bool = False


Reference = ImageReference | AudioReference | VideoReference


@dataclass(frozen=True)
class Presentation:
    """A request in the form of ``TextEncoder.forward``; all tensors int64 on the CPU."""

    token_ids: Tensor  # [L]
    tags: Tensor  # [L], 0 video, 1 text
    position_ids: Tensor  # [3, L], axes t, h, w
    vision_rows: Tensor  # [N], where the features of the frame blocks go
    grids: tuple[Grid, ...]  # of the frame blocks in sequence order, in patches


def text_to_video(prompt: str) -> list[Segment]:
    return [Text(prompt)]


def keyframes_to_video(prompt: str, keyframes: Sequence[Grid]) -> list[Segment]:
    """First and last keyframe, or the only one."""
    pictures: list[Segment] = []
    for ordinal, grid in enumerate(keyframes, 1):
        pictures += [Text(f"<Picture {ordinal}>: "), FrameSlot(grid)]
    return [*pictures, Text(prompt)]


def references_to_video(prompt: str, references: Sequence[Reference]) -> list[Segment]:
    """References in the order of the request; each kind is numbered on its own, a soundtrack just before its video."""
    counts = {"Picture": 0, "Audio": 0, "Video": 0}

    def label(kind: str) -> Text:
        counts[kind] += 1
        return Text(f"<{kind} {counts[kind]}>: ")

    segments: list[Segment] = []
    for reference in references:
        if isinstance(reference, ImageReference):
            segments += [label("Picture"), FrameSlot(reference.grid)]
        elif isinstance(reference, AudioReference):
            segments += [label("Audio")]
        else:
            segments += [label("Audio")] if reference.has_soundtrack else []
            segments += [label("Video"), *_frame_pairs(reference)]
    return [*segments, Text(prompt)]


def sampled_frames(num_frames: int) -> range:
    """Indices of the frames of a 24 fps reference video that the encoder sees."""
    return range(0, num_frames, FPS // SAMPLES_PER_SECOND)


def pair_seconds(num_samples: int) -> list[float]:
    """The time of each pair of sampled frames, the mean of the two; an odd last frame is paired with itself."""
    seconds = [sample / SAMPLES_PER_SECOND for sample in range(num_samples)]
    return [(first + second) / 2 for first, second in zip(seconds[::2], [*seconds[1::2], *seconds[-1:]], strict=False)]


def present(segments: Iterable[Segment], tokenizer: PromptTokenizer, config: TextEncoderConfig) -> Presentation:
    """Token ids, tags and positions of the segments; a request without any token is the single end-of-text token.

    Raises TokenizerError for a token without a row in the embedding table of ``config``, ValueError for pictures without a tower.
    """
    vocabulary = _Vocabulary(tokenizer, config)
    segments = list(segments)
    spans = [vocabulary.span(segment) for segment in segments]
    if not any(span.token_ids for span in spans):
        spans = [vocabulary.end_of_text()]
    token_ids = [token_id for span in spans for token_id in span.token_ids]
    tags = [span.tag for span in spans for _ in span.token_ids]
    runs = [run for span in spans for run in span.runs]
    grids = tuple(segment.grid for segment in segments if isinstance(segment, FrameSlot))
    _warn_of_length(tags.count(TEXT_TAG))
    return Presentation(torch.tensor(token_ids), torch.tensor(tags), position_ids(runs), vision_rows(runs), grids)


def position_ids(runs: Iterable[Run]) -> Tensor:
    """[3, L] int64 positions on the axes t, h, w: text counts on, a block spans a rectangle from where the count stands."""
    count = 0
    pieces = [torch.empty(3, 0, dtype=torch.int64)]
    for run in runs:
        extent = (1, *run) if isinstance(run, tuple) else (run,)
        axes = torch.meshgrid(*(torch.arange(count, count + n) for n in extent), indexing="ij")
        pieces.append(torch.stack([axis.flatten() for axis in axes]).expand(3, -1))  # text: one axis for all three
        count += max(extent)
    return torch.cat(pieces, dim=1)


def vision_rows(runs: Iterable[Run]) -> Tensor:
    """[N] int64: the rows of the sequence that are frame blocks."""
    is_vision = [isinstance(run, tuple) for run in runs for _ in range(prod(run) if isinstance(run, tuple) else run)]
    return torch.tensor(is_vision, dtype=torch.bool).nonzero().flatten()


@dataclass(frozen=True)
class _Span:
    """The tokens of one segment."""

    token_ids: list[int]
    tag: int
    runs: tuple[Run, ...]


class _Vocabulary:
    """Segments to spans, every id of which has a row in the embedding table."""

    def __init__(self, tokenizer: PromptTokenizer, config: TextEncoderConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config

    def span(self, segment: Segment) -> _Span:
        return self._text(segment) if isinstance(segment, Text) else self._frame_block(segment)

    def end_of_text(self) -> _Span:
        return _Span([self._special(None, "<|endoftext|>")], TEXT_TAG, (1,))

    def _text(self, segment: Text) -> _Span:
        token_ids = [self._checked(token_id) for token_id in self._tokenizer.encode(segment.text)]
        return _Span(token_ids, TEXT_TAG, (len(token_ids),))

    def _frame_block(self, slot: FrameSlot) -> _Span:
        config = self._config
        if config.vision is None:
            raise ValueError(NO_TOWER)
        rows, columns = (side // config.vision.spatial_merge_size for side in slot.grid)
        start = self._special(config.vision_start_token_id, "<|vision_start|>")
        end = self._special(config.vision_end_token_id, "<|vision_end|>")
        image, video = (config.image_token_id, "<|image_pad|>"), (config.video_token_id, "<|video_pad|>")
        pad = self._special(*(video if slot.is_video else image))
        return _Span([start, *[pad] * (rows * columns), end], VIDEO_TAG, (1, (rows, columns), 1))

    def _special(self, configured: int | None, literal: str) -> int:
        return self._checked(self._tokenizer.id_of(literal) if configured is None else configured)

    def _checked(self, token_id: int) -> int:
        num_rows = self._config.vocab_size
        if token_id >= num_rows:
            raise TokenizerError(
                f"Token {self._tokenizer.token(token_id)!r} of {self._tokenizer.source} has id {token_id}, but the text encoder "
                f"knows {num_rows} tokens: use the tokenizer that belongs to it."
            )
        return token_id


def _frame_pairs(video: VideoReference) -> Iterator[Segment]:
    for seconds in pair_seconds(video.num_samples):
        yield Text(f"<{seconds:.1f} seconds>")
        yield FrameSlot(video.grid, is_video=True)


def _warn_of_length(num_text: int) -> None:
    if num_text > LONG_PROMPT:
        logger.warning("The prompt has %d text tokens; the model was trained with at most %d.", num_text, LONG_PROMPT)
