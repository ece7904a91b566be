from __future__ import annotations

import builtins
import gc
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lazy_h3.memory import device as devices
from lazy_h3.memory.checkpoint import CheckpointError
from lazy_h3.memory.component import Component
from lazy_h3.memory.device import GIB
from lazy_h3.memory.ledger import Ledger
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import Resource
from lazy_h3.memory.skeleton import WeightsNotLoaded
from lazy_h3.memory.store import MemoryRefused, Store
from memory_models import PLENTY, BytesRead, Foreign, One, codec, component_of, written
from torch import Tensor, nn

ExceptionGroup = getattr(builtins, "ExceptionGroup", None)  # new in Python 3.11
CODEC_BYTES = (64 + 8 + 8 + 2 * (16 + 64 + 8)) * 4
ENCODER, DECODER = frozenset({"encoder"}), frozenset({"decoder"})


@pytest.fixture
def store() -> Store:
    return Store(pretended_total=PLENTY)


@pytest.fixture(params=["component", "foreign"])
def make(request, store, tmp_path) -> Callable[..., Resource]:
    """Makes a named resource of about the same size, of either kind: no test of the store can tell them apart."""

    def component(name: str) -> Resource:
        return store.add(codec(tmp_path / f"{name}.safetensors", kind=name))

    def foreign(name: str) -> Resource:
        return Foreign(store, name, CODEC_BYTES)

    return component if request.param == "component" else foreign


def story(store: Store) -> list[tuple[str, str, str]]:
    return [(event.event, event.component, event.reason) for event in store.ledger.events]


def kinds(store: Store) -> list[str]:
    return [event.event for event in store.ledger.events]


