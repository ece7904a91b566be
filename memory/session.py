"""One prompt's run: start, finish and end events in, releases out. Nothing it does can fail the prompt."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .graph import ANY, PLAIN_TYPES, Key, Node, NodeClass, Output, Trail, needs_of, trails
from .resource import Resource, is_hosted, is_pinned_by_users, origins_of
from .store import Store
from .turns import Turnstile, grouped_order

log = logging.getLogger("lazy_h3")


@dataclass(frozen=True)
class GraphView:
    """The prompt as it is now. ``version`` changes whenever an expansion adds nodes; ``plain``: see ``graph.trails``."""

    version: Any
    nodes: Mapping[str, Node]
    constants: Mapping[str, Iterable[Key]]
    plain: Callable[[Key], frozenset[str]] = lambda _: PLAIN_TYPES


class Prompt(Protocol):
    """What a session asks of its host."""

    @property
    def prompt_id(self) -> str: ...
    def version(self) -> Any:
        """Cheap; equal while the graph is unchanged."""

    def view(self) -> GraphView: ...
    def may_run(self) -> Container[str]:
        """Nodes that may still run, the present one included, and perhaps some that have finished."""

    def will_run(self, node: str) -> bool:
        """Whether the node is certain to run, errors and interrupts aside; False where the host does not tell."""

    def classes(self, class_type: str) -> NodeClass | None: ...
    def sources(self, nodes: Mapping[str, Node]) -> Mapping[Output, Key]:
        """Loader outputs and the identities of their resources; ANY where the loader's inputs are not known yet."""


