"""Files of the text encoder: Comfy-Org's single file and the Hugging Face folder (text encoder spec, section 7)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

import torch

from ..config import TextEncoderConfig, VisionConfig
from ..text_encoder import TextEncoder
from .header import CORRECT_THE_CONFIG, Header, Shapes
from .layout import FormatError, Layout, Tensors, shown, shown_name
from .recipe import Recipe, copied
from .stated import json_object, overlaid, stated_numbers

MAX_LAYERS = 50  # H3 is conditioned on the hidden state after this layer
BF16_FILE = "qwen3vl_32b_minimax_h3_bf16.safetensors"
QK_NORM = re.compile(
    r"(model\.language_model|language_model|model)\.layers\.\d+\.self_attn\.[qk]_norm\.weight"
)  # only Qwen3 has it
SPECIAL_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
LANGUAGE_NUMBERS = ("rms_norm_eps", "rope_theta", "mrope_section", *SPECIAL_IDS)  # what shapes cannot tell
VISION_NUMBERS = ("num_heads", "deepstack_visual_indexes", "rope_theta")
QUANTISED_NAMES = {  # how names end that only such files have
    "weight_scale_2": "nvfp4",
    "weight_scale_inv": "block fp8",
    "weight_s_rel": "asym_w4a8_int8",
    "scaled_fp8": "fp8",
}
QUANTISED_WEIGHTS = {"U8": "4 bit", "I8": "int8", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}
HEAD, NORM = "H3 uses hidden states, not words", "H3 uses the hidden state before the final norm"


@dataclass(frozen=True)
class Spelling:
    """How a file begins the names of each part; called, it turns a name of ours, or the start of one, into the file's."""

    language: str = "model."
    vision: str = "visual."

    def __call__(self, name: str) -> str:
        if name.startswith("visual."):
            return self.vision + name.removeprefix("visual.")
        return self.language + name.removeprefix("model.")


SPELLINGS = {"comfy": Spelling(), "huggingface": Spelling("model.language_model.", "model.visual.")}


def recipes(config: TextEncoderConfig, layout: str) -> dict[str, Recipe]:
    """Every parameter stands whole in a file of ``layout``."""
    return _copied(_shapes(config), SPELLINGS[layout])


def recognise(tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any] | None) -> Layout | None:
    """The text encoder, with or without vision tower; None for another model. Raises FormatError for one that cannot be used."""
    if not any(QK_NORM.fullmatch(name) for name in tensors):
        return None
    header = Header("text encoder", tensors, _spelling(tensors))
    _refuse_quantised(header)
    sizes = _config(header, metadata, config or {})
    shapes = _shapes(sizes)
    found = _copied(shapes, header.spelled)
    ignored = _ignored(header, sizes.num_hidden_layers)
    header.check(shapes, found, ignored)
    layout = "comfy" if header.spelled == SPELLINGS["comfy"] else "huggingface"
    return Layout("text_encoder", layout, "full", sizes, partial(TextEncoder, sizes), found, ignored)


def _copied(shapes: Shapes, spelling: Callable[[str], str]) -> dict[str, Recipe]:
    return {name: copied(spelling(name)) for name in shapes}


@functools.lru_cache(maxsize=8)
def _shapes(config: TextEncoderConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in TextEncoder(config).state_dict().items()}


def _spelling(tensors: Tensors) -> Spelling:
    """That of the file: the official one, the same without its leading ``model.``, or ours."""

    def first_used(*starts: str) -> str:
        return next((start for start in starts if any(name.startswith(start) for name in tensors)), starts[-1])

    return Spelling(first_used("model.language_model.", "language_model.", "model."), first_used("model.visual.", "visual."))


def _refuse_quantised(header: Header) -> None:
    """Names the formats that are known; whatever else is no plain number is refused by its dtype."""
    for name, tensor in header.tensors.items():
        _, _, last = name.rpartition(".")
        kind = QUANTISED_NAMES.get(last) or (QUANTISED_WEIGHTS.get(tensor.dtype) if last == "weight" else None)
        if kind is not None:
            raise FormatError(
                f"The text encoder is quantised to {kind} (tensor {shown_name(name)}), which cannot be read yet: use {BF16_FILE}."
            )
    header.refuse_quantised(BF16_FILE)


