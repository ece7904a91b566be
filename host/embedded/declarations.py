"""What node classes say about themselves: inputs, outputs, and how they want to be called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import NodeNotFoundError

CATEGORIES = ("required", "optional", "hidden")


@dataclass(frozen=True)
class InputDeclaration:
    """One entry of INPUT_TYPES: ``type`` is a name, several names with commas, or a list of choices."""

    category: str
    type: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_lazy(self) -> bool:
        return bool(self.options.get("lazy"))

    @property
    def is_raw_link(self) -> bool:
        return bool(self.options.get("rawLink"))

    @property
    def choices(self) -> list[Any] | None:
        """What a combo box offers, None for every other type."""
        if isinstance(self.type, (list, tuple)):
            return list(self.type)
        return list(self.options.get("options", [])) if self.type == "COMBO" else None


def _declaration(category: str, entry: Any) -> InputDeclaration:
    if category == "hidden":
        return InputDeclaration(category, entry)
    return InputDeclaration(category, entry[0], entry[1] if len(entry) > 1 else {})


class Declarations:
    """Node classes by name. INPUT_TYPES may list a folder, so it is asked once per class and prompt."""

    def __init__(self, node_classes: Mapping[str, type]):
        self._classes = node_classes
        self._inputs: dict[str, dict[str, InputDeclaration]] = {}

    def __contains__(self, class_type: object) -> bool:
        return class_type in self._classes

    def node_class(self, class_type: str) -> Any:
        if class_type not in self._classes:
            raise NodeNotFoundError(f"There is no node class '{class_type}': is its node pack installed?")
        return self._classes[class_type]

    def inputs(self, class_type: str) -> dict[str, InputDeclaration]:
        """Declared inputs by name, hidden ones included."""
        if class_type not in self._inputs:
            types = self.node_class(class_type).INPUT_TYPES()
            self._inputs[class_type] = {
                name: _declaration(category, entry) for category in CATEGORIES for name, entry in types.get(category, {}).items()
            }
        return self._inputs[class_type]

    def hidden(self, class_type: str) -> dict[str, str]:
        """Hidden inputs: parameter name -> what it receives ("PROMPT", "UNIQUE_ID", ...)."""
        return {name: entry.type for name, entry in self.inputs(class_type).items() if entry.category == "hidden"}

    def is_lazy(self, class_type: str, input_name: str) -> bool:
        declared = self.inputs(class_type).get(input_name)
        return declared is not None and declared.is_lazy

    def is_output(self, class_type: str) -> bool:
        return getattr(self.node_class(class_type), "OUTPUT_NODE", False) is True

    def is_async(self, class_type: str) -> bool:
        node_class = self.node_class(class_type)
        return inspect.iscoroutinefunction(getattr(node_class, getattr(node_class, "FUNCTION", ""), None))

    def is_tied_to_id(self, class_type: str) -> bool:
        """Two nodes of this class are never the same, whatever their inputs."""
        return "UNIQUE_ID" in self.hidden(class_type).values() or getattr(self.node_class(class_type), "NOT_IDEMPOTENT", False)
