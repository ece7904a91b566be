"""Estimates of activations beside what is really alive in a forward pass, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy_h3.commands.presets import build, tiny
from lazy_h3.h3 import activations, sampling
from lazy_h3.h3.config import AudioVAEConfig, DiTConfig, TextEncoderConfig, VideoVAEConfig
from lazy_h3.h3.geometry import LatentSize
from lazy_h3.memory.device import HEAP_SLACK, heap_slack
from lazy_h3.memory.plan import Stage, make_plan
from lazy_h3.nodes.decode import _fill, _frames_shape
from live_tensors import LiveTensors
from small_models import DECODE_AUDIO, DECODE_VIDEO, ENCODE, SAMPLER, stage, text_to_video

TOLERANCE = 0.08
NUM_CHANNELS, NUM_AUDIO_CHANNELS = 24, 32
TEXT_ENCODER = TextEncoderConfig(
    hidden_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=320,
    vocab_size=64,
    mrope_section=(6, 5, 5),
    vision=None,
)
DIT = replace(tiny().dit, hidden_size=96, num_layers=1, num_attention_heads=4, attention_head_dim=48, ffn_dim=160, text_dim=48)
VIDEO_VAE = replace(VideoVAEConfig(), block_out_channels=(8,) * 6, norm_num_groups=8, decoder_num_layers=1)
AUDIO_VAE = replace(
    tiny().audio_vae,
    decoder_dim=64,  # 32 and 16 channels: kernels that copy narrower ones do so out of our sight
    decoder_rates=(5, 2),
    decoder_kernel_sizes=(9, 4),
    resblock_kernel_sizes=(3, 5, 7),
    resblock_dilation_sizes=((1, 3), (1, 3), (1, 3)),
)
WIDE_DIT = replace(DIT, ffn_dim=1200)
MANY_QUERIES = replace(TEXT_ENCODER, num_attention_heads=20)


def filled(kind: str, config: Any, compute: torch.dtype) -> torch.nn.Module:
    """A module with small random weights, held as it would compute."""
    torch.manual_seed(0)
    module = build(kind, config).requires_grad_(False)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        tensor.data = torch.randn(tensor.shape).mul(0.02).to(module.storage_dtype(name, compute))
    return module


def encode(config: TextEncoderConfig, num_rows: int, compute: torch.dtype) -> tuple[Callable[[], Any], int]:
    model = filled("text_encoder", config, compute)
    ids, positions = torch.arange(num_rows) % config.vocab_size, torch.arange(num_rows).expand(3, -1)
    return lambda: model(ids, positions), activations.text_encoding(config, num_rows, compute.itemsize)


def sample(config: DiTConfig, size: LatentSize, compute: torch.dtype) -> tuple[Callable[[], Any], int]:
    model, states = filled("dit", config, compute), torch.randn(1, 30, config.text_dim)
    shapes = (1, NUM_CHANNELS, size.frames, size.height, size.width), (1, NUM_AUDIO_CHANNELS, 2, size.audio)

    def run() -> Any:
        noise = sampling.comfy_noise(*shapes, torch.Generator().manual_seed(0))
        return sampling.sample(model, states, None, noise, sampling.Schedule.official(2))

    return run, activations.sampling(config, 30, size, compute.itemsize)


def decode_video(config: VideoVAEConfig, size: LatentSize, compute: torch.dtype) -> tuple[Callable[[], Any], int]:
    model, latent = filled("video_vae", config, compute), torch.randn(1, NUM_CHANNELS, size.frames, size.height, size.width)
    frames = torch.empty(_frames_shape(latent, config))  # there before: results are not activations
    return lambda: _fill(frames, model.decode_stream(latent)), activations.video_decoding(config, size, compute.itemsize)


def decode_audio(config: AudioVAEConfig, num_latents: int, compute: torch.dtype) -> tuple[Callable[[], Any], int]:
    model, latent = filled("audio_vae", config, compute), torch.randn(1, NUM_AUDIO_CHANNELS, 2, num_latents)
    return lambda: model.decode(latent), activations.audio_decoding(config, num_latents)


SMALL_TILES = replace(VIDEO_VAE, decoder_num_attention_heads=2, decoder_attention_head_dim=16, tile_size=64, tile_overlap=16)
HEAVY_CALLS = replace(SMALL_TILES, decoder_num_attention_heads=12, decoder_attention_head_dim=32)
CASES = {
    "text, short": (encode, TEXT_ENCODER, 40),
    "text, long": (encode, TEXT_ENCODER, 300),
    "text, many queries": (encode, MANY_QUERIES, 200),
    "clip, small": (sample, DIT, LatentSize(2, 16, 16, 8)),
    "clip, long": (sample, DIT, LatentSize(12, 12, 20, 37)),
    "clip, odd sides": (sample, DIT, LatentSize(7, 13, 15, 20)),
    "clip, wide feed-forward": (sample, WIDE_DIT, LatentSize(2, 16, 16, 8)),
    "one tile of one window": (decode_video, SMALL_TILES, LatentSize(2, 4, 4, 0)),
    "many tiles": (decode_video, SMALL_TILES, LatentSize(7, 16, 13, 0)),
    "many tiles of several windows": (decode_video, SMALL_TILES, LatentSize(17, 10, 16, 0)),
    "heavy calls": (decode_video, HEAVY_CALLS, LatentSize(7, 4, 7, 0)),
    "sound, short": (decode_audio, AUDIO_VAE, 40),
    "sound, long": (decode_audio, AUDIO_VAE, 400),
}


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_is_alive_at_the_peak(case, compute):
    make, config, geometry = CASES[case]
    run, estimate = make(config, geometry, compute)
    with torch.no_grad():
        run()  # what is made once and kept is not an activation
        with LiveTensors() as live:
            run()
    assert estimate == pytest.approx(live.peak, rel=TOLERANCE)


def test_a_tensor_that_nobody_needs_is_seen():
    """The check of the check: as much again as one row more of everything would break the tolerance."""
    with LiveTensors() as live:
        kept = torch.zeros(100)
        torch.zeros(50)
        del kept
        torch.zeros(60)
    assert live.peak == 4 * 150
    assert live.live_bytes() == 0


def test_published_sizes_grow_with_the_clip():
    """Rows count linearly; a window's canvas grows with the picture and not with the length."""
    hd, twice_wide, twice_long = LatentSize(37, 48, 84, 207), LatentSize(37, 48, 168, 207), LatentSize(74, 48, 84, 414)
    one, wide, long = (activations.sampling(DiTConfig(), 0, size, 2) for size in (hd, twice_wide, twice_long))
    assert long == 2 * one
    assert one < wide < long
    one, wide, long = (activations.video_decoding(VideoVAEConfig(), size, 4) for size in (hd, twice_wide, twice_long))
    assert one == long
    assert 1.5 * one < wide < 2.2 * one
    assert activations.audio_decoding(AudioVAEConfig(), 414) == 2 * activations.audio_decoding(AudioVAEConfig(), 207)
    assert activations.text_encoding(TextEncoderConfig(), 512, 2) == 2 * activations.text_encoding(TextEncoderConfig(), 256, 2)


