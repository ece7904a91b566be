"""``bench run``: a whole workflow on a replica, watched from outside; and its measured half.

The parent samples the child's anonymous memory. The child runs the small text-to-video workflow and reports what it knows itself:
bytes of components, growth inside each node while its component is already resident (its activations), a hash of the latents.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from ..host.embedded.executor import NodeError
from ..memory import device
from ..memory.account import accounts
from ..memory.ledger import Page
from ..memory.plan import Policy
from ..memory.store import MemoryRefused
from .bench import MIB, figures, note, replica_models, shown_checks
from .demo import WORKFLOW
from .process_memory import ANONYMOUS, sampled, status_bytes, watched
from .run import RunOptions, hosted, load_workflow

SAMPLER = "7"
PROMPT = "5"
MODEL = "minimax-h3-r16"
BUDGET_PARTS = (3, 8)
REFUSED_PART = 13  # the video VAE's decoder is more than that of this model, and is never streamed
REFUSED_COMPONENT = "video VAE"
MOST_ERROR = 0.05  # of the predicted peak
MOST_REFUSAL_SECONDS = 1.0
TOKENIZER_AND_CODE = MIB  # read once in a process beside headers: the tokenizer, and modules that are imported when needed


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
    models = replica_models(folder, scale, MODEL)
    note("run, activations")
    warm, activations = _watched_child(models, Variant("keep", is_plain=True, is_warm=True), 1)
    variants = {
        "keep, whole": Variant("keep", is_plain=True),
        "free, whole": Variant("free", is_plain=True),
        "free": Variant("free"),
    }
    rows = {name: _row(name, models, variant, repeats) for name, variant in variants.items()}
    total = rows["keep, whole"]["peak_resident_bytes"]
    budgets = {part: Variant("free", budget=total // part) for part in (*BUDGET_PARTS, REFUSED_PART)}
    parts = {f"1/{part} of the sum": budgets[part] for part in BUDGET_PARTS}
    limited = {name: _row(name, models, variant, repeats) for name, variant in parts.items()}
    note(f"run, 1/{REFUSED_PART} of the sum, which is refused")
    refusal, _ = _watched_child(models, budgets[REFUSED_PART], 1)
    checks = {
        **_checks_of_freeing(rows["free, whole"], max(warm["activation_bytes"].values())),
        **_checks_of_budgets(limited, activations),
        **_checks_of_refusal(refusal),
    }
    rows |= limited
    latents = rows["keep, whole"]["latents"]
    checks["all latents are bit-identical"] = all(row["latents"] == latents for row in rows.values())
    for name, row in rows.items():
        error = abs(row["predicted_peak_bytes"] / row["peak_resident_bytes"] - 1)
        checks[f"{name}: predicted peak within {MOST_ERROR:.0%} of measured"] = error <= MOST_ERROR
    activation = {"activation_bytes": activations, "activations_by_node": warm["activation_bytes"]}
    return figures({**activation, "model": MODEL, "scale": scale, "rows": rows, "refusal": refusal}, checks)


def _checks_of_freeing(row: Mapping[str, Any], in_one_node: int) -> dict[str, bool]:
    largest, peak, total = (row[f"{key}_bytes"] for key in ("largest", "peak_resident", "sum"))
    drift = row["rss_after_bytes"][-1] - row["rss_after_bytes"][0]
    return {
        "free, whole: growth <= 1.1 x largest + activations of a node": row["growth_bytes"] <= 1.1 * largest + in_one_node,
        "free, whole: peak resident == largest < sum": peak == largest < total,
        "free, whole: no growth beyond 64 MiB after run 1": drift <= 64 * MIB,
    }


def _checks_of_budgets(rows: Mapping[str, Mapping[str, Any]], activations: int) -> dict[str, bool]:
    checks = {}
    for name, row in rows.items():
        budget = row["budget_bytes"]
        checks[f"{name}: weights stay under the budget at every event"] = row["peak_resident_bytes"] <= budget
        checks[f"{name}: growth <= budget + activations + 64 MiB"] = row["growth_bytes"] <= budget + activations + 64 * MIB
    return checks


def _checks_of_refusal(found: Mapping[str, Any]) -> dict[str, bool]:
    refused = f"1/{REFUSED_PART} of the sum: refused"
    read = found["read_bytes"] - found["header_bytes"]
    return {
        f"{refused}, naming the {REFUSED_COMPONENT}": (found["refused"] or "").startswith(REFUSED_COMPONENT),
        f"{refused} in less than {MOST_REFUSAL_SECONDS:g} s": found["seconds"][0] < MOST_REFUSAL_SECONDS,
        f"{refused}, no weight read and no byte beyond headers, tokenizer and code": (
            found["peak_resident_bytes"] == 0 and read <= TOKENIZER_AND_CODE
        ),
    }


def shown(found: dict[str, Any]) -> Iterator[str]:
    """The figures as lines for people."""
    largest, total = max(found["activations_by_node"].values()), found["activation_bytes"]
    yield f"replica of {found['model']}, 1/{found['scale']:g} of its bytes"
    yield f"activations, separately measured: {total / MIB:.0f} MiB, {largest / MIB:.0f} MiB in the largest node"
    for name, row in found["rows"].items():
        predicted, peak, growth = (row[key] / MIB for key in ("predicted_peak_bytes", "peak_resident_bytes", "growth_bytes"))
        seconds = ", ".join(f"{value:.1f}" for value in row["seconds"])
        budget = "" if row["budget_bytes"] is None else f"budget {row['budget_bytes'] / MIB:.0f} MiB, "
        weights = f"weights {peak:.0f} MiB (predicted {predicted:.0f})"
        yield f"{name:16} {budget}{weights}, process grew {growth:.0f} MiB, runs {seconds} s"
    refusal = found["refusal"]
    read, headers = (refusal[f"{key}_bytes"] / 1024 for key in ("read", "header"))
    took = f"{refusal['seconds'][0]:.2f} s, {read:.0f} KiB read, {headers:.0f} KiB of them headers"
    yield f"1/{REFUSED_PART} of the sum: {took}: {refusal['refused']}"
    yield from shown_checks(found)


def _row(name: str, models: Path, variant: Variant, repeats: int) -> dict[str, Any]:
    note(f"run, {name}")
    found, growth = _watched_child(models, variant, repeats)
    if found["refused"] is not None:
        raise RuntimeError(f"The run was refused: {found['refused']}")
    return {**found, "growth_bytes": growth, "budget_bytes": variant.budget}


def _watched_child(models: Path, variant: Variant, repeats: int) -> tuple[dict[str, Any], int]:
    return watched([sys.executable, "-m", __spec__.name, str(models), json.dumps(asdict(variant)), str(repeats)])


def measure(models: Path, variant: Variant, repeats: int) -> dict[str, Any]:
    """Run the workflow ``repeats`` times with new prompts and seeds, or until it is refused."""
    prompt = load_workflow(WORKFLOW)
    prompt["hash"] = {"class_type": "LatentHash", "inputs": {"latent": [SAMPLER, 0]}}
    found: dict[str, Any] = {"rss_after_bytes": [], "seconds": [], "refused": None}
    with tempfile.TemporaryDirectory() as out, hosted(_options(variant, Path(out), models)) as (host, shared):
        host.node_classes["LatentHash"] = LatentHash
        if variant.is_warm:
            _fill_all(host, shared, prompt)
        found["anonymous_before_bytes"] = status_bytes(os.getpid(), ANONYMOUS)
        read_before = _read_bytes()
        for number in range(repeats):
            prompt[PROMPT]["inputs"]["prompt"] = f"Take {number} of a cat on a windowsill."
            prompt[SAMPLER]["inputs"]["seed"] = number
            began = time.perf_counter()
            with _node_growth(host) as growth:
                result = host.run(prompt)
            found["seconds"].append(time.perf_counter() - began)
            found["rss_after_bytes"].append(device.process_bytes())
            if result.error is not None:
                found["refused"] = _refusal(result.error)
                break
        found["activation_bytes"] = growth
        plan, ledger = shared.plan(), shared.store.ledger
        sizes = [account.bytes for account in accounts(Page(events=tuple(ledger.events)))]
        found |= {
            "read_bytes": _read_bytes() - read_before,
            "header_bytes": sum(_header_bytes(path) for path in models.rglob("*.safetensors")),
            "predicted_peak_bytes": plan.peak_bytes if plan else 0,
            "peak_resident_bytes": ledger.peak_bytes,
            "largest_bytes": max(sizes, default=0),
            "sum_bytes": sum(sizes),
        }
    return found | {"latents": LatentHash.found}


def _refusal(error: NodeError) -> str:
    """What a run that was refused says. Raises RuntimeError for any other error."""
    if not error.type.endswith(MemoryRefused.__name__):
        raise RuntimeError(error.message)
    return error.message


def _read_bytes() -> int:
    """Bytes that this process has read from files so far, from the page cache or not."""
    return int(psutil.Process().io_counters().read_chars)


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


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
