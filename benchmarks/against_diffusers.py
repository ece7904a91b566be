"""The table of docs/performance.md: one request through diffusers' H3 classes and through ours, on the same files and machine.

    .venv/bin/python benchmarks/against_diffusers.py --dir FOLDER

FOLDER gets a replica of MiniMax-H3 in the Hugging Face layout (all layers, one ``--scale``-th of the bytes, random weights), which
is used again the next time. Each row is a process of its own, watched from here, and starts with the files cold. Needs the extra
``oracle``: pip install -e '.[oracle]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from lazy_h3.commands.bench import MIB, drop_cache, figures
from lazy_h3.commands.bench_run import ANONYMOUS, status_bytes, watched
from lazy_h3.commands.make_checkpoint import FOLDER, make_checkpoint
from lazy_h3.commands.presets import replica
from lazy_h3.commands.run import RunOptions, hosted
from lazy_h3.memory.ledger import Event
from lazy_h3.nodes.policy import Policy
from small_models import DECODE_AUDIO, DECODE_VIDEO, ENCODE, SAMPLER, folder_prompt, keeper

MEASURE = "measure"
NUM_THREADS = "2"
RESIDENT, MOST_RESIDENT = "VmRSS", "VmHWM"
PHASES = {"encode": (ENCODE,), "sample": (SAMPLER,), "decode": (DECODE_VIDEO, DECODE_AUDIO)}
REQUEST = {
    "prompt": "A cat on a windowsill looks up and says <d>[en] good morning</d>; rain on the glass.",
    "width": 256,
    "height": 256,
    "frames": 22,
    "steps": 4,
    "seed": 7,
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LARGEST_ERROR = {"bf16": 2.0**-6, "fp32": 1e-5}  # of diffusers' latents, relative: four roundings of bf16


@dataclass(frozen=True)
class Ours:
    """How our nodes run. ``budget_part``: of the sum of all components, as the divisor."""

    policy: Policy
    may_plan: bool = True
    budget_part: int | None = None


REFERENCE = "ours, keep-all"
ROWS: dict[str, Ours | None] = {  # None: diffusers
    "diffusers": None,
    REFERENCE: Ours("keep", may_plan=False),
    "ours, free, whole": Ours("free", may_plan=False),
    "ours, free": Ours("free"),
    "ours, auto with room": Ours("auto"),
    "ours, budget 1/8 of the sum": Ours("auto", budget_part=8),
}


@dataclass
class Measured:
    """What one process found. Bytes are growth over the moment before the first file is opened."""

    anonymous_before_bytes: int = field(default_factory=lambda: status_bytes(os.getpid(), ANONYMOUS))
    resident_before_bytes: int = field(default_factory=lambda: status_bytes(os.getpid(), RESIDENT))
    resident_growth_bytes: int = 0
    weight_bytes: int = 0  # the most that was alive at once; ours only
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - began

    def finished(self) -> dict[str, Any]:
        self.resident_growth_bytes = status_bytes(os.getpid(), MOST_RESIDENT) - self.resident_before_bytes
        return asdict(self)


def measure_diffusers(models: Path, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Everything is loaded before the prompt is encoded and stays to the end, as in a pipeline."""
    from diffusers_pipeline import Pipeline, Request

    request = Request(**REQUEST)
    found = Measured()
    with found.timed("load"):
        pipeline = Pipeline(models / FOLDER, DTYPES[dtype])
    with found.timed("encode"):
        states = pipeline.encode(request.prompt)
    with found.timed("sample"):
        latents = pipeline.sample(states, request)
    with found.timed("decode"):
        pipeline.decode(latents)
    audio = latents["audio_latents"].transpose(0, 1)[None]  # [2, C, T] to [1, C, 2, T]
    return found.finished(), {"video": latents["latents"], "audio": audio}


def measure_ours(models: Path, dtype: str, row: Ours, budget: int | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as out:
        options = RunOptions(Path(out), [models], budget, row.policy, may_stream=row.may_plan, may_fold=row.may_plan)
        with hosted(options, torch.device("cpu")) as (host, shared):
            host.node_classes["Keep"] = keeper(kept)
            found = Measured()
            result = host.run(prompt(dtype))
            if result.error is not None:
                raise RuntimeError(result.error.message)
            found.seconds = phase_seconds(result.seconds, shared.store.ledger.events)
            found.weight_bytes = shared.store.ledger.peak_bytes
            measured = found.finished()
    video, audio = kept["latent"]["samples"].unbind()
    return measured, {"video": video, "audio": audio}


def prompt(dtype: str) -> dict[str, Any]:
    """The request as a graph with one folder loader, noise in the official order."""
    return folder_prompt(
        Path(FOLDER).name,
        {
            "1.dtype": dtype,
            "5.prompt": REQUEST["prompt"],
            "6.width": REQUEST["width"],
            "6.height": REQUEST["height"],
            "6.duration": REQUEST["frames"],
            "7.steps": REQUEST["steps"],
            "7.seed": REQUEST["seed"],
            "7.noise": "official",
        },
    )


def phase_seconds(nodes: Mapping[str, float], events: Iterator[Event]) -> dict[str, float]:
    """Seconds of loading, and of the nodes without it. Blocks that are read while others compute count as computing."""
    loads = dict.fromkeys(nodes, 0.0)
    began = 0.0
    for event in events:
        if event.event == "load_begin":
            began = event.t
        elif event.event == "load_end" and event.node is not None:
            loads[event.node] += event.t - began
    computing = {phase: sum(nodes[n] - loads[n] for n in users) for phase, users in PHASES.items()}
    return {"load": sum(loads.values()), **computing}


def run_row(models: Path, dtype: str, title: str, budget: int | None, results: Path) -> dict[str, Any]:
    """One row in a process of its own, with its latents."""
    for path in models.rglob("*.safetensors"):
        drop_cache(path)
    latents = results / f"{list(ROWS).index(title)}.safetensors"
    task = {"models": str(models), "dtype": dtype, "title": title, "budget": budget, "latents": str(latents)}
    found, anonymous = watched([sys.executable, __file__, MEASURE, json.dumps(task)])
    return {**found, "anonymous_growth_bytes": anonymous, "latents": load_file(latents)}


def measure(models: str, dtype: str, title: str, budget: int | None, latents: str) -> dict[str, Any]:
    row = ROWS[title]
    ran = measure_diffusers(Path(models), dtype) if row is None else measure_ours(Path(models), dtype, row, budget)
    found, tensors = ran
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, latents)
    return found


