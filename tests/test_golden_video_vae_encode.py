"""The video VAE's encoder against reference outputs (tolerance 5e-6 absolute on latents)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_files import Fixture
from lazy_h3.h3.formats import video_vae
from torch import Tensor, nn
from vae_cases import as_frames, case_names, error, loaded, outputs_of, relative_error, unnoticed

TOLERANCE = 5e-6
RELATIVE_TOLERANCE = 1e-5
SAMPLE_TOLERANCE = 2e-3  # one unit in the last place of fp16, after normalisation


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def encoded(vae: nn.Module, fixture: Fixture, case: str) -> Tensor:
    return vae.encode(as_frames(fixture.input[case + "pixels"]))


@pytest.mark.parametrize("name", ["h3_video_vae_encode", "h3_video_vae_encode_tiled", "h3_video_vae_temporal_stream"])
def test_pictures_and_clips_encode_to_the_reference_latents(name: str):
    fixture, _, vae = loaded(name, video_vae)
    for case in case_names(fixture.input, "pixels"):
        assert error(encoded(vae, fixture, case), fixture.output[case + "latents"]) < TOLERANCE, case


def test_a_large_tile_encodes_in_one_piece():
    fixture, layout, vae = loaded("h3_video_vae_encode_tiled", video_vae)
    vae.config = replace(layout.config, tile_size=1024)
    for case in case_names(fixture.input, "pixels"):
        assert error(encoded(vae, fixture, case), fixture.output[case + "latents_untiled"]) < TOLERANCE, case


def test_each_layer_has_the_reference_output():
    fixture, _, vae = loaded("h3_video_vae_encoder_layers", video_vae)
    modules = {"conv_in": vae.encoder.conv_in, "conv_out": vae.encoder.conv_out, "moments": vae.quant_conv}
    modules |= {f"down{i}_blocks": level.block[-1] for i, level in enumerate(vae.encoder.down)}
    modules |= {f"down{i}_downsample": level.downsample for i, level in enumerate(vae.encoder.down)}
    pixels = []
    vae.encoder.register_forward_pre_hook(lambda module, args: pixels.append(args[0].clone()))
    for case in case_names(fixture.input, "pixels"):
        pixels.clear()
        seen = outputs_of(modules)
        encoded(vae, fixture, case)
        if case + "normalized_pixels" in fixture.output:
            assert error(pixels[0], fixture.output[case + "normalized_pixels"]) < TOLERANCE
        expected = {n.removeprefix(case): t for n, t in fixture.intermediate.items() if n.startswith(case)}
        assert expected.keys() <= modules.keys()
        for name, tensor in expected.items():
            assert relative_error(seen[name][0], tensor) < RELATIVE_TOLERANCE, case + name
        assert relative_error(seen["moments"][0], fixture.output[case + "moments"]) < RELATIVE_TOLERANCE


def test_conditions_are_the_mean_or_the_sample_of_the_official_pipeline():
    fixture, _, vae = loaded("h3_video_vae_condition", video_vae)
    for case in case_names(fixture.input, "pixels"):
        frames = as_frames(fixture.input[case + "pixels"])
        assert relative_error(vae.moments(frames), fixture.output[case + "moments"]) < RELATIVE_TOLERANCE
        assert error(vae.encode(frames), fixture.output[case + "latents_mode"]) < TOLERANCE
        sampled = vae.encode_sampled(frames)
        assert error(sampled, fixture.output[case + "latents_sampled"]) < SAMPLE_TOLERANCE
        assert error(sampled, vae.encode_sampled(frames, seed=43)) > SAMPLE_TOLERANCE


@pytest.mark.parametrize("group", ["weights", "weights_diffusers"])
def test_both_key_layouts_are_the_same_encoder(group: str):
    fixture, _, vae = loaded("h3_video_vae_key_layouts", video_vae, group)
    assert error(encoded(vae, fixture, ""), fixture.output["latents"]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("h3_video_vae_encode", "weights"),
        ("h3_video_vae_key_layouts", "weights"),
        ("h3_video_vae_key_layouts", "weights_diffusers"),
    ],
)
def test_a_change_of_any_encoder_weight_is_noticed(name: str, group: str):
    fixture, layout, vae = loaded(name, video_vae, group)
    clips = [case for case in case_names(fixture.input, "pixels") if fixture.input[case + "pixels"].shape[2] > 1]
    case = min(clips, key=lambda case: fixture.input[case + "pixels"].shape[2])
    tensors, latents = fixture.groups[group], fixture.output[case + "latents"]
    quiet = unnoticed(vae, "encoder", layout, tensors, lambda: error(encoded(vae, fixture, case), latents) < TOLERANCE)
    assert [source for source in quiet if not is_normalised_away(source, tensors[source], layout.config.norm_num_groups)] == []


def is_normalised_away(source: str, tensor: Tensor, num_groups: int) -> bool:
    """A group norm over single channels removes what the convolution right before it adds to a channel."""
    return source.endswith(".conv1.bias") and len(tensor) == num_groups
