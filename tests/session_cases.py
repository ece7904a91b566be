"""A scene on which prompts are played: small models, nodes of ours and of other packs, and a record of who is in memory when."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from embedded_nodes import node, node_class
from lazy_h3.host.embedded import (
    EmbeddedHost,
    ExecutionBlocker,
    ProgressHandler,
    RunResult,
    add_progress_handler,
    get_executing_context,
    get_progress_state,
    interrupt,
    throw_exception_if_processing_interrupted,
)
from lazy_h3.host.embedded.port import EmbeddedPort
from lazy_h3.memory.handle import Handle
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import Resource
from lazy_h3.memory.store import Store
from lazy_h3.nodes.runtime import Runtime, installed
from memory_models import CPU, PLENTY, Foreign, codec
from torch import Tensor

CACHES = ("ram", "classic", "lru", "none")
WIDTH = 8
HANGS_SECONDS = 20
NAMES = ("te", "dit", "vae", "spare")
ANY = ("*",)
TEXT = ("STRING", {})
LATENT = ("LATENT",)

Kind = Literal["component", "foreign"]
Prompt = dict[str, dict[str, Any]]


class Wire(Handle):
    """A handle on any kind of resource."""

    __slots__ = ()

    def __init__(self, resource: Resource, store: Store) -> None:
        self._component = store.add(resource)
        self._store = store


class OwnersWire(Wire):
    """A handle on what somebody else fills and drops, as hosts do with their models: without a question and without a pin."""

    __slots__ = ()

    @contextmanager
    def use(self, *parts: str, node: tuple[str, str] | None = None) -> Iterator[Any]:
        if not self._component.resident_parts():
            self._component.loaded_by_owner()
        yield self._component.compute


class Owned(Foreign):
    """Its weights are zeros, and it adds one."""

    def compute(self, x: Tensor) -> Tensor:
        return x + 1 + self.weights[0]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """A host collects garbage after a failed prompt; what was there before the tests of a module is left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@functools.cache
