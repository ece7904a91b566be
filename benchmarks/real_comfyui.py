"""The table of docs/real-comfyui.md: what a real ComfyUI server holds at every node, in every cache mode.

LAZY_H3_COMFYUI=<folder of ComfyUI> LAZY_H3_COMFYUI_PYTHON=<its python> .venv/bin/python benchmarks/real_comfyui.py
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from comfy_server import CACHE_OPTIONS, FOLDER, Run, Server, started
from lazy_h3.commands.make_checkpoint import make_checkpoint
from lazy_h3.commands.presets import tiny
from test_real_comfyui import twin_branches, workflow

LETTERS = {"text encoder": "T", "diffusion transformer": "D", "video VAE": "V", "audio VAE": "A"}


def scenarios(server: Server) -> Iterator[tuple[str, Run]]:
    """Name and run of each scenario that core nodes can build."""
    prompt = workflow()
    yield "linear chain", server.run(prompt)
    yield "the same again", server.run(prompt)
    prompt["7"]["inputs"]["seed"] += 1
    yield "new seed", server.run(prompt)
    prompt["5"]["inputs"]["prompt"] += " It rains."
    yield "new prompt", server.run(prompt)
    yield "loaders last in the file", server.run(dict(reversed(workflow().items())))
    yield "two branches, all models shared", server.run(twin_branches(workflow()))
    foreign = workflow()
    foreign["12"] = {"class_type": "PreviewAny", "inputs": {"source": ["2", 0]}}
    yield "a core node takes the DiT, too", server.run(foreign)
    if "ComfySwitchNode" in server.get("/object_info"):
        yield "behind a core switch", server.run(switched(workflow()))
    failing = workflow(n_11_filename_prefix="../../outside")
    yield "error in the last node", server.run(failing)


def switched(prompt: dict[str, Any]) -> dict[str, Any]:
    prompt["21"] = copy.deepcopy(prompt["1"])
    prompt["21"]["inputs"]["dtype"] = "fp32"
    prompt["22"] = {"class_type": "ComfySwitchNode", "inputs": {"switch": True, "on_true": ["1", 0], "on_false": ["21", 0]}}
    prompt["5"]["inputs"]["text_encoder"] = ["22", 0]
    return prompt


def story(run: Run) -> str:
    """Starts with the KiB that are resident, loads (+T) and releases (-T), in order."""
    words = []
    resident = 0
    for name, data in run.messages:
        if name == "executing" and data.get("node"):
            words.append(f"{data['node']}:{resident / 1024:.0f}")
        elif name == "lazy_h3.memory":
            resident = data["resident_bytes"]
            letter = LETTERS[data["component"].partition(" (")[0]]
            if data["event"] == "load_end" and data["bytes"]:
                words.append(f"**+{letter}**")
            elif data["event"] == "release":
                words.append(f"**-{letter}**")
    return " ".join(words)


def main() -> None:
    if FOLDER is None:
        raise SystemExit("Set LAZY_H3_COMFYUI to the folder of a ComfyUI server.")
    print("| cache | scenario | end | node:KiB resident at its start, loads and releases | KiB after |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        make_checkpoint(models, tiny())
        for cache in CACHE_OPTIONS:
            with started(Path(folder, cache), models, cache) as server:
                for name, run in scenarios(server):
                    end = run.status.removeprefix("execution_")
                    print(f"| {cache} | {name} | {end} | {story(run)} | {server.live_bytes() // 1024} |", flush=True)


if __name__ == "__main__":
    main()
