"""The whole numbers of a clip: frames, latents and canvas (DiT spec, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from .config import AUDIO_LATENTS_PER_SECOND, FPS

SPATIAL_RATIO = 16
CANVAS_MULTIPLE = 32
PATCH = 2  # latent rows and columns of one token
FRAMES_PER_LATENT = (1, 4, 4, 4, 4)  # pixel frames under latent frame k, by k mod 5
LATENTS_PER_CHUNK = len(FRAMES_PER_LATENT)
FRAMES_PER_CHUNK = sum(FRAMES_PER_LATENT)
SHORTEST_FRAMES, SHORTEST_LATENTS = 5, 2


def aligned_frames(frames: int) -> int:
    """The smallest frame count 17k + 5 that holds ``frames``."""
    chunks = -(-max(frames - SHORTEST_FRAMES, 0) // FRAMES_PER_CHUNK)
    return chunks * FRAMES_PER_CHUNK + SHORTEST_FRAMES


def frames_of_duration(seconds: float) -> int:
    """The aligned frame count of a clip of ``seconds``: 5.0 s is 124 frames, 2.4 s is 73."""
    return aligned_frames(round(seconds * FPS))


def latent_frames(frames: int) -> int:
    """Latent frames of a clip; a count between two aligned ones has those of the lower one."""
    return max(frames - SHORTEST_FRAMES, 0) // FRAMES_PER_CHUNK * LATENTS_PER_CHUNK + SHORTEST_LATENTS


def pixel_frames(num_latent_frames: int) -> int:
    """Pixel frames that the latent frames cover."""
    return sum(FRAMES_PER_LATENT[k % LATENTS_PER_CHUNK] for k in range(num_latent_frames))


def audio_latents(frames: int) -> int:
    """Audio latents of each stereo channel beside a clip of ``frames``."""
    return round(frames / FPS * AUDIO_LATENTS_PER_SECOND)


@dataclass(frozen=True)
class LatentSize:
    """Extent of the two streams: video latent frames, rows and columns, and audio latents of each stereo channel."""

    frames: int
    height: int
    width: int
    audio: int

    @classmethod
    def of_clip(cls, frames: int, height: int, width: int) -> LatentSize:
        """Of a clip in pixels. Raises ValueError unless frames are 17k + 5 and both sides multiples of 32."""
        if frames != aligned_frames(frames):
            raise ValueError(f"A clip of {frames} frames does not exist; the next longer one has {aligned_frames(frames)}.")
        if min(height, width) < CANVAS_MULTIPLE or height % CANVAS_MULTIPLE or width % CANVAS_MULTIPLE:
            raise ValueError(f"The canvas {width} x {height} is not allowed; both sides must be multiples of {CANVAS_MULTIPLE}.")
        return cls(latent_frames(frames), height // SPATIAL_RATIO, width // SPATIAL_RATIO, audio_latents(frames))

    @property
    def padded(self) -> LatentSize:
        """With height and width rounded up to whole patches."""
        return LatentSize(self.frames, self.height + self.height % PATCH, self.width + self.width % PATCH, self.audio)

    @property
    def tokens_per_frame(self) -> int:
        return (self.height // PATCH) * (self.width // PATCH)
