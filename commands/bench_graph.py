"""``bench graph``: what the analysis of a prompt and its session cost, in milliseconds beside the number of nodes and links.

Prompts of branches through three shared models run in the embedded host, with nodes that compute nothing. Every call that the
host makes of the session is timed, waiting for turns included; the host's own work is not.
"""

from __future__ import annotations

import gc
import logging
import time
import types
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..host.attachment import Attachment
from ..host.embedded.host import EmbeddedHost
from ..host.embedded.port import EmbeddedPort
from ..memory.component import Component
from ..memory.graph import link_of
from ..memory.handle import Handle
from ..memory.resource import Cost, FillRequest, Identity, Parts
from ..memory.session import Session
from ..memory.store import Store
from .bench import figures, note, shown_checks

log = logging.getLogger("lazy_h3")

SIZES = (50, 500, 1000, 2000)
MODELS = ("text encoder", "transformer", "video VAE")
PLENTY = 1 << 50
CPU = torch.device("cpu")
MOST_GROWTH = 1.5  # of the cost of a node or link from 500 to 2,000 nodes: twice would be halfway to quadratic
SIGHTS = {"the executor's list": True, "outputs alone": False}


class Featherweight:
    """A resource of no size."""

    parts: Parts = frozenset({"weights"})
    device = CPU

    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = Identity(name, ())
        self._is_filled = False

    def costs(self, parts: Parts, points: tuple[float, ...] = ()) -> dict[str, Cost]:
        return {"whole": Cost(0)}

    def resident_parts(self) -> Parts:
        return self.parts if self._is_filled else frozenset()

    def fill(self, request: FillRequest) -> None:
        self._is_filled = True

    def drop(self) -> None:
        self._is_filled = False

    def shrink(self, nbytes: int) -> int:
        return 0

    def live_bytes(self) -> int:
        return 0

    def dirty(self) -> None:
        return None


class Clock:
    """Seconds that this thread computes inside ``running`` blocks; one inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._depth += 1
        began = time.thread_time()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.thread_time() - began

    @types.coroutine
    def steps_of(self, awaitable: Awaitable[None]) -> Generator[Any, Any, None]:
        """Await it; the time between its steps is that of others."""
        steps = awaitable.__await__()
        while True:
            with self.running():
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step


class TimedAttachment(Attachment):
    """``prompt``: everything that is done for a prompt; ``events``: starts and finishes of nodes alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prompt, self.events = Clock(), Clock()
        self.num_events = 0

    def touch(self) -> Session | None:
        with self.prompt.running():
            return super().touch()

    async def turn(self) -> None:
        await self.prompt.steps_of(super().turn())

    def started(self, node: str) -> None:
        self.num_events += 1
        with self.prompt.running(), self.events.running():
            super().started(node)

    def finished(self, node: str) -> None:
        self.num_events += 1
        with self.prompt.running(), self.events.running():
            super().finished(node)

    def close(self) -> None:
        with self.prompt.running():
            super().close()


@dataclass(frozen=True)
class Measured:
    """One prompt."""

    nodes: int
    links: int
    seconds: float
    event_seconds: float  # of one event, on average

    @property
    def seconds_per_part(self) -> float:
        """Of a node or a link."""
        return self.seconds / (self.nodes + self.links)


def bench_graph(repeats: int) -> dict[str, Any]:
    """The best of ``repeats`` runs for each size, with and without the sight of the executor's list."""
    measure(SIZES[0], True)  # imports and first calls
    rows = {sight: [_best(sight, size, repeats) for size in SIZES] for sight in SIGHTS}
    tables = {sight: [{**vars(row), "seconds_per_part": row.seconds_per_part} for row in found] for sight, found in rows.items()}
    checks = {}
    for sight, (small, middle, _, large) in rows.items():
        checks[f"{sight}: 500 nodes under 50 ms in total"] = middle.seconds < 0.05
        checks[f"{sight}: an event under 50 us at 50 nodes"] = small.event_seconds < 50e-6
        checks[f"{sight}: linear in nodes and links up to 2,000 nodes"] = (
            large.seconds_per_part <= MOST_GROWTH * middle.seconds_per_part
        )
    return figures({"tables": tables}, checks)


def _best(sight: str, size: int, repeats: int) -> Measured:
    note(f"graph of {size} nodes, by {sight}")
    return min((measure(size, SIGHTS[sight]) for _ in range(repeats)), key=lambda measured: measured.seconds)


