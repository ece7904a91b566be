"""``bench run``: a whole workflow on a replica, watched from outside; and its measured half.

The parent samples the child's resident memory. The child runs the small text-to-video workflow and reports what it knows itself:
bytes of components, growth inside each node while its component is already resident (its activations), a hash of the latents.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from ..memory import device
from ..memory.plan import Policy
from .bench import MIB, figures, sampled
from .demo import WORKFLOW
from .make_checkpoint import make_checkpoint
from .presets import replica
from .run import RunOptions, hosted, load_workflow

SAMPLE_SECONDS = 0.01
ANONYMOUS = "RssAnon"  # resident memory that no file backs
MAX_ERROR = 2000
SAMPLER = "7"
PROMPT = "5"
BUDGET_PARTS = (3, 8)


class LatentHash:
    """An output node that keeps a hash of what it is given."""

    RETURN_TYPES = ()
    FUNCTION = "keep"
    OUTPUT_NODE = True
    found: ClassVar[list[str]] = []

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"latent": ("LATENT",)}}

    def keep(self, latent: dict[str, Any]) -> dict[str, Any]:
        streams = [stream.contiguous().numpy().tobytes() for stream in latent["samples"].unbind()]
        self.found.append(hashlib.sha256(b"".join(streams)).hexdigest())
        return {"result": ()}


@dataclass(frozen=True)
class Variant:
    """One way to run the workflow. ``is_plain``: whole, not folded; ``is_warm``: everything is resident before it starts."""

    policy: Policy = "free"
    is_plain: bool = False
    is_warm: bool = False
    budget: int | None = None


def bench_run(folder: Path, scale: float, repeats: int) -> dict[str, Any]:
    """A workflow at several policies and budgets: growth of the process, equal latents, predicted beside measured.

    Activations are the growth of a process in which everything is resident before the run: in all, and inside each node.
    """
    models = folder / f"replica-{scale:g}"
    if not models.is_dir():
        make_checkpoint(models, replica(scale))
    warm, activations = _watched_child(models, Variant("keep", is_plain=True, is_warm=True), 1)
    in_one_node = max(warm["activation_bytes"].values())
    keep, keep_growth = _watched_child(models, Variant("keep", is_plain=True), repeats)
    free, free_growth = _watched_child(models, Variant("free", is_plain=True), repeats)
    planned, planned_growth = _watched_child(models, Variant("free"), repeats)
    total = keep["peak_resident_bytes"]
    budgets = {f"1/{part} of the sum": total // part for part in BUDGET_PARTS}
    limited = {name: _watched_child(models, Variant("free", budget=nbytes), repeats) for name, nbytes in budgets.items()}
    drift = free["rss_after_bytes"][-1] - free["rss_after_bytes"][0]
    rows = {"keep, whole": (keep, keep_growth), "free, whole": (free, free_growth), "free": (planned, planned_growth), **limited}
    checks = {
        "free, whole: growth <= 1.1 x largest + activations": free_growth <= 1.1 * free["largest_bytes"] + in_one_node,
        "free, whole: peak resident == largest < sum": free["peak_resident_bytes"] == free["largest_bytes"] < free["sum_bytes"],
        "free, whole: no growth beyond 64 MiB after run 1": drift <= 64 * MIB,
        "all latents are bit-identical": all(found["latents"] == keep["latents"] for found, _ in rows.values()),
    }
    for name, nbytes in budgets.items():
        found, growth = limited[name]
        checks[f"{name}: weights stay under the budget at every event"] = found["peak_resident_bytes"] <= nbytes
        checks[f"{name}: growth <= budget + activations + 64 MiB"] = growth <= nbytes + activations + 64 * MIB
    for name, (found, _) in rows.items():
        error = abs(found["predicted_peak_bytes"] / found["peak_resident_bytes"] - 1)
        checks[f"{name}: predicted peak within 5 % of measured"] = error <= 0.05
    table = {name: {**found, "growth_bytes": growth} for name, (found, growth) in rows.items()}
    activation = {"activation_bytes": activations, "activations_by_node": warm["activation_bytes"]}
    return figures({**activation, "rows": table}, checks)


def shown(found: dict[str, Any]) -> Iterator[str]:
    """The figures as lines for people."""
    largest = max(found["activations_by_node"].values())
    total = found["activation_bytes"]
    yield f"activations, separately measured: {total / MIB:.0f} MiB, {largest / MIB:.0f} MiB in the largest node"
    for name, row in found["rows"].items():
        predicted, peak, growth = (row[key] / MIB for key in ("predicted_peak_bytes", "peak_resident_bytes", "growth_bytes"))
        seconds = ", ".join(f"{value:.1f}" for value in row["seconds"])
        yield f"{name:16} weights {peak:7.0f} MiB (predicted {predicted:7.0f}), process grew {growth:7.0f} MiB, runs {seconds} s"
    for check, passed in found["checks"].items():
        yield f"{'ok  ' if passed else 'FAIL'} {check}"


def _watched_child(models: Path, variant: Variant, repeats: int) -> tuple[dict[str, Any], int]:
    return watched([sys.executable, "-m", __spec__.name, str(models), json.dumps(asdict(variant)), str(repeats)])


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
            time.sleep(SAMPLE_SECONDS)
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


def measure(models: Path, variant: Variant, repeats: int) -> dict[str, Any]:
    """Run the workflow ``repeats`` times with new prompts and seeds."""
    prompt = load_workflow(WORKFLOW)
    prompt["hash"] = {"class_type": "LatentHash", "inputs": {"latent": [SAMPLER, 0]}}
    found: dict[str, Any] = {"rss_after_bytes": [], "seconds": []}
    with tempfile.TemporaryDirectory() as out, hosted(_options(variant, Path(out), models)) as (host, shared):
        host.node_classes["LatentHash"] = LatentHash
        if variant.is_warm:
            _fill_all(host, shared, prompt)
        found["anonymous_before_bytes"] = status_bytes(os.getpid(), ANONYMOUS)
        for number in range(repeats):
            prompt[PROMPT]["inputs"]["prompt"] = f"Take {number} of a cat on a windowsill."
            prompt[SAMPLER]["inputs"]["seed"] = number
            began = time.perf_counter()
            with _node_growth(host) as growth:
                result = host.run(prompt)
            if result.error is not None:
                raise RuntimeError(result.error.message)
            found["seconds"].append(time.perf_counter() - began)
            found["rss_after_bytes"].append(device.process_bytes())
        found["activation_bytes"] = growth
        plan, ledger = shared.plan(), shared.store.ledger
        sizes = _sizes(ledger.events)
        found |= {
            "predicted_peak_bytes": plan.peak_bytes if plan else 0,
            "peak_resident_bytes": ledger.peak_bytes,
            "largest_bytes": max(sizes.values(), default=0),
            "sum_bytes": sum(sizes.values()),
        }
    return found | {"latents": LatentHash.found}


def _options(variant: Variant, out: Path, models: Path) -> RunOptions:
    may_plan = not variant.is_plain
    return RunOptions(out, [models], variant.budget, variant.policy, may_stream=may_plan, may_fold=may_plan)


def _fill_all(host: Any, shared: Any, prompt: Mapping[str, Any]) -> None:
    """Bring every component of the workflow's loaders into memory, before any node runs."""
    for spec in prompt.values():
        cls = host.node_classes[spec["class_type"]]
        for component in cls.components(**spec["inputs"]).values() if hasattr(cls, "components") else ():
            parts = component.parts - {"encoder", "vision"}  # what text to video needs
            with shared.handle(component).use(*parts):
                pass


def _sizes(events: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for event in events:
        if event.event == "load_end":
            sizes[event.component] = max(sizes.get(event.component, 0), event.bytes)
    return sizes


@contextmanager
def _node_growth(host: Any) -> Iterator[Mapping[str, int]]:
    """Growth of this process inside each node, over where it stood when the node began."""
    growth: dict[str, int] = {}
    began: dict[str, int] = {}

    def sample() -> None:
        rss = device.process_bytes()
        for node, start in list(began.items()):
            growth[node] = max(growth.get(node, 0), rss - start)

    def follow(event: str, data: dict[str, Any]) -> None:
        if event == "node_started":
            began[data["node"]] = device.process_bytes()
        elif event == "node_finished":
            sample()
            began.pop(data["node"], None)

    undo = host.on_event(follow)
    try:
        with sampled(sample):
            yield growth
    finally:
        undo()


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Variant(**json.loads(sys.argv[2])), int(sys.argv[3]))))
