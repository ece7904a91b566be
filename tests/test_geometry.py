import pytest
from lazy_h3.h3.geometry import (
    LatentSize,
    aligned_frames,
    audio_latents,
    frames_of_duration,
    latent_frames,
    pixel_frames,
)


@pytest.mark.parametrize(("seconds", "frames"), [(5.0, 124), (10, 243), (15, 362), (2.4, 73), (0.1, 5)])
def test_a_duration_becomes_the_next_frame_count_of_the_grid(seconds: float, frames: int) -> None:
    assert frames_of_duration(seconds) == frames


@pytest.mark.parametrize(("asked", "given"), [(1, 5), (5, 5), (6, 22), (22, 22), (23, 39), (124, 124)])
def test_frames_align_upwards(asked: int, given: int) -> None:
    assert aligned_frames(asked) == given


def test_latent_frames_cover_exactly_the_frames_of_the_grid() -> None:
    for frames in range(5, 400, 17):
        assert pixel_frames(latent_frames(frames)) == frames
        assert latent_frames(frames + 16) == latent_frames(frames)


@pytest.mark.parametrize(("frames", "latents"), [(124, 207), (243, 405), (362, 603), (73, 122), (5, 8)])
def test_audio_has_forty_latents_a_second(frames: int, latents: int) -> None:
    assert audio_latents(frames) == latents


def test_a_clip_at_the_published_size() -> None:
    size = LatentSize.of_clip(124, 768, 1344)
    assert size == LatentSize(37, 48, 84, 207)
    assert size.frames * size.tokens_per_frame == 37296


def test_odd_latents_are_padded_to_whole_patches() -> None:
    assert LatentSize(5, 5, 3, 6).padded == LatentSize(5, 6, 4, 6)
    assert LatentSize(5, 4, 6, 6).padded == LatentSize(5, 4, 6, 6)


def test_a_frame_count_off_the_grid_is_refused_with_the_next_one() -> None:
    with pytest.raises(ValueError, match=r"120 frames .* 124"):
        LatentSize.of_clip(120, 768, 1344)


@pytest.mark.parametrize(("height", "width"), [(0, 32), (32, 48), (720, 1280)])
def test_a_canvas_off_the_grid_is_refused(height: int, width: int) -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        LatentSize.of_clip(124, height, width)
