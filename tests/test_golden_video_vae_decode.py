"""The video VAE's decoder against reference outputs (tolerance 1e-5 absolute)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from golden_files import assembled, described, golden_path, read_tensors
from lazy_h3.h3.formats import video_vae
from lazy_h3.h3.video_decoder import rotary_angles, window_positions
from vae_cases import as_pixels, case_names, error, loaded, outputs_of, relative_error, unnoticed

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_every_number_of_latent_frames_decodes_to_the_reference_pixels():
    fixture, _, vae = loaded("h3_video_vae_decode", video_vae)
    for case in case_names(fixture.input, "latents"):
        latents = fixture.input[case + "latents"]
        plan = "pixels_via_temporal_plan" if latents.shape[2] == 1 else "pixels"
        assert error(as_pixels(vae.decode(latents)), fixture.output[case + plan]) < TOLERANCE, case


def test_a_lone_latent_frame_can_be_decoded_as_comfyui_does():
    fixture, _, vae = loaded("h3_video_vae_decode", video_vae)
    lone = [case for case in case_names(fixture.input, "latents") if fixture.input[case + "latents"].shape[2] == 1]
    assert lone
    for case in lone:
        found = as_pixels(vae.decode(fixture.input[case + "latents"], single_frame="comfy"))
        assert error(found, fixture.output[case + "pixels"]) < TOLERANCE
        assert error(found, fixture.output[case + "pixels_via_temporal_plan"]) > 100 * TOLERANCE


def test_the_first_window_has_the_reference_raw_output():
    fixture, _, vae = loaded("h3_video_vae_decode", video_vae)
    for case in case_names(fixture.output, "raw_first_window"):
        raw = outputs_of({"raw": vae.decoder})["raw"]
        vae.decode(fixture.input[case + "latents"])
        expected = fixture.output[case + "raw_first_window"]
        assert error(raw[0][:, :, : expected.shape[2]], expected) < TOLERANCE


def test_each_layer_has_the_reference_output():
    fixture, _, vae = loaded("h3_video_vae_decoder_layers", video_vae)
    blocks = vae.decoder.transformer_blocks
    modules = {"post_quant_conv": vae.post_quant_conv, "x_embedder": vae.decoder.x_embedder, "norm_out": vae.decoder.norm_out}
    modules |= {f"block{i}": block for i, block in enumerate(blocks)}
    modules |= {f"block{i}_attn": block.attn.to_out for i, block in enumerate(blocks)}
    seen = outputs_of(modules)
    raw = vae.decoder(vae.post_quant_conv(fixture.input["denormalized_latents"]))
    assert error(raw, fixture.output["raw"]) < TOLERANCE
    for name in modules:
        assert relative_error(seen[name][0], fixture.intermediate[name]) < TOLERANCE, name


def test_positions_and_rotary_angles_have_the_reference_values():
    fixture, _, vae = loaded("h3_video_vae_decoder_layers", video_vae)
    window = fixture.input["denormalized_latents"].shape[2:]
    positions = window_positions(*window, vae.config.decoder_num_register_tokens + 1)
    assert error(positions[None], fixture.intermediate["position_ids"]) < 1e-6
    assert error(rotary_angles(vae.config, *window)[None], fixture.intermediate["rope_angles"]) < TOLERANCE


@pytest.mark.parametrize(("rule", "name"), [("raw", "pixels"), ("composited", "pixels_composited")])
def test_tiles_are_blended_by_either_rule(rule: str, name: str):
    fixture, _, vae = loaded("h3_video_vae_decode_tiled", video_vae)
    for case in case_names(fixture.input, "latents"):
        found = as_pixels(vae.decode(fixture.input[case + "latents"], rule=rule, single_frame="comfy"))
        assert error(found, fixture.output[case + name]) < TOLERANCE, case


def test_a_large_tile_decodes_in_one_piece():
    fixture, layout, vae = loaded("h3_video_vae_decode_tiled", video_vae)
    for case in case_names(fixture.input, "latents"):
        expected = fixture.output[case + "pixels_untiled"]
        vae.config = replace(layout.config, tile_size=1024)
        found = as_pixels(vae.decode(fixture.input[case + "latents"], single_frame="comfy"))
        assert error(found, expected) < TOLERANCE, case


def test_the_stream_gives_one_clip_a_window_and_then_the_tail():
    fixture, _, vae = loaded("h3_video_vae_temporal_stream", video_vae)
    chunks = list(vae.decode_stream(fixture.input["latents"]))
    assert [len(chunk) for chunk in chunks] == fixture.output["frames_per_emitted_chunk"].tolist()
    assert error(as_pixels(torch.cat(chunks)), fixture.output["pixels"]) < TOLERANCE
    assert torch.equal(vae.decode(fixture.input["latents"]), torch.cat(chunks))


@pytest.mark.parametrize("group", ["weights", "weights_diffusers"])
def test_both_key_layouts_are_the_same_decoder(group: str):
    fixture, _, vae = loaded("h3_video_vae_key_layouts", video_vae, group)
    assert error(as_pixels(vae.decode(fixture.input["latents"])), fixture.output["pixels"]) < TOLERANCE


def test_the_end_to_end_latents_decode_to_the_reference_frames():
    folder = ("e2e_t2va_tiny", "vae")
    tensors = read_tensors(golden_path(*folder, "diffusion_pytorch_model.safetensors"))
    config = json.loads(golden_path(*folder, "config.json").read_text())
    vae = assembled(video_vae.recognise(described(tensors), {"format": "pt"}, config), tensors)
    expected = read_tensors(golden_path("e2e_t2va_tiny", "expected.safetensors"))
    frames = vae.decode(expected["final_latents"]).movedim(-1, 1)[None]
    assert error(frames[:, :2], expected["frames_first2"]) < TOLERANCE
    assert error(frames[:, -1:], expected["frames_last"]) < TOLERANCE
    assert error(frames.mean(dim=(2, 3, 4)), expected["frame_means"]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("h3_video_vae_decode", "weights"),
        ("h3_video_vae_key_layouts", "weights"),
        ("h3_video_vae_key_layouts", "weights_diffusers"),
    ],
)
def test_a_change_of_any_decoder_weight_is_noticed(name: str, group: str):
    fixture, layout, vae = loaded(name, video_vae, group)
    case = max(case_names(fixture.input, "latents"), key=lambda case: fixture.input[case + "latents"].shape[2])

    def matches() -> bool:
        return error(as_pixels(vae.decode(fixture.input[case + "latents"])), fixture.output[case + "pixels"]) < TOLERANCE

    assert unnoticed(vae, "decoder", layout, fixture.groups[group], matches) == []
    assert set(layout.ignored) <= {"decoder.mask_token"}  # only training masks tokens