def run_all(models: Path, dtype: str) -> dict[str, dict[str, Any]]:
    """All rows; the reference first, for its sum is what budgets are parts of."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as results:
        for title in (REFERENCE, *(title for title in ROWS if title != REFERENCE)):
            row = ROWS[title]
            part = row.budget_part if row is not None else None
            budget = None if part is None else found[REFERENCE]["weight_bytes"] // part
            found[title] = run_row(models, dtype, title, budget, Path(results))
    return {title: found[title] for title in ROWS}


def difference(latents: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest absolute one, and the largest relative one of both streams (norms)."""
    pairs = [(latents[name], reference[name]) for name in reference]
    absolute = max((found - wanted).abs().max().item() for found, wanted in pairs)
    return absolute, max(((found - wanted).norm() / wanted.norm()).item() for found, wanted in pairs)


def agreement(latents: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str:
    if all(torch.equal(latents[name], reference[name]) for name in reference):
        return "bit-identical"
    return "max {:.1e}, relative {:.1e}".format(*difference(latents, reference))


def shown(found: Mapping[str, dict[str, Any]], dtype: str) -> Iterator[str]:
    """The table, then what it was measured with and what must hold."""
    phases = ("load", *PHASES)
    yield f"| {dtype} | anonymous MiB | with mapped files MiB | weights MiB | {' | '.join(phases)} | all, s | latents |"
    yield "| --- |" + " ---: |" * (len(phases) + 4) + " --- |"
    reference = found[REFERENCE]["latents"]
    for title, row in found.items():
        sizes = [f"{row[f'{kind}_growth_bytes'] / MIB:.0f}" for kind in ("anonymous", "resident")]
        weights = f"{row['weight_bytes'] / MIB:.0f}" if row["weight_bytes"] else ""
        seconds = [f"{row['seconds'][phase]:.1f}" for phase in phases]
        cells = [title, *sizes, weights, *seconds, f"{sum(row['seconds'].values()):.1f}", agreement(row["latents"], reference)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield machine()
    for check, passed in checks(found, dtype).items():
        yield f"{'ok  ' if passed else 'FAIL'} {check}"


def checks(found: Mapping[str, dict[str, Any]], dtype: str) -> dict[str, bool]:
    reference = found[REFERENCE]["latents"]
    ours = [row for title, row in found.items() if ROWS[title] is not None]
    limit = LARGEST_ERROR[dtype]
    return {
        "all of our rows are bit-identical": all(agreement(row["latents"], reference) == "bit-identical" for row in ours),
        f"diffusers differs by at most {limit:.1e}": difference(found["diffusers"]["latents"], reference)[1] <= limit,
    }


def machine() -> str:
    """What the figures were measured with, in one line."""
    facts = figures({}, {})["machine"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("diffusers", "transformers", "accelerate"))
    system = f"{facts['system']}, {facts['cores']} cores, {NUM_THREADS} threads, no accelerator"
    return f"{system}; Python {facts['python']}, torch {facts['torch']}, {packages}"


def main() -> None:
    if sys.argv[1:2] == [MEASURE]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, metavar="FOLDER", help="where the replica is, or is to be made")
    parser.add_argument("--scale", type=float, default=50, help="the replica has one SCALE-th of the model's bytes (default 50)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of text encoder and transformer; the VAEs are fp32")
    options = parser.parse_args()
    missing = [name for name in ("diffusers", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} is not installed; install the extra: pip install -e '.[oracle]'.")
    models = options.dir / f"replica-{options.scale:g}-folder"
    if not models.is_dir():
        make_checkpoint(models, replica(options.scale), "folder")
    os.environ["OMP_NUM_THREADS"] = NUM_THREADS
    found = run_all(models, options.dtype)
    print(*shown(found, options.dtype), sep="\n")
    sys.exit(not all(checks(found, options.dtype).values()))


if __name__ == "__main__":
    main()
