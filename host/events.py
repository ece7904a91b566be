"""Ledger events as messages to the front end (web contract, section 8)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..memory.ledger import Event

log = logging.getLogger("lazy_h3")

MESSAGE = "lazy_h3.memory"
SCHEMA = 1
MAX_RECENT = 256

Send = Callable[[str, dict[str, Any]], None]


class EventFeed:
    """Numbers the events and sends them on. Called by the ledger on any thread, so it never raises.

    ``prompt_id`` gives the running prompt. A client that missed messages asks for a snapshot, which has the latest of them.
    """

    def __init__(self, send: Send, prompt_id: Callable[[], str | None]) -> None:
        self._send = send
        self._prompt_id = prompt_id
        self._seq = 0
        self._recent: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT)
        self._lock = threading.Lock()  # messages leave in the order of their numbers
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._seq += 1
            message = payload(event, self._seq, self._prompt_id())
            self._recent.append(message)
            try:
                self._send(MESSAGE, message)
            except Exception:
                self._mention_failure()

    def latest(self) -> tuple[int, list[dict[str, Any]]]:
        """The number of the last message, and the last few messages."""
        with self._lock:
            return self._seq, list(self._recent)

    def _mention_failure(self) -> None:
        if not self._has_failed:
            log.exception("Lazy H3: memory events do not reach the front end; only the display is affected.")
        self._has_failed = True


def payload(event: Event, seq: int, prompt_id: str | None) -> dict[str, Any]:
    """``t``: monotonic seconds since the ledger began; ``bytes``: of the component; ``resident_bytes``: of everything alive."""
    return {
        "schema": SCHEMA,
        "seq": seq,
        "prompt_id": prompt_id,
        "node": event.node,
        "component": event.component,
        "event": event.event,
        "bytes": event.bytes,
        "resident_bytes": event.resident_bytes,
        "t": event.t,
    }