@contextmanager
def running(*works: Callable[[], object]) -> Iterator[list[threading.Thread]]:
    """Threads that run beside the block and must end after it."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Use and release.


def test_use_fills_pins_and_leaves_resident(store, make):
    resource = make("x")
    assert store.resident() == []
    with store.use(resource) as used:
        assert used is resource
        assert store.is_pinned(resource)
        assert store.resident() == [resource]
        assert store.live_bytes() == CODEC_BYTES
    assert not store.is_pinned(resource)
    assert resource.resident_parts() == resource.parts
    assert store.live_bytes() == CODEC_BYTES
    assert story(store) == [("pin", "x", ""), ("load_begin", "x", "whole"), ("load_end", "x", ""), ("unpin", "x", "")]


def test_using_it_again_reads_nothing(store, make):
    resource = make("x")
    for _ in range(3):
        with store.use(resource), store.use(resource):
            pass
    assert kinds(store).count("load_begin") == 1


def test_release_drops_now_and_only_once(store, make):
    resource = make("x")
    store.release(resource, "nobody ever used it")
    with store.use(resource):
        pass
    store.release(resource, "its last user is done")
    store.release(resource, "once more")
    assert store.live_bytes() == 0
    assert store.resident() == []
    assert story(store)[4:] == [("release", "x", "its last user is done")]
    with store.use(resource):
        assert resource.resident_parts() == resource.parts


def test_a_release_while_pinned_means_when_unpinned(store, make):
    resource = make("x")
    with store.use(resource):
        with store.use(resource):
            store.release(resource, "early")
            assert store.live_bytes() == CODEC_BYTES
        assert store.live_bytes() == CODEC_BYTES
        store.release(resource, "again")
    assert store.live_bytes() == 0
    assert story(store)[-2:] == [("unpin", "x", ""), ("release", "x", "again")]
    with store.use(resource):
        pass
    assert store.resident() == [resource], "a release that is done is not done again"


def test_a_release_during_a_fill_means_when_unpinned(store, make):
    resource = make("x")

    def release(filling: Resource, done: int, total: int) -> None:
        store.release(filling, "half loaded")
        store.release(filling, "half loaded")

    store.on_fill.append(release)
    with store.use(resource):
        assert resource.resident_parts() == resource.parts
    assert store.live_bytes() == 0
    assert kinds(store).count("release") == 1


def test_release_all_drops_what_is_free_and_marks_what_is_not(store, make):
    first, second = make("first"), make("second")
    with store.use(first), store.use(second):
        pass
    with store.use(second):
        store.release_all("free memory")
        assert store.resident() == [second]
    assert store.resident() == []


def test_pins_belong_to_owners_and_a_nodes_pins_can_be_dropped_for_it(store, make):
    resource = make("x")
    with ExitStack() as abandoned:
        for _ in range(2):
            abandoned.enter_context(store.use(resource, owner=("node", "prompt", "7")))
        abandoned.enter_context(store.use(resource, owner=("node", "prompt", "8")))
        store.release(resource, "last user")
        store.unpin_node("other prompt")
        store.unpin_node("prompt", "7")
        assert store.is_pinned(resource)
        store.unpin_node("prompt")
        assert not store.is_pinned(resource)
        assert store.live_bytes() == 0
    assert not store.is_pinned(resource)
    assert kinds(store).count("unpin") == 1


def test_an_abandoned_pin_that_ends_late_does_not_unpin_others(store, make):
    resource = make("x")
    late = store.use(resource, owner=("node", "prompt", "7"))
    late.__enter__()
    store.unpin_node("prompt", "7")
    store.release(resource, "gone")
    with store.use(resource):
        late.__exit__(None, None, None)
        store.release(resource, "now")
        assert store.is_pinned(resource)
        assert store.live_bytes() == CODEC_BYTES


def test_a_user_whose_pin_is_taken_away_before_it_reads_leaves_nobody_waiting(store, make):
    """A thread that outlives its prompt went on with a forgotten entry, and the one in the table was being filled for ever."""
    resource = make("x")

    def take(asking: Resource, nbytes: int) -> None:
        store.before_fill.remove(take)
        store.unpin_node("prompt")

    def use() -> None:
        with store.use(resource):
            assert resource.resident_parts() == resource.parts

    store.before_fill.append(take)
    with store.use(resource, owner=("node", "prompt", "7")), running(use):
        pass
    store.release(resource, "the end")
    assert store.live_bytes() == 0
    assert store.resident() == []


def test_equal_identities_are_one_resource(store, tmp_path):
    first = store.add(codec(tmp_path / "x.safetensors"))
    second = codec(tmp_path / "x.safetensors")
    assert store.add(second) is first
    assert store.find(second.identity) is first
    with store.use(second) as used:
        assert used is first
        assert second.resident_parts() == frozenset()
    assert store.live_bytes() == CODEC_BYTES


def test_a_resource_that_nobody_added_is_counted_and_released_too(store, tmp_path):
    component = codec(tmp_path / "x.safetensors")
    with store.use(component):
        assert store.live_bytes() == CODEC_BYTES
    store.release_all("done")
    assert component.live_bytes() == 0


def test_the_store_keeps_resources_alive_only_while_they_hold_weights(store, tmp_path):
    component = store.add(codec(tmp_path / "x.safetensors"))
    identity = component.identity
    with store.use(component):
        pass
    del component
    gc.collect()
    assert store.live_bytes() == CODEC_BYTES
    store.release_all("done")
    gc.collect()
    assert store.find(identity) is None


def test_entry_points_fill_first_and_hold_their_parts(store, tmp_path):
    component = store.add(codec(tmp_path / "x.safetensors"))
    module = component.module
    x = torch.randn(2, 8)
    with store.use(component):
        encoded, decoded, streamed = module.encode(x), module(x), list(module.stream(x))
    store.release(component, "done")
    assert torch.equal(module.encode(x), encoded)
    assert component.resident_parts() == ENCODER
    assert torch.equal(module(x), decoded)
    store.release(component, "done")
    stream = module.stream(x)
    assert torch.equal(next(stream), streamed[0])
    assert component.resident_parts() == DECODER
    assert store.is_pinned(component)
    store.release(component, "while it streams")
    assert torch.equal(next(stream), streamed[1])
    assert list(stream) == []
    assert not store.is_pinned(component)
    assert store.live_bytes() == 0
    with pytest.raises(WeightsNotLoaded):
        module.encoder(x)


def test_a_module_without_its_store_says_so(tmp_path):
    store = Store(pretended_total=PLENTY)
    component = store.add(codec(tmp_path / "x.safetensors"))
    del store
    gc.collect()
    with pytest.raises(RuntimeError, match="The store of this component is gone"):
        component.module(torch.ones(1, 8))


def test_parts_are_filled_as_they_are_needed(store, tmp_path):
    count = BytesRead()
    component = store.add(codec(tmp_path / "x.safetensors", reader=count.reader))
    with store.use(component, ENCODER):
        assert store.live_bytes() == count.total == component.nbytes(ENCODER)
        with store.use(component):
            assert store.live_bytes() == count.total == CODEC_BYTES
    assert [e.reason for e in store.ledger.events if e.event == "load_begin"] == ["encoder whole", "decoder whole"]


# Threads.


def test_threads_that_ask_for_the_same_component_fill_it_once(store, tmp_path):
    gate = threading.Event()
    read = []
    reader = Reader(num_threads=1, before_chunk=lambda nbytes: (gate.wait(10), read.append(nbytes)))
    component = store.add(codec(tmp_path / "x.safetensors", reader=reader))
    x = torch.ones(1, 8)
    outputs = []

    def compute() -> None:
        with torch.inference_mode(), store.use(component):
            outputs.append(component.module(x))

    with running(*[compute] * 6):
        wait_until(lambda: kinds(store) != [] and store.resident() == [component])
        gate.set()
    assert len(outputs) == 6
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert sum(read) == CODEC_BYTES
    assert kinds(store).count("load_begin") == 1


def test_threads_that_wait_for_a_failing_fill_try_for_themselves(store, tmp_path):
    turns = []

    def before_chunk(nbytes: int) -> None:
        turns.append(nbytes)
        if len(turns) == 1:
            time.sleep(0.05)
            raise OSError("the disk hiccuped")

    component = store.add(codec(tmp_path / "x.safetensors", reader=Reader(1, before_chunk=before_chunk)))
    outcomes = []

    def compute() -> None:
        try:
            with store.use(component):
                outcomes.append(component.resident_parts() == component.parts)
        except OSError as error:
            outcomes.append(str(error))

    with running(*[compute] * 4):
        pass
    assert sorted(map(str, outcomes)) == ["True", "True", "True", "the disk hiccuped"]
    assert kinds(store).count("load_begin") == 2


def test_a_release_from_another_thread_waits_for_the_fill(store, tmp_path):
    gate = threading.Event()
    component = store.add(codec(tmp_path / "x.safetensors", reader=Reader(1, before_chunk=lambda _: gate.wait(10))))
    seen = []

    def compute() -> None:
        with store.use(component):
            seen.append(component.resident_parts())

    with running(compute):
        wait_until(lambda: store.resident() == [component])
        store.release(component, "from outside")
        gate.set()
    assert seen == [component.parts]
    assert store.live_bytes() == 0


# Fills that fail.


def cut_file(path: Path) -> None:
    os.truncate(path, 1500)


def failing_codec(store: Store, path: Path, failure: str) -> Component:
    """A component that cannot be filled; each way the file is sound when the component is made."""
    reader = Reader(2, 64, before_chunk=(lambda _: cut_file(path)) if failure == "cut while read" else None)
    component = store.add(codec(path, reader=reader))
    if failure == "replaced":
        cut_file(path)
    if failure == "interrupted":
        store.on_fill.append(interrupt)
    return component


class Interrupted(BaseException):
    pass


def interrupt(*_: object) -> None:
    raise Interrupted


@pytest.mark.parametrize("failure", ["replaced", "cut while read", "interrupted"])
def test_a_failed_fill_leaves_nothing_even_while_its_error_is_looked_at(store, tmp_path, failure):
    component = failing_codec(store, tmp_path / "x.safetensors", failure)
    with pytest.raises((CheckpointError, Interrupted)) as caught, store.use(component):
        pytest.fail("was filled")
    assert caught.value.__traceback__ is not None
    assert store.live_bytes() == component.live_bytes() == 0
    assert store.resident() == []
    assert not store.is_pinned(component)
    assert not [t for t in threading.enumerate() if t.name.startswith("lazy-h3-read")]
    assert kinds(store)[-1] == "unpin"
    assert store.ledger.events[-2].reason == f"failed: {type(caught.value).__name__}"


def test_after_an_interrupt_the_next_use_fills_again(store, make):
    resource = make("x")
    store.on_fill.append(interrupt)
    with pytest.raises(Interrupted), store.use(resource):
        pytest.fail("was filled")
    assert store.live_bytes() == 0
    store.on_fill.clear()
    with store.use(resource):
        assert store.live_bytes() == CODEC_BYTES


def test_a_release_that_was_asked_for_during_a_failed_fill_is_done_with_it(store, make):
    resource = make("x")

    def release_and_fail(*_: object) -> None:
        store.release(resource, "during the fill")
        raise Interrupted

    store.on_fill.append(release_and_fail)
    with pytest.raises(Interrupted), store.use(resource):
        pytest.fail("was filled")
    store.on_fill.clear()
    with store.use(resource):
        pass
    assert store.resident() == [resource]


def test_an_observer_that_fails_at_the_start_of_a_fill_blocks_nobody(store, make):
    resource = make("x")

    def observer(event) -> None:
        if event.event == "load_begin":
            raise ArithmeticError

    with store.ledger.observed(observer), pytest.raises(ArithmeticError), store.use(resource):
        pytest.fail("was filled")
    assert store.resident() == []
    with store.use(resource):
        assert store.live_bytes() == CODEC_BYTES


class Faulty(One):
    """Fails deep inside, with weights and views of weights in local variables all the way."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        rows = list(weight.detach().unbind())
        try:
            return self.inner(x, rows)
        except ArithmeticError as error:
            raise RuntimeError(f"node failed at {len(rows)} rows of {weight.shape}") from error

    def inner(self, x: Tensor, rows: list[Tensor]) -> Tensor:
        first = rows[0]
        raise ArithmeticError(f"no sense in {first.shape}")


