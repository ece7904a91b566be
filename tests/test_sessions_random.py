"""Any graph under any budget, disturbed at any moment: it ends, it stays within the budget, and what it makes is right.

``LAZY_H3_SEEDS`` says how many graphs are tried.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from embedded_nodes import node, node_class
from lazy_h3.host.embedded import get_executing_context
from lazy_h3.memory import turns
from lazy_h3.memory.component import Component
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import Resource
from lazy_h3.nodes.demand import Demand
from memory_models import CPU, Codec, CodecConfig, component_of, random_weights, written
from session_cases import (
    ANY,
    CACHES,
    Prompt,
    Scene,
    model_files,
    quick_collections,  # noqa: F401  (a fixture)
    scene,
)
from streamed_models import VOCABULARY, Tower
from torch import Tensor, nn

SEEDS = range(int(os.environ.get("LAZY_H3_SEEDS", "12")))
POLICIES = ("free", "auto", "keep")
DEADLINE_SECONDS = 60.0  # a run takes a tenth of a second
ENDS_SECONDS = 10.0
PASSES = 3
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "te": lambda: Tower(6),
    "dit": lambda: Tower(9, 4),
    "vae": lambda: Codec(CodecConfig(20)),
    "spare": lambda: Codec(CodecConfig(12)),
}  # towers can be streamed, codecs cannot
READ_AHEAD, OWN_BLOCKS = "lazy-h3-prefetch", "lazy-h3-stream"


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ROUND_SECONDS", 0.001)


def model_of(name: str, before_piece: Callable[[int], None] | None = None) -> Component:
    """One of the models, read in many pieces."""
    path = model_files() / f"random-{name}.safetensors"
    if not path.exists():
        written(path, random_weights(MODELS[name]))
    reader = Reader(num_threads=1, chunk_bytes=256, before_chunk=before_piece)
    return component_of(path, MODELS[name], storage_dtype=Codec.storage_dtype, kind=name, reader=reader)


@functools.cache
def size_of(name: str) -> int:
    return model_of(name).nbytes()


def computed(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, Tower):
        return model((x * 100).long() % VOCABULARY).mean(1)
    width = model.config.width
    return model(torch.nn.functional.pad(x, (0, width - x.shape[-1])))[..., : x.shape[-1]]


class Disturbance:
    """What happens to a run from outside, at moments that chance picks. ``pressures`` are for the thread that computes."""

    def __init__(self, chance: random.Random, played: Scene, *, pressure: float, interrupts: float, delay: float) -> None:
        self.num_interrupts = 0
        self.is_over = False
        self._chance = chance
        self._played = played
        self._pressure, self._interrupts, self._delay = pressure, interrupts, delay
        self._lock = threading.Lock()

    def now(self, *_: Any) -> None:
        """A moment of a thread that computes or fills."""
        if self._falls(self._pressure):
            self._pick(self._pressures())()
        self.while_reading()

    def while_reading(self, *_: Any) -> None:
        """A moment of a thread that reads: for such a thread the store may wait."""
        if self._falls(self._interrupts):
            self.num_interrupts += 1
            self._played.host.interrupt()
        if self._delay and not self.is_over:
            time.sleep(self._delay * self._number())

    def elsewhere(self) -> None:
        """A moment of a thread that has nothing to do with it all, and must not touch the host's models."""
        if self._falls(self._pressure):
            for resource in self._played.store.resident():
                self._played.store.release_later(resource, "asked for from elsewhere", force=True)

    def _pressures(self) -> list[Callable[[], object]]:
        store, management = self._played.store, self._played.host.model_management
        return [
            lambda: store.release_all("pressure", force=True),
            lambda: store.release_all("a hint"),
            lambda: management.free_memory(1 << 60, CPU),
            lambda: [entry.model.partially_unload(CPU, 1) for entry in list(management.current_loaded_models)],
            store.settle,
        ]

    def _falls(self, share: float) -> bool:
        return not self.is_over and self._number() < share

    def _number(self) -> float:
        with self._lock:
            return self._chance.random()

    def _pick(self, actions: list[Callable[[], object]]) -> Callable[[], object]:
        with self._lock:
            return self._chance.choice(actions)


class QuietDisturbance(Disturbance):
    """For nodes on threads of their own: the host's list of models is left to the host's thread."""

    def _pressures(self) -> list[Callable[[], object]]:
        store = self._played.store
        return [lambda: store.release_all("pressure", force=True), store.settle]


@dataclass
class Watch:
    """Living bytes at every event, and all the time on a thread of its own, which also disturbs."""

    played: Scene
    made: Disturbance
    highest: int = 0

    def look(self, *_: Any) -> None:
        self.highest = max(self.highest, self.played.store.live_bytes())

    @contextmanager
    def always(self) -> Iterator[None]:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.0005):
                self.look()
                self.made.elsewhere()

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        with self.played.store.ledger.observed(self.look):
            yield
        ended.set()
        watching.join()


