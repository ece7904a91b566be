"""Reading the next component while the present node computes, where the plan says that there is room for both."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..memory.resource import Resource

if TYPE_CHECKING:
    from .runtime import Runtime
    from .session_plan import SessionPlanner

log = logging.getLogger("lazy_h3")


class Prefetcher:
    """Begins to read ahead when a node has what it computes with; once for each node and component."""

    def __init__(self, shared: Runtime, planner: SessionPlanner) -> None:
        self._shared = shared
        self._planner = planner
        self._begun: tuple[str | None, set[Any]] = None, set()  # prompt, and (node, identity of what it computes with)
        shared.store.on_ready.append(self._follow)

    def _follow(self, resource: Resource) -> None:
        try:
            node = self._node_that_begins(resource)
            if node is not None:
                self._look_ahead(node)
        except Exception:  # what only saves time must not fail the node
            log.exception("Lazy H3: nothing is read ahead, since the plan could not be followed.")

    def _node_that_begins(self, resource: Resource) -> str | None:
        """The executing node, unless it only asks again for what it computes with."""
        executing, session = self._shared.host.executing(), self._shared.attachment.session
        if executing is None or session is None or session.is_over or executing[0] != session.prompt_id:
            return None
        prompt, node = executing
        if self._begun[0] != prompt:
            self._begun = prompt, set()
        begun = self._begun[1]
        if (node, resource.identity) in begun:
            return None
        begun.add((node, resource.identity))
        return node

    def _look_ahead(self, node: str) -> None:
        store = self._shared.store
        for choice, stage in self._planner.ahead(node):
            item = choice.item
            resource = store.find(item.key)  # type: ignore[arg-type]
            if resource is not None:
                store.prefetch(resource, item.parts, item.points, beside=stage.bytes_beside_weights)
