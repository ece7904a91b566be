"""``bench stream``: streamed beside whole, on a replica: time in interleaved pairs, memory, and reading while computing.

Pairs follow one another, so that both sides see the same machine, and take turns in going first; ratios are taken within a pair.
Half of the processors compute and half are left for reading, as they are where a GPU computes.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..h3.sampling import Latents, Schedule, sample
from ..memory.checkpoint import TensorEntry
from ..memory.component import Component
from ..memory.device import trim
from ..memory.reader import STORED_DTYPES, Copy, Reader
from ..memory.resource import FillRequest, Mode, Parts
from ..nodes.catalogue import AS_STORED, Catalogue
from .bench import MIB, drop_cache, figures, note, raw_read_seconds, replica_models, shown_checks
from .make_checkpoint import SINGLE_FILES
from .process_memory import sampled

MODEL = "minimax-h3"
CPU = torch.device("cpu")
NUM_TOKENS = 256
NUM_STEPS = 4
VIDEO_SHAPE, AUDIO_SHAPE = (1, 24, 4, 16, 24), (1, 32, 2, 20)
OVERLAP_STEPS = 2
MODES: tuple[Mode, Mode] = ("whole", "streamed")


@dataclass(frozen=True)
class Job:
    """A component and what is computed with it in ``num_passes`` through its blocks."""

    component: Component
    compute: Callable[[Any], Tensor]
    parts: Parts
    num_passes: int
    points: tuple[float, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.component.checkpoint.path)

    def fill(self, mode: Mode, prefetch: bool = True) -> None:
        self.component.fill(FillRequest(self.parts, mode, num_passes=self.num_passes, prefetch=prefetch, points=self.points))

    @torch.inference_mode()
    def run(self, mode: Mode, prefetch: bool = True) -> Timing:
        """Fill, compute and drop; the drop is not in the time."""
        began = time.perf_counter()
        self.fill(mode, prefetch)
        filled = time.perf_counter()
        result = self.compute(self.component.module)
        done = time.perf_counter()
        self.component.drop()
        trim()
        return Timing(filled - began, done - filled, result)


@dataclass(frozen=True)
class Timing:
    fill_seconds: float
    compute_seconds: float
    result: Tensor = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.fill_seconds + self.compute_seconds


@dataclass(frozen=True)
class Claim:
    """A ratio and its limit: what it is at most, or else at least."""

    ratio: float
    limit: float
    is_most: bool = True

    @property
    def holds(self) -> bool:
        return self.ratio <= self.limit if self.is_most else self.ratio >= self.limit

    def __str__(self) -> str:
        return f"{self.ratio:.2f} (at {'most' if self.is_most else 'least'} {self.limit:g})"


def bench_stream(folder: Path, scale: float, repeats: int) -> dict[str, Any]:
    """Text encoder in one pass, DiT over several steps; both cold and warm. Then one slow reader beside one computing thread."""
    models = replica_models(folder, scale, MODEL)
    jobs = {"text encoder": encoding(models, Reader()), "DiT": denoising(models, Reader(), NUM_STEPS)}
    with computing_threads(max(1, (os.cpu_count() or 1) // 2)):
        rows = {f"{name}, {state}": pairs(job, state, repeats) for name, job in jobs.items() for state in ("cold", "warm")}
        memory = {name: held_bytes(job) for name, job in jobs.items()}
    with computing_threads(1):
        overlap = overlapped(models, repeats)
    encoder = memory["text encoder"]
    claims = {
        "text encoder, warm: streamed / (whole load + encode)": Claim(rows["text encoder, warm"]["ratio"], 1.0),
        "text encoder: weights held streamed / whole": Claim(encoder["streamed_bytes"] / encoder["whole_bytes"], 0.1),
        "DiT, warm: streamed / (load once + all steps)": Claim(rows["DiT, warm"]["ratio"], 1.2),
        "reading as slow as computing: streamed / the longer of both": Claim(overlap["ratio"], 1.3),
        "reading as slow as computing: without prefetch / the longer": Claim(
            overlap["ratio_without_prefetch"], 1.7, is_most=False
        ),
    }
    checks = {f"{name}: {claim}": claim.holds for name, claim in claims.items()}
    checks["all results are bit-identical"] = all(row["is_identical"] for row in (*rows.values(), overlap))
    return figures({"rows": rows, "memory": memory, "overlap": overlap}, checks)


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def encoding(models: Path, reader: Reader) -> Job:
    """A prompt through the language model."""
    component = Catalogue(reader).component(models / SINGLE_FILES["text_encoder"], "text_encoder", AS_STORED, CPU)
    vocabulary = component.module.config.vocab_size
    ids = torch.randint(vocabulary, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(NUM_TOKENS).expand(3, -1)
    return Job(component, lambda model: model(ids, positions), frozenset({"language"}), 1)


def denoising(models: Path, reader: Reader, num_steps: int, is_folded: bool = True) -> Job:
    """A small clip over a few steps."""
    component = Catalogue(reader).component(models / SINGLE_FILES["dit"], "dit", AS_STORED, CPU)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 64, component.module.config.text_dim, generator=generator)
    noise = Latents(torch.randn(VIDEO_SHAPE, generator=generator), torch.randn(AUDIO_SHAPE, generator=generator))
    schedule = Schedule.official(num_steps)

    def compute(model: Any) -> Tensor:
        return torch.cat([stream.flatten() for stream in sample(model, states, None, noise, schedule)])

    return Job(component, compute, component.parts, num_steps, schedule.clean_times if is_folded else ())


def pairs(job: Job, state: str, repeats: int) -> dict[str, Any]:
    """Seconds of both modes, run by run, and the median of their ratios."""
    note(f"stream, {job.component.name}, {state}")
    runs: dict[Mode, list[Timing]] = {mode: [] for mode in MODES}
    for number in range(repeats):
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            prepare_cache(job.path, state)
            runs[mode].append(job.run(mode))
    seconds = {mode: [timing.seconds for timing in timings] for mode, timings in runs.items()}
    first = runs["whole"][0].result
    return {
        "ratio": median_ratio(seconds["streamed"], seconds["whole"]),
        "whole_seconds": seconds["whole"],
        "streamed_seconds": seconds["streamed"],
        "is_identical": all(torch.equal(timing.result, first) for timings in runs.values() for timing in timings),
    }


def prepare_cache(path: Path, state: str) -> None:
    """Make the file cold, or warm: all of it in the page cache."""
    drop_cache(path)
    if state == "warm":
        raw_read_seconds(path)


def median_ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def held_bytes(job: Job) -> dict[str, int]:
    """The most weights that are alive in either mode. Measuring takes time: not in a run that is timed."""
    peaks = {}
    for mode in MODES:
        seen = [0]
        with sampled(lambda seen=seen: seen.append(job.component.live_bytes())):
            job.run(mode)
        peaks[f"{mode}_bytes"] = max(seen)
    return peaks


class Throttle:
    """Makes a reader slow by sleeping, which leaves the processor to others."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self.reader = Reader(num_threads=1, before_chunk=self._sleep)

    def _sleep(self, nbytes: int) -> None:
        time.sleep(nbytes * self.seconds_per_byte)


