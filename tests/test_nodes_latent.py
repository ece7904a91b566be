"""The empty latent: what was asked for, what it becomes, and that both are said."""

import pytest
from lazy_h3.h3.geometry import audio_latents
from lazy_h3.nodes import LazyH3EmptyLatent
from small_models import stage


@pytest.fixture
def make(tmp_path):
    with stage(tmp_path):
        yield LazyH3EmptyLatent().make


@pytest.mark.parametrize(("seconds", "frames"), [(5.0, 124), (10, 243), (15, 362), (2.4, 73)])
def test_durations_snap_up_to_the_grid_of_frames(make, seconds, frames):
    latent, delivered, info = make(1344, 768, seconds, "seconds")
    video, audio = latent["samples"].unbind()
    assert delivered == frames
    assert f"Asked for 1344 x 768, {seconds:g} seconds" in info
    assert f"{frames} frames ({frames / 24:.2f} s)" in info
    assert video.shape == (1, 24, (frames - 5) // 17 * 5 + 2, 48, 84)
    assert audio.shape == (1, 32, 2, round(frames / 24 * 40))
    assert abs(audio.shape[-1] / 40 - frames / 24) <= 1 / 40  # what the decoders then make of the two
    assert not video.any()
    assert not audio.any()


@pytest.mark.parametrize(("asked", "delivered"), [(1, 5), (5, 5), (6, 22), (22, 22), (23, 39), (124, 124)])
def test_a_number_of_frames_snaps_up_likewise(make, asked, delivered):
    latent, frames, info = make(32, 32, asked, "frames")
    assert frames == delivered
    assert f"{asked} frames; makes 32 x 32, {delivered} frames" in info
    assert latent["samples"].unbind()[1].shape[-1] == audio_latents(delivered)


@pytest.mark.parametrize(("side", "delivered"), [(32, 32), (63, 32), (64, 64), (800, 800), (813, 800)])
def test_sides_snap_down_to_multiples_of_32(make, side, delivered):
    latent, _, info = make(side, 64, 5, "frames")
    assert latent["samples"].unbind()[0].shape[3:] == (4, delivered // 16)
    assert f"makes {delivered} x 64" in info


@pytest.mark.parametrize(("seconds", "is_noted"), [(1.0, True), (4.9, False), (5.0, False), (15.0, False), (16.0, True)])
def test_lengths_the_model_was_not_trained_on_are_noted(make, seconds, is_noted):
    _, _, info = make(32, 32, seconds, "seconds")
    assert ("was trained on 5 to 15 seconds" in info) == is_noted


def test_the_latent_is_nested_as_in_core(make):
    samples = make(64, 32, 22, "frames")[0]["samples"]
    assert samples.is_nested
    assert samples.shape == samples.unbind()[0].shape


def test_a_latent_larger_than_the_machine_is_refused_in_one_sentence(make):
    with pytest.raises(ValueError, match=r"16384 x 16384 and 3600 seconds takes .* more than the memory of this machine"):
        make(16384, 16384, 3600.0, "seconds")
