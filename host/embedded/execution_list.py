"""Which nodes still have to run, which of them can, and what they have received (host contract, sections 2e, 2f and 3)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from .caching import CacheEntry, NodeCache
from .declarations import Declarations
from .errors import DependencyCycleError, NodeInputError
from .graph import DynamicPrompt, is_link, links_of


class ExecutionList:
    """The graph between the wanted outputs and what is cached; nodes leave it when they are done.

    ``pendingNodes`` holds the ids of the nodes that are in it, the running one included.
    """

    def __init__(self, dynprompt: DynamicPrompt, declarations: Declarations, outputs: NodeCache):
        self.pendingNodes: dict[str, bool] = {}
        self._dynprompt = dynprompt
        self._declarations = declarations
        self._outputs = outputs
        self._waits_for: dict[str, set[str]] = {}  # node -> producers that have to run first
        self._consumers: dict[str, dict[str, None]] = {}  # the same links, seen from the producer; in order
        self._blocks: Counter[str] = Counter()  # node -> what it waits for outside the graph
        self._unblocked = asyncio.Event()
        self._inbox: dict[str, dict[str, CacheEntry | None]] = {}  # consumer -> producer -> outputs
        self._subscribers: dict[str, set[str]] = {}
        self._inhibited: set[str] = set()

    def add_node(self, node_id: str) -> None:
        """Let a node run, cached or not, after everything behind its eager links that is not cached."""
        links, stack = [], [node_id]
        while stack:
            consumer = stack.pop()
            if consumer in self.pendingNodes or consumer in self._inhibited:
                continue
            self.pendingNodes[consumer] = True
            self._waits_for[consumer], self._consumers[consumer] = set(), {}
            for producer in self._eager_producers(consumer):
                links.append((producer, consumer))
                if not self._is_cached(producer):
                    stack.append(producer)
        for producer, consumer in links:
            self.add_link(producer, consumer)

    def add_link(self, producer: str, consumer: str) -> None:
        """Let the consumer wait for the producer, unless that is cached, and receive its outputs."""
        if not self._is_cached(producer):
            self.add_node(producer)
            if producer in self.pendingNodes:
                self._waits_for[consumer].add(producer)
                self._consumers[producer][consumer] = None
        self.subscribe(producer, consumer)

    def subscribe(self, producer: str, consumer: str) -> None:
        """Keep the producer's outputs for the consumer, which does not wait for them."""
        self._inbox.setdefault(consumer, {})[producer] = self._outputs.peek(producer)
        self._subscribers.setdefault(producer, set()).add(consumer)

    def require_input(self, node_id: str, input_name: str) -> None:
        """A node that has been started turns out to need a lazy input."""
        value = self._dynprompt.get_node(node_id)["inputs"].get(input_name)
        if not is_link(value):
            raise NodeInputError(
                f"Node {node_id} asks for its input '{input_name}', which is not linked: link it or give it a value."
            )
        self.add_link(value[0], node_id)

    def add_external_block(self, node_id: str) -> Callable[[], None]:
        """Hold a pending node until the returned function is called (from the event loop's thread)."""
        self._blocks[node_id] += 1

        def unblock() -> None:
            self._blocks[node_id] -= 1
            self._unblocked.set()

        return unblock

    def inhibit_nodes(self, node_ids: Iterable[str]) -> None:
        """Take nodes out for good; they vanish without having finished. A loop does so with its body, of which it runs copies."""
        for node_id in node_ids:
            self._inhibited.add(node_id)
            if node_id in self.pendingNodes:
                self._remove(node_id)

    async def next_node(self) -> str:
        """A node that waits for nothing; waits for one if all are held from outside.

        Raises:
            DependencyCycleError: the nodes wait for each other.
        """
        ready = self._ready()
        while not ready and self._blocks.total():
            await self._unblocked.wait()
            self._unblocked.clear()
            ready = self._ready()
        if not ready:
            raise self._cycle()
        return self._preferred(ready)

    def received(self, producer: str, consumer: str) -> CacheEntry | None:
        """What a consumer was given; reading it counts as use of the cached outputs."""
        entry = self._inbox.get(consumer, {}).get(producer)
        if entry is not None:
            self._outputs.set(producer, entry)
        return entry

    def deliver(self, producer: str, entry: CacheEntry) -> None:
        """The producer has outputs: hand them to the consumers in the list."""
        for consumer in self._subscribers.get(producer, ()):
            if consumer in self._inbox:
                self._inbox[consumer][producer] = entry

    def complete(self, node_id: str) -> None:
        """A node is done; what it has received is let go."""
        if node_id in self.pendingNodes:
            self._remove(node_id)

    def _remove(self, node_id: str) -> None:
        del self.pendingNodes[node_id], self._waits_for[node_id]
        for consumer in self._consumers.pop(node_id):
            self._waits_for.get(consumer, set()).discard(node_id)
        self._inbox.pop(node_id, None)
        self._subscribers.pop(node_id, None)

    def _eager_producers(self, node_id: str) -> list[str]:
        node = self._dynprompt.get_node(node_id)
        return [who for name, who, _ in links_of(node) if not self._declarations.is_lazy(node["class_type"], name)]

    def _is_cached(self, node_id: str) -> bool:
        return self._outputs.peek(node_id) is not None

    def _ready(self) -> list[str]:
        return [node_id for node_id in self.pendingNodes if not self._waits_for[node_id] and not self._blocks[node_id]]

    def _preferred(self, ready: list[str]) -> str:
        """Results early, and waiting early: outputs and async nodes, then what feeds an output, directly or over one node."""
        for is_preferred in (self._is_urgent, self._feeds_output, self._feeds_feeder):
            for node_id in ready:
                if is_preferred(node_id):
                    return node_id
        return ready[0]

    def _is_urgent(self, node_id: str) -> bool:
        return self._is_output(node_id) or self._declarations.is_async(self._class_type(node_id))

    def _is_output(self, node_id: str) -> bool:
        return self._declarations.is_output(self._class_type(node_id))

    def _feeds_output(self, node_id: str) -> bool:
        return any(map(self._is_output, self._consumers.get(node_id, ())))

    def _feeds_feeder(self, node_id: str) -> bool:
        return any(map(self._feeds_output, self._consumers[node_id]))

    def _class_type(self, node_id: str) -> str:
        return self._dynprompt.get_node(node_id)["class_type"]

    def _cycle(self) -> DependencyCycleError:
        cycle = self._in_cycle()
        added = [node_id for node_id in cycle if self._dynprompt.get_display_node_id(node_id) != node_id]
        # validation has refused cycles among submitted nodes, so an expansion closed this one
        return DependencyCycleError(self._dynprompt.get_real_node_id((added or cycle)[0]), cycle)

    def _in_cycle(self) -> list[str]:
        """Peel off the nodes on which nobody waits until only loops are left."""
        consumers = {node_id: set(self._consumers[node_id]) for node_id in self.pendingNodes}
        while leaves := [node_id for node_id, waiting in consumers.items() if not waiting]:
            for leaf in leaves:
                del consumers[leaf]
            for waiting in consumers.values():
                waiting.difference_update(leaves)
        return list(consumers)