class Known:
    """What plans find their components in."""

    def __init__(self, resources: Mapping[str, Resource]) -> None:
        self._resources = resources

    def find(self, key: Any) -> Resource | None:
        return next((resource for resource in self._resources.values() if resource.identity == key), None)


# Nodes.


def heavy_nodes(played: Scene, disturbance: Disturbance) -> dict[str, type]:
    """Nodes that compute with one model each, as the pack's own do, and what stands around them."""
    shared = played.runtime

    def work(wire: Any, value: Any) -> Tensor:
        context = get_executing_context()
        x = value if isinstance(value, Tensor) else torch.randn(1, 8, generator=torch.Generator().manual_seed(len(value)))
        report = shared.progress(PASSES)
        with wire.use(node=(context.prompt_id, context.node_id), num_passes=PASSES) as model, torch.inference_mode():
            for done in range(PASSES):
                disturbance.now()
                x = torch.tanh(computed(model, x))
                report(done + 1, PASSES)
        return x.clone()

    async def heavy(self: Any, model: Any, value: Any) -> tuple[Tensor]:
        await shared.attachment.turn()
        return (work(model, value),)

    async def heavy_on_thread(self: Any, model: Any, value: Any) -> tuple[Tensor]:
        await shared.attachment.turn()
        return (await asyncio.to_thread(work, model, value),)

    def demand(cls: type, inputs: Mapping[str, Any], sizes: Any, component: Component) -> Demand:
        return Demand(component.parts, PASSES, activation_bytes=64)

    def expands(self: Any, model: Any, value: Any, kind: str) -> dict[str, Any]:
        first, last = (f"{get_executing_context().node_id}.0.0.{n}" for n in (1, 2))
        graph = {first: node(kind, model=model, value=value), last: node(kind, model=model, value=[first, 0])}
        return {"result": ([last, 0],), "expand": graph}

    def is_positive(self: Any, value: Tensor) -> tuple[bool]:
        return (bool(value.sum() > 0),)

    def total(self: Any, values: list[Tensor]) -> tuple[Tensor]:
        return (torch.tanh(sum(values)),)

    def adds(self: Any, value: Tensor, other: Tensor) -> tuple[Tensor]:
        return (torch.tanh(value + other),)

    made = {}
    for kind, function in (("Heavy", heavy), ("Threaded", heavy_on_thread)):
        for name in MODELS:
            attributes = {"TAKES_TURNS": True, "USES": name, "demand": classmethod(demand)}
            made[f"{kind}-{name}"] = node_class(function, {"model": ("MODEL",), "value": ANY}, ("LATENT",), **attributes)
    expanding = {"model": ("*", {"rawLink": True}), "value": ANY, "kind": ("STRING", {})}
    return {
        **made,
        "Expands": node_class(expands, expanding, ("LATENT",)),
        "IsPositive": node_class(is_positive, {"value": ANY}, ("BOOLEAN",)),
        "Total": node_class(total, {"values": ANY}, ("LATENT",), INPUT_IS_LIST=True),
        "Adds": node_class(adds, {"value": ANY, "other": ANY}, ("LATENT",)),
    }


def random_prompt(chance: random.Random, kind: str) -> Prompt:
    """Branches of heavy nodes, some of which split, join, expand, map over a list, or are never asked for."""
    names = [*MODELS]
    prompt: Prompt = {f"L{name}": node("Load", name=name) for name in names}
    ends: list[list[Any]] = []

    def add(class_type: str, **inputs: Any) -> list[Any]:
        number = str(len(prompt))
        prompt[number] = node(class_type, **inputs)
        return [number, 0]

    def heavy(value: Any) -> list[Any]:
        name = chance.choice(names)
        if chance.random() < 0.15:
            return add("Expands", model=[f"L{name}", 0], value=value, kind=f"{kind}-{name}")
        return add(f"{kind}-{name}", model=[f"L{name}", 0], value=value)

    for _ in range(chance.randint(1, 3)):
        value: Any = add("Passes", value="x" * chance.randint(1, 9))
        if chance.random() < 0.2:
            value = add("Total", values=heavy(add("Many", values=" ".join("x" * chance.randint(1, 9) for _ in range(3)))))
        for _ in range(chance.randint(1, 3)):
            value = heavy(value)
            if chance.random() < 0.25:
                lazily = {"on_true": heavy(value), "on_false": heavy(value)}
                value = add("ComfySwitchNode", switch=add("IsPositive", value=value), **lazily)
            if ends and chance.random() < 0.3:
                value = add("Adds", value=value, other=chance.choice(ends))
        ends.append(value)
    for end in ends:
        add("Show", value=end)
    return prompt


# Runs.


def seen_after(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def threads_of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith((READ_AHEAD, "lazy-h3-read"))]