@pytest.mark.parametrize("release", ["inside", "after"])
def test_a_failed_nodes_traceback_keeps_no_weights_alive(store, tmp_path, release):
    path = written(tmp_path / "x.safetensors", {"weight": torch.ones(4, 4)})
    component = store.add(component_of(path, lambda: Faulty(4, 4)))

    def node() -> None:
        with store.use(component):
            if release == "inside":
                store.release(component, "when unpinned")
            component.module(torch.ones(4))

    with pytest.raises(RuntimeError, match="node failed") as caught:
        node()
    store.release(component, "end of the prompt")
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert component.live_bytes() == 0
    assert store.live_bytes() == 0


@pytest.mark.skipif(ExceptionGroup is None, reason="this Python has no error groups")
def test_an_error_group_keeps_no_weights_alive(store, tmp_path):
    path = written(tmp_path / "x.safetensors", {"weight": torch.ones(4, 4)})
    component = store.add(component_of(path, lambda: Faulty(4, 4)))

    def tasks() -> None:
        errors = []
        for _ in range(2):
            try:
                component.module.inner(torch.ones(4), [component.module.weight])
            except ArithmeticError as error:
                errors.append(error)
        raise ExceptionGroup("tasks failed", errors)

    with pytest.raises(ExceptionGroup) as caught, store.use(component):
        tasks()
    store.release(component, "end of the prompt")
    assert len(caught.value.exceptions) == 2
    assert component.live_bytes() == 0


