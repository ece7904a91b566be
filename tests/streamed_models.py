"""Models with lists of alike blocks: a small tower, and tiny H3 models that are deep enough to stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from lazy_h3.commands.make_checkpoint import random_weight
from lazy_h3.commands.presets import tiny
from lazy_h3.h3.dit import DiT, dit_class
from lazy_h3.h3.formats.recipe import Recipe
from lazy_h3.h3.sampling import Latents, Schedule, sample
from lazy_h3.h3.text_encoder import TextEncoder
from lazy_h3.memory.component import Component
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import FillRequest
from memory_models import Block, Codec, component_of, random_weights, written
from torch import Tensor, nn

VOCABULARY = 16
WIDTH = 8
BLOCK_BYTES = (2 * WIDTH + WIDTH * WIDTH + WIDTH) * 4  # of an fp32 block of the tower
JOIN_SECONDS = 20.0  # a deadlock shows as a thread that is alive after this


class Tower(nn.Module):
    """Token ids through two lists of blocks."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"all": ("",)}
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {"forward": ("all",)}
    REPEATED: ClassVar[tuple[str, ...]] = ("blocks", "more")

    def __init__(self, num_blocks: int = 6, num_more: int = 0) -> None:
        super().__init__()
        self.config = None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(num_blocks))
        self.more = nn.ModuleList(Block(WIDTH) for _ in range(num_more))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, *self.more):
            x = block(x)
        return self.last(x.to(self.last.weight.dtype))


def tower(
    path: Path,
    *,
    num_blocks: int = 6,
    num_more: int = 0,
    stored: torch.dtype = torch.float32,
    compute: torch.dtype = torch.float32,
    recipes: Mapping[str, Recipe] | None = None,
    reader: Reader | None = None,
) -> Component:
    """A Tower whose file is written first if it is not there."""

    def build() -> Tower:
        return Tower(num_blocks, num_more)

    if not path.exists():
        written(path, random_weights(build, stored))
    return component_of(path, build, recipes=recipes, compute=compute, storage_dtype=Codec.storage_dtype, reader=reader)


DIT = replace(tiny().dit, num_layers=6, num_refiner_layers=3, time_embed_dim=32)
SCHEDULE = Schedule.official(4)
POINTS = tuple(sorted({time for times in SCHEDULE.times for time in times}))


def deep_dit(path: Path, *, compute: torch.dtype = torch.bfloat16, reader: Reader | None = None, **config: Any) -> Component:
    """A tiny DiT of six blocks; ``config`` replaces numbers of it."""
    wanted = replace(DIT, **config)
    return _h3_component(path, lambda: dit_class(wanted)(wanted), DiT.storage_dtype, compute, reader)


def tiny_text_encoder(
    path: Path, *, has_vision: bool = True, compute: torch.dtype = torch.bfloat16, reader: Reader | None = None
) -> Component:
    """All fifty layers, and three of the vision tower or none."""
    config = tiny().text_encoder if has_vision else replace(tiny().text_encoder, vision=None)
    return _h3_component(path, lambda: TextEncoder(config), TextEncoder.storage_dtype, compute, reader)


def _h3_component(
    path: Path, build: Callable[[], nn.Module], storage_dtype: Any, compute: torch.dtype, reader: Reader | None
) -> Component:
    with torch.device("meta"):
        module = build()
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        written(path, {n: random_weight(n, s, generator).to(type(module).storage_dtype(n, compute)) for n, s in shapes.items()})
    storage = type(module).storage_dtype
    return component_of(path, build, compute=compute, storage_dtype=storage, reader=reader)


def denoised(model: nn.Module, schedule: Schedule = SCHEDULE) -> Tensor:
    """Video and sound of the smallest size, as one row of numbers."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, 5, model.config.text_dim, generator=generator)
    noise = Latents(torch.randn(1, 24, 1, 2, 2, generator=generator), torch.randn(1, 32, 2, 3, generator=generator))
    with torch.inference_mode():
        result = sample(model, states, None, noise, schedule)
    return torch.cat([result.video.flatten(), result.audio.flatten()])


def streamed(component: Component, grant: int | None = None, parts: frozenset[str] | None = None, **more: Any) -> Component:
    """The component, filled in streamed mode."""
    component.fill(FillRequest(component.parts if parts is None else parts, "streamed", grant, **more))
    return component


def held(component: Component, num_blocks: int, parts: frozenset[str] | None = None, **more: Any) -> Component:
    """The component, streamed with so many blocks held."""
    wanted = component.parts if parts is None else parts
    cost = component.costs(wanted, more.get("points", ()))["streamed"]
    return streamed(component, cost.holding(num_blocks).resident, wanted, **more)


def whole(component: Component) -> Component:
    component.fill(FillRequest(component.parts))
    return component


@contextmanager
def threads(*work: Callable[[], object]) -> Iterator[None]:
    """Runs all of it beside the block; a thread that does not end, or fails, fails the test."""
    failures: list[BaseException] = []

    def guarded(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in work]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        for thread in running:
            thread.join(JOIN_SECONDS)
    assert not any(thread.is_alive() for thread in running), "deadlock"
    assert not failures, failures
