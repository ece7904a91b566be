"""Video VAE files: recognised from names and shapes alone, refused with one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_files import Info, described, golden
from lazy_h3.h3.config import VideoVAEConfig
from lazy_h3.h3.formats import FormatError, Layout
from lazy_h3.h3.formats.header import source_shapes
from lazy_h3.h3.formats.recipe import constant, copied
from lazy_h3.h3.formats.video_vae import recipes, recognise
from lazy_h3.h3.video_vae import VideoVAE
from torch import nn

PUBLISHED = VideoVAEConfig()
LIGHT = replace(PUBLISHED, decoder_num_layers=26)
FP16_FILE = "minimax_h3_video_vae_fp16.safetensors"


def parameter_shapes(config: VideoVAEConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in VideoVAE(config).state_dict().items()}


def header_of(config: VideoVAEConfig, layout: str, prefixes: tuple[str, ...] = ("",)) -> dict[str, Info]:
    """The header of a whole file, or of what begins with ``prefixes``."""
    shapes = parameter_shapes(config)
    stored: dict[str, tuple[int, ...]] = {}
    for name, recipe in recipes(config, layout).items():
        stored |= source_shapes(recipe, shapes[name])
    if layout == "comfy":
        stored["decoder.mask_token"] = (1, 1, config.decoder_width)
    return {name: Info(tuple(shape), "F16") for name, shape in stored.items() if name.startswith(prefixes)}


def built(layout: Layout) -> nn.Module:
    with torch.device("meta"):
        return layout.build()


def recognised(tensors: dict[str, Info], config: dict[str, Any] | None = None, header: Any = None) -> Layout:
    layout = recognise(tensors, {"config": json.dumps(header)} if header else {}, config)
    assert layout is not None
    assert layout.kind == "video_vae"
    used = {source for recipe in layout.recipes.values() for source in recipe.sources}
    assert used | layout.ignored.keys() == tensors.keys()
    assert not used & layout.ignored.keys()
    assert built(layout).state_dict().keys() == layout.recipes.keys()
    return layout


def test_the_published_model_has_the_published_sizes():
    shapes = parameter_shapes(PUBLISHED)
    assert sum(shape.numel() for name, shape in shapes.items() if not name.startswith("latents_")) == 2_603_868_984
    assert len(header_of(PUBLISHED, "comfy")) == 562
    assert len(header_of(PUBLISHED, "huggingface")) == 703


@pytest.mark.parametrize("layout", ["comfy", "huggingface"])
@pytest.mark.parametrize("config", [PUBLISHED, LIGHT], ids=["published", "light"])
def test_shapes_alone_tell_the_published_models(config: VideoVAEConfig, layout: str):
    found = recognised(header_of(config, layout))
    assert (found.config, found.layout, found.variant) == (config, layout, "full")


@pytest.mark.parametrize("layout", ["comfy", "huggingface"])
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_one_half_alone_is_a_variant(part: str, layout: str):
    found = recognised(header_of(LIGHT, layout, VideoVAE.PARTS[part]))
    assert (found.layout, found.variant) == (layout, f"{part} only")
    assert built(found).PARTS.keys() == {part}


def test_huggingface_names_are_those_of_the_official_folder():
    stored = {source for recipe in recipes(PUBLISHED, "huggingface").values() for source in recipe.sources}
    assert {
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
        "encoder.down_blocks.3.downsamplers.0.conv.bias",
        "decoder.proj_in.weight",
        "decoder.transformer_blocks.35.attn.to_v.bias",
        "decoder.transformer_blocks.0.attn.to_out.0.weight",
        "decoder.transformer_blocks.0.ff.net.0.proj.weight",
        "decoder.transformer_blocks.0.ff.net.2.bias",
    } <= stored
    assert not any(".block." in name or "to_qkv" in name or name.startswith("latents_") for name in stored)


def test_statistics_of_the_file_win_over_published_ones():
    tensors = header_of(PUBLISHED, "comfy")
    assert recognised(tensors).recipes["latents_mean"] == copied("latents_mean")
    bare = {name: tensor for name, tensor in tensors.items() if not name.startswith("latents_")}
    assert recognised(bare).recipes["latents_std"] == constant(PUBLISHED.latents_std)
    stated = [float(channel) for channel in range(24)]
    assert recognised(bare, {"latents_mean": stated}).recipes["latents_mean"] == constant(tuple(stated))


def test_the_header_and_a_folder_state_the_same_numbers():
    fixture = golden("h3_video_vae_key_layouts")
    by_header = recognised(described(fixture.weights), header={"vae": fixture.config, "other": 1})
    by_folder = recognised(described(fixture.groups["weights_diffusers"]), fixture.config)
    assert by_header.config == by_folder.config
    assert by_header.config.tile_overlap == fixture.config["tile_overlap_min"]
    assert (by_header.layout, by_folder.layout) == ("comfy", "huggingface")


def test_other_models_are_none_of_its_business():
    two_dimensional = {"encoder.down.0.block.0.conv1.weight": Info((128, 128, 3, 3), "F32")}
    with_middle = {
        "encoder.down.0.block.0.conv1.weight": Info((128, 128, 3, 3, 3), "F32"),
        "encoder.mid.block_1.conv1.weight": Info((512, 512, 3, 3, 3), "F32"),
    }
    for tensors in ({}, {"blocks.0.attn.qkv_proj.weight": Info((96, 32), "BF16")}, two_dimensional, with_middle):
        assert recognise(tensors, {}, None) is None


def changed(remove: str = "", **add: Info) -> dict[str, Info]:
    return {name: tensor for name, tensor in header_of(PUBLISHED, "comfy").items() if name != remove} | add


BLOCK = "decoder.transformer_blocks.7."


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(remove=BLOCK + "ff.w2.bias"), f"lacks {BLOCK}ff.w2.bias: download"),
        (changed(remove="decoder.x_embedder.weight"), "lacks the tensor decoder.x_embedder.weight"),
        (changed(**{name: Info((1,), "F16") for name in "abcde"}), "has a, b, c and 2 more tensors, which we do not know"),
        (changed(**{BLOCK + "scale1": Info((7,), "F16")}), r"scale1 .* has shape \[7\] .* asks for \[2048\]"),
        (changed(**{"decoder.proj_out.weight": Info((768, 2048), "F16")}), r"\[768, 2048\] .* \[3072, 2048\].*config.json"),
        (changed(**{BLOCK + "attn.to_qkv.weight": Info((6144, 2048), "I8")}), f"quantised .* I8.*use {FP16_FILE}"),
        (changed(**{BLOCK + "attn.to_qkv.comfy_quant": Info((60,), "U8")}), f"quantised .*use {FP16_FILE}"),
        (changed(**{BLOCK + "attn.to_qkv.weight_scale": Info((6144,), "F32")}), f"quantised .*use {FP16_FILE}"),
    ],
)
def test_a_broken_file_is_refused_with_the_tensor_and_the_remedy(tensors: dict[str, Info], message: str):
    with pytest.raises(FormatError, match=message):
        recognise(tensors, {}, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"spatial_padding_mode": "zeros"}, "pads with 'zeros'"),
        ({"spatial_downsample_factors": [2, 2]}, "has 6 levels and downsample factors for 2"),
        ({"decoder_num_layers": "36"}, "decoder_num_layers = '36', which should be like 36"),
        ({"decoder_num_layers": 40}, "should have decoder_num_layers = 40 and the file has 36"),
        ({"decoder_num_attention_heads": 16}, "width 2048 does not split into 16 heads of 64"),
        ({"latents_mean": [0.0, 1.0]}, r"needs \[24\] numbers for latents_mean and was given 2"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        recognise(header_of(PUBLISHED, "huggingface"), {}, config)


@pytest.mark.parametrize(("entry", "message"), [("{", "is not JSON"), ("[]", "no JSON object"), ('{"vae": 3}', "at 'vae'")])
def test_a_broken_config_entry_is_refused(entry: str, message: str):
    with pytest.raises(FormatError, match=message):
        recognise(header_of(PUBLISHED, "comfy"), {"config": entry}, None)
