"""What a process takes, watched from inside or from outside."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..memory.device import process_bytes

RUN_SECONDS = 0.02  # between two looks at a run, which is not to be disturbed
BENCH_SECONDS = 0.005
OUTSIDE_SECONDS = 0.01
ANONYMOUS = "RssAnon"  # resident memory that no file backs
MAX_ERROR = 2000


@contextmanager
def sampled(sample: Callable[[], object], period_seconds: float = BENCH_SECONDS) -> Iterator[None]:
    """Calls ``sample`` from a thread while the block runs, and once more at its end."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(period_seconds):
            sample()

    watcher = threading.Thread(target=watch, name="lazy-h3-sampling", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        sample()


@dataclass
class ProcessMemory:
    """Resident memory of this process: before, at its peak, and at the last look."""

    before: int = 0
    peak: int = 0
    after: int = 0

    def look(self) -> None:
        self.after = process_bytes()
        self.peak = max(self.peak, self.after)


@contextmanager
def sampled_memory() -> Iterator[ProcessMemory]:
    """Watches this process from a thread of its own while the block runs."""
    before = process_bytes()
    memory = ProcessMemory(before, before, before)
    with sampled(memory.look, RUN_SECONDS):
        yield memory


def watched(command: Sequence[str]) -> tuple[dict[str, Any], int]:
    """What a measuring process prints as JSON, and how much its anonymous memory grew at most, as seen from here.

    The growth is over ``anonymous_before_bytes`` of what it prints. Raises RuntimeError with its last words if it fails.
    """
    peak = 0
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=output, stderr=errors) as child,
    ):
        while child.poll() is None:
            peak = max(peak, status_bytes(child.pid, ANONYMOUS))
            time.sleep(OUTSIDE_SECONDS)
        output.seek(0)
        errors.seek(0)
        if child.returncode:
            raise RuntimeError(f"The measuring process failed:\n{errors.read()[-MAX_ERROR:]}")
        found = json.load(output)
    return found, peak - found["anonymous_before_bytes"]


def status_bytes(pid: int, field: str) -> int:
    """A size that the system states of a process; all of its resident memory where it states none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended, or there is no /proc
        return psutil.Process(pid).memory_info().rss if psutil.pid_exists(pid) else 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)
