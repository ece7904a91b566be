from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_files import Info
from lazy_h3.h3.config import TextEncoderConfig, VisionConfig
from lazy_h3.h3.formats import FormatError, Layout
from lazy_h3.h3.formats.text_encoder import BF16_FILE, recipes, recognise
from lazy_h3.h3.text_encoder import TextEncoder

VISION = VisionConfig(
    depth=3, hidden_size=16, num_heads=2, intermediate_size=24, num_position_embeddings=16, deepstack_visual_indexes=(0, 2),
    out_hidden_size=32,
)  # fmt: skip
TINY = TextEncoderConfig(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    vocab_size=99, mrope_section=(4, 2, 2), vision=VISION,
)  # fmt: skip
SETTINGS = {
    "text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}},
    "vision_config": {"num_heads": 2, "deepstack_visual_indexes": [0, 2]},
}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def stored(config: TextEncoderConfig, spelled: Callable[[str], str] = str) -> dict[str, Info]:
    with torch.device("meta"):
        return {spelled(name): Info(tuple(p.shape), "BF16") for name, p in TextEncoder(config).named_parameters()}


def official(name: str) -> str:
    return name.replace("visual.", "model.visual.") if "visual" in name else name.replace("model.", "model.language_model.")


def bare(name: str) -> str:
    return name if "visual" in name else name.replace("model.", "language_model.")


def read(tensors: dict[str, Info], settings: dict[str, Any] | None = SETTINGS, metadata: dict[str, str] | None = None) -> Layout:
    layout = recognise(tensors, metadata or {}, settings)
    assert layout is not None
    return layout


@pytest.mark.parametrize(("spelled", "name"), [(str, "comfy"), (official, "huggingface"), (bare, "huggingface")])
def test_sizes_come_from_shapes_under_every_spelling(spelled: Callable[[str], str], name: str) -> None:
    layout = read(stored(TINY, spelled))
    assert (layout.kind, layout.layout, layout.variant, layout.config) == ("text_encoder", name, "full", TINY)
    assert {ours: recipe.sources for ours, recipe in layout.recipes.items()} == {n: (spelled(n),) for n in stored(TINY)}
    assert layout.ignored == {}


@pytest.mark.parametrize(("spelled", "name"), [(str, "comfy"), (official, "huggingface")])
def test_recipes_need_no_file(spelled: Callable[[str], str], name: str) -> None:
    assert recipes(TINY, name) == read(stored(TINY, spelled)).recipes


def test_published_file_needs_no_settings() -> None:
    assert read(stored(TextEncoderConfig()), None).config == TextEncoderConfig()


def test_layers_after_50_norm_and_head_are_ignored_with_the_reason() -> None:
    deep = replace(TINY, num_hidden_layers=52, vision=None)
    extra = {"model.language_model.norm.weight": Info((32,), "BF16"), "lm_head.weight": Info((99, 32), "BF16")}
    layout = read(stored(deep, official) | extra)
    assert layout.config.num_hidden_layers == 50
    late = {name for name in stored(deep, official) if ".layers.50." in name or ".layers.51." in name}
    assert set(layout.ignored) == late | set(extra)
    assert layout.ignored["lm_head.weight"] == "H3 uses hidden states, not words"
    assert layout.ignored["model.language_model.layers.51.mlp.up_proj.weight"] == "H3 uses the hidden state after layer 50"


def test_file_without_tower_has_no_tower() -> None:
    layout = read(stored(replace(TINY, vision=None)))
    assert layout.config.vision is None
    assert not any(name.startswith("visual.") for name in layout.build().state_dict())


def test_header_entry_says_what_shapes_cannot() -> None:
    entry = {
        "text_config": {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "mrope_section": [4, 2, 2], "image_token_id": 77},
        "vision_config": SETTINGS["vision_config"],
    }
    layout = read(stored(TINY), None, {"config": json.dumps(entry)})
    assert layout.config == replace(TINY, rms_norm_eps=1e-5, rope_theta=1e4, image_token_id=77)


def test_special_ids_stand_at_the_top_of_config_json() -> None:
    ids = {"vision_start_token_id": 1, "vision_end_token_id": 2, "image_token_id": 3, "video_token_id": 4}
    assert read(stored(TINY), SETTINGS | ids).config == replace(TINY, **ids)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_rope_settings_of_old_and_new_configs_are_found(place: str) -> None:
    text = {"rope_theta": 1e6, place: {"mrope_section": [4, 2, 2]}}
    assert read(stored(TINY), SETTINGS | {"text_config": text}).config.rope_theta == 1e6


def test_other_models_are_not_text_encoders() -> None:
    assert recognise({"blocks.0.attn.q_norm.weight": Info((8,), "BF16")}, {}, None) is None
    clip_like = {name: info for name, info in stored(TINY).items() if "_norm.weight" not in name}
    assert recognise(clip_like, {}, None) is None


def broken(**changes: Info | None) -> dict[str, Info]:
    """The tiny file with tensors changed, added or, for None, removed."""
    return {name: info for name, info in {**stored(TINY), **changes}.items() if info is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (broken(**{QUERY: None}), f"lacks {QUERY}"),
        (broken(**{"model.embed_tokens.weight": None}), "lacks the tensor model.embed_tokens.weight"),
        (broken(**{"visual.merger.norm.bias": None}), "lacks visual.merger.norm.bias"),
        (broken(**{"model.surprise": Info((1,), "BF16")}), "model.surprise, which we do not know"),
        (broken(**{QUERY: Info((65, 32), "BF16")}), rf"{QUERY} .*\[65, 32\].*\[64, 32\]"),
        (broken(**{QUERY: Info((64, 32), "I64")}), QUERY),
        (stored(TINY) | stored(TINY, official), "which we do not know"),
    ],
)
def test_incomplete_or_foreign_tensors_are_named(tensors: dict[str, Info], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(tensors)


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({QUERY: Info((64, 16), "U8"), QUERY + "_scale_2": Info((), "F32")}, "nvfp4|4 bit"),
        ({QUERY: Info((64, 32), "I8"), QUERY + "_scale": Info((64, 1), "F32")}, "int8"),
        ({QUERY: Info((64, 32), "F8_E4M3"), QUERY + "_scale": Info((), "F32")}, "fp8"),
        ({QUERY: Info((64, 32), "F8_E4M3"), "scaled_fp8": Info((0,), "F8_E4M3")}, "fp8"),
        ({QUERY + "_scale_inv": Info((1, 1), "F32")}, "block fp8"),
        ({"model.layers.1.self_attn.q_proj.comfy_quant": Info((30,), "U8")}, "quantised"),
    ],
)
def test_quantised_file_names_its_format_and_the_file_to_use(extra: dict[str, Info], kind: str) -> None:
    with pytest.raises(FormatError, match=f"({kind}).*{BF16_FILE}"):
        read(broken(**extra))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"vision_config": SETTINGS["vision_config"]}, "mrope_section"),
        ({"text_config": SETTINGS["text_config"]}, "deepstack_visual_indexes"),
        (SETTINGS | {"vision_config": {"num_heads": 3, "deepstack_visual_indexes": [0, 2]}}, "num_heads"),
        (SETTINGS | {"vision_config": {"num_heads": 2, "deepstack_visual_indexes": [0, 3]}}, "deepstack_visual_indexes"),
    ],
)
def test_settings_that_do_not_fit_the_shapes_are_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(FormatError, match=name):
        read(stored(TINY), settings)
