"""Stock graphs in docs/real-comfyui.md: what a ComfyUI server holds at every finish of a node, and what it may hold.

LAZY_H3_COMFYUI=<folder of ComfyUI> LAZY_H3_COMFYUI_PYTHON=<its python> .venv/bin/python benchmarks/core_bridge.py

Exits with 1 if a promise about memory is broken, and says which.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import core_graphs as graphs
from comfy_server import FOLDER, Run, Server, core_process, started
from core_graphs import Prompt, lazily, text_to_video

MEGABYTE = 1 << 20
SLACK = 32 * MEGABYTE
LOADERS = ("1", "2", "3", "4")
ENVIRONMENT = {"LAZY_H3_CORE_SCALE": "medium", "LAZY_H3_PROBE_TENSORS": "on", "OMP_NUM_THREADS": "1"}


@dataclass
class Story:
    """One prompt: its run, the memory at the finish of each node, and at the end."""

    run: Run
    moments: list[dict[str, Any]]
    rest: dict[str, Any]

    @property
    def peak(self) -> int:
        return max(moment["peak"] for moment in [*self.moments, self.rest])

    def loads(self) -> list[str]:
        return [data["component"] for data in self.run.memory("load_end") if data["bytes"]]


def graph(prompt: str, seed: int) -> Prompt:
    return text_to_video(prompt=prompt, seed=seed, length=22)


def told(server: Server, prompt: Prompt, expected: str = "execution_success") -> Story:
    run = server.run(prompt)
    if run.status != expected:
        raise SystemExit(f"The prompt ended as {run.status}: {run.error()}")
    *moments, rest = server.get("/test/memory")
    return Story(run, moments, rest)


def stories(models: Path, base: Path, cache: str, change: Any) -> tuple[dict[str, Any], dict[str, Story]]:
    """Memory after a warm-up prompt, and prompts after it."""
    pack = Path(__file__).parent.parent / "tests/comfy_pack"
    with started(base, models, cache, packs=(pack,), environment=ENVIRONMENT) as server:
        warm = told(server, change(graph("Warm up.", 0))).rest
        told_of = {
            "first": told(server, change(graph("A cat.", 1))),
            "new seed": told(server, change(graph("A cat.", 2))),
            "third": told(server, change(graph("A cat.", 3))),
            "keyframe": told(server, change(graphs.keyframe(graph("A cat.", 4)))),
            "LoRA": told(server, change(graphs.with_lora(graph("A cat.", 5)))),
            "error": told(server, change(graphs.failing(graph("A cat.", 6))), "execution_error"),
        }
    return warm, told_of


def table(prompt: str, by_way: dict[str, Story]) -> None:
    """Rows: nodes that ran anywhere, by their ids; cells: living tensors, anonymous pages, and the most since the node before."""
    moments = {way: {m["node"]: m for m in story.moments} for way, story in by_way.items()}
    names = {node: moment["class"].removeprefix("LazyH3") for found in moments.values() for node, moment in found.items()}
    print(f"\n| {prompt}, MB | {' | '.join(by_way)} |\n| {'--- | ' * (len(by_way) + 1)}".rstrip())
    for node in sorted(names, key=int):
        print(f"| {node} {names[node]} | " + " | ".join(_cell(found.get(node)) for found in moments.values()) + " |")
    print("| at rest | " + " | ".join(_cell(story.rest) for story in by_way.values()) + " |", flush=True)


def _cell(moment: dict[str, Any] | None) -> str:
    return "" if moment is None else " / ".join(str(_megabytes(moment[key])) for key in ("tensors", "anonymous", "peak"))


def broken_promises(warm: dict[str, Any], ours: dict[str, Story], none: dict[str, Story], largest: int) -> list[str]:
    """What should hold and does not."""
    broken = []

    def promise(is_kept: bool, what: str) -> None:
        if not is_kept:
            broken.append(what)

    for name, story in ours.items():
        rest = story.rest["anonymous"] - warm["anonymous"]
        promise(rest <= SLACK, f"{name}: {_megabytes(rest)} MB more than after the warm-up are held at the end")
        alive = story.rest["tensors"] - warm["tensors"]
        promise(alive <= MEGABYTE, f"{name}: {_megabytes(alive)} MB of tensors are alive at the end")
        promise(
            story.peak <= none[name].peak, f"{name}: peak {_megabytes(story.peak)}, --cache-none {_megabytes(none[name].peak)}"
        )
        first_use = story.run.resident_at_starts()
        promise(all(not first_use.get(node) for node in LOADERS), f"{name}: weights were alive when a loader began")
    allowed = largest * 1.1  # with the activations, which are small at this size
    peak = ours["new seed"].peak - warm["anonymous"]
    promise(
        peak <= allowed, f"new seed: peak {_megabytes(peak)} MB, a tenth more than the largest resource is {_megabytes(allowed)}"
    )
    promise(not any("CLIP" in name for name in ours["new seed"].loads()), "new seed: the text encoder was read")
    reads = [name for name in ours["keyframe"].loads() if "video_vae" in name]
    promise(len(reads) == 2, f"keyframe: the video VAE was read {len(reads)} times: it should go while the transformer works")
    drift = ours["third"].rest["anonymous"] - ours["first"].rest["anonymous"]
    promise(drift <= SLACK / 2, f"third: {_megabytes(drift)} MB more at rest than after the first")
    return broken


def _megabytes(nbytes: float) -> int:
    return round(nbytes / 1e6)


def main() -> None:
    if FOLDER is None:
        raise SystemExit("Set LAZY_H3_COMFYUI to the folder of a ComfyUI server.")
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        core_process("medium", "write", models, "medium")
        sizes = core_process("medium", "build", models)
        ways = {"lazy loaders": ("ram", lazily), "stock": ("ram", dict), "stock, --cache-none": ("none", dict)}
        found = {name: stories(models, Path(folder, name[:5] + cache), cache, change) for name, (cache, change) in ways.items()}
    for name, (warm, _) in found.items():
        print(f"{name}: {_megabytes(warm['anonymous'])} MB anonymous after the warm-up")
    for prompt in found["lazy loaders"][1]:
        table(prompt, {name: told_of[prompt] for name, (_, told_of) in found.items()})
    largest = max(one["weights"] for one in sizes.values())
    print(f"\nLargest resource: {_megabytes(largest)} MB.")
    broken = broken_promises(*found["lazy loaders"], found["stock, --cache-none"][1], largest)
    print("\n".join(broken) or "All promises are kept.")
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
