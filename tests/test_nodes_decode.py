"""The decoder nodes: lengths, kinds of latent, options."""

import asyncio

import pytest
import torch
from lazy_h3.h3.audio_vae import normalise_loudness
from lazy_h3.h3.config import FPS
from lazy_h3.nodes import (
    LazyH3AudioVAELoader,
    LazyH3DecodeAudio,
    LazyH3DecodeVideo,
    LazyH3EmptyLatent,
    LazyH3VideoVAELoader,
)
from small_models import AUDIO_VAE, VIDEO_VAE, stage

AUDIO_LATENT_SECONDS = 1 / 40


@pytest.fixture
def running(tmp_path):
    with stage(tmp_path) as found:
        yield found


@pytest.fixture
def video_vae(running):
    return LazyH3VideoVAELoader().load(file=VIDEO_VAE)[0]


@pytest.fixture
def audio_vae(running):
    return LazyH3AudioVAELoader().load(file=AUDIO_VAE)[0]


def empty_latent(duration, unit: str) -> dict:
    return LazyH3EmptyLatent().make(32, 32, duration, unit)[0]


def random_latent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def video_of(vae, latent, **options) -> torch.Tensor:
    return asyncio.run(LazyH3DecodeVideo().decode(vae, latent, **options))[0]


def audio_of(vae, latent, **options) -> dict:
    return asyncio.run(LazyH3DecodeAudio().decode(vae, latent, **options))[0]


@pytest.mark.parametrize(("seconds", "frames"), [(2.4, 73), (5.0, 124)])
def test_the_sound_is_as_long_as_the_video_within_one_audio_latent(audio_vae, seconds, frames):
    audio = audio_of(audio_vae, empty_latent(seconds, "seconds"))
    length = audio["waveform"].shape[-1] / audio["sample_rate"]
    assert abs(length - frames / FPS) <= AUDIO_LATENT_SECONDS
    assert audio["waveform"].shape[:2] == (1, 2)
    assert audio["waveform"].dtype == torch.float32


@pytest.mark.parametrize("frames", [5, 22, 39, 124])
def test_the_video_has_the_frames_of_its_latent(video_vae, frames):
    images = video_of(video_vae, empty_latent(frames, "frames"))
    assert images.shape == (frames, 32, 32, 3)
    assert images.dtype == torch.float32
    assert 0 <= images.min() <= images.max() <= 1


def test_a_stream_alone_decodes_as_it_does_beside_the_other(video_vae, audio_vae):
    both = empty_latent(22, "frames")
    video, audio = both["samples"].unbind()
    assert torch.equal(video_of(video_vae, {"samples": video}), video_of(video_vae, both))
    assert torch.equal(audio_of(audio_vae, {"samples": audio})["waveform"], audio_of(audio_vae, both)["waveform"])


def test_tiles_blend_by_either_rule(video_vae):
    latent = {"samples": random_latent(1, 24, 2, 18, 18)}  # larger than a tile both ways: the rules differ where tiles cross
    raw, composited = (video_of(video_vae, latent, tile_blending=rule) for rule in ("raw", "composited"))
    assert raw.shape == composited.shape == (5, 288, 288, 3)
    assert torch.equal(raw, video_of(video_vae, latent))
    assert not torch.equal(raw, composited)


def test_a_lone_frame_decodes_by_either_rule(video_vae):
    latent = {"samples": random_latent(1, 24, 1, 2, 2)}
    padded, comfy = (video_of(video_vae, latent, single_frame=rule) for rule in ("padded", "comfy"))
    assert padded.shape == comfy.shape == (1, 32, 32, 3)
    assert torch.equal(padded, video_of(video_vae, latent))
    assert not torch.equal(padded, comfy)


def test_loudness_is_limited_only_where_asked(audio_vae):
    latent = {"samples": 30 * random_latent(1, 32, 2, 12)}
    plain, limited = (audio_of(audio_vae, latent, limit_loudness=limit)["waveform"] for limit in (False, True))
    assert torch.equal(limited, normalise_loudness(plain))
    assert torch.equal(plain, audio_of(audio_vae, latent)["waveform"])


@pytest.mark.parametrize("shape", [(1, 16, 7, 2, 2), (2, 24, 7, 2, 2), (1, 24, 2, 2)])
def test_latents_of_another_video_vae_are_refused_with_their_shape(video_vae, shape):
    with pytest.raises(ValueError, match=r"The video VAE decodes latents \[1, 24, T, h, w\], not "):
        video_of(video_vae, {"samples": torch.zeros(shape)})


@pytest.mark.parametrize("shape", [(1, 8, 2, 12), (1, 32, 12)])
def test_latents_of_another_audio_vae_are_refused_with_their_shape(audio_vae, shape):
    with pytest.raises(ValueError, match=r"The audio VAE decodes latents \[B, 32, 2, T\], not "):
        audio_of(audio_vae, {"samples": torch.zeros(shape)})


def test_nothing_that_comes_out_is_a_view_of_the_weights(running, video_vae, audio_vae):
    images = video_of(video_vae, empty_latent(22, "frames"))
    audio = audio_of(audio_vae, empty_latent(22, "frames"))
    for handle in (video_vae, audio_vae):
        handle.release("the test is done")
    assert running.store.live_bytes() == 0
    assert images.isfinite().all()
    assert audio["waveform"].isfinite().all()
