"""Which files are recognised as a diffusion transformer, and with what words others are refused. No weights anywhere."""

import json
import re
from dataclasses import replace
from math import prod

import pytest
import torch
from golden_files import Info
from lazy_h3.h3.config import DiTConfig
from lazy_h3.h3.dit import CurveDiT, DiT, RankDiT, dit_class
from lazy_h3.h3.formats import FormatError, Layout
from lazy_h3.h3.formats.dit import SIGNATURES, recipes, recognise
from lazy_h3.h3.formats.header import source_shapes

PUBLISHED = DiTConfig()
SMALL = DiTConfig(
    hidden_size=24,
    num_layers=3,
    num_refiner_layers=1,
    num_attention_heads=3,
    attention_head_dim=16,
    ffn_dim=40,
    in_channels=6,
    audio_in_channels=7,
    text_dim=20,
    freq_dim=8,
    time_embed_hidden_dim=18,
    time_embed_dim=12,
    rope_freq_dim=2,
)
LAYOUTS = ["comfy", "huggingface"]
Stored = dict[str, Info]


def shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in dit_class(config)(config).state_dict().items()}


def stored(config: DiTConfig, layout: str, prefix: str = "") -> Stored:
    """The header of a file that holds the model, by its recipes read backwards."""
    needed = shapes(config)
    sources = (source_shapes(recipe, needed[name]) for name, recipe in recipes(config, layout).items())
    return {prefix + source: Info(shape, "BF16") for pieces in sources for source, shape in pieces.items()}


def seen(tensors: Stored, config: dict | None = None, **stated: object) -> Layout | None:
    """Recognised with ``stated`` in the header and ``config`` as config.json."""
    return recognise(tensors, {"config": json.dumps({"transformer": stated})} if stated else {}, config)


@pytest.mark.parametrize(
    ("config", "layout", "num_tensors", "num_parameters"),
    [
        (PUBLISHED, "comfy", 535, 33_122_992_896 + 16),
        (PUBLISHED, "huggingface", 638, 33_122_992_896),
        (replace(PUBLISHED, adaln_curve=(1025, 8)), "comfy", 532, 20_111_438_744),
        (replace(PUBLISHED, adaln_rank=16), "huggingface", 639, 20_166_101_760),
    ],
)
def test_published_files_have_their_published_sizes(config, layout, num_tensors, num_parameters) -> None:
    tensors = stored(config, layout)
    assert len(tensors) == num_tensors
    assert sum(prod(tensor.shape) for tensor in tensors.values()) == num_parameters
    assert seen(tensors).config == config


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("changes", "variant", "model"),
    [({}, "base", DiT), ({"adaln_rank": 5}, "rank", RankDiT), ({"adaln_curve": (9, 4)}, "curve", CurveDiT)],
)
def test_sizes_and_variant_come_from_the_shapes(layout, changes, variant, model) -> None:
    found = seen(stored(replace(SMALL, **changes), layout), rope_freq_dim=2)
    assert (found.kind, found.layout, found.variant) == ("dit", layout, variant)
    expected = replace(SMALL, **changes)
    if variant == "curve":  # it has no time embedder to measure
        expected = replace(expected, freq_dim=256, time_embed_hidden_dim=5376, time_embed_dim=2688)
    assert found.config == expected
    with torch.device("meta"):
        module = found.build()
    assert type(module) is model
    assert module.state_dict().keys() == found.recipes.keys()


def test_the_hugging_face_layout_splits_qkv_swaps_halves_and_computes_rope() -> None:
    found = recipes(PUBLISHED, "huggingface")
    qkv = found["blocks.7.attn.qkv_proj.weight"].rows
    assert [(r.source, r.start, r.count) for r in qkv] == [
        (f"transformer_blocks.7.attn.to_{part}.weight", 0, 7168) for part in "qkv"
    ]
    fc1 = found["token_refiner.blocks.1.mlp.fc1.weight"].rows
    assert [(r.source, r.start, r.count) for r in fc1] == [
        ("token_refiner.refiner_blocks.1.ff.net.0.proj.weight", start, 14336) for start in (14336, 0)
    ]
    frequencies = torch.tensor(found["rope.inv_freq"].values, dtype=torch.float64)
    exact = 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    torch.testing.assert_close(frequencies, exact, rtol=2e-7, atol=0)
    assert torch.equal(frequencies.float().double(), frequencies)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
