"""In what order the heavy nodes of a prompt should run, so that branches share one load of each model.

A host runs branch by branch: k branches through three models make 3k loads. In the order given here, all encodes come before all
samplings, and those before all decodes, as far as the wiring allows: 3 loads. Pure, but for the waiting itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from .graph import Key, Node, link_of

ROUND_SECONDS = 0.1
PATIENT_ROUNDS = 2


def grouped_order(nodes: Mapping[str, Node], needs: Mapping[str, frozenset[Key]]) -> list[str]:
    """The nodes of ``needs`` (node -> resources) so that none comes before its ancestors, and equal needs stand together.

    Greedy: stay with the resources of the last node while a node is ready for them; else begin the need of which most nodes are
    ready, preferring one with none left to wait for. Linear in nodes and links but for the number of heavy nodes.
    """
    position = {node: number for number, node in enumerate(needs)}
    before = _heavy_ancestors(nodes, position)
    left = dict.fromkeys(position)
    order: list[str] = []
    done = 0
    current: frozenset[Key] | None = None
    while left:
        ready = [node for node in left if before[node] & ~done == 0] or list(left)  # a cycle: any order will do
        matching = [node for node in ready if needs[node] == current]
        if not matching:
            current = _best_need(ready, left, needs)
            matching = [node for node in ready if needs[node] == current]
        for node in matching:
            order.append(node)
            done |= 1 << position[node]
            del left[node]
    return order


def _best_need(ready: list[str], left: Iterable[str], needs: Mapping[str, frozenset[Key]]) -> frozenset[Key]:
    available = Counter(needs[node] for node in ready)
    waiting = Counter(needs[node] for node in left)
    return max(available, key=lambda need: (available[need] == waiting[need], available[need]))


def _heavy_ancestors(nodes: Mapping[str, Node], position: Mapping[str, int]) -> dict[str, int]:
    """Node -> bit set of the heavy nodes that it depends on."""
    masks: dict[str, int] = {}
    entered: set[str] = set()
    pending = [*position]
    while pending:
        node = pending[-1]
        if node in masks:
            pending.pop()
            continue
        parents = _parents(nodes, node)
        unknown = [parent for parent in parents if parent not in masks and parent not in entered]
        entered.add(node)
        if unknown:
            pending += unknown
            continue
        masks[node] = 0
        for parent in parents:
            masks[node] |= masks.get(parent, 0) | (1 << position[parent] if parent in position else 0)
        pending.pop()
    return masks


def _parents(nodes: Mapping[str, Node], node: str) -> list[str]:
    links = (link_of(value) for value in nodes[node].inputs.values())
    return [link[0] for link in links if link is not None and link[0] in nodes]


class Turnstile:
    """Where heavy nodes wait for earlier ones. All methods run on the event loop's thread.

    ``earlier(node)`` names the nodes that should go first and may still run; ``running()`` those that have started and have
    not finished.
    """

    def __init__(self, earlier: Callable[[str], set[str]], running: Callable[[], set[str]]) -> None:
        self._earlier = earlier
        self._running = running
        self._waiting: dict[str, None] = {}
        self._changed: asyncio.Event | None = None

    async def turn(self, node: str, check: Callable[[], None]) -> None:
        """Wait while an earlier node may still run. ``check`` runs each round and may raise (interrupts).

        If nobody but waiting nodes has been running for a while, the first in order goes, whatever it waits for.
        """
        self._changed = self._changed or asyncio.Event()
        quiet_rounds = 0
        self._waiting[node] = None
        try:
            while self._earlier(node) and quiet_rounds < PATIENT_ROUNDS:
                check()
                changed = await self._wait()
                is_first = not self._earlier(node) & self._waiting.keys()
                stuck = is_first and self._running() <= self._waiting.keys()
                quiet_rounds = quiet_rounds + 1 if stuck and not changed else 0
        finally:
            del self._waiting[node]

    def wake(self) -> None:
        """A node has started or finished."""
        if self._changed is not None:
            self._changed.set()

    async def _wait(self) -> bool:
        """Until somebody starts or finishes, or a round is over; whether something happened."""
        assert self._changed is not None
        try:
            await asyncio.wait_for(self._changed.wait(), ROUND_SECONDS)
        except asyncio.TimeoutError:
            return False
        self._changed.clear()
        return True