# Changes by hand.


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def changed(store: Store, resource: Resource) -> str:
    """Changes a filled resource by hand; what the warning must name."""
    with store.use(resource):
        if isinstance(resource, Foreign):
            resource.edit = "weights was replaced"
            return resource.edit
        resource.module.encoder.weight.data.add_(1)
        return "encoder.weight was edited in place"


def test_a_resource_that_was_changed_by_hand_stays_with_one_warning(store, make, caplog):
    resource = make("x")
    edit = changed(store, resource)
    for _ in range(3):
        store.release(resource, "last user")
    assert store.resident() == [resource]
    assert [warning for warning in warnings_of(caplog) if f"x: kept, because {edit}" in warning] == warnings_of(caplog)
    assert len(warnings_of(caplog)) == 1
    assert story(store)[-1] == ("keep", "x", f"changed by hand: {edit}")


def test_force_drops_a_change_by_hand_with_a_second_warning(store, make, caplog):
    resource = make("x")
    edit = changed(store, resource)
    store.release(resource, "last user")
    store.release(resource, "free memory", force=True)
    assert store.live_bytes() == 0
    assert len(warnings_of(caplog)) == 2
    assert f"x: dropped although {edit} since it was filled; the change is lost" in warnings_of(caplog)[1]


def test_force_while_pinned_is_still_force_when_unpinned(store, make, caplog):
    resource = make("x")
    changed(store, resource)
    with store.use(resource):
        store.release(resource, "last user")
        store.release(resource, "free memory", force=True)
        store.release(resource, "last user")
    assert store.live_bytes() == 0
    assert "the change is lost" in warnings_of(caplog)[-1]


def test_a_refilled_component_has_lost_the_change(store, tmp_path):
    component = store.add(codec(tmp_path / "x.safetensors"))
    x = torch.randn(2, 8)
    before = component.module.encode(x)
    changed(store, component)
    assert not torch.equal(component.module.encode(x), before)
    store.release(component, "free memory", force=True)
    assert torch.equal(component.module.encode(x), before)


def test_an_added_parameter_keeps_a_component_resident(store, tmp_path, caplog):
    component = store.add(codec(tmp_path / "x.safetensors"))
    with store.use(component):
        component.module.encoder.lora = nn.Parameter(torch.ones(2))
    store.release(component, "last user")
    assert store.resident() == [component]
    assert "encoder.lora was added" in warnings_of(caplog)[0]


def test_an_unchanged_resource_is_released_without_a_warning(store, make, caplog):
    resource = make("x")
    with store.use(resource):
        pass
    store.release(resource, "last user")
    assert warnings_of(caplog) == []


# What somebody else still holds.


