"""The video VAE's behaviour beside its numbers: dtypes, progress, refusals."""

from __future__ import annotations

import pytest
import torch
from lazy_h3.h3.config import VideoVAEConfig
from lazy_h3.h3.video_vae import VideoVAE
from torch import nn

CONFIG = VideoVAEConfig(
    latent_channels=4,
    block_out_channels=(4, 8),
    layers_per_block=1,
    spatial_downsample_factors=(2, 2),
    temporal_downsample_factors=(2, 2),
    norm_num_groups=2,
    decoder_num_layers=2,
    decoder_num_attention_heads=2,
    decoder_attention_head_dim=16,
    tile_size=16,
    tile_overlap=4,
)


def filled(compute: torch.dtype = torch.float32) -> VideoVAE:
    """Random weights, the same for every dtype."""
    vae = VideoVAE(CONFIG)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in vae.state_dict().items():
        value = torch.randn(tensor.shape, generator=generator) * 0.2 + (1.0 if "norm" in name or "std" in name else 0.0)
        replaced = value.to(VideoVAE.storage_dtype(name, compute))
        module, _, leaf = name.rpartition(".")
        setattr(vae.get_submodule(module), leaf, replaced if leaf.startswith("latents_") else nn.Parameter(replaced))
    return vae.requires_grad_(False)


def latents(num_frames: int, height: int = 4, width: int = 6) -> torch.Tensor:
    return torch.randn(1, 4, num_frames, height, width, generator=torch.Generator().manual_seed(2))


def frames(num_frames: int, height: int = 16, width: int = 24) -> torch.Tensor:
    return torch.rand(num_frames, height, width, 3, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_half_precision_linears_between_fp32_islands_stay_close(compute: torch.dtype):
    vae = filled(compute)
    assert vae.decoder.transformer_blocks[0].attn.to_qkv.weight.dtype == compute
    assert vae.decoder.transformer_blocks[0].scale1.dtype == vae.encoder.conv_in.weight.dtype == torch.float32
    pixels = vae.decode(latents(2))
    assert pixels.dtype == torch.float32
    assert (pixels - filled().decode(latents(2))).abs().max() < 0.05
    assert torch.equal(vae.encode(frames(5)), filled().encode(frames(5)))


def test_inference_mode_changes_nothing():
    plain = filled().decode(latents(2))
    with torch.inference_mode():
        assert torch.equal(filled().decode(latents(2)), plain)


def test_progress_counts_windows_times_tiles():
    calls: list[tuple[int, int]] = []
    filled().decode(latents(8), on_window=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 4) for done in range(1, 5)]  # two windows of two tiles


def test_progress_counts_clips_times_tiles():
    calls: list[tuple[int, int]] = []
    filled().encode(frames(18), on_clip=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 4) for done in range(1, 5)]


def test_a_callback_that_raises_stops_the_decoding_there():
    calls = []

    def interrupt(done: int, total: int) -> None:
        calls.append(done)
        if done == 3:
            raise InterruptedError

    stream = filled().decode_stream(latents(12), on_window=interrupt)
    assert len(next(stream)) == 17
    with pytest.raises(InterruptedError):
        next(stream)
    assert calls == [1, 2, 3]


@pytest.mark.parametrize("num_frames", [2, 4, 18, 21])
def test_the_last_clip_is_filled_with_its_last_frame(num_frames: int):
    vae, video = filled(), frames(num_frames)
    missing = -num_frames % CONFIG.clip_length
    extended = torch.cat([video, video[-1:].expand(missing, -1, -1, -1)])
    assert torch.equal(vae.encode(video), vae.encode(extended))
    black = torch.cat([video, torch.zeros(missing, *video.shape[1:])])
    assert not torch.allclose(vae.encode(video), vae.encode(black), atol=1e-3)


def test_a_picture_is_the_first_latent_frame_of_a_clip():
    vae, video = filled(), frames(17)
    torch.testing.assert_close(vae.encode(video[:1]), vae.encode(video)[:, :, :1], atol=1e-5, rtol=0)


def test_pictures_encode_in_a_batch():
    vae, pictures = filled(), frames(2)
    alone = torch.cat([vae.encode(picture[None]) for picture in pictures])
    torch.testing.assert_close(vae.encode(pictures[:, None]), alone, atol=1e-5, rtol=0)


def test_the_log_variance_is_clamped_before_sampling():
    vae = filled()
    vae.quant_conv.bias[4:] = 1e6
    assert vae.encode_sampled(frames(1)).isfinite().all()


def test_one_half_alone_has_one_part():
    decoder = VideoVAE(CONFIG, ("decoder",))
    assert decoder.PARTS.keys() == {"decoder"}
    assert all(name.startswith(decoder.PARTS["decoder"]) for name in decoder.state_dict())
    encoder = VideoVAE(CONFIG, ("encoder",))
    assert encoder.PARTS.keys() == {"encoder"}
    assert encoder.REPEATED == ()
    assert VideoVAE(CONFIG).PARTS == VideoVAE.PARTS


@pytest.mark.parametrize("shape", [(2, 4, 2, 4, 6), (1, 5, 2, 4, 6), (4, 2, 4, 6), (1, 4, 0, 4, 6)])
def test_latents_of_another_shape_are_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"decodes latents \[1, 4, T, h, w\]"):
        filled().decode(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(5, 16, 22, 3), (5, 4, 16, 3), (0, 16, 16, 3), (16, 16, 3)])
def test_frames_of_another_shape_are_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="sides in steps of 4 from 8 on"):
        filled().encode(torch.zeros(shape))


def test_tiles_that_cut_latents_are_refused():
    vae = VideoVAE(VideoVAEConfig(**{**vars(CONFIG), "tile_size": 18}))
    with pytest.raises(ValueError, match="multiples of 4"):
        vae.requires_grad_(False).decode(latents(2))
