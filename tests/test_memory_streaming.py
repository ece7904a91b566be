from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lazy_h3.h3.formats.recipe import Recipe, Rows, copied
from lazy_h3.memory.checkpoint import CheckpointError
from lazy_h3.memory.component import Component
from lazy_h3.memory.ledger import Ledger
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import FillRequest
from lazy_h3.memory.skeleton import WeightsNotLoaded
from lazy_h3.memory.store import Store
from memory_models import PLENTY, BytesRead, component_of, random_weights, written
from safetensors.torch import load_file, save_file
from streamed_models import (
    BLOCK_BYTES,
    WIDTH,
    Tower,
    deep_dit,
    denoised,
    held,
    streamed,
    threads,
    tiny_text_encoder,
    tower,
    whole,
)
from torch import Tensor, nn

IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])
REST_BYTES = (16 * WIDTH + WIDTH * WIDTH + WIDTH) * 4  # embedding table and last layer of the tower
LAST_BYTES = (WIDTH * WIDTH + WIDTH) * 4
DENOISER = frozenset({"denoiser"})
TEXT = frozenset({"text"})
LANGUAGE = frozenset({"language"})


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "tower.safetensors"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Iterator[Component]:
    component = tiny_text_encoder(tmp_path_factory.mktemp("encoder") / "encoder.safetensors")
    yield component
    component.drop()


@pytest.fixture(scope="module")
def dit(tmp_path_factory) -> Iterator[Component]:
    component = deep_dit(tmp_path_factory.mktemp("dit") / "dit.safetensors")
    yield component
    component.drop()


@torch.inference_mode()
def passes(component: Component, count: int = 3) -> list[Tensor]:
    """Results of several passes with different inputs."""
    return [component.module((IDS + number) % 16) for number in range(count)]


def whole_passes(component: Component, count: int = 3) -> list[Tensor]:
    results = passes(whole(component), count)
    component.drop()
    return results


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, found, expected))
    assert all(tensor.isfinite().all() for tensor in expected)


def assert_gone(component: Component) -> None:
    """Drops it: no weight, thread or changed forward is left."""
    streams = [stream for fill in component._streamed for stream in fill._streams]
    reading = [thread for stream in streams for thread in stream._reading._threads]
    component.drop()
    assert not any(thread.is_alive() for thread in reading)
    assert_empty(component)


def assert_empty(component: Component) -> None:
    assert component.live_bytes() == 0
    assert component.resident_parts() == frozenset()
    assert not any("forward" in module.__dict__ for module in component.module.modules())
    assert all(tensor.is_meta for tensor in component.module.state_dict(keep_vars=True).values())


# The same bits as in whole mode.


