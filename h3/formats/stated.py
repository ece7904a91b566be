"""The numbers that a checkpoint states of itself: in the ``config.json`` beside it or in the ``config`` entry of its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from .header import CORRECT_THE_CONFIG
from .layout import FormatError, shown

Config = TypeVar("Config")
MAX_COUNT = 1 << 24  # far above every size of a published model, and small enough for products of a few
MAX_FLOAT = torch.finfo(torch.float32).max
SIGNED = frozenset({"latents_mean", "pixel_mean"})
MAY_BE_ZERO = frozenset(
    {
        *("norm_eps", "qk_norm_eps", "final_norm_eps", "rms_norm_eps", "decoder_norm_eps"),
        *("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
        *("deepstack_visual_indexes", "mrope_section", "num_refiner_layers"),
        *("decoder_num_register_tokens", "token_drop", "tile_overlap"),
    }
)


def stated_numbers(component: str, metadata: Mapping[str, str], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Numbers under Hugging Face names: the header's under the key ``component``, overridden by those of ``config``.

    Raises FormatError where the header's entry is not a JSON object of objects, or ``config`` is something else.
    """
    try:
        entry = json.loads(metadata.get("config", "{}"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"The 'config' entry of the file's header is not JSON ({error}): write the file again.") from error
    if not isinstance(entry, dict) or not isinstance(entry.get(component, {}), dict):
        raise FormatError(f"The 'config' entry of the file's header has no JSON object at {component!r}: write the file again.")
    return entry.get(component, {}) | json_object(component, config)


def json_object(name: str, value: Any) -> dict[str, Any]:
    """``value``, which a configuration has under ``name``; null is an empty one. Raises FormatError for other kinds."""
    if value is not None and not isinstance(value, Mapping):
        raise FormatError(f"The configuration has {name} = {shown(value)}, which should be a JSON object: {CORRECT_THE_CONFIG}.")
    return dict(value or {})


def overlaid(base: Config, numbers: Mapping[str, Any]) -> Config:
    """``base`` with the values of ``numbers`` that it has fields for, lists as tuples.

    Raises FormatError for values of another kind or beyond what any model has.
    """
    found = {field.name: _frozen(numbers[field.name]) for field in fields(base) if numbers.get(field.name) is not None}
    for name, value in found.items():
        if not _alike(value, getattr(base, name), name):
            problem = f"The configuration has {name} = {shown(value)}, which should be like {shown(getattr(base, name))}"
            raise FormatError(f"{problem}: {CORRECT_THE_CONFIG}.")
    return replace(base, **found)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _alike(value: Any, example: Any, name: str) -> bool:
    """Whether both are tuples (of any lengths), both are flags or both are numbers, whole ones where the example is."""
    if isinstance(example, tuple):
        return isinstance(value, tuple) and all(_alike(item, example[0] if example else 0.0, name) for item in value)
    if isinstance(value, bool) or isinstance(example, bool):
        return isinstance(value, bool) and isinstance(example, bool)
    is_real = isinstance(example, float)
    return isinstance(value, float | int if is_real else int) and _in_range(value, MAX_FLOAT if is_real else MAX_COUNT, name)


def _in_range(value: float, limit: float, name: str) -> bool:
    """False for what is not finite, too."""
    if name in SIGNED:
        return abs(value) <= limit
    return 0 <= value <= limit and (value > 0 or name in MAY_BE_ZERO)
