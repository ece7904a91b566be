"""The executor's own list of nodes that still have to run: private to the host, optional, read only."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

EXECUTOR_FUNCTION = "execute_async"


@dataclass(frozen=True)
class ExecutorView:
    """What the executor knows at this moment."""

    pending: frozenset[str]
    cached: frozenset[str]


def executor_view() -> ExecutorView | None:
    """Walk up to the executor's frame; None where it is not on this stack or does not look as expected."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == EXECUTOR_FUNCTION:
            pending = getattr(frame.f_locals.get("execution_list"), "pendingNodes", None)
            if pending is not None:
                return ExecutorView(frozenset(pending), _cached_nodes(frame.f_locals.get("self")))
        frame = frame.f_back
    return None


def _cached_nodes(executor: Any) -> frozenset[str]:
    """Nodes whose results were found in the cache when the prompt began."""
    messages = getattr(executor, "status_messages", ())
    lists = (data.get("nodes", ()) for event, data in messages if event == "execution_cached")
    return frozenset(node for nodes in lists for node in nodes)
