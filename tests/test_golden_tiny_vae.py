"""TAEH3 against reference outputs (tolerance 5e-6 absolute), and its files."""

from __future__ import annotations

import pytest
import torch
from golden_files import Info, described, golden
from lazy_h3.h3.config import TinyVAEConfig
from lazy_h3.h3.formats import FormatError, tiny_vae
from lazy_h3.h3.geometry import pixel_frames
from lazy_h3.h3.tiny_vae import TinyVAE
from vae_cases import as_pixels, case_names, error, loaded, unnoticed

TOLERANCE = 5e-6
NAME = "h3_taeh3_tiny"


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_latents_decode_to_the_reference_pixels():
    fixture, _, vae = loaded(NAME, tiny_vae)
    for case in case_names(fixture.input, "latents"):
        assert error(as_pixels(vae.decode(fixture.input[case + "latents"])), fixture.output[case + "pixels"]) < TOLERANCE, case


def test_frames_encode_to_the_reference_latents():
    fixture, _, vae = loaded(NAME, tiny_vae)
    for case in case_names(fixture.input, "pixels"):
        frames = fixture.input[case + "pixels"][0].movedim(0, -1)
        assert error(vae.encode(frames), fixture.output[case + "latents"]) < TOLERANCE, case


@pytest.mark.parametrize("num_latents", range(1, 14))
def test_every_number_of_latents_has_as_many_frames_as_the_full_vae(num_latents: int):
    _, _, vae = loaded(NAME, tiny_vae)
    calls: list[tuple[int, int]] = []
    latents = torch.zeros(1, vae.config.latent_channels, num_latents, 1, 2)
    chunks = [len(chunk) for chunk in vae.decode_stream(latents, on_chunk=lambda *call: calls.append(call))]
    assert sum(chunks) == pixel_frames(num_latents)
    assert calls == [(done, len(chunks)) for done in range(1, len(chunks) + 1)]


def test_the_last_clip_is_filled_with_its_last_frame():
    _, _, vae = loaded(NAME, tiny_vae)
    frames = torch.rand(19, 16, 16, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(vae.encode(frames), vae.encode(torch.cat([frames, frames[-1:].expand(15, -1, -1, -1)])))


def test_a_change_of_any_weight_is_noticed():
    fixture, layout, vae = loaded(NAME, tiny_vae)
    case = max(case_names(fixture.input, "latents"), key=lambda case: fixture.input[case + "latents"].shape[2])
    clip = max(case_names(fixture.input, "pixels"), key=lambda case: fixture.input[case + "pixels"].shape[2])
    frames = fixture.input[clip + "pixels"][0].movedim(0, -1)

    def decodes() -> bool:
        return error(as_pixels(vae.decode(fixture.input[case + "latents"])), fixture.output[case + "pixels"]) < TOLERANCE

    def encodes() -> bool:
        return error(vae.encode(frames), fixture.output[clip + "latents"]) < TOLERANCE

    assert unnoticed(vae, "decoder", layout, fixture.weights, decodes) == []
    assert unnoticed(vae, "encoder", layout, fixture.weights, encodes) == []


def test_shapes_alone_tell_the_widths_and_the_parts():
    fixture = golden(NAME)
    header = described(fixture.weights)
    found = tiny_vae.recognise(header, {}, None)
    assert list(found.config.decoder_widths) == fixture.config["decoder_widths"]
    assert found.config.encoder_width == fixture.config["encoder_width"]
    for part in TinyVAE.PARTS:
        half = tiny_vae.recognise({name: info for name, info in header.items() if name.startswith(part)}, {}, None)
        assert half.variant == f"{part} only"
        assert half.build().PARTS.keys() == {part}


def test_the_published_widths_have_the_published_size():
    with torch.device("meta"):
        vae = TinyVAE(TinyVAEConfig())
    assert sum(parameter.numel() for parameter in vae.parameters()) == 11_348_964
    assert sum(parameter.numel() for parameter in vae.decoder.parameters()) == 9_868_236


def test_other_tiny_autoencoders_are_none_of_its_business_and_broken_ones_are_refused():
    header = described(golden(NAME).weights)
    another = {"decoder.1.weight": Info((64, 16, 3, 3), "F32"), "decoder.22.bias": Info((3,), "F32")}
    assert tiny_vae.recognise(another, {}, None) is None
    with pytest.raises(FormatError, match=r"lacks decoder\.15\.conv\.2\.bias"):
        tiny_vae.recognise({name: info for name, info in header.items() if name != "decoder.15.conv.2.bias"}, {}, None)
    with pytest.raises(FormatError, match=r"has decoder\.99\.weight"):
        tiny_vae.recognise(header | {"decoder.99.weight": Info((1,), "F32")}, {}, None)


def test_shapes_that_do_not_fit_are_refused():
    _, _, vae = loaded(NAME, tiny_vae)
    with pytest.raises(ValueError, match=r"decodes latents \[1, 24, T, h, w\]"):
        vae.decode(torch.zeros(1, 3, 2, 2, 2))
    with pytest.raises(ValueError, match="in steps of 16"):
        vae.encode(torch.zeros(1, 16, 24, 3))