def test_a_stray_reference_shows_in_the_warning_and_in_live_bytes(store, tmp_path, caplog):
    component = store.add(codec(tmp_path / "x.safetensors"))
    with store.use(component):
        stray = component.module.encoder.weight.data[1:3]
    store.release(component, "last user")
    assert store.live_bytes() == 8 * 8 * 4
    assert warnings_of(caplog) == ["codec: 256 B of its weights are still alive after release: somebody else holds a reference."]
    assert store.ledger.events[-1].bytes == CODEC_BYTES - 256
    assert store.ledger.events[-1].resident_bytes == 256
    del component
    gc.collect()
    assert store.live_bytes() == 256
    del stray
    assert store.live_bytes() == 0


def test_a_reference_cycle_is_not_a_stray_reference(store, tmp_path, caplog):
    component = store.add(codec(tmp_path / "x.safetensors"))
    gc.disable()
    try:
        with store.use(component):
            cycle = [component.module.encoder.weight]
            cycle.append(cycle)
            del cycle
        store.release(component, "last user")
    finally:
        gc.enable()
    assert store.live_bytes() == 0
    assert warnings_of(caplog) == []


# Room.


def fixed_pool(monkeypatch: pytest.MonkeyPatch, used: int = 0) -> None:
    monkeypatch.setattr(devices, "process_bytes", lambda: used)


def test_what_does_not_fit_is_refused_before_a_byte_is_read(tmp_path, monkeypatch):
    fixed_pool(monkeypatch, used=GIB)
    store = Store(pretended_total=3 * GIB + 100)
    count = BytesRead()
    component = store.add(codec(tmp_path / "x.safetensors", reader=count.reader))
    with pytest.raises(MemoryRefused) as caught, store.use(component):
        pytest.fail("was filled")
    assert (caught.value.need_bytes, caught.value.have_bytes) == (CODEC_BYTES, 100)
    assert caught.value.component == "codec"
    assert "close other programs or use smaller files" in str(caught.value)
    assert count.total == 0
    assert store.live_bytes() == 0
    assert not store.is_pinned(component)
    assert kinds(store) == ["pin", "refuse", "unpin"]
    assert (store.ledger.events[1].bytes, store.ledger.events[1].reason) == (CODEC_BYTES, "100 bytes available")
    assert store.last_refusal is not None
    assert (store.last_refusal.need_bytes, store.last_refusal.__traceback__) == (CODEC_BYTES, None)


def test_what_just_fits_is_filled(tmp_path, monkeypatch):
    fixed_pool(monkeypatch, used=GIB)
    store = Store(pretended_total=3 * GIB + CODEC_BYTES)
    with store.use(store.add(codec(tmp_path / "x.safetensors"))):
        assert store.live_bytes() == CODEC_BYTES


def test_a_refusal_names_need_and_have_in_gib(monkeypatch):
    fixed_pool(monkeypatch)
    store = Store(pretended_total=8 * GIB)
    huge = Foreign(store, "huge", 40 * GIB)
    with pytest.raises(MemoryRefused, match=r"huge needs 40\.00 GiB of memory and 6\.00 GiB are available; close other"):
        store.use(huge).__enter__()
    with pytest.raises(MemoryRefused, match=r"huge needs 40\.00 GiB"):
        huge.loaded_by_owner()
    assert huge.num_fills == 0


def test_the_remedy_is_for_the_bound_that_binds(monkeypatch):
    fixed_pool(monkeypatch)
    huge = Foreign(Store(budget=GIB, pretended_total=8 * GIB), "huge", 40 * GIB)
    with pytest.raises(MemoryRefused, match=r"1\.00 GiB are available; raise the budget"):
        huge.loaded_by_owner()
    huge = Foreign(Store(budget=20 * GIB, pretended_total=8 * GIB), "huge", 40 * GIB)
    with pytest.raises(MemoryRefused, match=r"6\.00 GiB are available; close other programs"):
        huge.loaded_by_owner()


def test_staging_counts_as_need(tmp_path):
    reader = Reader(num_threads=2, chunk_bytes=1000)
    store = Store(budget=CODEC_BYTES + 1999, pretended_total=PLENTY)
    component = store.add(codec(tmp_path / "x.safetensors", stored=torch.float16, reader=reader))
    with pytest.raises(MemoryRefused) as caught:
        store.use(component).__enter__()
    assert caught.value.need_bytes == CODEC_BYTES + 2000
    store.budget += 1
    with store.use(component):
        pass


@pytest.fixture
def tight(store) -> Store:
    """Room for two of the resources that ``make`` makes, and not for three."""
    store.budget = 2 * CODEC_BYTES + 16
    return store