@pytest.mark.parametrize(("num_held", "num_passes", "prefetch"), [(0, None, True), (1, 3, True), (3, 1, True), (0, 3, False)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_passes_have_the_bits_of_whole_mode(path, stored, compute, num_passes, prefetch, num_held):
    component = tower(path, stored=stored, compute=compute)
    expected = whole_passes(component)
    assert_same(passes(held(component, num_held, num_passes=num_passes, prefetch=prefetch)), expected)
    assert_gone(component)


@pytest.mark.parametrize("lengths", [(6, 4), (3, 7), (2, 5), (5, 1)])
def test_two_lists_pass_through_rings_of_their_own(path, lengths):
    component = tower(path, num_blocks=lengths[0], num_more=lengths[1])
    expected = whole_passes(component)
    for num_held in (0, 1, 2):
        assert_same(passes(held(component, num_held)), expected)
        assert_gone(component)


def test_blocks_may_be_row_ranges_of_common_tensors(path):
    """As files do that stack the layers, and halves that stand in the file the other way round."""
    weights = random_weights(lambda: Tower(4))
    stacked = torch.cat([weights[f"blocks.{i}.linear.weight"] for i in range(4)])
    written(path, {**weights, "stack": stacked})
    recipes = {name: copied(name) for name in weights}
    half = WIDTH // 2
    for i in range(4):
        rows = (Rows("stack", i * WIDTH + half, half), Rows("stack", i * WIDTH, half))
        recipes[f"blocks.{i}.linear.weight"] = Recipe(rows)
    component = tower(path, num_blocks=4, recipes=recipes)
    expected = whole_passes(component)
    assert_same(passes(streamed(component)), expected)
    component.drop()
    plain = tower(path.with_name("plain.safetensors"), num_blocks=4)
    assert not torch.equal(whole_passes(plain)[0], expected[0])


@torch.inference_mode()
def test_the_text_encoder_streams_in_one_pass_with_the_same_bits(encoder):
    ids, positions = torch.tensor([7, 200, 7, 31, 5]), torch.arange(5).expand(3, -1)
    expected = whole(encoder).module(ids, positions)
    encoder.drop()
    for num_held in (0, 20):
        assert torch.equal(held(encoder, num_held, LANGUAGE, num_passes=1).module(ids, positions), expected)
        assert encoder.live_bytes() < 0.55 * encoder.nbytes(LANGUAGE)
        assert_gone(encoder)


@torch.inference_mode()
def test_the_vision_tower_streams_although_it_reads_its_position_table_itself(encoder):
    """The table is an ``nn.Embedding`` that is never called: it cannot be gathered row by row."""
    config = encoder.module.config.vision
    patches = torch.randn(16, 3 * config.temporal_patch_size * config.patch_size**2)
    expected = whole(encoder).module.encode_vision(patches, [(4, 4)])
    encoder.drop()
    found = streamed(encoder).module.encode_vision(patches, [(4, 4)])
    assert torch.equal(found.embeds, expected.embeds)
    assert all(map(torch.equal, found.deepstack, expected.deepstack))
    assert_gone(encoder)


@pytest.mark.parametrize("num_held", [0, 2, 3, 6])
def test_the_dit_streams_over_all_steps_with_the_same_bits(dit, num_held):
    expected = denoised(whole(dit).module)
    dit.drop()
    for num_passes in (4, None):
        assert torch.equal(denoised(held(dit, num_held, num_passes=num_passes).module), expected)
        assert_gone(dit)


def test_a_text_encoder_without_a_tower_streams_its_layers(tmp_path):
    component = tiny_text_encoder(tmp_path / "encoder.safetensors", has_vision=False)
    streamed(component)
    assert component.resident_parts() == LANGUAGE == component.parts
    assert_gone(component)


# How many bytes are alive.


class Watched:
    """Measures a component before every read and inside every block."""

    def __init__(self) -> None:
        self.component: Component | None = None
        self.peak = 0
        self.reader = Reader(num_threads=2, before_chunk=lambda _: self.measure())

    def follow(self, component: Component) -> Component:
        self.component = component
        for blocks in component.repeated():
            for block in blocks:
                block.linear.register_forward_hook(lambda *_: self.measure())
        return component

    def measure(self) -> None:
        if self.component is not None:
            self.peak = max(self.peak, self.component.live_bytes())


@pytest.mark.parametrize("num_more", [0, 4])
def test_no_more_is_ever_alive_than_the_grant_or_the_least(path, num_more):
    watched = Watched()
    component = watched.follow(tower(path, num_blocks=8, num_more=num_more, reader=watched.reader))
    least = component.costs(component.parts)["streamed"]
    everything = component.costs(component.parts)["whole"].resident
    assert least.resident == LAST_BYTES + (2 if num_more == 0 else 4) * BLOCK_BYTES
    measured = []
    for grant in (0, *range(least.resident, everything + 2 * BLOCK_BYTES, BLOCK_BYTES // 3)):
        watched.peak = 0
        passes(streamed(component, grant), 2)
        assert watched.peak == component.live_bytes() == least.granted(grant).resident <= max(grant, least.resident)
        measured.append(component.live_bytes())
        component.drop()
    assert measured == sorted(measured)
    assert len(set(measured)) == 7  # none to five beside the ring, and all eight in the room of seven


def test_all_blocks_are_held_as_soon_as_the_ring_would_hold_the_rest(path):
    count = BytesRead()
    component = tower(path, num_blocks=8, reader=count.reader)
    cost = component.costs(component.parts)["streamed"]
    assert [cost.num_held(n * BLOCK_BYTES) for n in range(9)] == [0, 1, 2, 3, 4, 5, 8, 8, 8]
    assert cost.holding(8).reread_per_pass == 0
    held(component, 6)
    assert component.live_bytes() == LAST_BYTES + 8 * BLOCK_BYTES
    before = count.total
    passes(component, 2)
    assert count.total - before < 2 * 16 * WIDTH * 4  # rows of the table
    assert component.dirty() is None


@pytest.mark.parametrize("num_held", [0, 1, 4])
def test_what_a_pass_reads_is_what_the_cost_says(path, num_held):
    count = BytesRead()
    component = tower(path, num_blocks=8, num_more=3, reader=count.reader)
    cost = component.costs(component.parts)["streamed"].holding(num_held)
    held(component, num_held, num_passes=3)
    results = passes(component, 3)
    component.drop()
    rows = 3 * IDS.unique().numel() * WIDTH * 4
    assert count.total == cost.read_bytes(3) + rows
    assert len(results) == 3


def test_the_ring_is_used_again_and_again_without_a_new_allocation(path):
    component = tower(path, num_blocks=7)
    seen: list[tuple[int, int]] = []
    for block in component.module.blocks:
        block.linear.register_forward_hook(lambda module, *_: seen.append((id(module.weight), module.weight.data_ptr())))
    streamed(component)
    num_storages = len(component._storages)
    passes(component, 4)
    assert len(seen) == 4 * 7
    assert len(set(seen)) == 2
    assert len(component._storages) == num_storages
    assert not any(tensor.is_inference() for slot in component._streamed[0]._streams[0]._ring for tensor in slot.tensors)


# What is read when.


def wait_for_reads(component: Component) -> None:
    """The reading thread does one thing after the other."""
    component._streamed[0]._streams[0]._reading.submit(lambda: None).result(20)


def reads_of(path: Path, count: int, **options) -> int:
    """Blocks that so many passes read."""
    counted = BytesRead()
    component = tower(path, reader=counted.reader)
    streamed(component, **options)
    fixed = 0
    for _ in range(count):
        passes(component, 1)
        fixed += IDS.unique().numel() * WIDTH * 4
    wait_for_reads(component)
    component.drop()
    return (counted.total - fixed - LAST_BYTES) // BLOCK_BYTES


def test_reading_stops_after_the_last_block_of_the_last_pass(path):
    assert reads_of(path, 2, num_passes=2) == 12
    assert reads_of(path, 2, num_passes=None) == 13
    assert reads_of(path, 2, num_passes=5) == 13
    assert reads_of(path, 2, prefetch=False) == 12


def test_more_passes_than_were_told_are_no_error_and_are_read_ahead_from_then_on(path):
    """A later user of a component that was kept has another number of passes."""
    assert reads_of(path, 5, num_passes=2) == 31


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_block_is_read_while_a_block_computes(path, prefetch):
    counted = BytesRead()
    component = streamed(tower(path, reader=counted.reader), prefetch=prefetch)
    reads: list[int] = []

    def watch(*_: object) -> None:
        wait_for_reads(component)
        reads.append((counted.total - LAST_BYTES) // BLOCK_BYTES)

    x = torch.ones(1, WIDTH)
    for block in component.module.blocks:
        block.linear.register_forward_hook(watch)
    with torch.inference_mode():
        for block in (*component.module.blocks, component.module.blocks[0]):
            block(x)
    ahead = 1 if prefetch else 0
    assert reads == [n + ahead for n in range(1, 8)]


# Other orders, other callers.


def test_blocks_may_be_called_in_any_order_and_alone(path):
    component = tower(path)
    x = torch.randn(2, WIDTH)
    with torch.inference_mode():
        whole(component)
        expected = [block(x) for block in component.module.blocks]
        component.drop()
        held(component, 1)
        assert torch.equal(component.module.blocks[4](x), expected[4])
        order = random.Random(0).choices(range(6), k=40)
        assert all(torch.equal(component.module.blocks[i](x), expected[i]) for i in (*range(5, -1, -1), *order))
        assert all(not slot.is_filled for slot in component._slots.values() if slot.name.startswith("blocks.4"))
    assert_gone(component)


def test_a_block_inside_a_block_is_refused_and_nothing_hangs(path):
    component = tower(path)
    expected = whole_passes(component)
    blocks = component.module.blocks
    hook = blocks[2].linear.register_forward_hook(lambda *_: blocks[4](torch.ones(1, WIDTH)))
    streamed(component)
    with pytest.raises(RuntimeError, match="Block 4 was called inside block 2"):
        passes(component, 1)
    hook.remove()
    with threads(lambda: assert_same(passes(component), expected)):
        pass
    assert_gone(component)


def test_two_threads_share_a_stream_without_mixing_weights(path):
    component = tower(path, num_blocks=5)
    expected = whole_passes(component, 6)
    streamed(component)
    with threads(*[lambda: assert_same(passes(component, 6), expected)] * 3):
        assert_same(passes(component, 6), expected)
    assert_gone(component)


def test_a_component_in_a_store_streams_for_whoever_calls_it(path):
    ledger = Ledger()
    store = Store(ledger, budget=REST_BYTES + 3 * BLOCK_BYTES, pretended_total=PLENTY)
    expected = whole_passes(tower(path))
    component = store.add(tower(path))
    with threads(lambda: assert_same(passes(component), expected)):
        assert_same(passes(component), expected)
    assert component.costs(component.parts)["whole"].resident > store.budget >= store.live_bytes() > 0
    store.release(component, "test")
    assert store.live_bytes() == 0


# Whatever goes wrong: nothing hangs, nothing stays, and the next try works.


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("number", [0, 3, 5])
def test_an_error_inside_a_block_takes_its_weights_back(path, error, number):
    """Hooks of torch are not called for a KeyboardInterrupt."""
    component = tower(path)
    expected = whole_passes(component)

    def fail(*_: object) -> None:
        raise error

    streamed(component)
    hook = component.module.blocks[number].linear.register_forward_hook(fail)
    with pytest.raises(error):
        passes(component)
    hook.remove()
    assert not any(slot.is_filled for name, slot in component._slots.items() if name.startswith("blocks"))
    with threads(lambda: assert_same(passes(component), expected)):  # another thread: the failed one holds no lock
        pass
    assert_same(passes(component), expected)
    assert_gone(component)


class Failing:
    """A reader that fails once it has read so many bytes."""

    def __init__(self, after: int, error: type[BaseException] = CheckpointError) -> None:
        self.left = after
        self.error = error
        self.is_broken = True
        self.reader = Reader(num_threads=2, before_chunk=self._count)

    def _count(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.is_broken and self.left < 0:
            raise self.error("the disk is gone")


@pytest.mark.parametrize("error", [CheckpointError, KeyboardInterrupt])
@pytest.mark.parametrize("num_blocks_read", [0, 1, 5, 6])
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_read_that_fails_is_raised_where_its_block_is_needed(path, error, num_blocks_read, prefetch):
    expected = whole_passes(tower(path))
    rows = IDS.unique().numel() * WIDTH * 4
    failing = Failing(LAST_BYTES + 2 * rows + num_blocks_read * BLOCK_BYTES, error)
    component = streamed(tower(path, reader=failing.reader), prefetch=prefetch)
    with pytest.raises(error, match="the disk is gone"):
        passes(component)
    with pytest.raises(error, match="the disk is gone"):
        passes(component)
    assert not any(slot.is_filled for name, slot in component._slots.items() if name.startswith("blocks"))
    failing.is_broken = False
    with threads(lambda: assert_same(passes(component), expected)):
        pass
    assert_gone(component)


def test_a_failed_read_that_nobody_waits_for_keeps_nothing_alive(path):
    failing = Failing(LAST_BYTES)
    component = streamed(tower(path, reader=failing.reader))
    wait_for_reads(component)
    gc.disable()
    try:
        assert_gone(component)
    finally:
        gc.enable()


def test_a_failed_pass_keeps_nothing_alive_when_its_error_is_gone(path):
    failing = Failing(LAST_BYTES + 3 * BLOCK_BYTES)
    component = streamed(tower(path, reader=failing.reader))
    gc.disable()
    try:
        with pytest.raises(CheckpointError) as caught:
            passes(component)
        del caught
        component.drop()
        gc.collect()
        assert component.live_bytes() == 0
    finally:
        gc.enable()


def test_a_file_cut_short_between_header_and_read_is_reported(path):
    component = streamed(tower(path, reader=Reader(num_threads=1)))
    wait_for_reads(component)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"tower.safetensors: (ends inside tensor|was replaced on disk)"):
        passes(component)
    assert_gone(component)
    with pytest.raises(CheckpointError, match="was replaced"):
        streamed(component)
    assert_gone(component)


@pytest.mark.parametrize("moment", ["before the first pass", "between passes"])
def test_weights_of_a_file_that_was_replaced_are_never_mixed_in(path, moment):
    """The same names, shapes and size: only the identity of the file tells."""
    component = streamed(tower(path))
    wait_for_reads(component)
    if moment == "between passes":
        passes(component)
        wait_for_reads(component)
    other = path.with_name("other")
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, other)
    other.replace(path)
    os.utime(path, (1, 1))  # clocks of file systems are too coarse for two files of one moment
    with pytest.raises(CheckpointError, match="was replaced on disk"):
        passes(component)
    assert_gone(component)
    assert_same(passes(streamed(tower(path))), whole_passes(tower(path)))


class Gate:
    """A reader that stops before a read until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()
        self.is_open.set()
        self.on_reach = lambda: None
        self.reader = Reader(num_threads=1, before_chunk=self._pass)

    def _pass(self, _: int) -> None:
        if not self.is_open.is_set():
            self.is_reached.set()
            self.on_reach()
            assert self.is_open.wait(20)


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Interrupts raise KeyboardInterrupt, also where tests run in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
def test_an_interrupt_while_a_block_is_waited_for_leaves_the_stream_usable(path):
    gate = Gate()
    component = tower(path, reader=gate.reader)
    expected = whole_passes(component)
    streamed(component)
    passes(component, 1)
    wait_for_reads(component)
    gate.is_open.clear()
    gate.on_reach = lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        passes(component)
    gate.is_open.set()  # the read goes on, into a ring slot that is free again
    assert_same(passes(component), expected)
    assert_gone(component)


def test_a_drop_during_a_prefetch_waits_for_it_and_leaves_nothing(path):
    gate = Gate()
    component = tower(path, reader=gate.reader)
    expected = whole_passes(component)
    streamed(component)
    wait_for_reads(component)
    gate.is_open.clear()
    with torch.inference_mode():
        component.module.blocks[0](torch.ones(1, WIDTH))
    assert gate.is_reached.wait(20)
    with threads(component.drop):
        gate.is_open.set()
    assert_gone(component)
    assert_same(passes(streamed(component)), expected)
    assert_gone(component)


def test_an_empty_block_refuses_after_the_drop(path):
    component = streamed(tower(path))
    blocks = component.module.blocks
    component.drop()
    with pytest.raises(WeightsNotLoaded):
        blocks[0](torch.ones(1, WIDTH))


@pytest.mark.parametrize("after", [0, LAST_BYTES // 2, LAST_BYTES + BLOCK_BYTES])
def test_a_fill_that_fails_leaves_nothing(path, after):
    failing = Failing(after)
    component = tower(path, reader=failing.reader)
    with pytest.raises(CheckpointError):
        held(component, 3)
    assert_empty(component)
    failing.is_broken = False
    assert_same(passes(held(component, 3)), whole_passes(tower(path)))
    component.drop()


# Parts, other models, compiled blocks.


def test_parts_that_are_filled_one_after_the_other_stream_side_by_side(dit):
    expected = denoised(whole(dit).module)
    dit.drop()
    streamed(dit, parts=TEXT)
    assert dit.resident_parts() == TEXT
    held(dit, 2, DENOISER)
    assert dit.resident_parts() == dit.parts
    assert torch.equal(denoised(dit.module), expected)
    assert_gone(dit)


class InParts(Tower):
    """Its blocks' matrices are a part of their own."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "matrices": tuple(f"blocks.{i}.linear" for i in range(6)),
        "rest": ("embed", "last", *(f"blocks.{i}.norm" for i in range(6))),
    }
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {"forward": ("matrices", "rest")}


def test_blocks_whose_parts_are_filled_apart_stream_in_both(path):
    expected = whole_passes(tower(path))
    component = component_of(path, InParts)
    streamed(component, parts=frozenset({"matrices"}))
    streamed(component, parts=frozenset({"rest"}))
    assert_same(passes(component), expected)
    assert_gone(component)


class Uneven(Tower):
    def __init__(self) -> None:
        super().__init__(5)
        self.blocks[3].linear = nn.Linear(WIDTH, WIDTH, bias=False)


@pytest.mark.parametrize(
    "build",
    [Uneven, lambda: Tower(2), lambda: Tower(0), lambda: Tower(1, 2)],
    ids=["unlike blocks", "two", "none", "one and two"],
)
def test_lists_that_a_ring_does_not_shorten_stay_whole(path, build):
    written(path, random_weights(build))
    component = component_of(path, build)
    assert component.costs(component.parts).keys() == {"whole"}
    streamed(component)
    assert component.live_bytes() == component.nbytes()
    assert component.module.embed.weight.shape == (16, WIDTH)
    assert passes(component, 1)[0].isfinite().all()


@pytest.mark.parametrize("form", ["in place", "in the list", "called directly"])
def test_compiled_blocks_stay_compiled_while_weights_pass_through_them(path, form):
    torch.compiler.reset()
    counts = itertools.count()
    component = tower(path, num_blocks=8)
    expected = whole_passes(component, 2)
    blocks = component.module.blocks

    def backend(graph: torch.fx.GraphModule, _: object):
        next(counts)
        return graph.forward

    compiled = [torch.compile(block, backend=backend) for block in blocks]
    if form == "in the list":
        component.module.blocks = nn.ModuleList(compiled)
    elif form == "in place":
        for block in blocks:
            block.compile(backend=backend)

    def run() -> list[Tensor]:
        if form != "called directly":
            return passes(component, 2)
        return [_through(compiled, component, (IDS + number) % 16) for number in range(2)]

    for cycle in range(3):
        held(component, cycle)
        assert_same(run(), expected)
        component.drop()
        assert component.live_bytes() == 0
    assert next(counts) <= 4  # for inputs in and out of inference mode; none for a block, a pass or a fill
    if form == "in the list":
        assert all(block.forward is not Tower.forward and "forward" in block.__dict__ for block in component.module.blocks)


@torch.inference_mode()
def _through(blocks: list[nn.Module], component: Component, ids: Tensor) -> Tensor:
    x = component.module.embed(ids)
    for block in blocks:
        x = block(x)
    return component.module.last(x)


# Changes by hand.


def test_an_edit_of_a_held_weight_is_found_and_one_of_a_passing_weight_is_not(path):
    component = held(tower(path), 2)
    assert component.dirty() is None
    passes(component)
    assert component.dirty() is None

    def edit(module: nn.Linear, *_: object) -> None:
        module.weight.data.add_(1)

    hook = component.module.blocks[4].linear.register_forward_hook(edit)
    passes(component)
    hook.remove()
    assert component.dirty() is None
    component.module.blocks[1].linear.weight.data.add_(1)
    assert component.dirty() == "blocks.1.linear.weight was edited in place"


def test_a_whole_fill_after_a_streamed_one_reads_nothing_more(path):
    counted = BytesRead()
    component = streamed(tower(path, reader=counted.reader))
    wait_for_reads(component)
    before = counted.total
    component.fill(FillRequest(component.parts))
    assert counted.total == before
    assert_gone(component)
