from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from lazy_h3.memory.ledger import MAX_EVENTS, Ledger
from lazy_h3.memory.store import Store
from memory_models import PLENTY, Foreign, codec
from torch import nn


@pytest.fixture
def store() -> Store:
    return Store(pretended_total=PLENTY)


def test_an_event_says_what_when_where_and_how_much_was_alive():
    ledger = Ledger()
    ledger.measure = lambda: 700
    ledger.current_node = lambda: "12"
    first = ledger.record("load_end", "dit", 500, "because")
    second = ledger.record("release", "dit", 500, node="13")
    assert [first, second] == list(ledger.events)
    assert 0 <= first.t <= second.t <= ledger.now()
    assert first.as_dict() == {
        "t": first.t,
        "run": 0,
        "event": "load_end",
        "component": "dit",
        "node": "12",
        "bytes": 500,
        "resident_bytes": 700,
        "reason": "because",
    }
    assert second.node == "13"


def test_events_are_in_the_order_in_which_things_happened(store, tmp_path):
    component = store.add(codec(tmp_path / "x.safetensors"))
    with store.use(component):
        pass
    store.release(component, "last user")
    events = list(store.ledger.events)
    assert [e.event for e in events] == ["pin", "load_begin", "load_end", "unpin", "release"]
    assert [e.t for e in events] == sorted(e.t for e in events)
    nbytes = component.nbytes()
    assert [e.resident_bytes for e in events] == [0, 0, nbytes, nbytes, 0]
    assert [e.bytes for e in events] == [0, nbytes, nbytes, nbytes, nbytes]


def test_the_peak_is_what_was_alive_together_and_not_the_sum(store):
    small, large = Foreign(store, "small", 1000), Foreign(store, "large", 5000)
    for resource in (small, large, small):
        with store.use(resource):
            pass
        store.release(resource, "last user")
    assert store.ledger.peak_bytes == 5000
    with store.use(small), store.use(large):
        pass
    assert store.ledger.peak_bytes == 6000


def test_a_run_has_its_own_events_and_its_own_peak(store):
    resource = Foreign(store, "x", 1000)
    store.ledger.begin_run(1)
    with store.use(resource):
        pass
    store.ledger.begin_run(2)
    assert store.ledger.peak_bytes == 1000, "what is still alive belongs to the new run as well"
    store.release(resource, "last user")
    store.ledger.begin_run(3)
    assert store.ledger.peak_bytes == 0
    assert [e.event for e in store.ledger.of_run(1)] == ["pin", "load_begin", "load_end", "unpin"]
    assert [e.event for e in store.ledger.of_run(2)] == ["release"]
    assert store.ledger.of_run(3) == []


def test_a_fill_that_fails_counts_into_the_peak(store, tmp_path):
    """Its weights were allocated, and are gone before its last event."""
    component = store.add(codec(tmp_path / "x.safetensors"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    store.on_fill.append(interrupt)
    with pytest.raises(KeyboardInterrupt), store.use(component):
        pytest.fail("was filled")
    assert store.live_bytes() == 0
    assert store.ledger.peak_bytes == component.nbytes()


@pytest.mark.parametrize(
    "take",
    [lambda w: w, lambda w: w[2:4], lambda w: w.data, lambda w: nn.Parameter(w.detach(), requires_grad=False)],
    ids=["the weight", "a view", "its data", "another parameter"],
)
def test_a_planted_stray_reference_shows_in_the_peak_until_it_is_gone(store, tmp_path, take):
    first = store.add(codec(tmp_path / "first.safetensors", kind="first"))
    second = store.add(codec(tmp_path / "second.safetensors", kind="second"))
    with store.use(first):
        stray = take(first.module.encoder.weight)
        stray_bytes = first.module.encoder.weight.nbytes
    store.release(first, "last user")
    store.ledger.begin_run(1)
    with store.use(second):
        pass
    assert store.ledger.peak_bytes == second.nbytes() + stray_bytes
    assert next(e.resident_bytes for e in store.ledger.of_run(1)) == stray_bytes
    store.release(second, "last user")
    del stray
    store.ledger.begin_run(2)
    assert store.ledger.peak_bytes == 0
    with store.use(second):
        pass
    assert store.ledger.peak_bytes == second.nbytes()


def test_observers_hear_every_event_inside_their_block_and_none_after():
    ledger = Ledger()
    heard = []
    with ledger.observed(heard.append):
        ledger.record("pin", "x", 0)
        ledger.record("unpin", "x", 0)
    ledger.record("release", "x", 0)
    assert heard == list(ledger.events)[:2]


def test_observers_are_removed_when_the_block_fails():
    ledger = Ledger()
    heard = []
    with pytest.raises(ArithmeticError), ledger.observed(heard.append):
        raise ArithmeticError
    ledger.record("pin", "x", 0)
    assert heard == []


def test_old_events_make_room_for_new_ones():
    ledger = Ledger()
    ledger.events.extend([ledger.record("pin", "old", 0)] * MAX_EVENTS)
    ledger.record("pin", "new", 0)
    assert len(ledger.events) == MAX_EVENTS
    assert ledger.events[-1].component == "new"


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns after every few instructions, so that what can go wrong between two of them does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_events_can_be_read_while_others_are_written(hasty):
    ledger = Ledger()
    faults = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                ledger.of_run(0)
        except RuntimeError as fault:
            faults.append(fault)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        ledger.record("pin", "x", 0)
    done.set()
    reader.join()
    assert faults == []
    assert len(ledger.of_run(0)) == 2000


def test_bytes_are_measured_from_storages_and_not_kept_in_a_book(store, tmp_path):
    component = store.add(codec(tmp_path / "x.safetensors"))
    with store.use(component):
        component.module.encoder.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
        assert store.ledger.sample() == component.nbytes() - 8 * 8 * 4
