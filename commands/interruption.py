"""SIGTERM and Ctrl-C while a workflow runs: what is known is written at once, then the prompt is interrupted.

Handlers only note the signal: they run between any two instructions of the main thread, which may hold a lock. A thread does the
rest. Whoever sent the signal may send SIGKILL when a step takes longer than its patience; the report is on disk by then.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..memory.units import shown_bytes

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.1  # a prompt that is about to begin forgets earlier interrupts
ECHO_SECONDS = 1.0  # ``timeout`` and shells send a signal to a process and to its group
EXIT_BASE = 128  # exit code of a command that a signal ended, by the custom of shells


@dataclass(frozen=True)
class Interruption:
    """A signal that came during a run. ``node``: what ran then; ``resident``: component -> bytes of weights then."""

    signal: signal.Signals
    node: str | None = None
    resident: Mapping[str, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """As a shell has it: 130 for Ctrl-C, 143 for SIGTERM."""
        return EXIT_BASE + self.signal

    @property
    def message(self) -> str:
        place = f"at node {self.node}" if self.node else "between two nodes"
        held = ", ".join(f"{name} {shown_bytes(nbytes)}" for name, nbytes in self.resident.items()) or "no weights"
        return f"{self.signal.name} ended the run {place} with {held} in memory; start it again to have its results."


class SignalWatch:
    """Follows up the first signal that comes inside the block ``watched``."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._came = threading.Event()
        self._at = 0.0
        self._handlers: dict[signal.Signals, Any] = {}

    @contextmanager
    def watched(self, begin: Callable[[signal.Signals], object], interrupt: Callable[[], object]) -> Iterator[None]:
        """A signal has ``begin`` called with it, once, and ``interrupt`` again and again until the block ends; both on a thread.

        A second signal, unless it is an echo of the first, does what it does without us. Signals that are ignored (by ``nohup``,
        or in the background of a shell) stay so. Outside the main thread nothing is followed up.
        """
        done = threading.Event()
        follower = threading.Thread(target=self._follow, args=(done, begin, interrupt), name="lazy-h3-signals", daemon=True)
        follower.start()
        self._install()
        try:
            yield
        finally:
            self._restore()
            done.set()
            self._came.set()
            follower.join()

    def _follow(self, done: threading.Event, begin: Callable[[signal.Signals], object], interrupt: Callable[[], object]) -> None:
        self._came.wait()
        if self._signal is None:
            return
        try:
            begin(self._signal)
        finally:  # a report that cannot be written does not let the prompt go on
            while not done.is_set():
                interrupt()
                done.wait(AGAIN_SECONDS)

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
            self._handlers = {number: signal.signal(number, self._note) for number in heard}

    def _restore(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _note(self, number: int, _: object) -> None:
        if self._signal is None:
            self._signal, self._at = signal.Signals(number), time.monotonic()
            self._came.set()
        elif time.monotonic() - self._at > ECHO_SECONDS:
            self._restore()
            signal.raise_signal(number)
