"""The floor at run time: if the machine runs short of memory while weights are in use, kept ones go, else the run stops in time.

A thread looks at the pools for as long as something is pinned. It only asks: drops touch the host's list of models, and a
computation can be stopped by its own thread alone. So it has that thread come by (``check``) at its next report of progress,
chunk of a file, or block of a model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .component import Component
from .device import PoolStatus, pool_status, process_bytes
from .ledger import Event
from .resource import Resource
from .store import Store
from .table import Status
from .units import shown_bytes

CPU = torch.device("cpu")
log = logging.getLogger("lazy_h3")

PERIOD_SECONDS = 0.1  # a disk fills a fifth of a GiB meanwhile, and the hard line is a GiB below the floor at least
HARD_PART = 2  # plans fill up to the floor, and what they estimate too low ends above half of it; below, swapping is near
MIN_SHARE = 4  # stopping is no help where less than a quarter of what is missing would come back


class MemoryShort(RuntimeError):
    """The machine has hardly any memory left while nodes of ours compute."""


class Pool(NamedTuple):
    """A pool that is looked at."""

    device: torch.device
    status: PoolStatus

    @property
    def shortage(self) -> int:
        """Bytes below the floor."""
        return self.status.floor - self.status.free

    @property
    def is_hard(self) -> bool:
        """Whether the machine is about to swap. A discrete GPU does not: torch raises where its memory ends."""
        return self.status.unified and self.status.free < self.status.floor // HARD_PART


class FloorWatch:
    """Watches the pools behind a store (design: budget and policies). Idle, and without a thread, while nothing is in use."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_low = False
        self._num_pinned = 0
        self._other_bytes = 0  # of the process when the thread began, weights left out
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # taken under the store's, never the other way round
        self._hooks: dict[torch.nn.Module, Any] = {}
        store.ledger.observers.append(self._follow)
        store.on_fill.append(lambda *_: self.check())

    def check(self) -> None:
        """For a thread that computes: drop what is merely kept, where memory is low.

        Raises MemoryShort where it is still below the hard line and our part in that is material; all weights go then.
        """
        if not self._is_low:
            return
        self._store.settle()
        short = next(filter(self._must_stop, self._pools()), None)
        if short is not None:
            message = self._message(short)
            for resource in self._store.resident():
                self._store.release_later(resource, "the machine is short of memory", force=True)
            raise MemoryShort(message)

    def look(self) -> None:
        """For the thread that watches: ask what is merely kept to go, and the threads that compute to ``check``."""
        low = [pool for pool in self._pools() if pool.shortage > 0]
        self._is_low = bool(low)
        asked = [self._ask_to_go(pool) for pool in low]
        if any(asked) or any(map(self._must_stop, low)):
            self._hook_blocks()
        else:
            self._unhook()

    def _follow(self, event: Event) -> None:
        """Begin with the first pin. Runs under the store's lock."""
        with self._lock:
            self._num_pinned += {"pin": 1, "unpin": -1}.get(event.event, 0)
            if event.event == "pin" and self._thread is None:
                self._other_bytes = self._other_bytes_now()
                self._thread = threading.Thread(target=self._run, name="lazy-h3-floor", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            while self._is_needed():
                self.look()
                time.sleep(PERIOD_SECONDS)
        except Exception:
            log.exception("Lazy H3: free memory is no longer watched until the next component is used.")
            with self._lock:
                self._thread = None
        finally:
            self._unhook()

    def _is_needed(self) -> bool:
        with self._lock:
            if self._num_pinned <= 0:
                self._thread = None
                self._is_low = False
            return self._thread is not None

    def _pools(self) -> Iterator[Pool]:
        """The pools of what is resident, and the machine's RAM."""
        devices = {resource.device for resource in self._store.resident()}
        for device in devices:
            yield Pool(device, pool_status(device, self._store.pretended_total))
        if CPU not in devices:
            yield Pool(CPU, pool_status(CPU))

    def _must_stop(self, pool: Pool) -> bool:
        if not pool.is_hard:
            return False
        growth = max(0, self._other_bytes_now() - self._other_bytes)
        return MIN_SHARE * (self._live_bytes(pool.device) + growth) >= pool.shortage

    def _ask_to_go(self, pool: Pool) -> bool:
        """Whether something of the pool is kept or being read ahead, so that it can go."""
        idle = [s.resource for s in self._statuses() if not s.is_pinned and s.resource.device == pool.device]
        for resource in idle:
            self._store.release_later(resource, f"{shown_bytes(pool.status.free)} of memory are left", force=True)
        return bool(idle)

    def _hook_blocks(self) -> None:
        """A step may take minutes, a block takes seconds."""
        for resource in [status.resource for status in self._statuses() if status.is_pinned]:
            for block in _blocks(resource):
                if block not in self._hooks:
                    self._hooks[block] = block.register_forward_pre_hook(lambda *_: self.check())

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def _message(self, pool: Pool) -> str:
        names = ", ".join(status.resource.name for status in self._statuses() if status.is_pinned) or "no component"
        node = self._store.ledger.current_node()
        place = f"Node {node}" if node else "The run"
        free, floor = shown_bytes(pool.status.free), shown_bytes(pool.status.floor)
        return (
            f"{place} was stopped while it used {names}: {free} of memory are left on this machine, and {floor} should be; "
            "close other programs, set a smaller budget or choose a smaller picture."
        )

    def _statuses(self) -> list[Status]:
        return [status for status in self._store.statuses() if status.state != "absent"]

    def _live_bytes(self, device: torch.device) -> int:
        return sum(resource.live_bytes() for resource in self._store.resident() if resource.device == device)

    def _other_bytes_now(self) -> int:
        return process_bytes() - self._live_bytes(CPU)


def _blocks(resource: Resource) -> Iterator[torch.nn.Module]:
    """The alike blocks of a component; other resources have none that we know of."""
    if isinstance(resource, Component):
        yield from (block for blocks in resource.repeated() for block in blocks)
