"""``bench run``: a whole workflow on a replica, watched from outside; and its measured half.

The parent samples the child's resident memory. The child runs the small text-to-video workflow and reports what it knows itself:
bytes of components, growth inside each node while its component is already resident (its activations), a hash of the latents.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil

from ..memory import device
from .bench import MIB, figures, sampled
from .demo import WORKFLOW
from .make_checkpoint import make_checkpoint
from .presets import replica
from .run import RunOptions, hosted, load_workflow

SAMPLE_SECONDS = 0.01
SAMPLER = "7"
PROMPT = "5"


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


def bench_run(folder: Path, scale: float, repeats: int) -> dict[str, Any]:
    """Peak memory at policy free beside the largest component and the activations; equal latents at policy keep; no drift."""
    models = folder / f"replica-{scale:g}"
    if not models.is_dir():
        make_checkpoint(models, replica(scale))
    free, peak = _watched_child(models, "free", repeats)
    keep, _ = _watched_child(models, "keep", repeats)
    growth = peak - free["rss_before_bytes"]
    drift = free["rss_after_bytes"][-1] - free["rss_after_bytes"][0]
    activations = max(keep["activation_bytes"].values())
    values = {
        "sum_bytes": free["sum_bytes"],
        "largest_bytes": free["largest_bytes"],
        "peak_resident_bytes": free["peak_resident_bytes"],
        "keep_peak_resident_bytes": keep["peak_resident_bytes"],
        "activation_bytes": activations,
        "rss_growth_bytes": growth,
        "drift_after_run_1_bytes": drift,
        "activations_by_node": keep["activation_bytes"],
        "free_seconds": free["seconds"],
        "keep_seconds": keep["seconds"],
    }
    return figures(
        values,
        {
            "growth <= 1.1 x largest + activations": growth <= 1.1 * free["largest_bytes"] + activations,
            "latents of free and keep are bit-identical": free["latents"] == keep["latents"],
            "peak resident == largest < sum": free["peak_resident_bytes"] == free["largest_bytes"] < free["sum_bytes"],
            "no growth beyond 64 MiB after run 1": drift <= 64 * MIB,
        },
    )


def _watched_child(models: Path, policy: str, repeats: int) -> tuple[dict[str, Any], int]:
    """What the child reports, and its peak resident memory as seen from here."""
    command = [sys.executable, "-m", __spec__.name, str(models), policy, str(repeats)]
    peak = 0
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            peak = max(peak, process.memory_info().rss)
            time.sleep(SAMPLE_SECONDS)
        output.seek(0)
        if child.returncode:
            raise RuntimeError(
                f"The measured run with policy {policy} failed; run the same workflow with lazy-h3 run to see why."
            )
        return json.load(output), peak


def measure(models: Path, policy: str, repeats: int) -> dict[str, Any]:
    """Run the workflow ``repeats`` times with new prompts and seeds."""
    prompt = load_workflow(WORKFLOW)
    prompt["hash"] = {"class_type": "LatentHash", "inputs": {"latent": [SAMPLER, 0]}}
    found: dict[str, Any] = {"rss_after_bytes": [], "seconds": [], "activation_bytes": {}}
    with tempfile.TemporaryDirectory() as out, hosted(RunOptions(Path(out), [models], policy=policy)) as (host, shared):
        host.node_classes["LatentHash"] = LatentHash
        if policy == "keep":
            _fill_all(host, shared, prompt)
        found["rss_before_bytes"] = device.process_bytes()
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
            if number == 0:
                found["activation_bytes"] = growth  # only with policy keep: everything was resident before
        ledger = shared.store.ledger
        sizes = _sizes(ledger.events)
        found |= {
            "peak_resident_bytes": ledger.peak_bytes,
            "largest_bytes": max(sizes.values()),
            "sum_bytes": sum(sizes.values()),
        }
    return found | {"latents": LatentHash.found}


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
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