def test_the_least_recently_used_goes_first(tight, make):
    first, second, third = make("first"), make("second"), make("third")
    for resource in (first, second, first):
        with tight.use(resource):
            pass
    with tight.use(third):
        assert set(map(id, tight.resident())) == {id(first), id(third)}
    assert ("release", "second", "room for third") in story(tight)
    assert tight.live_bytes() <= tight.budget


def test_what_is_in_use_never_goes(tight, make):
    first, second, third = make("first"), make("second"), make("third")
    with tight.use(first), tight.use(second):
        with pytest.raises(MemoryRefused) as caught:
            tight.use(third).__enter__()
        assert (caught.value.need_bytes, caught.value.have_bytes) == (CODEC_BYTES, 16)
        assert "raise the budget" in str(caught.value)
        assert tight.live_bytes() == 2 * CODEC_BYTES
    with tight.use(third):
        pass


def test_pressure_takes_what_was_changed_by_hand(tight, make, caplog):
    first, second, third = make("first"), make("second"), make("third")
    changed(tight, first)
    with tight.use(second), tight.use(third):
        assert tight.resident() == [second, third]
    assert "first: dropped although" in warnings_of(caplog)[-1]


def test_two_fills_at_the_same_time_count_once_each(tight, tmp_path):
    """A fill's reservation and the tensors that it has allocated are the same bytes."""
    gate = threading.Barrier(2, timeout=10)
    reader = Reader(1, before_chunk=lambda _: gate.wait())
    components = [tight.add(codec(tmp_path / f"{n}.safetensors", kind=n, reader=reader)) for n in ("first", "second")]
    errors = []

    def compute(component: Component) -> None:
        try:
            with tight.use(component):
                pass
        except (MemoryRefused, threading.BrokenBarrierError) as error:
            errors.append(error)

    with running(*[lambda c=c: compute(c) for c in components]):
        pass
    assert errors == []
    assert tight.live_bytes() == 2 * CODEC_BYTES


def test_a_third_fill_is_refused_while_two_are_under_way(tight, tmp_path):
    gate = threading.Event()
    reader = Reader(1, before_chunk=lambda _: gate.wait(10))
    first, second, third = (tight.add(codec(tmp_path / f"{n}.safetensors", kind=n, reader=reader)) for n in "abc")
    with running(lambda: tight.use(first).__enter__(), lambda: tight.use(second).__enter__()):
        wait_until(lambda: len(tight.resident()) == 2)
        with pytest.raises(MemoryRefused):
            tight.use(third).__enter__()
        gate.set()


def test_before_fill_is_asked_for_the_bytes_and_may_make_room(tight, make):
    first, second, third = make("first"), make("second"), make("third")
    asked = []

    def make_room(resource: Resource, nbytes: int) -> None:
        asked.append((resource.name, nbytes))
        if resource is third:
            tight.release(first, "asked for room")

    tight.before_fill.append(make_room)
    with tight.use(first), tight.use(second):
        pass
    with tight.use(third):
        pass
    assert asked == [(name, CODEC_BYTES) for name in ("first", "second", "third")]
    assert ("release", "first", "asked for room") in story(tight)


def test_two_ways_to_hold_the_same_files_are_not_held_together(store, tmp_path):
    single = store.add(codec(tmp_path / "x.safetensors"))
    half = store.add(codec(tmp_path / "x.safetensors", compute=torch.bfloat16))
    with store.use(single):
        pass
    with store.use(half):
        assert store.resident() == [half]
    with store.use(half), store.use(single):
        assert len(store.resident()) == 2, "a sibling in use stays"
    assert ("release", "codec", "codec is about to be filled from the same files") in story(store)


GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]


def test_freeing_for_one_device_never_touches_the_other(store):
    store.budget = 2 * CODEC_BYTES
    on_first = [Foreign(store, f"first {n}", CODEC_BYTES, GPUS[0]) for n in range(2)]
    on_second = [Foreign(store, f"second {n}", CODEC_BYTES, GPUS[1]) for n in range(3)]
    for resource in (*on_first, *on_second):
        with store.use(resource):
            pass
    assert store.resident() == [*on_first, on_second[1], on_second[2]]
    with store.use(on_second[1]), store.use(on_second[2]), pytest.raises(MemoryRefused):
        store.use(on_second[0]).__enter__()
    assert all(resource in store.resident() for resource in on_first)


def test_the_same_files_on_two_devices_live_side_by_side(store):
    copies = [Foreign(store, "same file", CODEC_BYTES, gpu) for gpu in GPUS]
    assert copies[0].identity.is_sibling_of(copies[1].identity)
    for copy in copies:
        with store.use(copy):
            pass
    assert store.resident() == copies


