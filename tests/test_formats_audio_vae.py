"""Audio VAE files: recognised from names and shapes alone, refused with one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_files import Info, described, golden
from lazy_h3.h3.audio_vae import AudioVAE
from lazy_h3.h3.config import AudioVAEConfig
from lazy_h3.h3.formats import FormatError, Layout
from lazy_h3.h3.formats.audio_vae import recipes, recognise
from lazy_h3.h3.formats.header import source_shapes
from lazy_h3.h3.formats.recipe import constant, copied
from torch import nn

PUBLISHED = AudioVAEConfig()
STATISTICS = {"latents_mean": [0.5] * 32, "latents_std": [2.0] * 32}


def parameter_shapes(config: AudioVAEConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in AudioVAE(config).state_dict().items()}


def header_of(config: AudioVAEConfig, layout: str) -> dict[str, Info]:
    """The header of a whole file, with what it has besides our parameters."""
    shapes = parameter_shapes(config)
    stored: dict[str, tuple[int, ...]] = {}
    for name, recipe in recipes(config, layout).items():
        stored |= source_shapes(recipe, shapes[name])
    for name in (name for name in shapes if name.endswith(".act.alpha")):
        activation = name.removesuffix("act.alpha")
        stored |= {activation + "upsample.filter": (1, 1, 12), activation + "downsample.lowpass.filter": (1, 1, 12)}
    channels = config.latent_channels
    stored |= {"logs_proj.weight": (channels, channels, 1), "logs_proj.bias": (channels,)}
    stored["pre_block.attn.zero_k_bias"] = (config.latent_dim,)
    return {name: Info(tuple(shape), "F32") for name, shape in stored.items()}


def built(layout: Layout) -> nn.Module:
    with torch.device("meta"):
        return layout.build()


def recognised(tensors: dict[str, Info], config: dict[str, Any] | None = None, header: Any = None) -> Layout:
    layout = recognise(tensors, {"config": json.dumps(header)} if header else {}, config)
    assert layout is not None
    assert (layout.kind, layout.variant) == ("audio_vae", "full")
    used = {source for recipe in layout.recipes.values() for source in recipe.sources}
    assert used | layout.ignored.keys() == tensors.keys()
    assert not used & layout.ignored.keys()
    assert built(layout).state_dict().keys() == layout.recipes.keys()
    return layout


def test_the_published_model_has_the_published_sizes():
    stored = header_of(PUBLISHED, "comfy")
    values = sum(torch.Size(tensor.shape).numel() for name, tensor in stored.items() if not name.startswith("latents_"))
    assert values == 151_287_256
    assert len(stored) == 917
    assert len(header_of(PUBLISHED, "huggingface")) == 1087


def test_shapes_alone_tell_the_published_model():
    found = recognised(header_of(PUBLISHED, "comfy"))
    assert (found.config, found.layout) == (PUBLISHED, "comfy")
    assert found.recipes["latents_std"] == copied("latents_std")
    assert set(found.ignored.values()) == {
        "every copy is the one resampling filter, which is computed",
        "the posterior's spread, of which only the mean is used",
        "all zeros: keys have no bias",
    }


def test_the_official_file_takes_its_statistics_from_the_configuration():
    found = recognised(header_of(PUBLISHED, "huggingface"), STATISTICS)
    assert found.layout == "huggingface"
    assert found.config == replace(PUBLISHED, latents_mean=(0.5,) * 32, latents_std=(2.0,) * 32)
    assert found.recipes["latents_mean"] == constant((0.5,) * 32)
    assert found.recipes["decoder.ups.0.0.weight"].sources == ("decoder.ups.0.0.weight_v", "decoder.ups.0.0.weight_g")


def test_the_header_can_state_what_shapes_cannot():
    fixture = golden("h3_audio_vae_hop800")
    found = recognised(described(fixture.weights), header={"audio_vae": fixture.config, "vae": {}})
    assert found.config == recognised(described(fixture.weights), fixture.config).config
    assert found.config.hop_length == fixture.config["hop_length"]
    assert list(found.config.decoder_rates) == fixture.config["decoder_rates"]


@pytest.mark.parametrize("name", ["h3_audio_vae_hop800", "h3_audio_vae_small", "h3_audio_vae_weightnorm"])
def test_shapes_tell_every_number_that_the_configuration_states(name: str):
    fixture = golden(name)
    told_apart = ("num_attention_heads", "resblock_dilation_sizes", "latents_mean", "latents_std")
    told = recognised(described(fixture.weights), {key: fixture.config[key] for key in told_apart}).config
    assert told == recognised(described(fixture.weights), fixture.config).config


def test_other_models_are_none_of_its_business():
    for name in ("decoder.conv_pre.weight", "encoder.block.0.weight"):
        assert recognise({name: Info((512, 128, 7), "F32")}, {}, None) is None
    assert recognise({}, {}, None) is None


def changed(remove: str = "", **add: Info) -> dict[str, Info]:
    return {name: tensor for name, tensor in header_of(PUBLISHED, "comfy").items() if name != remove} | add


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(remove="decoder.conv_post.weight"), r"lacks decoder\.conv_post\.weight: download"),
        (changed(remove="decoder.ups.3.0.weight"), r"lacks the tensor decoder\.ups\.3\.0\.weight"),
        (changed(remove="latents_mean"), r"needs \[32\] numbers for latents_mean and was given 0: put"),
        (changed(**{"decoder.extra": Info((1,), "F32")}), r"has decoder\.extra, which we do not know"),
        (changed(**{"decoder.conv_pre.bias": Info((1023,), "F32")}), r"conv_pre\.bias .* \[1023\] .* \[1024\]"),
        (changed(**{"mean_proj.weight": Info((32, 32), "F32")}), r"mean_proj\.weight .* not 3 dimensions"),
        (changed(**{"dec_in_proj.weight": Info((2048, 32, 1), "F8_E4M3")}), "quantised .*use minimax_h3_audio_vae_fp32"),
    ],
)
def test_a_broken_file_is_refused_with_the_tensor_and_the_remedy(tensors: dict[str, Info], message: str):
    with pytest.raises(FormatError, match=message):
        recognise(tensors, {}, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"decoder_rates": [5, 5]}, "decoder_rates and decoder_kernel_sizes differ in number"),
        ({"resblock_dilation_sizes": [[1, 3, 5]]}, "resblock_kernel_sizes and resblock_dilation_sizes differ in number"),
        ({"resblock_dilation_sizes": [1, 3, 5]}, "which should be like"),
        ({"latents_std": ["1.0"]}, "which should be like"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        recognise(header_of(PUBLISHED, "huggingface"), {}, STATISTICS | config)
