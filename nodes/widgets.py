"""Widget values of a prompt that no validation has seen: of the kind, in the range and among the choices that a node declares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..memory.graph import Node, link_of

NUMBERS = {"INT": int, "FLOAT": float}


def checked(node: str, spec: Node, cls: Any) -> Node:
    """The node with what its class declares, numbers as numbers. Raises ValueError for a value that a validator refuses.

    Only classes that say sizes to a plan are looked at; others, and a prompt's links, come back as they are.
    """
    if not (hasattr(cls, "demand") or hasattr(cls, "latent_size")):
        return spec
    kinds = cls.INPUT_TYPES()
    declared = {**kinds.get("required", {}), **kinds.get("optional", {})}
    inputs = {name: spec.inputs[name] for name in declared if name in spec.inputs}
    try:
        values = {name: _checked(name, value, *declared[name]) for name, value in inputs.items()}
    except ValueError as error:
        raise ValueError(f"node {node} ({spec.class_type}): {error}") from error
    return Node(spec.class_type, values)


def _checked(name: str, value: Any, kind: Any, options: Mapping[str, Any] | None = None) -> Any:
    if link_of(value) is not None:
        return value
    if isinstance(kind, (list, tuple)):
        if value not in kind:
            raise ValueError(f"{name} is {value!r:.40}, which is none of {', '.join(map(str, kind))}")
        return value
    return _number(name, value, kind, options or {}) if kind in NUMBERS else value


def _number(name: str, value: Any, kind: str, options: Mapping[str, Any]) -> Any:
    low, high = options.get("min", -math.inf), options.get("max", math.inf)
    try:
        number = NUMBERS[kind](value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {value!r:.40}, which is no {kind}") from error
    if not low <= number <= high:  # nor is NaN in any range
        raise ValueError(f"{name} is {value!r:.40}; choose a value from {low} to {high}")
    return number
