"""``bench activations``: what a plan predicts beside what a run takes, over the example workflows and three sizes of clip.

Each run is a process of its own, watched from here, with a fifth of the models' files as its budget, so that activations count.
Its baseline is taken after the same workflow ran with a tiny model: what torch, the video encoder and their threads take once is
not counted. Two sizes were there when the formulas of ``h3.activations`` were compared with runs; the third was not, and its
activations are large beside its weights.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..memory.device import collect_and_trim
from .bench import MIB, figures, note, replica_models, shown_checks
from .bench_run import MODEL
from .demo import WORKFLOW, demo_models
from .process_memory import ANONYMOUS, status_bytes, watched
from .run import RunOptions, as_prompt, hosted, load_workflow

WEIGHTS_ERROR, GROWTH_ERROR, UNSEEN_SHARE = 0.05, 0.15, 0.30


@dataclass(frozen=True)
class ClipSize:
    """Pixels and frames of what a workflow is made to make."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width} x {self.height}, {self.frames} frames"


EXAMPLES = "text_to_video*.json"
TINY = ClipSize(64, 64, 5)
CALIBRATION = (ClipSize(256, 256, 22), ClipSize(512, 320, 39))
UNSEEN = ClipSize(1024, 640, 5)
BUDGET_PART = 5


def bench_activations(folder: Path, scale: float) -> dict[str, Any]:
    """Peak of weights and growth of the process, predicted and measured."""
    models = replica_models(folder, scale, MODEL)
    rows, checks = [], {}
    for names, workflow in distinct_workflows().items():
        for size in (*CALIBRATION, UNSEEN):
            row = {"workflows": names, **_row(models, workflow, size)}
            rows.append(row)
            title = f"{names}, {size}"
            checks[f"{title}: predicted peak of weights within 5 %"] = abs(row["weights_error"]) <= WEIGHTS_ERROR
            checks[f"{title}: predicted growth within 15 %"] = abs(row["growth_error"]) <= GROWTH_ERROR
            if size is UNSEEN:
                checks[f"{title}: at least 30 % more than the weights"] = row["share"] >= UNSEEN_SHARE
    return figures({"rows": rows}, checks)


def shown(found: dict[str, Any]) -> Iterator[str]:
    """The figures as lines for people, in MiB."""
    for row in found["rows"]:
        weights, growth = (
            f"{name} {row[f'{name}_bytes'] / MIB:6.0f} (predicted {row[f'predicted_{name}_bytes'] / MIB:6.0f}, "
            f"{row[f'{name}_error']:+6.1%})"
            for name in ("weights", "growth")
        )
        yield f"{row['workflows']}, {row['size']}: {weights}, {growth}, {row['share']:.0%} above the weights"
    yield from shown_checks(found)


def distinct_workflows() -> dict[str, Path]:
    """One file for each prompt among the example workflows of our nodes, named after all files that come to it at one size."""
    found: dict[str, list[Path]] = {}
    with tempfile.TemporaryDirectory() as out, hosted(RunOptions(Path(out))) as (host, _):
        for path in sorted(WORKFLOW.parent.glob(EXAMPLES)):
            prompt = resized(as_prompt(load_workflow(path), host, {}), TINY)
            found.setdefault(json.dumps([prompt[node] for node in sorted(prompt)], sort_keys=True), []).append(path)
    return {", ".join(path.stem for path in paths): paths[0] for paths in found.values()}


def _row(models: Path, workflow: Path, size: ClipSize) -> dict[str, Any]:
    note(f"activations, {workflow.stem}, {size}")
    arguments = [str(models), str(workflow), *map(str, (size.width, size.height, size.frames))]
    found, growth = watched([sys.executable, "-m", __spec__.name, *arguments])
    weights = found["weights_bytes"]
    return {
        "size": str(size),
        **found,
        "growth_bytes": growth,
        "weights_error": found["predicted_weights_bytes"] / weights - 1,
        "growth_error": found["predicted_growth_bytes"] / growth - 1,
        "share": growth / weights - 1,
    }


def measure(models: Path, workflow: Path, size: ClipSize) -> dict[str, Any]:
    """Run the workflow with the tiny model, then with these models at this size: what the plan predicted and the ledger saw."""
    with tempfile.TemporaryDirectory() as out:
        _ran(demo_models(), workflow, TINY, Path(out))
        collect_and_trim()
        before = status_bytes(os.getpid(), ANONYMOUS)
        budget = sum(file.stat().st_size for file in models.rglob("*.safetensors")) // BUDGET_PART
        return {"anonymous_before_bytes": before, **_ran(models, workflow, size, Path(out), budget)}


def _ran(models: Path, workflow: Path, size: ClipSize, out: Path, budget: int | None = None) -> dict[str, Any]:
    with hosted(RunOptions(out, [models], budget, policy="free")) as (host, shared):
        prompt = resized(as_prompt(load_workflow(workflow), host, {}), size)
        result = host.run(prompt)
        if result.error is not None:
            raise RuntimeError(result.error.message)
        plan = shared.plan()
        if plan is None:
            raise RuntimeError(f"{workflow.name}: the run had no plan; its log says why.")
        return {
            "predicted_weights_bytes": plan.peak_bytes,
            "weights_bytes": shared.store.ledger.peak_bytes,
            "predicted_growth_bytes": plan.peak_growth_bytes,
            "predicted_at_node": plan.growth_node,
        }


def resized(prompt: Mapping[str, Any], size: ClipSize) -> dict[str, Any]:
    """The prompt with another size of clip and a few steps."""
    changes = {
        "LazyH3EmptyLatent": {"width": size.width, "height": size.height, "duration": size.frames, "unit": "frames"},
        "LazyH3Sampler": {"steps": 2},  # fewer steps change no peak
    }
    return {
        node: {"class_type": spec["class_type"], "inputs": spec["inputs"] | changes.get(spec["class_type"], {})}
        for node, spec in prompt.items()
    }


if __name__ == "__main__":
    models, workflow, *sides = sys.argv[1:]
    print(json.dumps(measure(Path(models), Path(workflow), ClipSize(*map(int, sides)))))