def test_observers_follow_fills_and_drops(store, make):
    resource = make("x")
    changes = []
    store.on_change.append(lambda changed, is_resident: changes.append((changed, is_resident, resource in store.resident())))
    with store.use(resource), store.use(resource):
        store.release(resource, "last user")
        assert changes == [(resource, True, True)]
    assert changes == [(resource, True, True), (resource, False, False)]
    store.on_fill.append(interrupt)
    with pytest.raises(Interrupted), store.use(resource):
        pytest.fail("was filled")
    assert len(changes) == 2


# Resources that somebody else fills and drops.


def test_fills_and_drops_by_somebody_else_are_recorded(store):
    foreign = Foreign(store, "x", 1000)
    foreign.loaded_by_owner()
    assert store.resident() == [foreign]
    assert store.live_bytes() == 1000
    foreign.unloaded_by_owner()
    assert store.resident() == []
    foreign.unloaded_by_owner()
    assert story(store) == [("load_begin", "x", ""), ("load_end", "x", ""), ("release", "x", "its owner needed the room")]


def test_a_fill_by_somebody_else_makes_room_and_is_evicted_like_any_other(tight, make):
    ours = [make("first"), make("second")]
    foreign = Foreign(tight, "foreign", CODEC_BYTES)
    for resource in ours:
        with tight.use(resource):
            pass
    foreign.loaded_by_owner()
    assert tight.resident() == [ours[1], foreign]
    with tight.use(ours[1]), tight.use(ours[0]):
        assert foreign.weights is None
    assert [entry for entry in story(tight) if "foreign" in entry[1]][-1] == ("release", "foreign", "room for first")


def test_a_failed_fill_by_somebody_else_leaves_it_absent(store):
    foreign = Foreign(store, "x", 1000)
    with pytest.raises(Interrupted), store.filling(foreign, 1000):
        raise Interrupted
    assert store.resident() == []
    assert story(store)[-1] == ("load_end", "x", "failed: Interrupted")


def test_what_its_owner_drops_while_it_is_in_use_is_filled_again_and_never_dropped_twice(store):
    foreign = Foreign(store, "x", 1000)
    with store.use(foreign):
        foreign.unloaded_by_owner()
        assert store.live_bytes() == 0
        assert store.is_pinned(foreign)
        with store.use(foreign):
            assert store.live_bytes() == 1000
        store.release(foreign, "last user")
        assert store.live_bytes() == 1000
    assert store.live_bytes() == 0
    assert kinds(store).count("release") == 2


def test_a_drop_by_its_owner_settles_an_earlier_release(store):
    foreign = Foreign(store, "x", 1000)
    with store.use(foreign):
        store.release(foreign, "last user")
        foreign.unloaded_by_owner()
        with store.use(foreign):
            pass
    assert store.resident() == [foreign]


def test_a_resource_that_cannot_be_dropped_stays_and_harms_nobody(store, caplog):
    class Stuck(Foreign):
        def drop(self) -> None:
            raise OSError("the driver is gone")

    stuck = Stuck(store, "stuck", 1000)

    def node() -> None:
        with store.use(stuck):
            store.release(stuck, "when unpinned")
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        node()
    assert store.resident() == [stuck]
    assert "stuck: could not be dropped and stays resident" in caplog.text
    with store.use(stuck):
        assert stuck.num_fills == 1


def test_both_kinds_tell_the_same_story(tmp_path):
    """The whole ledger of a run is the same for a component and for a foreign resource."""

    def told(make: Callable[[Store, str], Resource]) -> list[tuple[str, str, int, int, str]]:
        store = Store(budget=2 * CODEC_BYTES, pretended_total=PLENTY)
        first, second, third = (make(store, name) for name in ("first", "second", "third"))
        with store.use(first), store.use(second):
            store.release(first, "last user")
            with pytest.raises(MemoryRefused):
                store.use(third).__enter__()
        with store.use(third):
            pass
        with store.use(first):
            pass
        store.release(third, "last user")
        store.release_all("end")
        return [(e.event, e.component, e.bytes, e.resident_bytes, e.reason) for e in store.ledger.events]

    ours = told(lambda store, name: store.add(codec(tmp_path / f"{name}.safetensors", kind=name)))
    theirs = told(lambda store, name: Foreign(store, name, CODEC_BYTES))
    assert ours == theirs
    assert len(ours) > 15


# Everything at once.


