"""AUDIO: a waveform [B, C, T] in -1..1 with its sample rate, to and from files through PyAV."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import av
import numpy as np
import torch
from torch import Tensor

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


class Audio(TypedDict):
    waveform: Tensor
    sample_rate: int


def audio_frame(audio: Audio, item: int) -> av.AudioFrame:
    """One item of the batch as a single frame of planar floats."""
    waveform = audio["waveform"][item].detach().float().cpu().clamp(-1, 1)
    if waveform.shape[0] not in LAYOUTS:
        raise ValueError(f"Audio with {waveform.shape[0]} channels cannot be written: use {', '.join(LAYOUTS.values())}.")
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(waveform.numpy()), format="fltp", layout=LAYOUTS[waveform.shape[0]])
    frame.sample_rate = int(audio["sample_rate"])
    frame.pts = 0
    return frame


def save_flac(audio: Audio, item: int, path: Path, metadata: dict[str, str]) -> None:
    """One item of the batch as a FLAC file of 24 bits."""
    frame = audio_frame(audio, item)
    with av.open(str(path), "w", format="flac") as container:
        container.metadata.update(metadata)
        stream = container.add_stream("flac", rate=frame.sample_rate, layout=frame.layout)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def load_audio(path: Path) -> Audio:
    """The first audio track of any file that FFmpeg reads, waveform [1, C, T] in fp32.

    Raises:
        ValueError: the file has no audio.
    """
    with av.open(str(path)) as container:
        if not container.streams.audio:
            raise ValueError(f"{path} has no audio track: choose another file.")
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
        frames = [part for frame in container.decode(stream) for part in resampler.resample(frame)]
        pieces = [torch.from_numpy(frame.to_ndarray()) for frame in [*frames, *resampler.resample(None)]]
        rate: Any = stream.rate
    return Audio(waveform=torch.cat(pieces, dim=1).unsqueeze(0), sample_rate=int(rate))
