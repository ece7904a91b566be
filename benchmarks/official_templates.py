"""The official templates in docs/real-comfyui.md: what a ComfyUI server holds while it samples with quantised files, and at rest.

LAZY_H3_COMFYUI=<folder of ComfyUI> LAZY_H3_COMFYUI_PYTHON=<its python> .venv/bin/python benchmarks/official_templates.py

Needs Playwright and a Chromium. Exits with 1 if results differ, if more is held than with core's loaders, or if quantised weights
are not mapped while they are in use.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from comfy_server import FOLDER, Server, core_process, started
from core_graphs import Prompt
from official_templates import HASH, STEPS, TEMPLATES, queued_prompts, small, write_pictures

COMFY_PACK = Path(__file__).parent.parent / "tests/comfy_pack"
ENVIRONMENT = {"LAZY_H3_CORE_SCALE": "medium", "LAZY_H3_PROBE_TENSORS": "on", "OMP_NUM_THREADS": "1"}
FORMS = ("plain", "as named")
NOISE = 16 << 20  # bytes by which an idle process grows and shrinks

Prompts = dict[str, tuple[Prompt, Prompt]]
Row = tuple[dict[str, int], dict[str, int]]  # what is held after the first step of the sampler, and after the prompt


def told(server: Server, prompt: Prompt) -> tuple[Row, Any]:
    """The memory in one run, and the digests of its frames and sound. Reading weights is a node's progress, too."""
    (sampler,) = (node for node, spec in prompt.items() if spec["class_type"] == "SamplerCustomAdvanced")
    sampling: list[dict[str, int]] = []

    def look(message: str, data: Mapping[str, Any]) -> None:
        if message == "progress" and data.get("node") == sampler and (data["value"], data["max"]) == (1, STEPS):
            sampling.append(server.get("/test/memory")[-1])

    run = server.run(prompt, during=look)
    if run.status != "execution_success":
        raise SystemExit(f"The prompt ended as {run.status}: {run.error()}")
    digests = server.get(f"/history/{run.prompt_id}")[run.prompt_id]["outputs"][HASH]
    return (sampling[0], server.get("/test/memory")[-1]), digests


def measured(models: Path, base: Path, prompts: Prompts, way: int, form: str) -> dict[str, tuple[Row, Any]]:
    """Template -> memory and digests, in a server of its own, after a warm-up prompt."""
    with started(base, models, packs=(COMFY_PACK,), environment=ENVIRONMENT) as server:
        for stock, _ in prompts.values():
            write_pictures(base / "input", stock)
        told(server, small(prompts[TEMPLATES[0]][way], form, is_turbo=True))
        return {name: told(server, small(prompts[name][way], form)) for name in TEMPLATES}


def queued(base: Path, models: Path) -> Prompts:
    with started(base, models, packs=(COMFY_PACK,), environment=ENVIRONMENT) as server:
        return queued_prompts(server)


def main() -> None:
    if FOLDER is None:
        raise SystemExit("Set LAZY_H3_COMFYUI to the folder of a ComfyUI server.")
    broken = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        core_process("medium", "write", models, "medium")
        core_process("medium", "write_template_files", models)
        prompts = queued(Path(folder, "queue"), models)
        print("| files | template | loaders | sampling: anonymous | mapped | at rest: anonymous | mapped |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for form in FORMS:
            ways = [measured(models, Path(folder, f"{form[0]}{way}"), prompts, way, form) for way in (0, 1)]
            for name in TEMPLATES:
                broken += broken_promises(name, form, *(found[name] for found in ways))
                for loaders, found in zip(("stock", "lazy"), ways, strict=True):
                    print(f"| {form} | {name[-3:]} | {loaders} | {' | '.join(_cells(found[name][0]))} |", flush=True)
    print("\n".join(broken) or "All promises are kept.")
    raise SystemExit(bool(broken))


def broken_promises(name: str, form: str, stock: tuple[Row, Any], lazy: tuple[Row, Any]) -> list[str]:
    """What should hold and does not."""
    (sampling, rest), digests = lazy
    promises = {
        "frames or sound differ from those of the stock template": digests == stock[1],
        "more is held while sampling than by the stock template": sampling["anonymous"] <= stock[0][0]["anonymous"] + NOISE,
        "quantised weights are not mapped while sampling": form == "plain" or sampling["mapped"] > rest["mapped"] + NOISE,
        "tensors are alive after the prompt": rest["tensors"] <= NOISE,
    }
    return [f"{name}, {form}: {what}" for what, is_kept in promises.items() if not is_kept]


def _cells(row: Row) -> list[str]:
    return [str(round(moment[key] / 1e6)) for moment in row for key in ("anonymous", "mapped")]


if __name__ == "__main__":
    main()