def test_a_prefix_is_kept_in_the_recipes_and_other_tensors_are_left_alone(prefix: str) -> None:
    tensors = {**stored(SMALL, "comfy", prefix), "vae.conv.weight": Info((3, 3), "F16")}
    found = seen(tensors)
    assert found.config == SMALL
    assert list(found.ignored) == ["vae.conv.weight"]
    used = {source for recipe in found.recipes.values() for source in recipe.sources}
    assert used | found.ignored.keys() == tensors.keys()


def test_config_json_and_the_header_give_what_shapes_cannot() -> None:
    tensors = stored(SMALL, "huggingface")
    given = {"rope_theta": 500.0, "norm_eps": 1e-6, "rope_freq_dim": 2, "patch_size": [1, 2, 2]}
    expected = replace(SMALL, rope_theta=500.0, norm_eps=1e-6)
    assert seen(tensors, **given).config == expected
    assert seen(tensors, config=given).config == expected
    assert seen(tensors, config=given, rope_theta=7.0).config == expected


def test_files_of_other_models_are_none_of_its_business() -> None:
    assert seen({}) is None
    assert seen({"model.layers.0.self_attn.q_norm.weight": Info((128,), "BF16")}) is None
    assert seen({"proj_in.weight": Info((4, 4), "BF16"), "proj_out.weight": Info((4, 4), "BF16")}) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_tensor_is_named(layout: str) -> None:
    whole = stored(SMALL, layout)
    for name in whole.keys() - set(SIGNATURES[layout]):
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        with pytest.raises(FormatError, match=re.escape(name)):
            seen(rest, rope_freq_dim=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(layout: str) -> None:
    tensors = stored(SMALL, layout)
    name = next(name for name in tensors if name.endswith("1.norm2.weight"))
    tensors[name] = Info((25,), "BF16")
    with pytest.raises(FormatError, match=rf"{name} .*\[25\].*\[24\]"):
        seen(tensors, rope_freq_dim=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unknown_tensor_is_named(layout: str) -> None:
    with pytest.raises(FormatError, match="surprise"):
        seen({**stored(SMALL, layout), "blocks_extra.surprise": Info((3,), "BF16")}, rope_freq_dim=2)


def refusals() -> dict[str, tuple[Stored, dict, str]]:
    """Case: tensors, keyword arguments of ``seen``, words of the refusal."""
    comfy = stored(SMALL, "comfy")
    fp8 = {"blocks.0.mlp.fc1.weight": Info((80, 24), "F8_E4M3")}
    heads = {"final_layer.video_out.weight": Info((32 * 24, 24), "F32"), "final_layer.video_out.bias": Info((32 * 24,), "F32")}
    return {
        "original folder": (comfy, {"config": {}}, "interleaved by head"),
        "fp8 weights": (comfy | fp8, {}, "quantised"),
        "comfy quant": (comfy | {"blocks.0.mlp.fc1.comfy_quant": Info((30,), "U8")}, {}, "quantised"),
        "head bank": (comfy | heads, {}, "bank of output heads"),
        "head bank by its config": (stored(SMALL, "huggingface"), {"config": {"pdd_steps": 32}}, "bank of output heads"),
        "other patches": (comfy, {"patch_size": [2, 2, 2]}, "patches"),
        "too many rope frequencies": (stored(SMALL, "huggingface"), {}, "rope_freq_dim = 16"),
        "lost layers": (comfy, {"num_layers": 4}, "num_layers = 4"),
        "config of another model": (comfy, {"ffn_dim": 41}, r"\[82, 24\]"),
        "a number that is none": (comfy, {"num_layers": "three"}, "three"),
    }


@pytest.mark.parametrize("case", list(refusals()))
def test_what_would_come_out_wrong_is_refused_in_one_sentence(case: str) -> None:
    tensors, arguments, words = refusals()[case]
    with pytest.raises(FormatError, match=words) as caught:
        seen(tensors, **arguments)
    assert "\n" not in str(caught.value)


def test_a_header_entry_that_is_not_json_is_refused() -> None:
    with pytest.raises(FormatError, match="JSON"):
        recognise(stored(SMALL, "comfy"), {"config": "{"}, None)


def test_weights_without_a_size_are_refused() -> None:
    tensors = stored(SMALL, "comfy") | {"blocks.0.attn.q_norm.weight": Info((0,), "BF16")}
    with pytest.raises(FormatError):
        seen(tensors)
