"""Who may still touch which resource, read from the wiring of a prompt. Pure: no host, no torch, no side effects.

A resource enters the graph at a loader's output. From there it may travel through any node whose outputs can carry it: a
switch, a reroute, a node of another pack. Values of plain types (pictures, latents, numbers, ...) carry no model, so the trail
ends there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PLAIN_TYPES = frozenset(
    "IMAGE MASK LATENT AUDIO VIDEO INT FLOAT STRING BOOLEAN COMBO SIGMAS NOISE".split()  # noqa: SIM905  (reads as the spec does)
)

Key = Hashable
ANY: Key = "any resource"  # of a loader whose inputs are computed: it may turn out to load anything
Output = tuple[str, int]  # (node id, slot)
Reason = Literal["direct wire", "passed through", "constant in an expansion", "unknown class"]


@dataclass(frozen=True)
class NodeClass:
    """What a node class declares: the types of its outputs, and which slots carry a handle on (None: judge by type).

    ``takes_turns``: computes with what it uses for so long that branches should share the load. ``is_async``: once started, it
    may be at work while the host waits.
    """

    output_types: tuple[str, ...]
    carries: frozenset[int] | None = None
    takes_turns: bool = False
    is_async: bool = False

    def may_carry(self, slot: int, plain: frozenset[str] = PLAIN_TYPES) -> bool:
        """Whether a resource that comes in may go out by this slot; values of ``plain`` types hold nothing of it."""
        if self.carries is not None:
            return slot in self.carries
        return slot >= len(self.output_types) or self.output_types[slot] not in plain


@dataclass(frozen=True)
class Node:
    """One node of a prompt: ``inputs`` are constants or links ``[node id, slot]``."""

    class_type: str
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Trail:
    """Where one resource may go: the nodes that may touch it, each with the first reason found."""

    consumers: Mapping[str, Reason]


Classes = Callable[[str], NodeClass | None]


def link_of(value: Any) -> Output | None:
    """The output that an input value refers to, if it is a link."""
    if isinstance(value, (list, tuple)) and len(value) == 2:
        node, slot = value
        if isinstance(node, str) and type(slot) in (int, float) and slot == slot // 1:  # JSON may spell 0 as 0.0
            return node, int(slot)
    return None


class Needed:
    """Nodes that somebody needs, directly or not, while nodes come and go. All calls together are linear in nodes and links.

    ``needs``: node -> the nodes that it needs.
    """

    def __init__(self, needs: Mapping[str, Iterable[str]]) -> None:
        self._needs = needs
        self._num_users: Counter[str] = Counter()

    def __contains__(self, node: object) -> bool:
        return node in self._num_users

    def enter(self, nodes: Iterable[str]) -> None:
        """Somebody more needs the nodes."""
        pending = list(nodes)
        while pending:
            node = pending.pop()
            self._num_users[node] += 1
            if self._num_users[node] == 1:
                pending += self._needs.get(node, ())

    def leave(self, nodes: Iterable[str]) -> None:
        """Somebody who entered the nodes needs them no longer."""
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node not in self:
                continue  # it has finished
            self._num_users[node] -= 1
            if not self._num_users[node]:
                del self._num_users[node]
                pending += self._needs.get(node, ())

    def finish(self, node: str) -> None:
        """The node needs nothing more, whoever needs it."""
        if self._num_users.pop(node, 0):
            self.leave(self._needs.get(node, ()))


def trails(
    nodes: Mapping[str, Node],
    classes: Classes,
    sources: Mapping[Output, Key],
    constants: Mapping[str, Iterable[Key]] | None = None,
    plain: Callable[[Key], frozenset[str]] = lambda _: PLAIN_TYPES,
) -> dict[Key, Trail]:
    """Follow every resource from where it enters the graph.

    ``sources``: loader output -> resource. ``constants``: node -> resources that it was given as plain objects (expansions).
    ``plain``: types that carry nothing of a resource.
    Linear in nodes and links for each resource.
    """
    wiring = _Wiring(nodes, classes)
    entries: dict[Key, list[Output]] = defaultdict(list)
    for output, key in sources.items():
        entries[key].append(output)
    holders: dict[Key, list[str]] = defaultdict(list)
    for node, keys in (constants or {}).items():
        for key in keys:
            holders[key].append(node)
    return {key: Trail(wiring.follow(entries[key], holders[key], plain(key))) for key in {**entries, **holders}}


def needs_of(nodes: Iterable[str], paths: Mapping[Key, Trail]) -> dict[str, frozenset[Key]]:
    """The resources that each of the nodes may touch."""
    return {node: frozenset(key for key, trail in paths.items() if node in trail.consumers) for node in nodes}


class _Wiring:
    def __init__(self, nodes: Mapping[str, Node], classes: Classes) -> None:
        self._classes = {node: classes(spec.class_type) for node, spec in nodes.items()}
        self._users: dict[Output, list[str]] = defaultdict(list)
        self._used_slots: dict[str, set[int]] = defaultdict(set)
        for node, spec in nodes.items():
            for value in spec.inputs.values():
                link = link_of(value)
                if link is not None:
                    self._users[link].append(node)
                    self._used_slots[link[0]].add(link[1])

    def follow(self, outputs: list[Output], holders: list[str], plain: frozenset[str]) -> dict[str, Reason]:
        """Nodes that a resource may reach from these outputs, and from nodes that hold it as a constant."""
        reached: dict[str, Reason] = dict.fromkeys(holders, "constant in an expansion")
        pending = list(outputs)
        for node in reached:
            pending += self._carried_out_of(node, plain)
        origins = {node for node, _ in outputs}
        while pending:
            output = pending.pop()
            for user in self._users.get(output, ()):
                if user not in reached:
                    reached[user] = self._reason(user, output[0] in origins)
                    pending += self._carried_out_of(user, plain)
        return reached

    def _carried_out_of(self, node: str, plain: frozenset[str]) -> list[Output]:
        declared = self._classes.get(node)
        slots = self._used_slots.get(node, ())
        return [(node, slot) for slot in slots if declared is None or declared.may_carry(slot, plain)]

    def _reason(self, user: str, is_direct: bool) -> Reason:
        if self._classes.get(user) is None:
            return "unknown class"
        return "direct wire" if is_direct else "passed through"
