"""In what order the heavy nodes of a prompt should run, so that branches share one load of each model.

A host runs branch by branch: k branches through three models make 3k loads. In the order given here, all encodes come before all
samplings, and those before all decodes, as far as the wiring allows: 3 loads. Pure, but for the waiting itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set

from .graph import Key, Node, link_of

ROUND_SECONDS = 0.1
PATIENT_ROUNDS = 2
MOST_ROUNDS = 100  # with a node that may be at work: it may also be waiting for children or for a lazy input


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

    ``earlier(node)`` names the nodes that should go first and may still run, best the last of them first; ``running()`` those
    that have started, have not finished, and may be at work meanwhile.
    """

    def __init__(self, earlier: Callable[[str], Iterable[str]], running: Callable[[], Set[str]]) -> None:
        self._earlier = earlier
        self._running = running
        self._waiting: Counter[str] = Counter()  # a node that is mapped over a list waits once for each item
        self._bells: dict[str, asyncio.Event] = {}  # node -> rings for those who wait for it
        self._num_events = 0

    async def turn(self, node: str, check: Callable[[], None]) -> None:
        """Wait while an earlier node may still run. ``check`` runs each round and may raise (interrupts).

        If nobody but waiting nodes has been running for a while, the first in order goes, whatever it waits for; so it does if
        nothing at all has happened for a long while.
        """
        quiet_rounds = 0
        self._waiting[node] += 1
        try:
            while (last := next(iter(self._earlier(node)), None)) is not None:
                is_first = self._waiting.keys().isdisjoint(self._earlier(node))
                if is_first and quiet_rounds >= self._patience():
                    return
                check()
                seen = self._num_events
                rounds = 1 if is_first else len(self._waiting)  # all of them together look up as often as two would
                await self._wait_for(last, rounds * ROUND_SECONDS)
                quiet_rounds = quiet_rounds + 1 if self._num_events == seen else 0
        finally:
            self._waiting[node] -= 1
            if not self._waiting[node]:
                del self._waiting[node]

    def note_start(self) -> None:
        """A node has started: nobody's wait is over, but things go on."""
        self._num_events += 1

    def wake(self, node: str | None = None) -> None:
        """The node (None: any) has finished."""
        self._num_events += 1
        for rung in [*self._bells] if node is None else [node]:
            bell = self._bells.pop(rung, None)
            if bell is not None:
                bell.set()

    def _patience(self) -> int:
        return PATIENT_ROUNDS if self._running() <= self._waiting.keys() else MOST_ROUNDS

    async def _wait_for(self, node: str, seconds: float) -> None:
        """Until the node has finished, or for so long."""
        bell = self._bells.setdefault(node, asyncio.Event())
        ringing = asyncio.ensure_future(bell.wait())
        try:  # not wait_for: before Python 3.12 it swallows a cancellation that comes together with the bell
            await asyncio.wait({ringing}, timeout=seconds)
        finally:
            ringing.cancel()
