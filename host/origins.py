"""Which loader an object on a link is from, and a key for what that loader gives. From the wiring alone, before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..memory.graph import ANY, Key, Node, NodeClass, Output, link_of
from ..memory.resource import Identity

MODEL_TYPES = frozenset({"MODEL", "CLIP", "VAE", "CONTROL_NET", "CLIP_VISION", "STYLE_MODEL", "UPSCALE_MODEL", "MODEL_PATCH"})
OTHERS = "core object of "  # how kinds of keys begin that are made here
WILDCARDS = frozenset({"*", "COMFY_MATCHTYPE_V3"})  # of outputs that are what their inputs are

Classes = Callable[[str], NodeClass | None]


class Wiring:
    """The nodes of a prompt, seen from what comes out of them. ``known``: outputs that have a key already."""

    def __init__(self, nodes: Mapping[str, Node], classes: Classes, known: Mapping[Output, Key]) -> None:
        self._nodes = nodes
        self._classes = classes
        self._known = known
        self._signatures: dict[str, str] = {}

    def origins(self, output: Output) -> dict[Output, Key]:
        """The outputs that an object may have come from unchanged but for patches, each with its key.

        Upstream along links of the object's own type; where types do not tell, along all that may carry a model.
        """
        found: dict[Output, Key] = {}
        pending, seen = [output], {output}
        while pending:
            here = pending.pop()
            before = [] if here in self._known else self._carried(here)
            pending += [link for link in before if link not in seen]
            seen.update(before)
            if not before and here[0] in self._nodes:
                found[here] = self.key(here)
        return found

    def loaders(self, types: frozenset[str] = MODEL_TYPES) -> dict[Output, Key]:
        """All outputs of these types that no other node's object comes out of, but for those that have a key already."""
        outputs = ((node, slot) for node in self._nodes for slot in range(len(self._types(node))))
        given = (output for output in outputs if self._type(output) in types and output not in self._known)
        return {output: self.key(output) for output in given if not self._carried(output)}

    def key(self, output: Output) -> Key:
        """The same for all loaders of one class with the same inputs."""
        node, slot = output
        own = Identity(OTHERS + self._nodes[node].class_type, (), (self._signed(node), slot))
        return self._known.get(output, own)

    def _carried(self, output: Output) -> list[Output]:
        """Inputs of the node that may hold what comes out here."""
        node, _ = output
        if node not in self._nodes:
            return []
        kind = self._type(output)
        links = [link for value in self._nodes[node].inputs.values() if (link := link_of(value)) is not None]
        return [link for link in links if link[0] in self._nodes and _may_be(kind, self._type(link))]

    def _type(self, output: Output) -> str:
        node, slot = output
        types = self._types(node)
        return types[slot] if slot < len(types) else "*"

    def _types(self, node: str) -> tuple[str, ...]:
        declared = self._classes(self._nodes[node].class_type) if node in self._nodes else None
        return () if declared is None else declared.output_types

    def _signed(self, node: str) -> str:
        """Of the node's class and inputs, and of all that these come from; another node with the same has the same."""
        if node not in self._signatures:
            self._signatures[node] = ""  # of a circle
            spec = self._nodes[node]
            inputs = {name: self._signed_input(value) for name, value in sorted(spec.inputs.items())}
            text = json.dumps([spec.class_type, inputs], default=repr)
            self._signatures[node] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._signatures[node]

    def _signed_input(self, value: Any) -> Any:
        link = link_of(value)
        return [self._signed(link[0]), link[1]] if link is not None and link[0] in self._nodes else value


def _may_be(kind: str, given: str) -> bool:
    """Whether what comes out may be what went in."""
    kinds = {kind, given}
    return kind == given if kinds.isdisjoint(WILDCARDS) else kinds <= MODEL_TYPES | WILDCARDS


def is_of_another(key: Key) -> bool:
    """Whether it is the key of what a loader that is none of ours gives out."""
    return isinstance(key, Identity) and key.kind.startswith(OTHERS)


def released(nodes: Mapping[str, Node], inputs: Iterable[tuple[str, str]], wiring: Wiring) -> dict[Output, Key]:
    """Origins of what is wired to these (node, input name), but for loaders that may load anything."""
    links = (link_of(nodes[node].inputs.get(name)) for node, name in inputs)
    found = {output: key for link in links if link is not None for output, key in wiring.origins(link).items()}
    return {output: key for output, key in found.items() if key is not ANY}