def finished(work: Callable[[], Any]) -> Any:
    """The result of some work on a thread; where it stands, if it does not end."""
    results: list[Any] = []
    working = threading.Thread(target=lambda: results.append(work()), daemon=True)
    working.start()
    working.join(DEADLINE_SECONDS)
    if working.is_alive():
        stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
        pytest.fail("deadlock:\n" + "\n".join(stacks))
    return results[0]


@contextmanager
def stage(chance: random.Random, **options: Any) -> Iterator[tuple[Scene, Disturbance]]:
    """A scene with these models and nodes. ``kind``: whether heavy nodes compute on threads of their own."""
    kind = options.pop("kind")
    strengths = {name: options.pop(name, 0.0) for name in ("pressure", "interrupts", "delay")}
    with scene(**options) as played:
        made = (QuietDisturbance if kind == "Threaded" else Disturbance)(chance, played, **strengths)
        played.resources.update({name: model_of(name, made.while_reading) for name in MODELS})
        played.runtime.catalogue = Known(played.resources)
        played.host.node_classes |= heavy_nodes(played, made)
        played.store.on_fill.append(made.now)
        yield played, made
        made.is_over = True


def calm_results(prompt: Prompt) -> dict[str, Tensor]:
    with stage(random.Random(0), kind="Heavy", policy="keep", take_turns=False) as (calm, _):
        calm.succeed(prompt)
        return dict(calm.kept)


def assert_settled(played: Scene, is_empty: bool, was_pressed: bool) -> None:
    """After a run: nothing is in use or on its way, and the host knows what is there."""
    assert seen_after(ENDS_SECONDS, lambda: not threads_of_ours())
    for status in played.store.statuses():
        assert status.state in ("absent", "resident"), status
        assert not status.is_pinned, status
    assert not (is_empty and played.store.live_bytes())
    played.store.settle()  # as the next event would: a thread that outlived its prompt may have let go of something later
    listed = {
        entry.model.resource.name: entry.model.loaded_size() for entry in played.host.model_management.current_loaded_models
    }
    resident = {resource.name for resource in played.store.resident()}
    assert resident <= listed.keys()
    assert not any(listed[name] for name in listed.keys() - resident)
    assert was_pressed or listed.keys() == resident  # an entry of which the host has taken everything may stay


def assert_runs(seed: int, kind: str) -> str:
    """One graph, run twice with different disturbances; says how it ended."""
    chance = random.Random(seed)
    prompt = random_prompt(chance, kind)
    policy, cache = chance.choice(POLICIES), chance.choice(CACHES)
    largest, everything = max(map(size_of, MODELS)), sum(map(size_of, MODELS))
    budget = chance.choice([None, None, largest, largest * 6 // 5, everything, chance.randint(largest // 2, everything)])
    strengths = {
        "pressure": chance.choice([0, 0.03, 0.2]),
        "interrupts": chance.choice([0, 0, 0.01]),
        "delay": chance.choice([0, 0.0005, 0.002]),
    }
    wanted = calm_results(prompt)
    options = {"policy": policy, "cache": cache, "take_turns": chance.random() < 0.7, "seed": seed, **strengths}
    with stage(chance, kind=kind, **options) as (played, made):
        played.store.budget = budget
        watch = Watch(played, made)
        ends = []
        for _ in range(2):
            with watch.always():
                result = finished(functools.partial(played.run, prompt))
            if kind == "Threaded":  # a thread does not end with its prompt
                assert seen_after(ENDS_SECONDS, lambda: not any(status.is_pinned for status in played.store.statuses()))
            assert budget is None or watch.highest <= budget, (watch.highest, budget)
            outlived = kind == "Threaded" and result.status != "success"  # such a thread may have begun to fill afterwards
            assert_settled(played, policy == "free" and not outlived, was_pressed=bool(strengths["pressure"]))
            ends.append(result.status)
            if result.status == "success":
                assert all(torch.equal(played.kept[name], value) for name, value in wanted.items() if name in played.kept)
                assert played.kept.keys() == wanted.keys() or result.cached
            elif result.status == "error":
                assert result.error.type.endswith("MemoryRefused"), result.error
                assert budget is not None
                assert kind == "Threaded" or played.runtime.plan().refusal is not None, result.error
            else:
                assert made.num_interrupts
        made.is_over = True
        read_ahead = sum(event.reason == "ahead of its first user" for event in played.store.ledger.events)
        played.store.release_all("the end", force=True)
        assert played.store.live_bytes() == 0
        assert not any(entry.model.loaded_size() for entry in played.host.model_management.current_loaded_models)
    return f"{' '.join(ends)} {read_ahead}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_graph_that_is_disturbed_ends_within_its_budget_and_is_right(seed):
    assert_runs(seed, "Heavy")


@pytest.mark.parametrize("seed", SEEDS)
def test_so_it_does_with_heavy_nodes_that_compute_at_once(seed):
    assert_runs(seed, "Threaded")
