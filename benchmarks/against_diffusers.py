"""The first table of docs/performance.md: one request through diffusers' H3 classes and through ours, on the same files.

    .venv/bin/python benchmarks/against_diffusers.py --dir FOLDER

FOLDER gets a replica of MiniMax-H3 in the Hugging Face layout (all layers, one ``--scale``-th of the bytes, random weights), that
is used again the next time. Each row is a process of its own, watched from here, and starts with cold files. Needs the extra
``oracle``: pip install -e '.[oracle]'. Exit code 1 if our rows differ by a bit, or diffusers' by more than rounding explains.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
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
from lazy_h3.commands.make_checkpoint import FOLDER, make_checkpoint
from lazy_h3.commands.presets import replica
from lazy_h3.commands.process_memory import ANONYMOUS, status_bytes, watched
from lazy_h3.commands.run import RunOptions, hosted
from lazy_h3.memory.ledger import Event
from lazy_h3.nodes.policy import Policy
from small_models import DECODE_AUDIO, DECODE_VIDEO, ENCODE, SAMPLER, folder_prompt, keeper

MEASURE = "measure"
NUM_THREADS = "2"
THREADS = {"OMP_NUM_THREADS": NUM_THREADS, "OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin make a busy machine useless
RESIDENT, MOST_RESIDENT = "VmRSS", "VmHWM"
PACKAGES = ("diffusers", "transformers", "accelerate")
PHASES = {"encode": (ENCODE,), "sample": (SAMPLER,), "decode": (DECODE_VIDEO, DECODE_AUDIO)}
REQUEST: dict[str, Any] = {
    "prompt": "A cat on a windowsill looks up and says <d>[en] good morning</d>; rain on the glass.",
    "width": 256,
    "height": 256,
    "frames": 22,
    "steps": 4,
    "seed": 7,
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LARGEST_ERROR = {"bf16": 2.0**-5, "fp32": 1e-5}  # of diffusers' latents, relative

Latents = Mapping[str, Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Theirs:
    """How diffusers loads: as weights that are the mapped pages of the files, or read into memory."""

    disable_mmap: bool = False


@dataclass(frozen=True)
class Ours:
    """How our nodes run. ``budget_part``: the budget is the sum of all components divided by it."""

    policy: Policy
    may_plan: bool = True
    budget_part: int | None = None


REFERENCE = "ours, keep-all"
ROWS: dict[str, Theirs | Ours] = {
    "diffusers": Theirs(),
    "diffusers, `disable_mmap`": Theirs(disable_mmap=True),
    REFERENCE: Ours("keep", may_plan=False),
    "ours, free, whole": Ours("free", may_plan=False),
    "ours, free": Ours("free"),
    "ours, auto, with room": Ours("auto"),
    "ours, auto, budget 1/8": Ours("auto", budget_part=8),
}


@dataclass
class Measured:
    """What one process found. Growth is over the moment at which this was made, before any file is opened."""

    anonymous_before_bytes: int = field(default_factory=lambda: status_bytes(os.getpid(), ANONYMOUS))
    resident_before_bytes: int = field(default_factory=lambda: status_bytes(os.getpid(), RESIDENT))
    resident_growth_bytes: int = 0
    weight_bytes: int = 0  # the most that was alive at once
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - began

    def finished(self) -> Row:
        self.resident_growth_bytes = status_bytes(os.getpid(), MOST_RESIDENT) - self.resident_before_bytes
        return asdict(self)


def measure(models: str, dtype: str, title: str, budget: int | None, latents: str) -> Row:
    """The measured process: writes its latents, returns the rest."""
    row = ROWS[title]
    if isinstance(row, Theirs):
        found, tensors = measure_theirs(Path(models), dtype, row)
    else:
        found, tensors = measure_ours(Path(models), dtype, row, budget)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, latents)
    return found


def measure_theirs(models: Path, dtype: str, row: Theirs) -> tuple[Row, Latents]:
    """Everything is loaded before the prompt is encoded and stays to the end, as in a pipeline."""
    from diffusers_pipeline import Pipeline, Request

    request = Request(**REQUEST)
    found = Measured()
    with found.timed("load"):
        pipeline = Pipeline(models / FOLDER, DTYPES[dtype], row.disable_mmap)
    with found.timed("encode"):
        states = pipeline.encode(request.prompt)
    with found.timed("sample"):
        latents = pipeline.sample(states, request)
    with found.timed("decode"):
        pipeline.decode(latents)
    found.weight_bytes = pipeline.weight_bytes
    audio = latents["audio_latents"].transpose(0, 1)[None]  # [2, C, T] to [1, C, 2, T]
    return found.finished(), {"video": latents["latents"], "audio": audio}


def measure_ours(models: Path, dtype: str, row: Ours, budget: int | None) -> tuple[Row, Latents]:
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
    """The request as a graph with one folder loader, its noise drawn in the official order."""
    widgets = {
        "1.dtype": dtype,
        "5.prompt": REQUEST["prompt"],
        "6.width": REQUEST["width"],
        "6.height": REQUEST["height"],
        "6.duration": REQUEST["frames"],
        "7.steps": REQUEST["steps"],
        "7.seed": REQUEST["seed"],
        "7.noise": "official",
    }
    return folder_prompt(Path(FOLDER).name, widgets)


def phase_seconds(nodes: Mapping[str, float], events: Iterable[Event]) -> dict[str, float]:
    """Seconds of loading, and of the nodes without it. What is read while a node computes counts as computing."""
    loads = dict.fromkeys(nodes, 0.0)
    began: dict[str, float] = {}  # component -> when a node that waits for it had it read
    for event in events:
        if event.event == "load_begin" and not event.reason.startswith("ahead"):
            began[event.component] = event.t
        elif event.event == "load_end" and event.node is not None and event.component in began:
            loads[event.node] += event.t - began.pop(event.component)
    computing = {phase: sum(nodes[n] - loads[n] for n in users) for phase, users in PHASES.items()}
    return {"load": sum(loads.values()), **computing}


def run_all(models: Path, dtype: str) -> dict[str, Row]:
    """All rows; the reference first, for budgets are parts of its sum."""
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as results:
        for title in (REFERENCE, *(title for title in ROWS if title != REFERENCE)):
            part = getattr(ROWS[title], "budget_part", None)
            budget = None if part is None else found[REFERENCE]["weight_bytes"] // part
            found[title] = run_row(models, dtype, title, budget, Path(results, "latents.safetensors"))
    return {title: found[title] for title in ROWS}


def run_row(models: Path, dtype: str, title: str, budget: int | None, latents: Path) -> Row:
    """One row in a process of its own, with its latents."""
    for path in models.rglob("*.safetensors"):
        drop_cache(path)
    task = {"models": str(models), "dtype": dtype, "title": title, "budget": budget, "latents": str(latents)}
    found, anonymous = watched([sys.executable, __file__, MEASURE, json.dumps(task)])
    return {**found, "anonymous_growth_bytes": anonymous, "latents": load_file(latents)}


def difference(latents: Latents, reference: Latents) -> tuple[float, float]:
    """The largest absolute one, and the larger relative one of the two streams (norms)."""
    pairs = [(latents[name], wanted) for name, wanted in reference.items()]
    absolute = max((found - wanted).abs().max().item() for found, wanted in pairs)
    return absolute, max(((found - wanted).norm() / wanted.norm()).item() for found, wanted in pairs)


def is_identical(latents: Latents, reference: Latents) -> bool:
    return all(torch.equal(latents[name], wanted) for name, wanted in reference.items())


def checks(found: Mapping[str, Row], dtype: str) -> dict[str, bool]:
    reference = found[REFERENCE]["latents"]
    ours = [row["latents"] for title, row in found.items() if isinstance(ROWS[title], Ours)]
    theirs = [row["latents"] for title, row in found.items() if isinstance(ROWS[title], Theirs)]
    limit = LARGEST_ERROR[dtype]
    return {
        "all of our latents are bit-identical": all(is_identical(latents, reference) for latents in ours),
        f"diffusers' differ by at most {limit:.1e}": all(difference(latents, reference)[1] <= limit for latents in theirs),
    }


def table(found: Mapping[str, Row], dtype: str) -> Iterator[str]:
    """One line a row, in Markdown."""
    phases = ("load", *PHASES)
    yield f"| {dtype} | weights, MiB | anonymous, MiB | resident, MiB | {', s | '.join(phases)}, s | all, s | latents |"
    yield "| --- |" + " ---: |" * (len(phases) + 4) + " --- |"
    reference = found[REFERENCE]["latents"]
    for title, row in found.items():
        sizes = [f"{row[name] / MIB:.0f}" for name in ("weight_bytes", "anonymous_growth_bytes", "resident_growth_bytes")]
        seconds = [f"{row['seconds'][phase]:.1f}" for phase in phases]
        cells = [title, *sizes, *seconds, f"{sum(row['seconds'].values()):.1f}", agreement(row["latents"], reference)]
        yield f"| {' | '.join(cells)} |"


def agreement(latents: Latents, reference: Latents) -> str:
    if is_identical(latents, reference):
        return "bit-identical"
    absolute, relative = difference(latents, reference)
    return f"differ by at most {absolute:.1e}, relatively {relative:.1e}"


def machine() -> str:
    """What the figures were measured with, in one line."""
    facts = figures({}, {})["machine"]
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    system = f"{facts['system']}, {facts['cores']} cores, {NUM_THREADS} threads, on the CPU"
    return f"{system}; Python {facts['python']}, torch {facts['torch']}, {packages}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, metavar="FOLDER", help="where the replica is, or is to be made")
    parser.add_argument("--scale", type=float, default=50, help="the replica has one SCALE-th of the model's bytes (default 50)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of text encoder and transformer; the VAEs are fp32")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == [MEASURE]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
        return
    options = arguments()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"Not installed: {', '.join(missing)}; install the extra with pip install -e '.[oracle]'.")
    models = options.dir / f"replica-{options.scale:g}-folder"
    if not models.is_dir():
        make_checkpoint(models, replica(options.scale), "folder")
    os.environ.update(THREADS)
    found = run_all(models, options.dtype)
    verdicts = checks(found, options.dtype)
    print(*table(found, options.dtype), "", machine(), sep="\n")
    print(*(f"{'ok  ' if passed else 'FAIL'} {check}" for check, passed in verdicts.items()), sep="\n")
    sys.exit(not all(verdicts.values()))


if __name__ == "__main__":
    main()
