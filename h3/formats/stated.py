"""The numbers that a checkpoint states of itself: in the ``config.json`` beside it or in the ``config`` entry of its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from .layout import FormatError

Config = TypeVar("Config")


def stated_numbers(component: str, metadata: Mapping[str, str], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Numbers under Hugging Face names: the header's under the key ``component``, overridden by those of ``config``.

    Raises FormatError where the header's entry is not a JSON object of objects.
    """
    try:
        entry = json.loads(metadata.get("config", "{}"))
    except ValueError as error:
        raise FormatError(f"The 'config' entry of the file's header is not JSON ({error}): write the file again.") from error
    if not isinstance(entry, dict) or not isinstance(entry.get(component, {}), dict):
        raise FormatError(f"The 'config' entry of the file's header has no JSON object at {component!r}: write the file again.")
    return entry.get(component, {}) | dict(config or {})


def overlaid(base: Config, numbers: Mapping[str, Any]) -> Config:
    """``base`` with the values of ``numbers`` that it has fields for, lists as tuples. Raises FormatError for other kinds."""
    found = {field.name: _frozen(numbers[field.name]) for field in fields(base) if numbers.get(field.name) is not None}
    for name, value in found.items():
        if not _alike(value, getattr(base, name)):
            raise FormatError(f"The configuration has {name} = {value!r}, which should be like {getattr(base, name)!r}.")
    return replace(base, **found)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _alike(value: Any, example: Any) -> bool:
    """Whether both are tuples (of any lengths) or both are numbers, whole ones where the example is."""
    if isinstance(example, tuple):
        return isinstance(value, tuple) and all(_alike(item, example[0] if example else 0.0) for item in value)
    return isinstance(value, float | int if isinstance(example, float) else int)
