"""Stock graphs on a GPU: stock loaders, the lazy ones and release nodes, with and without dynamic VRAM. Not run yet.

LAZY_H3_COMFYUI=<folder of ComfyUI> LAZY_H3_COMFYUI_PYTHON=<its python> .venv/bin/python benchmarks/core_bridge_gpu.py [--cpu]

Exits with 1 if results differ within one way to hold models, or if memory does not come back. ``--cpu`` only tries the script.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import core_graphs as graphs
from comfy_server import Server, core_process, started
from core_graphs import Prompt

TESTS = Path(__file__).parent.parent / "tests"
MEGABYTE = 1 << 20
SLACK = 128 * MEGABYTE  # a tokenizer takes 75
SECONDS_TO_FREE = 3  # the server looks at such a request about once a second
EVICT = {"LAZY_H3_EVICT_DYNAMIC": "on"}
WAYS: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "dynamic VRAM": ((), {}),
    "dynamic VRAM, evicted after the last use": ((), EVICT),
    "placed whole": (("--disable-dynamic-vram",), {}),
    "streamed from RAM": (("--novram",), {}),
}
GRAPHS: dict[str, Callable[[Prompt], Prompt]] = {"stock": dict, "lazy": graphs.lazily, "released": graphs.released}
MEASURES = ("device", "pinned", "anonymous")


@dataclass
class Figures:
    """Bytes before a prompt, at most while it ran (at starts of nodes), and after it."""

    before: dict[str, int]
    most: dict[str, int]
    after: dict[str, int]
    digests: str

    def cells(self, measure: str) -> str:
        return " / ".join(str(round(moment[measure] / MEGABYTE)) for moment in (self.before, self.most, self.after))


def held(server: Server) -> dict[str, int]:
    return {**server.get("/test/device"), "anonymous": server.get("/test/memory")[-1]["anonymous"]}


def measured(server: Server, prompt: Prompt) -> Figures:
    server.run(prompt)  # libraries, kernels and the heap
    server.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(SECONDS_TO_FREE)
    before = held(server)
    most = dict(before)

    def look(name: str, data: Mapping[str, Any]) -> None:
        if name == "executing":
            most.update({measure: max(most[measure], value) for measure, value in held(server).items()})

    run = server.run(prompt, during=look)
    if run.status != "execution_success":
        raise SystemExit(f"The prompt ended as {run.status}: {run.error()}")
    (digests,) = server.get(f"/history/{run.prompt_id}")[run.prompt_id]["outputs"]["15"]["digests"]
    return Figures(before, most, held(server), digests)


def faults(way: str, found: Mapping[str, Figures]) -> list[str]:
    """Promises that do not hold."""
    broken = [f"{way}: {name} gives other results than stock" for name, f in found.items() if f.digests != found["stock"].digests]
    if way == "dynamic VRAM":
        return broken  # nothing is evicted there
    for name in ("lazy", "released"):
        for measure in MEASURES:
            growth = found[name].after[measure] - found[name].before[measure]
            if growth > SLACK:
                broken.append(f"{way}: {name} keeps {growth // MEGABYTE} MB more ({measure})")
    return broken


def main() -> int:
    device = ("--cpu",) if "--cpu" in sys.argv[1:] else ()
    scale = "tiny" if device else "medium"
    broken = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        core_process(scale, "write", models, scale)
        print("| models | graph | GPU: before / most / after, MB | pinned | anonymous |\n| --- | --- | --- | --- | --- |")
        for way, (options, environment) in WAYS.items():
            base = Path(folder, way.replace(" ", "-"))
            packs = (TESTS / "comfy_pack", TESTS / "foreign_pack")
            own = {"LAZY_H3_CORE_SCALE": scale, **environment}
            with started(base, models, options=() if device else options, packs=packs, environment=own, device=device) as server:
                found = {name: measured(server, change(graphs.text_to_video(length=22))) for name, change in GRAPHS.items()}
            for name, figures in found.items():
                print(f"| {way} | {name} | " + " | ".join(map(figures.cells, MEASURES)) + " |")
            broken += faults(way, found)
    print(*broken, sep="\n", file=sys.stderr)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