Keeps = Callable[[Resource], str | None]  # why a resource stays for the next prompt, or None


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    """An exception in an event would kill the host's worker thread; a lost event only costs time."""

    @functools.wraps(method)
    def call(self: Session, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception:
            if not self._has_failed:
                log.exception("Lazy H3: the analysis of prompt %s failed; weights are released at its end.", self.prompt_id)
            self._has_failed = True

    return call


class Session:
    """Releases each resource of ``store`` when no node that may still run can touch it, and the rest at the end."""

    def __init__(self, prompt: Prompt, store: Store, keeps: Keeps = lambda _: None, takes_turns: bool = True) -> None:
        self.prompt = prompt
        self.prompt_id = prompt.prompt_id
        self.store = store
        self.is_over = False
        self.finished: set[str] = set()
        self._keeps = keeps
        self._kept: set[Key] = set()
        self._version: Any = object()
        self._trails: dict[Key, Trail] = {}
        self._left: dict[Key, list[str]] = {}  # consumers, but for those that were found to be gone
        self._running: set[str] = set()
        self._sync: set[str] = set()  # nodes that are never at work while the host waits
        self._order: list[str] = []
        self._place: dict[str, int] = {}  # in the order
        self._turnstile = Turnstile(self._earlier, lambda: self._running - self._sync) if takes_turns else None
        self._has_failed = False

    @_contained
    def begin(self) -> None:
        """Read the graph; warns once for each component that nobody uses."""
        self._settle()
        self._read_graph()
        may_run = self.prompt.may_run()
        for key, trail in self._trails.items():
            if not any(node in may_run for node in trail.consumers) and self._loader_runs(key, may_run):
                log.warning("Lazy H3: %s is loaded by a node but used by none; it is never read.", _name(key))

    @_contained
    def started(self, node: str) -> None:
        """A node begins: it may run again, whatever it did before (loops)."""
        is_first = not self._running and not self.finished
        self.finished.discard(node)
        self._running.add(node)
        for key, trail in self._trails.items():
            if node in trail.consumers:
                self._left[key].append(node)
        self._pin_for(node)
        if self._turnstile is not None:
            self._turnstile.note_start()
        if is_first:
            self.prompt.may_run()  # its best source is the executor's list, which can be found from the executor's own events

    @_contained
    def ended(self, node: str) -> None:
        """A node has finished: release what it was the last to use."""
        if self.is_over:
            return
        self.finished.add(node)
        self._running.discard(node)
        if self._turnstile is not None:
            self._turnstile.wake(node)
        self.store.unpin_node(self.prompt_id, node)
        self._settle()
        candidates = [r for r in self.store.resident() if r.identity not in self._kept]
        if not candidates:
            return
        self._refresh()
        may_run = self.prompt.may_run()
        for resource in candidates:
            keys = (*origins_of(resource), ANY)
            if not any(self._has_users(key, may_run) for key in keys):
                is_wired = bool(self._trails.keys() & set(keys))
                self._release(resource, f"node {node} was its last user" if is_wired else "no node of this prompt uses it")

    @_contained
    def about_to_fill(self, resource: Resource, nbytes: int) -> None:
        """Hosted resources that wait for their next user make room: they cost no more to read again than they save now.

        Others stay from their first user to their last, as the plan has it.
        """
        for other in self.store.resident():
            is_small = is_hosted(other) and other is not resource and other.live_bytes() <= nbytes
            if is_small and not self.store.is_pinned(other) and self._why_kept(other) is None:
                self.store.release(other, f"room for {resource.name}, until its next user")

    @_contained
    def end(self) -> None:
        """The prompt is over, however it ended."""
        if self.is_over:
            return
        self.is_over = True
        self.store.unpin_node(self.prompt_id)
        self.store.stop_prefetches("end of the prompt")
        self._settle()
        for resource in self.store.resident():
            if resource.identity not in self._kept:
                self._release(resource, "end of the prompt")

    async def turn(self, node: str, check: Callable[[], None]) -> None:
        """Wait until ``node`` may compute, so that branches share one load of each model; ``check`` may raise to interrupt."""
        if self._turnstile is not None and not self.is_over:
            await self._turnstile.turn(node, check)

    def _has_users(self, key: Key, may_run: Container[str]) -> bool:
        """Whether a node that may still run may touch the resource. A consumer is looked at until it is gone: once, mostly."""
        left = self._left.get(key, [])
        while left and (left[-1] in self.finished or left[-1] not in may_run):
            left.pop()
        return bool(left)

    def _pin_for(self, node: str) -> None:
        """What its users do not pin themselves is in use while a node runs that may use it."""
        for resource in (status.resource for status in self.store.statuses()):
            trails = (self._trails[key] for key in origins_of(resource) if key in self._trails)
            if not is_pinned_by_users(resource) and any(node in trail.consumers for trail in trails):
                self.store.pin(resource, ("node", self.prompt_id, node))

    def _earlier(self, node: str) -> Iterator[str]:
        """Heavy nodes that should run before ``node`` and still may, the last first. An analysis that fails lets everybody go."""
        try:
            self._refresh()
            may_run = self.prompt.may_run()
            for other in reversed(self._order[: self._place.get(node, 0)]):
                if other not in self.finished and other in may_run:
                    yield other
        except Exception:
            log.exception("Lazy H3: the order of heavy nodes is unknown in prompt %s; they run as they come.", self.prompt_id)
            self._place = {}

    def _refresh(self) -> None:
        """Read the graph again if an expansion has added to it."""
        if self.prompt.version() != self._version:
            self._read_graph()

    @_contained
    def _settle(self) -> None:
        self.store.settle()

    @_contained
    def _release(self, resource: Resource, reason: str) -> None:
        why_kept = self._why_kept(resource)
        if why_kept is None:
            self.store.release(resource, reason)
            return
        self._kept.add(resource.identity)
        self.store.ledger.record("keep", resource.name, resource.live_bytes(), why_kept)

    def _why_kept(self, resource: Resource) -> str | None:
        try:
            return self._keeps(resource)
        except Exception:
            log.exception("Lazy H3: the policy failed for %s, which is therefore released.", resource.name)
            return None

    def _read_graph(self) -> None:
        view = self.prompt.view()
        declared = {node: self.prompt.classes(spec.class_type) for node, spec in view.nodes.items()}
        self._sources = self.prompt.sources(view.nodes)
        self._trails = trails(view.nodes, self.prompt.classes, self._sources, view.constants, view.plain)
        self._left = {key: list(trail.consumers) for key, trail in self._trails.items()}
        self._sync = {node for node, cls in declared.items() if cls is not None and not cls.is_async}
        heavy = (node for node, cls in declared.items() if cls is not None and cls.takes_turns)
        self._order = grouped_order(view.nodes, needs_of(heavy, self._trails))
        self._place = {node: place for place, node in enumerate(self._order)}
        self._version = view.version

    def _loader_runs(self, key: Key, may_run: Container[str]) -> bool:
        return any(node in may_run for (node, _), source in self._sources.items() if source == key)


def _name(key: Key) -> str:
    return str(getattr(key, "kind", key))
