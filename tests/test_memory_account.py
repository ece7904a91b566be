"""Pages of the ledger, and what is read from them. Times and bytes are small numbers."""

from __future__ import annotations

import pytest
from lazy_h3.memory.account import Level, accounts
from lazy_h3.memory.ledger import Event, Ledger, Page
from lazy_h3.memory.store import Store
from memory_models import PLENTY, Foreign


def page(*events: tuple, before: dict[str, int] | None = None) -> Page:
    """``events``: (t, kind, component, bytes, node[, reason])."""
    entries = tuple(
        Event(t, 0, kind, name, node, nbytes, 0, *(reason or [""])) for t, kind, name, nbytes, node, *reason in events
    )
    return Page("prompt", 10.0, 20.0, before or {}, 0, entries)


LOADED = ((11, "load_begin", "x", 5, "1"), (13, "load_end", "x", 5, "1"))
RELEASED = (14, "release", "x", 5, "1")


def test_a_component_is_being_read_then_resident_then_gone():
    (account,) = accounts(page(*LOADED, RELEASED))
    assert account.levels == [Level(10.0), Level(11, 0, 5), Level(13, 5), Level(14)]
    assert (account.bytes, account.resident_bytes) == (5, 0)
    assert (account.loads, account.load_seconds, account.reloads) == (1, 2, 0)
    assert account.released_after == ["1"]


def test_parts_add_up_and_are_no_reloads():
    (account,) = accounts(page(*LOADED, (15, "load_begin", "x", 3, "2"), (16, "load_end", "x", 3, "2")))
    assert (account.bytes, account.resident_bytes, account.loads, account.reloads) == (8, 8, 2, 0)


def test_a_load_after_a_release_is_a_reload():
    (account,) = accounts(page(*LOADED, RELEASED, (15, "load_begin", "x", 5, "2"), (18, "load_end", "x", 5, "2")))
    assert (account.loads, account.load_seconds) == (2, 5)
    assert (account.reloads, account.reload_seconds) == (1, 3)


def test_a_load_that_fails_is_none_and_leaves_what_was_there():
    (account,) = accounts(page(*LOADED, (15, "load_begin", "x", 3, "2"), (16, "load_end", "x", 0, "2")))
    assert (account.loads, account.resident_bytes) == (1, 5)


def test_what_was_there_before_is_resident_from_the_beginning():
    (account,) = accounts(page(before={"x": 7}))
    assert (account.levels, account.bytes, account.loads) == ([Level(10.0, 7)], 7, 0)


def test_a_streamed_component_stays_so_for_another_schedule_and_until_it_is_released():
    streamed = ((11, "load_begin", "x", 5, "1", "model streamed: it runs once"), (12, "load_end", "x", 5, "1"))
    refolded = ((13, "load_begin", "x", 1, "1", "another schedule"), (14, "load_end", "x", 1, "1"))
    whole = ((16, "load_begin", "x", 9, "2"), (17, "load_end", "x", 9, "2"))
    accounts_at = [accounts(page(*streamed, *later)) for later in ((), refolded, ((15, "release", "x", 6, "1"), *whole))]
    assert [account.mode for (account,) in accounts_at] == ["streamed", "streamed", "whole"]


@pytest.mark.parametrize("kind", ["pin", "unpin", "keep"])
def test_a_measured_figure_corrects_the_sum(kind):
    (account,) = accounts(page(*LOADED, (15, kind, "x", 4, "2")))
    assert account.levels[-1] == Level(15, 4)


def test_a_component_that_was_only_refused_has_no_account():
    assert accounts(page((11, "pin", "x", 0, "1"), (12, "refuse", "x", 99, "1"), (13, "unpin", "x", 0, "1"))) == []


def test_accounts_come_in_the_order_of_first_events():
    named = [(t, kind, name, 5, "1") for t, name in ((11, "b"), (12, "a")) for kind in ("load_begin", "load_end")]
    assert [account.name for account in accounts(page(*named, before={"c": 1}))] == ["c", "b", "a"]


def test_a_page_has_the_events_and_the_peak_of_its_prompt_alone():
    store = Store(pretended_total=PLENTY)
    large, small = Foreign(store, "large", 5000), Foreign(store, "small", 1000)
    for prompt, resource in (("first", large), ("second", small)):
        store.ledger.turn_page(prompt, {})
        with store.use(resource):
            pass
        store.release(resource, "last user")
    found = store.ledger.page()
    assert (found.prompt_id, found.peak_bytes) == ("second", 1000)
    assert [event.component for event in found.events] == ["small"] * 5
    assert found.began <= found.events[0].t <= found.events[-1].t <= found.ended
    assert store.ledger.peak_bytes == 5000, "runs are counted apart from prompts"


def test_a_page_begins_with_what_is_alive():
    ledger = Ledger()
    ledger.measure = lambda: 300
    ledger.turn_page("prompt", {"x": 300})
    assert (ledger.page().peak_bytes, ledger.page().before) == (300, {"x": 300})
