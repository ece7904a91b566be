"""Windows, clips and tiles of the video VAE against the reference tables (exact)."""

from __future__ import annotations

from golden_files import golden
from lazy_h3.h3.config import VideoVAEConfig
from lazy_h3.h3.tiling import tile_axis
from lazy_h3.h3.windows import decode_plan, num_encoded_latents


def test_decode_plans_have_the_reference_padding_windows_and_frames():
    fixture = golden("h3_video_vae_plans")
    for num_latents, *expected in fixture.output["decode_plan"].tolist():
        plan = decode_plan(num_latents, VideoVAEConfig())
        assert [plan.num_repeats, plan.num_windows, plan.num_frames] == expected, num_latents


def test_encoded_clips_have_the_reference_length():
    fixture = golden("h3_video_vae_plans")
    for num_frames, num_latents in fixture.output["encode_plan"].tolist():
        assert num_encoded_latents(num_frames, VideoVAEConfig()) == num_latents, num_frames


def test_tile_plans_have_the_reference_starts_and_overlaps():
    plans = golden("h3_video_vae_plans").config["tile_plans"]
    assert plans
    for plan in plans:
        tiles = tile_axis(plan["length"], plan["tile"], plan["min_overlap"], plan["ratio"])
        assert list(tiles.starts) == plan["starts"]
        assert list(tiles.overlaps) == plan["overlaps"]
        assert [tiles.length] * len(tiles.starts) == plan["lengths"]
