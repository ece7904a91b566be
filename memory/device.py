"""What memory there is: totals, free bytes, unified or not, container limits. All in bytes.

A *pool* is memory that weights compete for, named as torch names devices (``cpu``, ``cuda:0``, ``mps``). On unified machines the
CPU's and the GPU's pool are one and the same RAM.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

GIB = 1 << 30
HEAP_SLACK = 64 << 20  # glibc: twice 32 MiB, from where on an allocation is a mapping of its own
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class PoolStatus:
    """A pool at one moment. ``floor`` is what must stay free for the rest of the machine (design section 8)."""

    total: int
    free: int
    unified: bool

    @property
    def floor(self) -> int:
        return max(2 * GIB, self.total * 12 // 100) if self.unified else GIB

    @property
    def available(self) -> int:
        """What weights may still take."""
        return max(0, self.free - self.floor)


def pool_status(device: torch.device, pretended_total: int | None = None) -> PoolStatus:
    """The pool behind ``device``; with ``pretended_total`` as it would be on a machine of that size with only this process."""
    if pretended_total is not None:
        return _pretended(device, pretended_total)
    if device.type == "cuda":
        return _cuda_status(device)
    return PoolStatus(_ram_total(), _ram_available(), unified=True)


def is_unified(device: torch.device) -> bool:
    """Whether weights on ``device`` take the machine's RAM: CPUs, Apple Silicon, integrated GPUs."""
    if device.type != "cuda":
        return True
    if not torch.cuda.is_available():  # a what-if question about a GPU that is not here
        return False
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def process_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def heap_slack(nbytes: int) -> int:
    """What the heap may hold of freed tensors while ``nbytes`` of activations come and go: as much again, up to its limit."""
    return min(nbytes, HEAP_SLACK)


def trim() -> None:
    """Return freed memory to the system: torch's caching allocator, and glibc's heap, which keeps freed tensors below 32 MB."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        _malloc_trim()


def collect_and_trim() -> None:
    """As ``trim``, after collecting reference cycles that may hold tensors."""
    gc.collect()
    trim()


def _malloc_trim() -> None:
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from other C libraries
    if trim_heap is not None:
        trim_heap(0)


def _pretended(device: torch.device, total: int) -> PoolStatus:
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else process_bytes()
    return PoolStatus(total, max(0, total - used), is_unified(device))


def _cuda_status(device: torch.device) -> PoolStatus:
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
    if is_unified(device):  # the driver counts reclaimable page cache as used
        return PoolStatus(min(total, _ram_total()), _ram_available() + cached, unified=True)
    return PoolStatus(total, free + cached, unified=False)


def _ram_total() -> int:
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_limits())])


def _ram_available() -> int:
    return max(0, min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _container_limits())]))


def _container_limits() -> list[tuple[int, int]]:
    """(limit, unreclaimable use) of this process's cgroup v2 and of those around it, where they have a limit."""
    own = CGROUP / _cgroup_path()
    levels = [own, *own.parents]
    found = map(_limit_of, levels[: levels.index(CGROUP) + 1])
    return [limit for limit in found if limit is not None]


def _limit_of(cgroup: Path) -> tuple[int, int] | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(limit), max(0, used - int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no cgroup v2, or a controller that is not delegated
        return None


def _cgroup_path() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