def measure(size: int, is_probe_exposed: bool) -> Measured:
    """Run a prompt of ``size`` nodes once. Raises RuntimeError if it fails or reads a model twice."""
    prompt = branches(size)
    with EmbeddedHost(seed=0, expose_probe=is_probe_exposed) as host, _undisturbed():
        store = Store(pretended_total=PLENTY)
        attachment = TimedAttachment(EmbeddedPort(host, CPU), store)
        host.node_classes |= node_classes(attachment)
        result = host.run(prompt)
        loads = [event.component for event in store.ledger.events if event.event == "load_begin"]
        if result.error is not None or sorted(loads) != sorted(MODELS) or store.resident():
            raise RuntimeError(f"The prompt of {size} nodes did not run as it should: {result.error or loads}.")
    links = sum(link_of(value) is not None for spec in prompt.values() for value in spec["inputs"].values())
    return Measured(len(prompt), links, attachment.prompt.seconds, attachment.events.seconds / attachment.num_events)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without lines of log, and without collections of garbage, which take longer the more the process has loaded."""
    level = log.level
    log.setLevel(logging.WARNING)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        log.setLevel(level)


def branches(size: int) -> dict[str, dict[str, Any]]:
    """Three loaders, then branches of ten: text, pass-through, encode, sample, decode, a lazy switch, three filters, output."""
    prompt = {name: _node("Load", name=name) for name in MODELS}
    encoder, transformer, vae = ([name, 0] for name in MODELS)
    for number in range((size - len(prompt)) // 10):
        n = [f"{number}.{step}" for step in range(10)]
        prompt |= {
            n[0]: _node("Pass", value=f"text {number}"),
            n[1]: _node("Pass", value=encoder),
            n[2]: _node("Compute", model=[n[1], 0], value=[n[0], 0]),
            n[3]: _node("Compute", model=transformer, value=[n[2], 0]),
            n[4]: _node("Compute", model=vae, value=[n[3], 0]),
            n[5]: _node("ComfySwitchNode", switch=True, on_true=[n[4], 0], on_false=[n[0], 0]),
            **{n[step]: _node("Pass", value=[n[step - 1], 0]) for step in (6, 7, 8)},
            n[9]: _node("Show", value=[n[8], 0]),
        }
    for number in range(size - len(prompt)):
        prompt[f"more {number}"] = _node("Show", value=[n[8], 0])
    return prompt


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def node_classes(attachment: Attachment) -> dict[str, type]:
    """Nodes that do nothing, but tell the session what nodes tell it."""
    store = attachment.store
    resources = {name: Featherweight(name) for name in MODELS}

    class Wire(Handle):
        def __init__(self, resource: Featherweight) -> None:
            self._component: Any = resource
            self._store = store

    class Load:
        RETURN_TYPES = ("MODEL",)
        FUNCTION = "load"

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"name": ("STRING",)}}

        @classmethod
        def IS_CHANGED(cls, name: str) -> str:
            attachment.touch()
            return name

        @classmethod
        def lazy_h3_resources(cls, name: str) -> dict[int, Identity]:
            return {0: resources[name].identity}

        def load(self, name: str) -> tuple[Handle]:
            attachment.touch()
            return (Wire(resources[name]),)

    class Compute:
        RETURN_TYPES = ("LATENT",)
        FUNCTION = "compute"
        TAKES_TURNS = True

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"model": ("*",), "value": ("*",)}}

        async def compute(self, model: Handle, value: Any) -> tuple[Any]:
            await attachment.turn()
            component: Component = model.component
            with store.use(component):
                return (value,)

    class Pass:
        RETURN_TYPES: tuple[str, ...] = ("*",)
        FUNCTION = "go"

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"value": ("*",)}}

        def go(self, value: Any) -> tuple[Any]:
            return (value,)

    class Show(Pass):
        RETURN_TYPES = ()
        OUTPUT_NODE = True

    return {cls.__name__: cls for cls in (Load, Compute, Pass, Show)}


def shown(found: dict[str, Any]) -> Iterator[str]:
    """The figures as lines for people."""
    yield f"{'seen':20} {'nodes':>6} {'links':>6} {'ms in total':>12} {'us an event':>12} {'us a node or link':>18}"
    for sight, rows in found["tables"].items():
        for row in rows:
            total, event, part = row["seconds"] * 1e3, row["event_seconds"] * 1e6, row["seconds_per_part"] * 1e6
            yield f"{sight:20} {row['nodes']:6} {row['links']:6} {total:12.1f} {event:12.1f} {part:18.2f}"
    yield from shown_checks(found)
