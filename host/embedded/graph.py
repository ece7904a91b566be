"""The prompt graph while it runs (host contract, section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .errors import NodeNotFoundError

Node = dict[str, Any]  # {"class_type": str, "inputs": {name: constant or link}, "is_changed"?, "_meta"?}


def is_link(value: object) -> bool:
    """``[node id, slot]``: a list of a string and a number."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], (int, float))


def links_of(node: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(input name, producer, slot) of every linked input."""
    for name, value in node["inputs"].items():
        if is_link(value):
            yield name, value[0], int(value[1])


class DynamicPrompt:
    """The submitted nodes, those that expansions add ("ephemeral"), and those that a loop replaces ("overrides")."""

    def __init__(self, original_prompt: dict[str, Node]):
        self.original_prompt = original_prompt
        self.ephemeral_prompt: dict[str, Node] = {}
        self.node_overrides: dict[str, Node] = {}
        self._parents: dict[str, str] = {}
        self._displays: dict[str, str] = {}

    def get_node(self, node_id: str) -> Node:
        for nodes in (self.node_overrides, self.ephemeral_prompt, self.original_prompt):
            if node_id in nodes:
                return nodes[node_id]
        raise NodeNotFoundError(f"The prompt has no node {node_id}.")

    def has_node(self, node_id: str) -> bool:
        return node_id in self.original_prompt or node_id in self.ephemeral_prompt

    def all_node_ids(self) -> set[str]:
        return {*self.original_prompt, *self.ephemeral_prompt}

    def get_original_prompt(self) -> dict[str, Node]:
        return self.original_prompt

    def add_ephemeral_node(self, node_id: str, node: Node, parent_id: str, display_id: str) -> None:
        self.ephemeral_prompt[node_id] = node
        self._parents[node_id] = parent_id
        self._displays[node_id] = display_id

    def override_node(self, node_id: str, node: Node) -> None:
        self.node_overrides[node_id] = node

    def get_parent_node_id(self, node_id: str) -> str | None:
        """The node whose expansion added this one; None for a submitted node."""
        return self._parents.get(node_id)

    def get_real_node_id(self, node_id: str) -> str:
        """The submitted node from whose expansions this one came."""
        while node_id in self._parents:
            node_id = self._parents[node_id]
        return node_id

    def get_display_node_id(self, node_id: str) -> str:
        """The node on whose picture progress is shown."""
        while node_id in self._displays:
            node_id = self._displays[node_id]
        return node_id

    def lineage(self, node_id: str) -> tuple[tuple[str, str], ...]:
        """(id, class) of the nodes whose expansions led to this one, outermost first; empty for a submitted node."""
        chain = []
        parent = self.get_parent_node_id(node_id)
        while parent is not None:
            chain.append((parent, self.get_node(parent)["class_type"]))
            parent = self.get_parent_node_id(parent)
        return tuple(reversed(chain))