def model_files() -> Path:
    """A folder for the files of the small models, written when they are first needed."""
    folder = Path(tempfile.mkdtemp(prefix="lazy-h3-sessions-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@dataclass
class Moment:
    """Living bytes of every resource at an event: ``S7`` starts, ``X7`` computes, ``F7`` has finished, ``end``."""

    event: str
    nbytes: dict[str, int]


class Record(ProgressHandler):
    """What is alive at every start and finish of a node, after everybody else has seen the event."""

    def __init__(self, resources: Mapping[str, Resource]) -> None:
        super().__init__("record")
        self.moments: list[Moment] = []
        self._resources = resources

    def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        self._be_last()
        self.note(f"S{node_id}")

    def finish_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        self.note(f"F{node_id}")

    def executes(self, node_id: str) -> None:
        self._be_last()
        self.note(f"X{node_id}")

    def note(self, event: str) -> None:
        self.moments.append(Moment(event, {name: resource.live_bytes() for name, resource in self._resources.items()}))

    def events(self, kind: str = "SXFe") -> list[str]:
        return [moment.event for moment in self.moments if moment.event[0] in kind]

    def stays(self, name: str) -> list[tuple[str, str]]:
        """(first event with it in memory, first event without it), for each time that it was read."""
        present = [(moment.event, moment.nbytes.get(name, 0) > 0) for moment in self.moments]
        steps = zip([("", False), *present], present, strict=False)
        changes = [(event, is_in) for (_, was_in), (event, is_in) in steps if was_in != is_in]
        came, gone = [e for e, is_in in changes if is_in], [e for e, is_in in changes if not is_in]
        return list(zip(came, [*gone, "never"], strict=False))

    def peak(self) -> int:
        return max(sum(moment.nbytes.values()) for moment in self.moments)

    def _be_last(self) -> None:
        handlers = get_progress_state().handlers
        handlers[self.name] = handlers.pop(self.name, self)


class Resources(dict[str, Resource]):
    """By name; made when they are first asked for.

    ``devices``: name -> device of what is no component. ``before_piece(name)`` runs on the reader's thread, several times a file.
    """

    def __init__(self, store: Store, kind: Kind, devices: Mapping[str, torch.device]) -> None:
        super().__init__()
        self.before_piece: Callable[[str], object] = lambda name: None
        self._store = store
        self._kind = kind
        self._devices = devices

    def __missing__(self, name: str) -> Resource:
        self[name] = self._component(name) if self._kind == "component" else self._owned(name)
        return self[name]

    def _component(self, name: str) -> Resource:
        reader = Reader(num_threads=1, before_chunk=lambda _: self.before_piece(name))
        return codec(model_files() / f"{name}.safetensors", kind=name, reader=reader)

    def _owned(self, name: str) -> Resource:
        return Owned(self._store, name, device=self._devices.get(name, CPU))

    def wire(self, name: str) -> Wire:
        return (Wire if self._kind == "component" else OwnersWire)(self[name], self._store)


@dataclass
class Scene:
    """A host with our kind of nodes and those of other packs.

    ``kept``: what nodes "Show" were given in the last run. ``during(node)`` happens while a node has a model in use.
    """

    host: EmbeddedHost
    runtime: Runtime
    resources: Resources
    record: Record
    kept: dict[str, Any] = field(default_factory=dict)
    during: Callable[[str], object] = lambda node: None

    @property
    def store(self) -> Store:
        return self.runtime.store

    def run(self, prompt: Prompt, **options: Any) -> RunResult:
        """The record is that of the last run. A prompt that hangs is interrupted."""
        self.record.moments.clear()
        self.kept.clear()
        self.store.ledger.begin_run(self.store.ledger.run + 1)
        impatience = threading.Timer(HANGS_SECONDS, self.host.interrupt)
        impatience.start()
        try:
            result = self.host.run(prompt, **options)
        finally:
            impatience.cancel()
        self.record.note("end")
        return result

    def succeed(self, prompt: Prompt, **options: Any) -> RunResult:
        result = self.run(prompt, **options)
        assert result.status == "success", result.error
        return result

    def loaded(self) -> list[str]:
        """Names of what was read in the last run, in order."""
        events = self.store.ledger.of_run(self.store.ledger.run)
        return [event.component for event in events if event.event == "load_end" and event.bytes]

    def reasons(self) -> dict[str, str]:
        """Of the releases of the last run."""
        events = self.store.ledger.of_run(self.store.ledger.run)
        return {event.component: event.reason for event in events if event.event == "release"}

    def executing(self) -> str:
        """Note that a node computes; gives its id."""
        context = get_executing_context()
        self.record.executes(context.node_id)
        return context.node_id

    def compute(self, wire: Wire, x: Tensor) -> Tensor:
        """What every node of this scene does with a model."""
        context = get_executing_context()
        owner = None if context is None else (context.prompt_id, context.node_id)
        with wire.use(node=owner) as model, torch.inference_mode():
            self.during(self.executing())
            return model(x).clone()


@contextmanager
def scene(
    kind: Kind = "component",
    *,
    sees: str = "list",
    policy: Any = "free",
    take_turns: bool = True,
    devices: Mapping[str, torch.device] | None = None,
    **options: Any,
) -> Iterator[Scene]:
    """``sees``: the executor's "list"; or, without it, what was "queued"; or "nothing". ``options``: of the embedded host."""
    visible = {"expose_probe": sees == "list", "expose_queue": sees != "nothing"}
    with EmbeddedHost(**{"seed": 0, **visible, **options}) as host:
        store = Store(pretended_total=PLENTY)
        with installed(Runtime(EmbeddedPort(host, CPU), store, policy=policy, take_turns=take_turns)) as runtime:
            resources = Resources(store, kind, devices or {})
            played = Scene(host, runtime, resources, Record(resources))
            host.node_classes |= {**nodes_of_ours(played), **nodes_of_others(played), **nodes_that_expand(played)}
            host.on_event(lambda name, _: add_progress_handler(played.record) if name == "execution_cached" else None)
            yield played


def signal(value: Any) -> Tensor:
    """Some numbers for a text; a tensor is what it is."""
    if isinstance(value, Tensor):
        return value
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(zlib.crc32(str(value).encode())))


def nodes_of_ours(played: Scene) -> dict[str, type]:
    """Loaders, and heavy nodes that take turns, written as the pack's own."""
    attachment, resources = played.runtime.attachment, played.resources

    def fingerprint(cls: type, **names: str) -> str:
        attachment.touch()
        return str(names)

    def identities(cls: type, **names: str) -> dict[int, Any]:
        return {slot: resources[name].identity for slot, name in enumerate(names.values())}

    def load(self: Any, **names: str) -> tuple[Wire, ...]:
        attachment.touch()
        return tuple(resources.wire(name) for name in names.values())

    async def heavy(self: Any, model: Wire, value: Any) -> tuple[Tensor]:
        await attachment.turn()
        return (played.compute(model, signal(value)),)

    def heavy_class(output: str, **attributes: Any) -> type:
        return node_class(heavy, {"model": ("MODEL",), "value": ANY}, (output,), TAKES_TURNS=True, **attributes)

    loader = {"IS_CHANGED": classmethod(fingerprint), "lazy_h3_resources": classmethod(identities)}
    return {
        "Load": node_class(load, {"name": TEXT}, ("MODEL",), **loader),
        "LoadBoth": node_class(load, {"name": TEXT, "other": TEXT}, ("MODEL", "MODEL"), **loader),
        "Encode": heavy_class("CONDITIONING", CARRIES=()),
        "Sample": heavy_class("LATENT"),
        "Decode": heavy_class("IMAGE"),
    }


def nodes_of_others(played: Scene) -> dict[str, type]:
    """Nodes that know nothing of sessions."""

    def passes(self: Any, value: Any) -> tuple[Any]:
        return (value,)

    def uses(self: Any, model: Wire, value: Any) -> tuple[Tensor]:
        return (played.compute(model, signal(value)),)

    async def uses_late(self: Any, model: Wire, value: Any, seconds: float) -> tuple[Tensor]:
        await asyncio.sleep(seconds)
        return (played.compute(model, signal(value)),)

    async def waits(self: Any, value: Any, seconds: float) -> tuple[Any]:
        await asyncio.sleep(seconds)
        return (value,)

    def after(self: Any, value: Any, other: Any) -> tuple[Any]:
        return (value,)

    def many(self: Any, values: str) -> tuple[list[str]]:
        return (values.split(),)

    def together(self: Any, values: list[Any]) -> tuple[Tensor]:
        return (torch.cat(values),)

    def blocks(self: Any, value: Any) -> tuple[ExecutionBlocker]:
        return (ExecutionBlocker(None),)

    def fails(self: Any, value: Any) -> tuple[Any]:
        raise ArithmeticError("no good")

    def fails_inside(self: Any, model: Wire, value: Any) -> tuple[Any]:
        with model.use() as inside:
            inside(signal(value))
            raise ArithmeticError("no good")

    def stops(self: Any, value: Any) -> tuple[Any]:
        interrupt()
        throw_exception_if_processing_interrupted()
        return (value,)

    def stops_inside(self: Any, model: Wire, value: Any) -> tuple[Any]:
        with model.use() as inside:
            inside(signal(value))
            return stops(self, value)

    def inhibits(self: Any, value: Any, nodes: str, execution_list: Any) -> tuple[Any]:
        execution_list.inhibit_nodes(nodes.split())
        return (value,)

    def show(self: Any, value: Any) -> tuple[()]:
        played.kept[get_executing_context().node_id] = value
        return ()

    both = {"model": ANY, "value": ANY}
    return {
        "Passes": node_class(passes, {"value": ANY}),
        "Reroute": node_class(passes, {"value": ANY}),
        "Uses": node_class(uses, both, LATENT),
        "UsesLate": node_class(uses_late, {**both, "seconds": ("FLOAT",)}, LATENT),
        "Waits": node_class(waits, {"value": ANY, "seconds": ("FLOAT",)}),
        "After": node_class(after, {"value": ANY, "other": ANY}),
        "Many": node_class(many, {"values": TEXT}, OUTPUT_IS_LIST=(True,)),
        "Together": node_class(together, {"values": ANY}, INPUT_IS_LIST=True),
        "Blocks": node_class(blocks, {"value": ANY}),
        "Fails": node_class(fails, {"value": ANY}),
        "FailsInside": node_class(fails_inside, both),
        "Stops": node_class(stops, {"value": ANY}),
        "StopsInside": node_class(stops_inside, both),
        "Inhibits": _with_hidden(node_class(inhibits, {"value": ANY, "nodes": TEXT}), execution_list="EXECUTION_LIST"),
        "Show": node_class(show, {"value": ANY}, (), OUTPUT_NODE=True),
    }


def nodes_that_expand(played: Scene) -> dict[str, type]:
    """Nodes of others that put more nodes into the prompt."""

    def sampled_later(model: Any, value: Any, parent: str) -> tuple[str, Prompt]:
        """A child that samples, and before it one that makes it wait a moment."""
        first, child = (f"{parent}.0.0.{n}" for n in (0, 1))
        return child, {first: node("Waits", value=value, seconds=0.001), child: node("Sample", model=model, value=[first, 0])}

    def expands(self: Any, model: Any, value: Any) -> dict[str, Any]:
        """Samples once, in a child."""
        parent = played.executing()
        child, graph = sampled_later(model, value, parent)
        last = f"{parent}.0.0.2"
        return {"result": ([last, 0],), "expand": {**graph, last: node("Passes", value=[child, 0])}}

    def expands_to_loader(self: Any, name: str) -> dict[str, Any]:
        """Loads in a child, and gives out what that gives."""
        child = f"{get_executing_context().node_id}.0.0.1"
        return {"result": ([child, 0],), "expand": {child: node("Load", name=name)}}

    def expands_to_output(self: Any, model: Any, value: Any) -> dict[str, Any]:
        """Samples in a child for which nobody waits, because it is only shown."""
        parent = played.executing()
        child, graph = sampled_later(model, value, parent)
        shown = node("Show", value=[child, 0])
        passed = f"{parent}.0.0.2"
        return {"result": ([passed, 0],), "expand": {passed: node("Passes", value=value), **graph, f"{parent}.0.0.3": shown}}

    def repeats(self: Any, model: Any, value: Any, times: int) -> dict[str, Any]:
        """Samples ``times`` times, each in a child of the last: a loop as other packs write it."""
        parent = played.executing()
        child, rest = f"{parent}.0.0.1", f"{parent}.0.0.2"
        graph = {child: node("Sample", model=model, value=value)}
        if times > 1:
            graph[rest] = node("Repeats", model=model, value=[child, 0], times=times - 1)
        return {"result": ([rest if times > 1 else child, 0],), "expand": graph}

    both, raw = {"model": ANY, "value": ANY}, ("*", {"rawLink": True})
    return {
        "ExpandsByObject": node_class(expands, both, LATENT),
        "ExpandsByLink": node_class(expands, {**both, "model": raw}, LATENT),
        "ExpandsToLoader": node_class(expands_to_loader, {"name": TEXT}, ("MODEL",)),
        "ExpandsToOutput": node_class(expands_to_output, {**both, "model": raw}, LATENT),
        "Repeats": node_class(repeats, {**both, "model": raw, "times": ("INT",)}, LATENT),
    }


def _with_hidden(cls: type, **hidden: str) -> type:
    required = cls.INPUT_TYPES()
    cls.INPUT_TYPES = classmethod(lambda _: {**required, "hidden": hidden})
    return cls


# Pieces of prompts.


def loaders(names: Iterable[str] = ("te", "dit", "vae")) -> Prompt:
    """Nodes "1", "2" and "3", unless they are named otherwise."""
    return {str(n): node("Load", name=name) for n, name in enumerate(names, 1)}


def branch(text: str, first: int = 4) -> Prompt:
    """Encode, sample, decode and show: four nodes from number ``first`` on, with the models of 1, 2 and 3."""
    encode, sample, decode, shown = (str(n) for n in range(first, first + 4))
    return {
        encode: node("Encode", model=["1", 0], value=text),
        sample: node("Sample", model=["2", 0], value=[encode, 0]),
        decode: node("Decode", model=["3", 0], value=[sample, 0]),
        shown: node("Show", value=[decode, 0]),
    }


def chain(text: str = "a cat") -> Prompt:
    """Text to picture: 4 encodes, 5 samples, 6 decodes, 7 shows."""
    return {**loaders(), **branch(text)}