class Storm:
    """Threads that use, release, interrupt, fill and drop at random, and what must hold all the while."""

    SECONDS: ClassVar[float] = 2.0

    def __init__(self, folder: Path) -> None:
        self.store = Store(Ledger(), budget=4 * CODEC_BYTES, pretended_total=PLENTY)
        reader = Reader(num_threads=2, chunk_bytes=512)
        names = [f"ours {n}" for n in range(4)]
        self.ours = [self.store.add(codec(folder / f"{n}.safetensors", kind=n, reader=reader)) for n in names]
        self.theirs = [Foreign(self.store, f"theirs {n}", CODEC_BYTES) for n in range(3)]
        self.x = torch.ones(1, 8)
        self.expected = [component.module(self.x) for component in self.ours]
        self.store.on_fill.append(self._interrupt_sometimes)
        self.outcomes = dict.fromkeys(["used", "refused", "interrupted", "failed"], 0)
        self.faults: list[BaseException] = []
        self._ends = time.monotonic() + self.SECONDS

    def __call__(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self._ends and not self.faults:
            try:
                self._act(rng)
            except MemoryRefused:
                self.outcomes["refused"] += 1
            except Interrupted:
                self.outcomes["interrupted"] += 1
            except ArithmeticError:
                self.outcomes["failed"] += 1
            except BaseException as fault:
                self.faults.append(fault)

    def _act(self, rng: random.Random) -> None:
        action = rng.choice([self._compute, self._compute, self._nest, self._use_theirs, self._release, self._fail])
        action(rng)

    def _compute(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.ours))
        with self.store.use(self.ours[number], owner=rng.choice([None, ("node", "p", str(number))])):
            assert torch.equal(self.ours[number].module(self.x), self.expected[number])
            assert self.ours[number].resident_parts() == self.ours[number].parts
        self.outcomes["used"] += 1

    def _nest(self, rng: random.Random) -> None:
        with self.store.use(rng.choice(self.ours), rng.choice([ENCODER, DECODER])):
            self._compute(rng)

    def _use_theirs(self, rng: random.Random) -> None:
        foreign = rng.choice(self.theirs)
        with self.store.use(foreign):
            assert foreign.weights is not None
            self._compute(rng)
            assert foreign.weights is not None

    def _release(self, rng: random.Random) -> None:
        self.store.release(rng.choice([*self.ours, *self.theirs]), "at random", force=rng.random() < 0.5)
        if rng.random() < 0.2:
            self.store.release_all("at random")

    def _fail(self, rng: random.Random) -> None:
        with self.store.use(rng.choice(self.ours)) as component:
            weight = component.module.encoder.weight
            raise ArithmeticError(f"a node failed with {weight.shape} in its hands")

    @staticmethod
    def _interrupt_sometimes(*_: object) -> None:
        if random.random() < 0.1:
            raise Interrupted


def test_a_storm_of_threads_breaks_no_rule(tmp_path):
    """Nothing in use is ever dropped, nobody waits for ever, and in the end nothing is pinned or alive."""
    storm = Storm(tmp_path)
    with running(*[lambda seed=seed: storm(seed) for seed in range(6)]):
        pass
    assert storm.faults == []
    assert min(storm.outcomes.values()) > 0, storm.outcomes
    resources = [*storm.ours, *storm.theirs]
    assert not any(map(storm.store.is_pinned, resources))
    storm.store.release_all("the end")
    gc.collect()
    assert storm.store.resident() == []
    assert storm.store.live_bytes() == 0
    assert storm.store.ledger.peak_bytes <= storm.store.budget
    balance = [event.event for event in storm.store.ledger.events]
    assert balance.count("load_begin") == balance.count("load_end")
    assert balance.count("pin") == balance.count("unpin")


def test_many_loads_and_releases_leave_no_growth(store, tmp_path):
    component = store.add(codec(tmp_path / "x.safetensors"))
    tracked = []
    for _ in range(20):
        with store.use(component):
            pass
        store.release(component, "last user")
        tracked.append((store.live_bytes(), len(store._entries), len(store._haunted), len(component._storages)))
    assert set(tracked[1:]) == {tracked[1]}


# Holding: for hosts that say when they begin with a resource, and not when they are done.


def test_what_is_held_stays_pinned_until_its_node_is_over(store):
    resource = Foreign(store, "x")
    owner = ("node", "prompt", "7")
    store.hold(resource, owner)
    store.hold(resource, owner)
    store.release(resource, "too early")
    assert resource.num_fills == 1
    assert store.is_pinned(resource)
    store.unpin_node("prompt", "8")
    assert store.is_pinned(resource)
    store.unpin_node("prompt", "7")
    assert store.live_bytes() == 0


def test_holding_that_fails_leaves_no_pin(tight):
    tight.budget = 10
    resource = Foreign(tight, "x", 100)
    with pytest.raises(MemoryRefused):
        tight.hold(resource, ("node", "prompt", "7"))
    assert not tight.is_pinned(resource)
    assert tight.resident() == []