def overlapped(models: Path, repeats: int) -> dict[str, Any]:
    """Streamed with and without prefetch, with a reader that takes as long as the computation.

    Not folded: that is done before the first step, so that there is nothing to compute meanwhile.
    """
    note("stream, a slow reader")
    throttle = Throttle()
    job = denoising(models, throttle.reader, OVERLAP_STEPS, is_folded=False)
    rounds = [_overlap_round(job, throttle) for _ in range(repeats)]
    columns = {f"{name}_seconds": [found[name].seconds for found in rounds] for name in ("streamed", "without_prefetch")}
    columns |= {f"{name}_seconds": [found[name] for found in rounds] for name in ("read", "compute")}
    longer = [max(pair) for pair in zip(columns["read_seconds"], columns["compute_seconds"], strict=True)]
    return {
        "ratio": median_ratio(columns["streamed_seconds"], longer),
        "ratio_without_prefetch": median_ratio(columns["without_prefetch_seconds"], longer),
        **columns,
        "is_identical": all(
            torch.equal(found[name].result, found["whole"].result)
            for found in rounds
            for name in ("streamed", "without_prefetch")
        ),
    }


def _overlap_round(job: Job, throttle: Throttle) -> dict[str, Any]:
    """Computing alone, reading alone, both at once, both in turn, and computing alone again: other programs come and go.

    The file is warm: sleep makes reading slow, not a disk.
    """
    prepare_cache(job.path, "warm")
    blocks = stored_blocks(job.component)
    throttle.seconds_per_byte = 0.0
    before = job.run("whole")
    spare = before.compute_seconds - read_seconds(blocks, throttle.reader, job.num_passes)
    throttle.seconds_per_byte = max(0.0, spare) / (job.num_passes * sum(entry.nbytes for entries in blocks for entry in entries))
    read = read_seconds(blocks, throttle.reader, job.num_passes)
    streamed, in_turn = job.run("streamed"), job.run("streamed", prefetch=False)
    throttle.seconds_per_byte = 0.0
    after = job.run("whole")
    return {
        "whole": before,
        "compute": statistics.mean((before.compute_seconds, after.compute_seconds)),
        "read": read,
        "streamed": streamed,
        "without_prefetch": in_turn,
    }


def stored_blocks(component: Component) -> list[list[TensorEntry]]:
    """The tensors of each block of the DiT, as its file has them."""
    tensors = component.checkpoint.tensors
    count = len(component.module.blocks)
    return [[entry for name, entry in tensors.items() if name.startswith(f"blocks.{number}.")] for number in range(count)]


def read_seconds(blocks: list[list[TensorEntry]], reader: Reader, num_passes: int) -> float:
    """Reading alone, as a stream reads: block after block into the same memory."""
    room = [torch.empty(math.prod(entry.shape), dtype=STORED_DTYPES[entry.dtype]) for entry in blocks[0]]
    began = time.perf_counter()
    for entries in blocks * num_passes:
        reader.read([Copy(entry, 0, entry.nbytes, target) for entry, target in zip(entries, room, strict=True)])
    return time.perf_counter() - began


def shown(found: dict[str, Any]) -> Iterator[str]:
    """The figures as lines for people."""
    for name, row in found["rows"].items():
        streamed, whole = _listed(row["streamed_seconds"]), _listed(row["whole_seconds"])
        yield f"{name:20} streamed / whole {row['ratio']:.2f}: {streamed} s / {whole} s"
    for name, row in found["memory"].items():
        streamed, whole = row["streamed_bytes"], row["whole_bytes"]
        yield f"{name:20} streamed holds {streamed / MIB:.0f} of {whole / MIB:.0f} MiB ({streamed / whole:.1%})"
    overlap = found["overlap"]
    for name in ("compute", "read", "streamed", "without_prefetch"):
        yield f"{'slow reader':20} {name.replace('_', ' ')}: {_listed(overlap[f'{name}_seconds'])} s"
    with_prefetch, without = overlap["ratio"], overlap["ratio_without_prefetch"]
    yield f"{'slow reader':20} streamed {with_prefetch:.2f} x the longer, without prefetch {without:.2f} x"
    yield from shown_checks(found)


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in seconds)
