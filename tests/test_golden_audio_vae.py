"""The audio VAE against reference outputs (tolerance 5e-6 on waveforms, 5e-5 on latents)."""

from __future__ import annotations

import json

import pytest
import torch
from golden_files import assembled, described, golden, golden_path, read_tensors
from lazy_h3.h3.audio_vae import normalise_loudness
from lazy_h3.h3.formats import audio_vae
from lazy_h3.h3.resampling import lowpass_taps, upsampled
from torch import nn
from vae_cases import case_names, error, loaded, outputs_of, relative_error, unnoticed

WAVEFORM_TOLERANCE = 5e-6
LATENTS_TOLERANCE = 5e-5
RELATIVE_TOLERANCE = 1e-5
END_TO_END_TOLERANCE = 1e-5
FIXTURES = ["h3_audio_vae_hop800", "h3_audio_vae_small", "h3_audio_vae_weightnorm"]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", FIXTURES)
def test_latents_decode_to_the_reference_waveform(name: str):
    fixture, _, vae = loaded(name, audio_vae)
    for case in case_names(fixture.input, "latents"):
        found = vae.decode(fixture.input[case + "latents"])
        assert error(found, fixture.output[case + "waveform"]) < WAVEFORM_TOLERANCE, case


@pytest.mark.parametrize("name", FIXTURES)
def test_waveforms_encode_to_the_reference_latents(name: str):
    fixture, _, vae = loaded(name, audio_vae)
    for case in case_names(fixture.input, "waveform"):
        found = vae.encode(fixture.input[case + "waveform"])
        assert error(found, fixture.output[case + "latents"]) < LATENTS_TOLERANCE, case


def test_each_layer_has_the_reference_output():
    fixture, _, vae = loaded("h3_audio_vae_small", audio_vae)
    seen = outputs_of(named_modules(vae))
    vae.encode(fixture.input[case_names(fixture.input, "waveform")[0] + "waveform"])
    vae.decode(fixture.input[case_names(fixture.input, "latents")[0] + "latents"])
    assert fixture.intermediate.keys() <= seen.keys()
    for name, expected in fixture.intermediate.items():
        assert relative_error(seen[name][0], expected) < RELATIVE_TOLERANCE, name


def named_modules(vae: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names of the fixture's intermediates."""
    decoder = vae.decoder
    modules = {"pre_block": vae.pre_block, "pre_block_attn": vae.pre_block.attn.proj, "decoder_conv_pre": decoder.conv_pre}
    modules |= {f"encoder_block{i}": block for i, block in enumerate(vae.encoder.block)}
    modules |= {f"decoder_ups{i}": up for i, (up,) in enumerate(decoder.ups)}
    modules |= {f"decoder_resblock{i}": block for i, block in enumerate(decoder.resblocks)}
    return modules | {"decoder_activation_post": decoder.activation_post}


def test_the_computed_filter_is_the_stored_one():
    weights = golden("h3_audio_vae_small").weights
    filters = [tensor.flatten() for name, tensor in weights.items() if name.endswith(".filter")]
    assert filters
    assert all(error(lowpass_taps(), stored) < 1e-7 for stored in filters)


def test_the_alias_free_activation_has_the_reference_values_on_any_length():
    fixture, _, vae = loaded("h3_audio_vae_small", audio_vae)
    activation = vae.decoder.resblocks[0].activations[0]
    for case in case_names(fixture.input, "x"):
        x = fixture.input[case + "x"]
        assert error(upsampled(x, lowpass_taps()), fixture.output[case + "upsampled"]) < WAVEFORM_TOLERANCE, case
        assert error(activation(x, lowpass_taps()), fixture.output[case + "y"]) < WAVEFORM_TOLERANCE, case


def test_loudness_is_divided_as_the_reference_node_does():
    fixture = golden("h3_audio_loudness")
    assert error(normalise_loudness(fixture.input["waveform"]), fixture.output["waveform"]) < WAVEFORM_TOLERANCE


def test_the_end_to_end_latents_decode_to_the_reference_waveform():
    folder = ("e2e_t2va_tiny", "audio_vae")
    tensors = read_tensors(golden_path(*folder, "diffusion_pytorch_model.safetensors"))
    config = json.loads(golden_path(*folder, "config.json").read_text())
    vae = assembled(audio_vae.recognise(described(tensors), {"format": "pt"}, config), tensors)
    expected = read_tensors(golden_path("e2e_t2va_tiny", "expected.safetensors"))
    waveform = vae.decode(expected["final_audio_latents"].transpose(0, 1)[None])
    head = expected["audio_head"]
    assert error(waveform[..., : head.shape[-1]], head) < END_TO_END_TOLERANCE
    assert error(waveform.square().mean(dim=-1).sqrt(), expected["audio_rms"]) < END_TO_END_TOLERANCE


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_a_change_of_any_weight_is_noticed(name: str, part: str):
    fixture, layout, vae = loaded(name, audio_vae)
    given, wanted, run, tolerance = {
        "decoder": ("latents", "waveform", vae.decode, WAVEFORM_TOLERANCE),
        "encoder": ("waveform", "latents", vae.encode, LATENTS_TOLERANCE),
    }[part]
    case = max(case_names(fixture.input, given), key=lambda case: fixture.input[case + given].shape[-1])

    def matches() -> bool:
        return error(run(fixture.input[case + given]), fixture.output[case + wanted]) < tolerance

    assert unnoticed(vae, part, layout, fixture.weights, matches) == []
    without_effect = ("logs_proj.weight", "logs_proj.bias", "pre_block.attn.zero_k_bias", ".filter")
    assert all(source.endswith(without_effect) for source in layout.ignored)
