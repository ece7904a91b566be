"""The measured half of ``bench``: fills components in a fresh process and prints what it took, as JSON."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn

from ..h3.formats.recipe import copied
from ..memory.checkpoint import open_checkpoint
from ..memory.component import Component
from ..memory.handle import Handle
from ..memory.reader import Reader
from ..memory.store import Store
from ..memory.transforms import Cast
from .process_memory import sampled


class Matrices(nn.Module):
    """As many linear layers as the file has matrices."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"model": ("",)}
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {"forward": ("model",)}
    REPEATED: ClassVar[tuple[str, ...]] = ("layers",)

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.config = None
        self.layers = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers])


def component_of(path: Path) -> Component:
    checkpoint = open_checkpoint(path)
    shapes = [checkpoint.tensors[f"layers.{i}.weight"].shape for i in range(len(checkpoint.tensors))]
    return Component(
        kind="matrices",
        checkpoint=checkpoint,
        build=lambda: Matrices(shapes),
        recipes={name: copied(name) for name in checkpoint.tensors},
        cast=Cast(torch.bfloat16, lambda _, compute: compute),
        device=torch.device("cpu"),
        reader=Reader(keep_cache=False),
    )


def measure_load(path: Path) -> dict[str, Any]:
    """Peak growth of this process, and of process and page cache together, while a component is filled."""
    component = component_of(path)
    handle = Handle(component, Store())
    process = psutil.Process()
    before, cached_before = process.memory_info().rss, cached_bytes(path)
    growth: list[tuple[int, int]] = []

    def sample() -> None:
        rss = process.memory_info().rss - before
        growth.append((rss, rss + cached_bytes(path) - cached_before))

    began = time.perf_counter()
    with sampled(sample), handle.use():
        seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "weight_bytes": component.nbytes(),
        "rss_growth_bytes": max(rss for rss, _ in growth),
        "rss_and_cache_growth_bytes": max(both for _, both in growth),
        "cached_before_bytes": cached_before,
    }


def measure_release(path: Path, cycles: int) -> dict[str, Any]:
    """What is left after each of several fills and releases, and whether compiled blocks compile again."""
    component = component_of(path)
    handle = Handle(component, Store())
    compiled = _CountingCompile()
    first = compiled(component.module.layers[0])
    x = torch.ones(1, component.module.layers[0].in_features, dtype=torch.bfloat16)
    with torch.inference_mode():
        with handle.use():
            first(x)
        handle.release("warm-up")
        compiled.count = 0
        before = psutil.Process().memory_info().rss
        left = []
        for _ in range(cycles):
            with handle.use():
                first(x)
            handle.release("bench")
            left.append(psutil.Process().memory_info().rss - before)
    return {"rss_left_bytes": left, "live_bytes": component.live_bytes(), "recompiles": compiled.count}


class _CountingCompile:
    """torch.compile with a backend that only counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: nn.Module) -> Any:
        return torch.compile(module, backend=self._backend)

    def _backend(self, graph: Any, _: Any) -> Any:
        self.count += 1
        return graph.forward


def cached_bytes(path: Path) -> int:
    """Bytes of the file in the page cache (mincore); maps the file without touching it."""
    page = os.sysconf("SC_PAGE_SIZE")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as view,
    ):
        pages = (len(view) + page - 1) // page
        residency = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(view)), residency)
        del anchor
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(residency) * page


def main() -> None:
    command, path, *rest = sys.argv[1:]
    found = measure_load(Path(path)) if command == "load" else measure_release(Path(path), int(rest[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
