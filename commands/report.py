"""The run report: what was loaded when, what was alive, what the process took."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..host.embedded.executor import NodeError
from ..host.embedded.host import RunResult
from ..memory import device
from ..memory.ledger import Event, Ledger
from ..memory.store import MemoryRefused
from .interruption import Interruption

SAMPLE_SECONDS = 0.02
BAD_INPUT_ERRORS = frozenset({"CheckpointError", "FormatError", "TokenizerError", "PathError", "MemoryRefused", "ValueError"})


@dataclass
class ProcessMemory:
    """Resident memory of this process, before, at its peak, and after."""

    before: int = 0
    peak: int = 0
    after: int = 0


@contextmanager
def sampled_memory() -> Iterator[ProcessMemory]:
    """Watches this process from a thread of its own while the block runs."""
    memory = ProcessMemory(before=device.process_bytes())
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            memory.peak = max(memory.peak, device.process_bytes())

    watcher = threading.Thread(target=watch, name="lazy-h3-memory", daemon=True)
    watcher.start()
    try:
        yield memory
    finally:
        done.set()
        watcher.join()
        memory.after = device.process_bytes()
        memory.peak = max(memory.peak, memory.after, memory.before)


@dataclass
class RunRecord:
    """One repetition of the workflow."""

    result: RunResult
    seconds: float
    peak_bytes: int


@dataclass
class Report:
    """Everything that ``report.json`` says (its names are fixed)."""

    ledger: Ledger
    kinds: dict[str, str]  # component name -> kind
    runs: list[RunRecord] = field(default_factory=list)
    memory: ProcessMemory = field(default_factory=ProcessMemory)
    seconds: float = 0.0
    budget: int | None = None
    refusal: MemoryRefused | None = None
    predicted_peak: int | None = None  # of the last run's weights
    predicted_growth: int | None = None  # with activations and results
    interruption: Interruption | None = None

    @property
    def status(self) -> str:
        if self._failure is None:
            return "ok"
        return "refused" if self._error_type == "MemoryRefused" else "error"

    @property
    def message(self) -> str:
        """The error of the last run, in one line."""
        return " ".join(self._failure.message.split()) if self._failure else ""

    @property
    def is_bad_input(self) -> bool:
        """Whether the run ended because of what was given to it: the prompt, a file, the budget."""
        if self.interruption is not None:
            return False
        never_began = self._failure is not None and self._failure.node_id is None
        return never_began or self._error_type in BAD_INPUT_ERRORS

    @property
    def _failure(self) -> NodeError | None:
        if self.interruption is not None:
            return NodeError("Interrupted", self.interruption.message, self.interruption.node)
        return self.runs[-1].result.error

    @property
    def _error_type(self) -> str:
        return self._failure.type.rpartition(".")[2] if self._failure else ""

    def as_dict(self) -> dict[str, Any]:
        events = list(self.ledger.events)  # a run may go on meanwhile
        components = _components(events, self.kinds)
        sizes = [component["bytes"] for component in components]
        return {
            "status": self.status,
            "error": self._error(),
            "seconds": self.seconds,
            "runs": [self._run(number, record) for number, record in enumerate(self.runs)],
            "components": components,
            "sum_bytes": sum(sizes),
            "largest_bytes": max(sizes, default=0),
            "peak_resident_bytes": max([self.ledger.peak_bytes, *(record.peak_bytes for record in self.runs)]),
            "predicted_peak_bytes": self.predicted_peak,
            "predicted_growth_bytes": self.predicted_growth,
            "budget_bytes": self.budget,
            "rss_before_bytes": self.memory.before,
            "rss_peak_bytes": self.memory.peak,
            "rss_after_bytes": self.memory.after or device.process_bytes(),
            "events": [event.as_dict() for event in events],
            "outputs": [{"node": f.node, "path": str(f.path), "kind": f.kind} for r in self.runs[-1:] for f in r.result.files],
        }

    def _error(self) -> dict[str, Any] | None:
        if self._failure is None:
            return None
        refused = self.refusal if self.status == "refused" else None
        return {
            "type": self._error_type,
            "message": self.message,
            "node": self._failure.node_id,
            "need_bytes": refused.need_bytes if refused else None,
            "have_bytes": refused.have_bytes if refused else None,
            "component": refused.component if refused else None,
        }

    def _run(self, number: int, record: RunRecord) -> dict[str, Any]:
        loads = _loads(self.ledger.of_run(number))
        return {
            "seconds": record.seconds,
            "peak_resident_bytes": record.peak_bytes,
            "loads": {name: len(seconds) for name, seconds in loads.items()},
            "load_seconds": {name: sum(seconds) for name, seconds in loads.items()},
            "nodes": record.result.seconds,
        }


def _loads(events: list[Event]) -> dict[str, list[float]]:
    """Seconds of every completed load, by component."""
    began: dict[str, float] = {}
    loads: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.event == "load_begin":
            began[event.component] = event.t
        elif event.event == "load_end" and event.bytes:
            loads[event.component].append(event.t - began[event.component])
    return loads


def _components(events: list[Event], kinds: dict[str, str]) -> list[dict[str, Any]]:
    sizes: Counter[str] = Counter()
    resident: Counter[str] = Counter()
    released: dict[str, list[str]] = defaultdict(list)
    modes: dict[str, str] = {}
    for event in events:
        if event.event == "load_begin":
            modes[event.component] = "streamed" if event.reason.partition(":")[0].endswith("streamed") else "whole"
        elif event.event == "load_end":
            resident[event.component] += event.bytes
            sizes[event.component] = max(sizes[event.component], resident[event.component])
        elif event.event == "release":
            resident[event.component] = 0
            if event.node is not None:
                released[event.component].append(event.node)
    loads = _loads(events)
    return [
        {
            "name": name,
            "kind": kinds.get(name, name),
            "bytes": size,
            "mode": modes[name],
            "loads": len(loads[name]),
            "load_seconds": sum(loads[name]),
            "released_after": released[name],
        }
        for name, size in sizes.items()
    ]
