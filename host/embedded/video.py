"""VIDEO: frames with sound, and the file they become (H.264 and AAC through PyAV)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from torch import Tensor

from .audio import Audio, audio_frame
from .progress import ProgressBar

CONTAINERS = {"auto": "mp4", "mp4": "mp4", "mkv": "matroska"}
CODECS = {"auto": "libx264", "h264": "libx264"}
BT709 = 1
LIMITED_RANGE = 1
AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000)


@dataclass
class VideoComponents:
    """``images`` [N, H, W, 3] in 0..1, frames per second, and sound."""

    images: Tensor
    frame_rate: Fraction
    audio: Audio | None = None


class VideoFromComponents:
    """A video that exists as tensors; it becomes a file when it is saved."""

    def __init__(self, components: VideoComponents, bit_depth: int = 8):
        self._components = components
        self._bit_depth = bit_depth

    def get_components(self) -> VideoComponents:
        return self._components

    def get_dimensions(self) -> tuple[int, int]:
        """Width and height."""
        return self._components.images.shape[2], self._components.images.shape[1]

    def get_frame_count(self) -> int:
        return self._components.images.shape[0]

    def get_frame_rate(self) -> Fraction:
        return self._components.frame_rate

    def get_duration(self) -> float:
        """Seconds."""
        return float(self.get_frame_count() / self.get_frame_rate())

    def get_bit_depth(self) -> int:
        return self._bit_depth

    def save_to(
        self, path: str | Path, format: str = "auto", codec: str = "auto", metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Write an MP4 (or MKV) file; the sound is kept at its full length. An unfinished file is removed.

        Odd widths and heights are made even by repeating the last column or row, which H.264 demands.
        """
        if format not in CONTAINERS or codec not in CODECS:
            raise ValueError(
                f"Cannot write a video as {format} with {codec}: use one of {', '.join(CONTAINERS)} with {' or '.join(CODECS)}."
            )
        with _whole_file(Path(path)) as unfinished, _open(unfinished, CONTAINERS[format]) as container:
            for name, value in (metadata or {}).items():
                container.metadata[name] = json.dumps(value)
            video = self._add_video_stream(container, CODECS[codec])
            audio = _add_audio_stream(container, self._components.audio) if self._components.audio else None
            self._encode_images(container, video)
            if audio is not None:
                _encode_audio(container, audio, self._components.audio)

    def _add_video_stream(self, container: av.container.OutputContainer, codec: str) -> av.VideoStream:
        width, height = self.get_dimensions()
        stream = container.add_stream(codec, rate=Fraction(self.get_frame_rate()).limit_denominator(1001))
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv420p10le" if self._bit_depth > 8 else "yuv420p"
        for name in ("color_primaries", "color_trc", "colorspace"):
            setattr(stream.codec_context, name, BT709)
        stream.codec_context.color_range = LIMITED_RANGE
        return stream

    def _encode_images(self, container: av.container.OutputContainer, stream: av.VideoStream) -> None:
        progress = ProgressBar(self.get_frame_count())
        for image in self._components.images:
            frame = self._video_frame(image).reformat(format=stream.pix_fmt, dst_colorspace=BT709, dst_color_range=LIMITED_RANGE)
            container.mux(stream.encode(frame))
            progress.update(1)
        container.mux(stream.encode(None))

    def _video_frame(self, image: Tensor) -> av.VideoFrame:
        """[H, W, 3] in 0..1 to a frame of even size."""
        dtype, top, layout = (np.uint16, 65535, "rgb48le") if self._bit_depth > 8 else (np.uint8, 255, "rgb24")
        pixels = (image[..., :3].detach().float().cpu().clamp(0, 1) * top).round().numpy().astype(dtype)
        height, width = pixels.shape[:2]
        pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=layout)


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """A place to write to; becomes ``path`` at the end, or nothing if something goes wrong."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _open(path: Path, container: str) -> av.container.OutputContainer:
    options = {"movflags": "use_metadata_tags+faststart"} if container == "mp4" else {}
    return av.open(str(path), "w", format=container, options=options)


def _add_audio_stream(container: av.container.OutputContainer, audio: Audio) -> av.AudioStream:
    rate = audio["sample_rate"] if audio["sample_rate"] in AAC_RATES else 48000
    return container.add_stream("aac", rate=rate, layout=audio_frame(audio, 0).layout)


def _encode_audio(container: av.container.OutputContainer, stream: av.AudioStream, audio: Audio) -> None:
    resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
    for frame in [*resampler.resample(audio_frame(audio, 0)), *resampler.resample(None)]:
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
