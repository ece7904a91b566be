"""What happened to memory, when and why: facts from living storages, never bookkeeping."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

EventKind = Literal["load_begin", "load_end", "pin", "unpin", "release", "keep", "refuse"]
MAX_EVENTS = 100_000  # a server that runs for months must not grow
Observer = Callable[["Event"], None]


@dataclass(frozen=True)
class Event:
    """One change. ``t``: seconds since the ledger began; ``bytes``: of the component; ``resident_bytes``: of everything alive."""

    t: float
    run: int
    event: EventKind
    component: str
    node: str | None
    bytes: int
    resident_bytes: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Page:
    """What happened since a prompt began; times as in events. ``before``: component -> bytes that were resident already."""

    prompt_id: str | None = None
    began: float = 0.0
    ended: float = 0.0
    before: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    events: Sequence[Event] = ()


class Ledger:
    """Events in order, the peak of living weight bytes, and who is told about them.

    ``measure`` returns the bytes of weights alive now; the store sets it. ``current_node`` names the node that is executing.
    ``observers`` are called with every event, on the thread that causes it. Each prompt has a page.
    """

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.measure: Callable[[], int] = int
        self.current_node: Callable[[], str | None] = lambda: None
        self.run = 0
        self.peak_bytes = 0
        self.observers: list[Observer] = []
        self._started = time.monotonic()
        self._page = Page()  # its head; events and peak are kept beside it while it is written
        self._page_events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._page_peak_bytes = 0
        self._lock = threading.Lock()

    def record(self, event: EventKind, component: str, nbytes: int, reason: str = "", node: str | None = None) -> Event:
        """Add one event and tell the observers; measures what is alive."""
        resident = self.sample()
        entry = Event(self.now(), self.run, event, component, node or self.current_node(), nbytes, resident, reason)
        with self._lock:
            self.events.append(entry)
            self._page_events.append(entry)
        for observer in tuple(self.observers):
            observer(entry)
        return entry

    def sample(self) -> int:
        """Bytes of weights alive now, counted into the peak."""
        resident = self.measure()
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, resident)
            self._page_peak_bytes = max(self._page_peak_bytes, resident)
        return resident

    def now(self) -> float:
        return time.monotonic() - self._started

    def begin_run(self, run: int) -> None:
        """Events from here on belong to ``run``; the peak starts anew."""
        self.run = run
        self.peak_bytes = 0
        self.sample()

    def of_run(self, run: int) -> list[Event]:
        with self._lock:
            return [event for event in self.events if event.run == run]

    def turn_page(self, prompt_id: str, before: Mapping[str, int]) -> None:
        """A prompt begins; ``before``: component -> resident bytes."""
        with self._lock:
            self._page = Page(prompt_id, self.now(), before=dict(before))
            self._page_events.clear()
            self._page_peak_bytes = 0
        self.sample()

    def page(self) -> Page:
        """The page of the running prompt, or of the last one, up to now."""
        with self._lock:
            head, events, peak = self._page, tuple(self._page_events), self._page_peak_bytes
        return replace(head, ended=self.now(), peak_bytes=peak, events=events)

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """``observer`` is called with every event inside the block."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)
