"""Which resources there are, who is in memory, who uses it, what room is left. Questions only: nothing here moves a weight."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from . import device as devices
from .resource import Identity, Resource

State = Literal["absent", "filling", "resident", "dropping"]
Owner = tuple[Any, ...]  # ("use", id) or ("node", prompt, node)


@dataclass(frozen=True)
class Status:
    """One resource at one moment. ``is_leaving``: it is to be released as soon as nothing holds it up."""

    resource: Resource
    state: State
    is_pinned: bool
    is_leaving: bool


@dataclass
class Entry:
    """One resource as the store follows it."""

    resource: Resource
    state: State = "absent"
    pins: Counter[Owner] = field(default_factory=Counter)
    release_reason: str | None = None  # wanted, but pinned or filling
    is_release_forced: bool = False
    reserved: int = 0  # bytes that the fill under way may take, on top of ``before_fill``
    before_fill: int = 0
    last_use: float = 0.0
    known_edit: str | None = None  # a change by hand that was warned of
    reader: threading.Thread | None = None  # has read it, or still reads it, for a user who is still to come
    progress: tuple[int, int] = (0, 1)  # of that thread: bytes done and in all

    @property
    def is_busy(self) -> bool:
        return self.state in ("filling", "dropping")

    @property
    def is_ahead(self) -> bool:
        return self.reader is not None

    @property
    def is_being_prefetched(self) -> bool:
        return self.is_ahead and self.state == "filling" and not self.pins

    @property
    def is_unwanted(self) -> bool:
        return self.release_reason is not None and not self.pins

    @property
    def held_bytes(self) -> int:
        """What is alive, or will be at most when the fill under way is done."""
        return max(self.resource.live_bytes(), self.before_fill + self.reserved)

    @property
    def status(self) -> Status:
        return Status(self.resource, self.state, bool(self.pins), self.release_reason is not None)

    def ask_for_release(self, reason: str, force: bool) -> None:
        """Remember what cannot be done yet."""
        self.release_reason = reason
        self.is_release_forced |= force


class Table:
    """All resources of the process. One per identity; on any thread.

    ``budget``: cap on weight bytes per pool, None for what the machine has. ``pretended_total``: the size of the pool in tests
    and what-if runs.
    """

    def __init__(self, budget: int | None = None, pretended_total: int | None = None) -> None:
        self.budget = budget
        self.pretended_total = pretended_total
        self._known: weakref.WeakValueDictionary[Identity, Resource] = weakref.WeakValueDictionary()
        self._entries: dict[Identity, Entry] = {}  # strong references: what is pinned or not absent
        self._haunted: list[Resource] = []  # dropped, but somebody else still holds weights
        self._lock = threading.RLock()

    def find(self, identity: Identity) -> Resource | None:
        """The known resource of this identity."""
        return self._known.get(identity)

    def resident(self) -> list[Resource]:
        """Resources that hold weights now, or are being filled."""
        with self._lock:
            return [e.resource for e in self._entries.values() if e.state != "absent"]

    def statuses(self) -> list[Status]:
        """All known resources as they are now, in the order in which they became known."""
        with self._lock:
            return [self._entry(resource).status for resource in list(self._known.values())]

    def is_pinned(self, resource: Resource) -> bool:
        with self._lock:
            return bool(self._entry(resource).pins)

    def live_bytes(self) -> int:
        """Bytes of all weights that are alive, also of those that only somebody else still holds."""
        with self._lock:
            self._haunted = [resource for resource in self._haunted if resource.live_bytes()]
            return sum(resource.live_bytes() for resource in list(self._known.values()))

    def _entry(self, resource: Resource) -> Entry:
        """The resource's entry; one that is not in the table where it is absent and in use by nobody."""
        return self._entries.get(resource.identity) or Entry(resource)

    def _rivals(self, resource: Resource) -> list[Entry]:
        """What is resident on the same device, in use by nobody, and not ``resource``."""
        return [entry for entry in self._beside(resource) if entry.state == "resident" and not entry.pins]

    def _being_prefetched(self, resource: Resource) -> list[Entry]:
        """What takes room of the resource's pool ahead of its own user."""
        return [entry for entry in self._beside(resource) if entry.is_being_prefetched]

    def _beside(self, resource: Resource) -> list[Entry]:
        """Everything else that competes with the resource for one pool."""
        return [entry for entry in self._pool(resource.device) if entry.resource is not resource]

    def _pool(self, device: torch.device) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.resource.device == device]

    def _room(self, device: torch.device, beside: int = 0) -> int:
        """Bytes that weights on ``device`` may still take if ``beside`` of the pool go to something else."""
        return max(0, min(self._limits(device, beside).values()))

    def _limits(self, device: torch.device, beside: int = 0) -> dict[str, int]:
        """What there is room for by each bound, under the words that say how to move it.

        What other fills have reserved counts as taken from the pool until they end: their pages come one by one.
        """
        pool = self._pool(device)
        free = devices.pool_status(device, self.pretended_total).available - sum(e.reserved for e in pool) - beside
        limits = {"close other programs or use smaller files.": free}
        if self.budget is not None:
            alive = {r.identity: r.live_bytes() for r in list(self._known.values()) if r.device == device}  # strays as well
            alive |= {e.resource.identity: e.held_bytes for e in pool}
            limits["raise the budget or use smaller files."] = self.budget - sum(alive.values())
        return limits
