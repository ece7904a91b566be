"""The run report: what was loaded when, what was alive, what the process took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..host.embedded.executor import NodeError
from ..host.embedded.host import RunResult
from ..memory.account import Account, accounts
from ..memory.ledger import Event, Ledger, Page
from ..memory.store import MemoryRefused
from .interruption import Interruption
from .process_memory import ProcessMemory

BAD_INPUT_ERRORS = frozenset({"CheckpointError", "FormatError", "TokenizerError", "PathError", "MemoryRefused", "ValueError"})


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
        known = _accounts(events)
        sizes = [account.bytes for account in known]
        return {
            "status": self.status,
            "error": self._error(),
            "seconds": self.seconds,
            "runs": [self._run(number, record) for number, record in enumerate(self.runs)],
            "components": [_component(account, self.kinds) for account in known],
            "sum_bytes": sum(sizes),
            "largest_bytes": max(sizes, default=0),
            "peak_resident_bytes": max([self.ledger.peak_bytes, *(record.peak_bytes for record in self.runs)]),
            "predicted_peak_bytes": self.predicted_peak,
            "predicted_growth_bytes": self.predicted_growth,
            "budget_bytes": self.budget,
            "rss_before_bytes": self.memory.before,
            "rss_peak_bytes": self.memory.peak,
            "rss_after_bytes": self.memory.after,
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
        loaded = [account for account in _accounts(self.ledger.of_run(number)) if account.loads]
        return {
            "seconds": record.seconds,
            "peak_resident_bytes": record.peak_bytes,
            "loads": {account.name: account.loads for account in loaded},
            "load_seconds": {account.name: account.load_seconds for account in loaded},
            "nodes": record.result.seconds,
        }


def _accounts(events: Sequence[Event]) -> list[Account]:
    return accounts(Page(events=events))


def _component(account: Account, kinds: dict[str, str]) -> dict[str, Any]:
    return {
        "name": account.name,
        "kind": kinds.get(account.name, account.name),
        "bytes": account.bytes,
        "mode": account.mode,
        "loads": account.loads,
        "load_seconds": account.load_seconds,
        "released_after": account.released_after,
    }