def test_every_node_kind_of_a_prompt_has_an_estimate_that_grows_with_its_clip(tmp_path):
    with stage(tmp_path) as running:
        small, large = (
            running.runtime.plan_of(text_to_video({"6.width": side, "6.height": side, "6.duration": frames}))
            for side, frames in ((64, 5), (512, 56))
        )
    before, after = ({stage.node: stage for stage in plan.stages} for plan in (small, large))
    assert before.keys() == after.keys() == {ENCODE, SAMPLER, DECODE_VIDEO, DECODE_AUDIO}
    assert all(0 < before[node].activation_bytes <= after[node].activation_bytes for node in before)
    assert all(before[node].activation_bytes < after[node].activation_bytes for node in (SAMPLER, DECODE_VIDEO, DECODE_AUDIO))
    frames, pixels = 56, 512 * 512
    results = [stage.result_bytes for stage in large.stages]
    assert results == sorted(results)
    assert results[-1] > 4 * 3 * frames * pixels
    assert large.peak_growth_bytes > small.peak_growth_bytes > small.peak_bytes


def test_growth_counts_the_results_of_earlier_nodes():
    plan = make_plan([Stage("decode", (), 10, 100), Stage("sound", (), 50, 101)], [])
    assert (plan.peak_growth_bytes, plan.growth_node) == (151, "sound")
    assert make_plan([], []).growth_node is None


def test_results_take_room_from_weights():
    assert make_plan([Stage("decode", (), 10, 100)], [], room=111).refusal is None
    assert make_plan([Stage("decode", (), 10, 100)], [], room=110).refusal is not None


def test_the_heap_keeps_no_more_than_its_limit():
    assert heap_slack(1000) == 1000
    assert heap_slack(10 * HEAP_SLACK) == HEAP_SLACK
