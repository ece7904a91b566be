"""Cached outputs of other loaders, deleted after their last use. Caches are the host's own: unfamiliar ones are left alone."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ....memory import device as devices
from ....memory.graph import Key, Node, NodeClass, Trail, link_of, trails
from ....memory.session import GraphView, Prompt, Session
from ...origins import Wiring, is_of_another
from ...probe import find_caches
from ...prompt import plain_types

log = logging.getLogger("lazy_h3")

EMPTY = "NullCache"
FAMILIAR = ("HierarchicalCache", "LRUCache", "RAMPressureCache")
TABLES = ("used_generation", "timestamps", "children")  # of one cache: key -> what else it knows of an entry


class CachedLoaders:
    """Follows the nodes of a session. ``is_on``: whether anything is to be deleted."""

    def __init__(self, is_on: Callable[[], bool]) -> None:
        self._is_on = is_on
        self._loaders: _Loaders | None = None
        self._has_stood_down = False
        self._may_trim = False

    def __call__(self, session: Session) -> None:
        """A node has finished: delete entries of what no node that may still run can use."""
        if not self._is_on() or self._has_stood_down:
            return
        if self._may_trim:  # only now: the node before was the last to hold what it used
            devices.collect_and_trim()
        view = session.prompt.view()
        if self._loaders is None or self._loaders.version != (session.prompt_id, view.version):
            self._loaders = _Loaders.of(session.prompt, view)
        may_run = session.prompt.may_run()
        pending = {node for node in view.nodes if node in may_run and node not in session.finished}
        self._may_trim = bool(self._forget(self._loaders.unused(pending), self._loaders.needed(pending)))

    def _forget(self, unused: set[str], needed: set[str]) -> int:
        """Delete the entries of nodes, but for those that are another's, too, which is still needed; returns how many."""
        outputs: Any = getattr(find_caches(), "outputs", None)
        if not unused or type(outputs).__name__ == EMPTY:
            return 0
        try:
            if type(outputs).__name__ not in FAMILIAR:
                raise TypeError(f"its cache is a {type(outputs).__name__}")  # noqa: TRY301  (one way to stand down)
            keys = _keys(outputs, unused) - _keys(outputs, needed)
            num_deleted = sum([outputs.cache.pop(key, None) is not None for key in keys])
            for name in TABLES:
                for key in keys:
                    getattr(outputs, name, {}).pop(key, None)
        except (AttributeError, TypeError) as error:
            self._has_stood_down = True
            log.warning("Lazy H3: cached loaders are not dropped, since this version of ComfyUI is unfamiliar (%s).", error)
            return 0
        if num_deleted:
            log.info("Lazy H3: the cached outputs of %d loaders and nodes with their models are dropped.", num_deleted)
        return num_deleted


@dataclass(frozen=True)
class _Loaders:
    """Other loaders of a prompt. ``makers``: key -> nodes that give it out. ``users``: node -> those that are wired to it."""

    version: Hashable
    makers: Mapping[Key, set[str]]
    trails: Mapping[Key, Trail]
    carriers: Mapping[Key, set[str]]
    users: Mapping[str, set[str]]

    @classmethod
    def of(cls, prompt: Prompt, view: GraphView) -> _Loaders:
        ours = {output: key for output, key in prompt.sources(view.nodes).items() if not is_of_another(key)}
        sources = Wiring(view.nodes, prompt.classes, ours).loaders()
        found = trails(view.nodes, prompt.classes, sources, plain=plain_types)
        makers: dict[Key, set[str]] = defaultdict(set)
        for (node, _), key in sources.items():
            makers[key].add(node)
        users: dict[str, set[str]] = defaultdict(set)
        for node, spec in view.nodes.items():
            for link in map(link_of, spec.inputs.values()):
                if link is not None:
                    users[link[0]].add(node)
        carriers = {key: {n for n in trail.consumers if _carries(prompt, view.nodes[n], key)} for key, trail in found.items()}
        return cls((prompt.prompt_id, view.version), makers, found, carriers, users)

    def unused(self, pending: set[str]) -> set[str]:
        """Loaders whose objects no pending node can use, and the nodes that these objects came through."""
        done = [key for key, trail in self.trails.items() if pending.isdisjoint(trail.consumers)]
        return {node for key in done for node in self.makers[key] | self.carriers[key]} - self.needed(pending)

    def needed(self, pending: set[str]) -> set[str]:
        """Pending nodes, and those that they are wired to."""
        return pending | {node for node, users in self.users.items() if not pending.isdisjoint(users)}


def _carries(prompt: Prompt, node: Node, key: Key) -> bool:
    declared: NodeClass | None = prompt.classes(node.class_type)
    plain = plain_types(key)
    return declared is None or any(declared.may_carry(slot, plain) for slot in range(len(declared.output_types)))


def _keys(outputs: Any, nodes: set[str]) -> set[Hashable]:
    """Of the entries of nodes; those of expansions may have none here."""
    keys = {outputs.cache_key_set.get_data_key(node) for node in nodes}
    return keys - {None}
