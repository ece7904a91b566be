"""What is read ahead of its user takes room that nobody needs, goes when somebody does, and is never waited for in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lazy_h3.memory.checkpoint import CheckpointError
from lazy_h3.memory.component import Component
from lazy_h3.memory.ledger import Event
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import Cost, Resource
from lazy_h3.memory.store import MemoryRefused, Store
from memory_models import PLENTY, Foreign, codec
from streamed_models import POINTS, deep_dit, threads

NBYTES = (64 + 8 + 8 + 2 * (16 + 64 + 8)) * 4
END_SECONDS = 20.0
PROMPT_SECONDS = 2.0  # to cancel takes a tenth of one


class Slow:
    """A reader whose every piece takes a moment, so that a file takes seconds, until it is told to hurry."""

    def __init__(self, chunk_bytes: int = 16, seconds: float = 0.03) -> None:
        self.arrived = threading.Event()
        self.hurry = threading.Event()
        self.num_pieces = 0
        self.reader = Reader(num_threads=1, chunk_bytes=chunk_bytes, before_chunk=self._wait)
        self._seconds = seconds

    def _wait(self, nbytes: int) -> None:
        self.num_pieces += 1
        if self.num_pieces > 2:
            self.arrived.set()
        self.hurry.wait(self._seconds)


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(pretended_total=PLENTY)
    yield store
    store.stop_prefetches("end of the test")
    wait_until(lambda: not reading_threads())


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def ahead(store, slow, tmp_path) -> Component:
    """A component that is being read ahead, slowly."""
    component = store.add(codec(tmp_path / "ahead.safetensors", kind="ahead", reader=slow.reader))
    assert store.prefetch(component, component.parts) is not None
    assert slow.arrived.wait(END_SECONDS)
    return component


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("lazy-h3-prefetch", "lazy-h3-read"))]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def taking_less_than(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def joined(thread: threading.Thread | None) -> None:
    assert thread is not None
    thread.join(END_SECONDS)
    assert not thread.is_alive()


def reasons(store: Store, event: str) -> list[tuple[str, str]]:
    return [(found.component, found.reason) for found in store.ledger.events if found.event == event]


def computed(component: Any) -> torch.Tensor:
    with torch.inference_mode():
        return component.module(torch.arange(8.0)[None])


def expected(path: Any) -> torch.Tensor:
    other = Store(pretended_total=PLENTY)
    component = other.add(codec(path))
    with other.use(component):
        return computed(component)


def assert_nothing_left(store: Store) -> None:
    assert store.live_bytes() == 0
    assert store.resident() == []
    assert not any(status.is_leaving for status in store.statuses())


# Room.


def test_a_user_finds_what_was_read_ahead_and_reads_nothing(store, tmp_path):
    path = tmp_path / "x.safetensors"
    component = store.add(codec(path, kind="x"))
    joined(store.prefetch(component, component.parts))
    with store.use(component):
        assert torch.equal(computed(component), expected(path))
    assert reasons(store, "load_begin") == [("x", "ahead of its first user")]
    assert store.ledger.peak_bytes == NBYTES


@pytest.mark.parametrize(("budget", "is_read"), [(2 * NBYTES, True), (2 * NBYTES - 1, False)])
def test_it_takes_no_more_than_the_budget_leaves_and_drops_nothing_for_it(store, tmp_path, budget, is_read):
    store.budget = budget
    kept, component = Foreign(store, "kept", NBYTES), store.add(codec(tmp_path / "x.safetensors", kind="x"))
    with store.use(kept):
        pass
    reader = store.prefetch(component, component.parts)
    assert (reader is not None) is is_read
    if reader is not None:
        joined(reader)
    assert kept.weights is not None
    assert store.live_bytes() == (2 if is_read else 1) * NBYTES


def test_what_must_stay_beside_it_counts_for_the_machine_and_not_for_the_budget_of_weights(store, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "budget", NBYTES)
    monkeypatch.setattr("lazy_h3.memory.device.pool_status", lambda *_: FixedPool(available=10 * NBYTES))
    component = store.add(codec(tmp_path / "x.safetensors", kind="x"))
    assert store.prefetch(component, component.parts, beside=9 * NBYTES + 1) is None
    joined(store.prefetch(component, component.parts, beside=9 * NBYTES))


class FixedPool:
    """A pool of which always as much is free."""

    def __init__(self, available: int) -> None:
        self.available = available


def test_what_is_there_or_in_use_or_under_way_is_not_read_ahead(store, ahead, slow):
    assert store.prefetch(ahead, ahead.parts) is None
    slow.hurry.set()
    with store.use(ahead):
        assert store.prefetch(ahead, ahead.parts) is None
    assert store.prefetch(ahead, ahead.parts) is None
    assert reasons(store, "load_begin") == [("ahead", "ahead of its first user")]


def test_it_is_not_read_ahead_beside_another_form_of_the_same_file(store, tmp_path):
    path = tmp_path / "x.safetensors"
    one, other = store.add(codec(path, kind="x")), store.add(codec(path, kind="x", compute=torch.bfloat16))
    with store.use(one):
        assert store.prefetch(other, other.parts) is None
    assert store.prefetch(other, other.parts) is None


# Who needs the room gets it.


@pytest.mark.parametrize("kind", ["component", "foreign, filled by its owner"])
def test_a_fill_that_needs_the_room_gets_it_at_once(store, ahead, tmp_path, kind):
    store.budget = NBYTES + 1
    with taking_less_than(PROMPT_SECONDS):
        if kind == "component":
            other = store.add(codec(tmp_path / "y.safetensors", kind="y"))
            with store.use(other):
                assert ahead.live_bytes() == 0
        else:
            other = Foreign(store, "y", NBYTES)
            other.loaded_by_owner()
            assert ahead.live_bytes() == 0
    assert ("ahead", "given up: room for y") in reasons(store, "load_end")
    assert store.ledger.peak_bytes <= store.budget


def test_what_has_been_read_ahead_goes_before_what_was_kept(store, tmp_path):
    store.budget = 2 * NBYTES
    kept, component = Foreign(store, "kept", NBYTES), store.add(codec(tmp_path / "x.safetensors", kind="x"))
    with store.use(kept):
        pass
    joined(store.prefetch(component, component.parts))
    with store.use(Foreign(store, "y", NBYTES)):
        pass
    assert reasons(store, "release") == [("x", "room for y")]


def test_a_fill_with_room_beside_it_leaves_it_alone(store, ahead, slow):
    with store.use(Foreign(store, "y", NBYTES)):
        assert store.resident()[0] is ahead
    slow.hurry.set()
    wait_until(lambda: not reading_threads())
    assert ahead.resident_parts() == ahead.parts


def test_another_form_of_the_same_file_takes_its_place_even_with_room(store, ahead, tmp_path):
    other = store.add(codec(tmp_path / "ahead.safetensors", kind="ahead", compute=torch.bfloat16))
    with taking_less_than(PROMPT_SECONDS), store.use(other):
        assert ahead.live_bytes() == 0


def test_without_a_plan_room_that_is_only_read_ahead_into_is_no_reason_to_stream(store, ahead, tmp_path):
    """A component that fits whole once the read gives way is held whole."""
    store.budget = NBYTES + 8
    other = store.add(Streamable(store, "y", NBYTES))
    with store.use(other):
        assert other.modes == ["whole"]


class Streamable(Foreign):
    """As small as you like."""

    def __init__(self, store: Store, name: str, nbytes: int) -> None:
        super().__init__(store, name, nbytes)
        self.modes: list[str] = []

    def costs(self, parts: Any, points: tuple[float, ...] = ()) -> dict[str, Cost]:
        return {"whole": Cost(self.nbytes), "streamed": Cost(1)}

    def fill(self, request: Any) -> None:
        self.modes.append(request.mode)
        super().fill(request)


def test_what_is_on_another_device_does_not_have_to_go(store, ahead):
    elsewhere = Foreign(store, "y", NBYTES, device=torch.device("meta"))
    store.budget = NBYTES
    with pytest.raises(MemoryRefused), store.use(Foreign(store, "z", 2 * NBYTES, device=torch.device("meta"))):
        pass
    with store.use(elsewhere):
        assert ahead in store.resident()
    assert reasons(store, "load_end") == [("y", "")]


# It goes when it is told to.


@pytest.mark.parametrize("how", ["release", "release later", "release all", "stop"])
def test_a_release_cancels_it_in_the_middle(store, ahead, slow, how):
    with taking_less_than(PROMPT_SECONDS):
        if how == "release":
            store.release(ahead, "told to", force=True)
        elif how == "release later":
            store.release_later(ahead, "told to")
        elif how == "release all":
            store.release_all("told to")
        else:
            store.stop_prefetches("told to")
            assert ahead not in store.resident()
        wait_until(lambda: not reading_threads())
    assert reasons(store, "load_end") == [("ahead", "given up: told to")]
    assert slow.num_pieces < 30
    assert_nothing_left(store)


@pytest.mark.parametrize("where", ["its inputs", "its tables"])
def test_it_is_cancelled_in_the_middle_of_folding(store, tmp_path, where):
    slow = Slow(chunk_bytes=1024)
    component = store.add(deep_dit(tmp_path / "dit.safetensors", reader=slow.reader))
    assert store.prefetch(component, component.parts, POINTS) is not None
    assert slow.arrived.wait(END_SECONDS)
    if where == "its tables":
        wait_until(lambda: has_tables(component))
    with taking_less_than(PROMPT_SECONDS):
        store.stop_prefetches("told to")
    assert_nothing_left(store)
    slow.hurry.set()
    with store.use(component):
        assert component.resident_parts() == component.parts


def has_tables(component: Component) -> bool:
    """Whether one of its sub-modules answers from a table already."""
    return any("forward" in module.__dict__ for name, module in component.module.named_modules() if name.endswith(".adaln_proj"))


def test_a_release_that_comes_with_the_last_byte_is_done(store, tmp_path):
    """After that nothing asks the reader any more."""
    component = store.add(codec(tmp_path / "x.safetensors", kind="x"))
    fill = component.fill

    def filled(request: Any) -> None:
        fill(request)
        store.release(component, "too late", force=True)

    component.fill = filled
    heard = heard_changes(store)
    joined(store.prefetch(component, component.parts))
    assert_nothing_left(store)
    assert reasons(store, "release") == [("x", "too late")]
    store.settle()
    assert [is_resident for is_resident, _ in heard] == [True, False]


def test_nothing_stays_of_what_could_not_be_begun(store, tmp_path, monkeypatch):
    component = store.add(codec(tmp_path / "x.safetensors", kind="x"))

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    heard = heard_changes(store)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="new thread"):
            store.prefetch(component, component.parts)
    assert_nothing_left(store)
    assert [is_resident for is_resident, _ in heard] == [True, False]
    with store.use(component):
        pass


# Its user comes.


def test_a_user_who_comes_meanwhile_waits_sees_progress_and_gets_it(store, ahead, slow, tmp_path):
    seen = []

    def watch(resource: Resource, done: int, total: int) -> None:
        seen.append((done, total, threading.current_thread()))
        if len(seen) == 3:
            slow.hurry.set()

    store.on_fill.append(watch)
    with store.use(ahead):
        assert torch.equal(computed(ahead), expected(tmp_path / "ahead.safetensors"))
    assert len(seen) >= 3
    assert {thread for *_, thread in seen} == {threading.current_thread()}
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    assert seen[0][1] == NBYTES
    assert len(reasons(store, "load_begin")) == 1


def test_a_user_who_is_interrupted_while_waiting_leaves_it_to_be_cancelled(store, ahead):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    store.on_fill.append(interrupt)
    with taking_less_than(PROMPT_SECONDS), pytest.raises(KeyboardInterrupt), store.use(ahead):
        pass
    assert not store.is_pinned(ahead)
    assert ahead in store.resident()
    with taking_less_than(PROMPT_SECONDS):
        store.stop_prefetches("told to")
    assert_nothing_left(store)


def test_the_store_is_not_locked_while_a_waiting_user_is_shown_progress(store, ahead, slow):
    """Whoever shows it may wait for somebody who asks the store."""

    def ask(*_: Any) -> None:
        with threads(store.live_bytes):
            slow.hurry.set()

    store.on_fill.append(ask)
    with store.use(ahead):
        pass


def test_a_release_while_its_user_waits_means_when_the_user_is_done(store, ahead, slow):
    def release(*_: Any) -> None:
        store.release_all("told to", force=True)
        slow.hurry.set()

    store.on_fill.append(release)
    with store.use(ahead):
        assert ahead.resident_parts() == ahead.parts
    assert_nothing_left(store)
    assert len(reasons(store, "load_begin")) == 1


def test_stopping_does_not_take_it_from_a_user_who_waits(store, ahead, slow):
    with threads(lambda: use_for_a_moment(store, ahead)):
        wait_until(lambda: store.is_pinned(ahead))
        with taking_less_than(PROMPT_SECONDS):
            store.stop_prefetches("told to")
        slow.hurry.set()
    assert len(reasons(store, "load_begin")) == 1


def use_for_a_moment(store: Store, resource: Resource) -> None:
    with store.use(resource):
        assert resource.resident_parts() == resource.parts


def test_a_file_that_cannot_be_read_says_why_to_its_user_alone(store, tmp_path):
    path = tmp_path / "x.safetensors"
    component = store.add(codec(path, kind="x"))
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[:-8])
    heard = heard_changes(store)
    joined(store.prefetch(component, component.parts))
    assert_nothing_left(store)
    assert reasons(store, "load_end") == [("x", "failed: CheckpointError")]
    with pytest.raises(CheckpointError, match=r"x\.safetensors"), store.use(component):
        pass
    store.settle()
    assert [is_resident for is_resident, _ in heard] == [True, False]


def test_a_user_who_waits_for_a_read_that_fails_reads_for_itself(store, tmp_path):
    is_broken = threading.Event()
    gate = Slow()

    def fail(nbytes: int) -> None:
        if not is_broken.is_set() and gate.num_pieces > 5:
            is_broken.set()
            raise OSError("unplugged")
        gate._wait(nbytes)

    component = store.add(codec(tmp_path / "x.safetensors", kind="x", reader=Reader(1, 64, before_chunk=fail)))
    store.prefetch(component, component.parts)
    with store.use(component):
        assert component.resident_parts() == component.parts
    assert reasons(store, "load_end") == [("x", "failed: OSError"), ("x", "")]


# Who hears of it, and where.


def heard_changes(store: Store) -> list[tuple[bool, threading.Thread]]:
    heard: list[tuple[bool, threading.Thread]] = []
    store.on_change.append(lambda _, is_resident: heard.append((is_resident, threading.current_thread())))
    return heard


@pytest.mark.parametrize("end", ["used", "cancelled"])
def test_changes_are_told_on_the_threads_that_begin_use_and_settle(store, tmp_path, slow, end):
    heard = heard_changes(store)
    component = store.add(codec(tmp_path / "x.safetensors", kind="x", reader=slow.reader))
    reader = store.prefetch(component, component.parts)
    if end == "used":
        slow.hurry.set()
        joined(reader)
        with store.use(component):
            pass
        store.release(component, "done")
    else:
        store.stop_prefetches("told to")
        joined(reader)
        assert [is_resident for is_resident, _ in heard] == [True]
        store.settle()
    assert [is_resident for is_resident, _ in heard][-1] is False
    assert {thread for _, thread in heard} == {threading.current_thread()}


def test_news_that_are_old_are_not_told(store, tmp_path, slow):
    """It went, and came again before anybody settled."""
    component = store.add(codec(tmp_path / "x.safetensors", kind="x", reader=slow.reader))
    store.prefetch(component, component.parts)
    store.stop_prefetches("told to")
    slow.hurry.set()
    with store.use(component):
        heard = heard_changes(store)
        store.settle()
        assert heard == []


@pytest.mark.parametrize("moment", ["load_begin", "load_end"])
def test_an_observer_of_the_ledger_that_fails_leaves_a_table_that_works(store, tmp_path, moment):
    component = store.add(codec(tmp_path / "x.safetensors", kind="x"))

    def fail(event: Event) -> None:
        if event.event == moment:
            raise ArithmeticError("no good")

    with store.ledger.observed(fail):
        joined(store.prefetch(component, component.parts))
    with store.use(component):
        assert component.resident_parts() == component.parts
    store.release_all("done")
    assert_nothing_left(store)


def test_it_is_seen_as_being_filled_and_not_in_use(store, ahead):
    (status,) = [status for status in store.statuses() if status.resource is ahead]
    assert (status.state, status.is_pinned, status.is_leaving) == ("filling", False, False)
    assert store.resident() == [ahead]


def test_many_are_read_ahead_used_and_told_to_go_at_once(store, tmp_path):
    """Nobody waits for ever, and nothing stays."""
    made = [store.add(codec(tmp_path / f"{n}.safetensors", kind=str(n), reader=Slow(64, 0.001).reader)) for n in range(3)]
    budget = store.budget = 3 * NBYTES

    def begin() -> None:
        for n in range(40):
            store.prefetch(made[n % 3], made[n % 3].parts)
            time.sleep(0.001)

    def use() -> None:
        for n in range(20):
            use_for_a_moment(store, made[n % 3])

    def disturb() -> None:
        for n in range(20):
            [lambda: store.stop_prefetches("stop"), lambda: store.release_all("go", force=True), store.settle][n % 3]()
            time.sleep(0.002)

    with threads(begin, use, use, disturb):
        pass
    assert store.ledger.peak_bytes <= budget
    store.stop_prefetches("end")
    store.settle()
    store.release_all("end", force=True)
    assert_nothing_left(store)
