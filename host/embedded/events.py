"""What a host tells about a run, for a terminal, a report or a browser."""

from __future__ import annotations

import time
from typing import Any

from .node_runner import Emit
from .progress import NodeProgressState, ProgressHandler, ProgressRegistry


class RunEvents(ProgressHandler):
    """The host's own handler: turns node events into messages and measures how long nodes take.

    - ``node_started`` {node, prompt_id}
    - ``node_progress`` {node, value, max, prompt_id}
    - ``node_finished`` {node, seconds, prompt_id}; seconds is None if the node did not have to run
    """

    def __init__(self, emit: Emit):
        super().__init__("webui")
        self.seconds: dict[str, float] = {}
        self._emit = emit
        self._started: dict[str, float] = {}

    def set_registry(self, registry: ProgressRegistry) -> None:
        self._started.clear()

    def start_handler(self, node_id: str, state: NodeProgressState, prompt_id: str) -> None:
        self._started[node_id] = time.monotonic()
        self._emit("node_started", {"node": node_id, "prompt_id": prompt_id})

    def update_handler(
        self, node_id: str, value: float, max_value: float, state: NodeProgressState, prompt_id: str, image: Any = None
    ) -> None:
        self._emit("node_progress", {"node": node_id, "value": value, "max": max_value, "prompt_id": prompt_id})

    def finish_handler(self, node_id: str, state: NodeProgressState, prompt_id: str) -> None:
        started = self._started.pop(node_id, None)
        seconds = None if started is None else time.monotonic() - started
        if seconds is not None:
            self.seconds[node_id] = seconds
        self._emit("node_finished", {"node": node_id, "seconds": seconds, "prompt_id": prompt_id})