def _config(header: Header, metadata: Mapping[str, str], config: Mapping[str, Any]) -> TextEncoderConfig:
    """Sizes from shapes; what shapes cannot tell as stated, else as published.

    The special ids stand at the top of config.json, and beside the other numbers of ``text_config`` in a single file's header.
    """
    text = stated_numbers("text_config", metadata, config.get("text_config"))
    ids = {name: config[name] for name in SPECIAL_IDS if name in config}
    sizes = overlaid(_measured(header), _chosen(LANGUAGE_NUMBERS, _with_rope(text) | ids))
    _check_rope(sizes)
    if not header.count("visual.blocks."):
        return sizes
    vision = stated_numbers("vision_config", metadata, config.get("vision_config"))
    tower = overlaid(_measured_tower(header, sizes.hidden_size), _chosen(VISION_NUMBERS, _with_rope(vision)))
    _check_tower(tower, header.count("visual.deepstack_merger_list."))
    return replace(sizes, vision=tower)


def _measured(header: Header) -> TextEncoderConfig:
    vocab_size, hidden_size = header.shape("model.embed_tokens.weight", 2)
    (head_dim,) = header.shape("model.layers.0.self_attn.q_norm.weight", 1)
    return TextEncoderConfig(
        hidden_size=hidden_size,
        num_hidden_layers=min(MAX_LAYERS, header.count("model.layers.")),
        num_attention_heads=header.shape("model.layers.0.self_attn.q_proj.weight", 2)[0] // head_dim,
        num_key_value_heads=header.shape("model.layers.0.self_attn.k_proj.weight", 2)[0] // head_dim,
        head_dim=head_dim,
        intermediate_size=header.shape("model.layers.0.mlp.gate_proj.weight", 2)[0],
        vocab_size=vocab_size,
        vision=None,
    )


def _measured_tower(header: Header, out_hidden_size: int) -> VisionConfig:
    width, in_channels, num_frames, side, _ = header.shape("visual.patch_embed.proj.weight", 5)
    return VisionConfig(
        depth=header.count("visual.blocks."),
        hidden_size=width,
        intermediate_size=header.shape("visual.blocks.0.mlp.linear_fc1.weight", 2)[0],
        in_channels=in_channels,
        patch_size=side,
        temporal_patch_size=num_frames,
        spatial_merge_size=isqrt(header.shape("visual.merger.linear_fc1.weight", 2)[1] // width),
        num_position_embeddings=header.shape("visual.pos_embed.weight", 2)[0],
        out_hidden_size=out_hidden_size,
    )


def _with_rope(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Rope's numbers lifted to the others: transformers has kept them in three places over time."""
    places = ("rope_scaling", "rope_parameters")
    return dict(numbers) | {key: value for name in places for key, value in json_object(name, numbers.get(name)).items()}


def _chosen(names: tuple[str, ...], numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: numbers[name] for name in names if name in numbers}


def _check_rope(sizes: TextEncoderConfig) -> None:
    if len(sizes.mrope_section) != 3 or 2 * sum(sizes.mrope_section) != sizes.head_dim:
        raise FormatError(
            f"The text encoder's rope sections {shown(sizes.mrope_section)} (mrope_section) are not three numbers that make half "
            f"its head size {sizes.head_dim}: {CORRECT_THE_CONFIG}."
        )


def _check_tower(tower: VisionConfig, num_mergers: int) -> None:
    taps = tower.deepstack_visual_indexes
    if len(taps) != num_mergers or not all(0 <= tap < tower.depth for tap in taps):
        raise FormatError(
            f"A vision tower of {tower.depth} blocks and {num_mergers} deepstack mergers does not fit the taps {shown(taps)} "
            f"(deepstack_visual_indexes): {CORRECT_THE_CONFIG}."
        )
    if tower.hidden_size % (4 * tower.num_heads):
        raise FormatError(
            f"A vision tower of width {tower.hidden_size} does not split into {tower.num_heads} heads of four equal quarters "
            f"(num_heads): {CORRECT_THE_CONFIG}."
        )


def _ignored(header: Header, num_layers: int) -> dict[str, str]:
    heads = ("lm_head.weight", "model.lm_head.weight", header.spelled("model.lm_head.weight"))
    reasons = dict.fromkeys(heads, HEAD) | {header.spelled("model.norm.weight"): NORM}
    ignored = {name: reason for name, reason in reasons.items() if name in header.tensors}
    later_layer = re.compile(re.escape(header.spelled("model.layers.")) + r"(\d+)\.")
    for name in header.tensors:
        layer = later_layer.match(name)
        if layer and int(layer[1]) >= num_layers:
            ignored[name] = f"H3 uses the hidden state after layer {num_layers}"
    return ignored
