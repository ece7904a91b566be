"""The executor's own list of nodes that still have to run: private to the host, optional, read only."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

EXECUTOR_FUNCTION = "execute_async"


class Executor:
    """What the executor of a prompt knows. ``cached``: nodes whose results were found in the cache when the prompt began."""

    def __init__(self, execution_list: Any, cached: frozenset[str]) -> None:
        self._list = weakref.ref(execution_list)
        self.cached = cached

    @property
    def pending(self) -> Collection[str]:
        """Nodes that have not finished, as they are now; the running one is among them."""
        return getattr(self._list(), "pendingNodes", ())


def find_executor() -> Executor | None:
    """Walk up to the executor's frame; None where it is not on this stack or does not look as expected.

    It is on the stack of handlers and of plain nodes, once the prompt's list has been built; never on that of async nodes.
    """
    for local in _locals_of_executors():
        execution_list = local.get("execution_list")
        if hasattr(execution_list, "pendingNodes") and hasattr(execution_list, "__weakref__"):
            return Executor(execution_list, _cached_nodes(local.get("self")))
    return None


def find_caches() -> Any:
    """The caches of the executor that is on this stack; None where there is none, or it does not look as expected."""
    executors = (local.get("self") for local in _locals_of_executors())
    return next((executor.caches for executor in executors if hasattr(executor, "caches")), None)


def _locals_of_executors() -> Iterator[Mapping[str, Any]]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == EXECUTOR_FUNCTION:
            yield frame.f_locals
        frame = frame.f_back


def _cached_nodes(executor: Any) -> frozenset[str]:
    messages = getattr(executor, "status_messages", ())
    lists = (data.get("nodes", ()) for event, data in messages if event == "execution_cached")
    return frozenset(node for nodes in lists for node in nodes)
