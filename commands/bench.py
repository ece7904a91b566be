"""``bench load`` and ``bench release``: the figures of loading and freeing, each in a process of its own.

A child process does the work and reports; this one prepares the file, drops its pages from the page cache, and compares with a
raw read of the same bytes, interleaved, so that both see the same disk.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .make_checkpoint import make_checkpoint, write_safetensors
from .presets import replica

MIB = 1 << 20
ROW = 4096  # width of the test matrices
NUM_MATRICES = 24
RAW_CHUNK = 16 * MIB
CHILD = f"{__package__}.bench_child"


def note(what: str) -> None:
    """Say on stderr what is measured next."""
    print(f"bench: {what}", file=sys.stderr, flush=True)


def make_file(path: Path, nbytes: int) -> Path:
    """A safetensors file of about ``nbytes`` bytes of bf16 matrices, synced to disk; made once."""
    if path.is_file() and path.stat().st_size >= nbytes:
        return path
    note(f"writing {path.name}, once")
    rows = math.ceil(nbytes / (NUM_MATRICES * ROW * 2))
    shapes = {f"layers.{i}.weight": (torch.bfloat16, (rows, ROW)) for i in range(NUM_MATRICES)}
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(rows, ROW, generator=generator).to(torch.bfloat16)
    write_safetensors(path, shapes, {}, ((name, block) for name in shapes))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def replica_models(folder: Path, scale: float, name: str) -> Path:
    """A models folder with a replica of the published model ``name``; made once."""
    models = folder / f"{name}-{scale:g}"
    if not models.is_dir():
        note(f"writing a replica of {name}, 1/{scale:g} of its bytes, once")
        make_checkpoint(models, replica(scale, name))
    return models


def drop_cache(path: Path) -> None:
    """Make the file cold: its pages leave the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_read_seconds(path: Path) -> float:
    """Time to read the file's bytes into one buffer, cold."""
    drop_cache(path)
    buffer = bytearray(RAW_CHUNK)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began


def child(*arguments: str) -> dict[str, Any]:
    """One measurement in a fresh process."""
    done = subprocess.run([sys.executable, "-m", CHILD, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"The measuring process failed:\n{done.stderr}")
    return json.loads(done.stdout)


def bench_load(path: Path, repeats: int) -> dict[str, Any]:
    """Cold loads beside raw reads of the same file."""
    raw, loads = [], []
    for number in range(repeats):
        note(f"load {number + 1} of {repeats}, after a raw read")
        raw.append(raw_read_seconds(path))
        drop_cache(path)
        loads.append(child("load", str(path)))
    weights = loads[0]["weight_bytes"]
    worst = {
        key: max(load[key] for load in loads) for key in ("rss_growth_bytes", "rss_and_cache_growth_bytes", "cached_before_bytes")
    }
    seconds, raw_seconds = statistics.median(load["seconds"] for load in loads), statistics.median(raw)
    return figures(
        {"weight_bytes": weights, "seconds": seconds, "raw_seconds": raw_seconds, **worst},
        {
            "rss_growth <= 1.05 W + 128 MiB": worst["rss_growth_bytes"] <= 1.05 * weights + 128 * MIB,
            "rss + cache growth <= 1.15 W + 256 MiB": worst["rss_and_cache_growth_bytes"] <= 1.15 * weights + 256 * MIB,
            "seconds <= 1.5 x raw read + 0.5": seconds <= 1.5 * raw_seconds + 0.5,
            "file was cold": worst["cached_before_bytes"] < 0.01 * weights,
        },
    )


def bench_release(path: Path, cycles: int) -> dict[str, Any]:
    """Fill and release in turn: what stays, and whether it grows."""
    note(f"{cycles} fills and releases in one process")
    found = child("release", str(path), str(cycles))
    return figures(
        found,
        {
            "rss after release within 64 MiB of before": max(found["rss_left_bytes"]) <= 64 * MIB,
            "all old parameters dead": found["live_bytes"] == 0,
            "no drift over the cycles": found["rss_left_bytes"][-1] - found["rss_left_bytes"][0] <= 16 * MIB,
            "0 recompiles after reload": found["recompiles"] == 0,
        },
    )


def figures(values: dict[str, Any], checks: dict[str, bool]) -> dict[str, Any]:
    machine = {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {"ok": all(checks.values()), **values, "checks": checks, "machine": machine}


def shown(found: dict[str, Any]) -> Iterator[str]:
    """The figures as lines for people."""
    for name, value in found.items():
        if isinstance(value, dict):
            continue
        if name.endswith("_bytes"):
            yield f"{name.removesuffix('_bytes'):24} {_mib(value)}"
        elif name.endswith("seconds"):
            yield f"{name:24} {_seconds(value)}"
    yield from shown_checks(found)


def shown_checks(found: Mapping[str, Any]) -> Iterator[str]:
    """What was to hold, and whether it does."""
    for check, passed in found["checks"].items():
        yield f"{'ok  ' if passed else 'FAIL'} {check}"


def _seconds(value: float | Sequence[float]) -> str:
    values = [value] if isinstance(value, float) else value
    return ", ".join(f"{v:.2f}" for v in values) + " s"


def _mib(value: int | Sequence[int]) -> str:
    values = [value] if isinstance(value, int) else value
    return ", ".join(f"{v / MIB:.0f}" for v in values) + " MiB"
