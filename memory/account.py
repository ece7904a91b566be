"""Who was in memory when, and how often it was read: a page of the ledger, component by component. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from .ledger import Event, Page
from .resource import Mode


@dataclass(frozen=True)
class Level:
    """From ``t`` on: bytes that are resident, and bytes that are being read."""

    t: float
    resident: int = 0
    loading: int = 0


@dataclass
class Account:
    """One component. ``bytes``: the most that was resident; a reload is a load after a release of the same page.

    ``mode``: how it was held last; more parts and another schedule change nothing about it.
    """

    name: str
    levels: list[Level]
    bytes: int = 0
    mode: Mode = "whole"
    loads: int = 0
    load_seconds: float = 0.0
    reloads: int = 0
    reload_seconds: float = 0.0
    releases: list[Event] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        """At the end of the page."""
        return self.levels[-1].resident

    @property
    def released_after(self) -> list[str]:
        """Nodes after which it was released."""
        return [event.node for event in self.releases if event.node is not None]

    def enter(self, event: Event) -> None:
        """Add the next event of this component."""
        now = self.levels[-1]
        if event.event == "load_begin":
            is_streamed = event.reason.partition(":")[0].endswith("streamed")  # before it, which parts; behind it, why
            if is_streamed or not now.resident:
                self.mode = "streamed" if is_streamed else "whole"
            self._reach(Level(event.t, now.resident, event.bytes))
        elif event.event == "load_end":
            self._count_load(event, event.t - now.t if now.loading else 0.0)  # others fill unasked, and all at once
            self._reach(Level(event.t, now.resident + event.bytes))
        elif event.event == "release":
            self.releases.append(event)
            self._reach(Level(event.t))
        elif event.event != "refuse" and not now.loading:  # what was measured corrects what was added up
            self._reach(Level(event.t, event.bytes))

    def _reach(self, level: Level) -> None:
        self.levels.append(level)
        self.bytes = max(self.bytes, level.resident)

    def _count_load(self, event: Event, seconds: float) -> None:
        if not event.bytes:  # it failed
            return
        self.loads += 1
        self.load_seconds += seconds
        if self.releases:
            self.reloads += 1
            self.reload_seconds += seconds


def accounts(page: Page) -> list[Account]:
    """Of every component that was resident at some time, in the order of their first events."""
    found = {name: Account(name, [Level(page.began, nbytes)], nbytes) for name, nbytes in page.before.items()}
    for event in page.events:
        found.setdefault(event.component, Account(event.component, [Level(page.began)])).enter(event)
    return [account for account in found.values() if account.bytes]
