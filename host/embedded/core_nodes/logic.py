"""A switch that runs only the branch it takes, and plain values as nodes."""

from __future__ import annotations

import sys
from typing import Any


class ComfySwitchNode:
    RETURN_TYPES = ("*",)
    RETURN_NAMES = ("output",)
    FUNCTION = "choose"
    CATEGORY = "utilities/logic"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        branch = ("*", {"lazy": True})
        return {"required": {"switch": ("BOOLEAN", {"default": False}), "on_false": branch, "on_true": branch}}

    def check_lazy_status(self, switch: bool, on_false: Any = None, on_true: Any = None) -> list[str]:
        taken, value = ("on_true", on_true) if switch else ("on_false", on_false)
        return [taken] if value is None else []

    def choose(self, switch: bool, on_false: Any = None, on_true: Any = None) -> tuple[Any]:
        return (on_true if switch else on_false,)


def _primitive(name: str, kind: str, options: dict[str, Any]) -> type:
    def input_types(cls: type) -> dict[str, Any]:
        return {"required": {"value": (kind, options)}}

    def execute(self: Any, value: Any) -> tuple[Any]:
        return (value,)

    members = {"INPUT_TYPES": classmethod(input_types), "execute": execute, "RETURN_TYPES": (kind,), "FUNCTION": "execute"}
    return type(name, (), {**members, "CATEGORY": "utilities/primitive"})


_ANY_SIZE = {"min": -sys.maxsize, "max": sys.maxsize}

PRIMITIVES: dict[str, type] = {
    name: _primitive(name, kind, options)
    for name, kind, options in (
        ("PrimitiveInt", "INT", _ANY_SIZE),
        ("PrimitiveFloat", "FLOAT", _ANY_SIZE),
        ("PrimitiveString", "STRING", {}),
        ("PrimitiveStringMultiline", "STRING", {"multiline": True}),
        ("PrimitiveBoolean", "BOOLEAN", {}),
    )
}
