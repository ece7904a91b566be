"""The texts: a table for people, and one line a prompt."""

from __future__ import annotations

from lazy_h3.host.snapshot import prompt_report, prompt_table, summary_line
from lazy_h3.memory.ledger import Event, Page

MIB = 1 << 20


def event(t: float, kind: str, name: str, mib: int, node: str | None = None, reason: str = "") -> Event:
    return Event(t, 0, kind, name, node, mib * MIB, 0, reason)


def loaded(t: float, name: str, mib: int, node: str) -> tuple[Event, Event]:
    return event(t, "load_begin", name, mib, node), event(t + 1, "load_end", name, mib, node)


PAGE = Page(
    "p1",
    0.0,
    10.0,
    {"kept": 2 * MIB},
    9 * MIB,
    (
        *loaded(1, "encoder", 8, "5"),
        event(3, "release", "encoder", 8, "5", "node 5 was its last user"),
        *loaded(4, "encoder", 8, "6"),
        event(6, "release", "encoder", 8, None, "end of the prompt"),
    ),
)


def test_the_summary_line_says_peak_releases_and_reloads_with_their_seconds():
    assert summary_line(PAGE) == (
        "Lazy H3, prompt p1: peak 9.00 MiB; kept still resident; encoder freed after node 5 and freed (end of the prompt); "
        "read 2x in 2.0 s, 1x again in 1.0 s."
    )


def test_the_summary_line_says_how_far_the_peak_is_from_the_plan():
    assert "peak 9.00 MiB (as in the plan);" in summary_line(PAGE, PAGE.peak_bytes)
    assert "peak 9.00 MiB (-10.0 % from the plan);" in summary_line(PAGE, 10 * MIB)


def test_the_summary_line_of_a_prompt_without_components_says_so():
    assert summary_line(Page("p1")) == "Lazy H3, prompt p1: no component was in memory."


def test_the_summary_line_of_a_prompt_that_read_nothing_says_so():
    assert summary_line(Page("p1", before={"kept": MIB}, peak_bytes=MIB)).endswith("kept still resident; nothing was read.")


def test_the_table_has_a_row_a_component_and_the_peak_beside_the_sum():
    assert prompt_table(PAGE).splitlines() == [
        "component                       size  read          released",
        "kept                        2.00 MiB  0x in 0.00 s  still resident",
        "encoder                     8.00 MiB  2x in 2.00 s  freed after node 5 and freed (end of the prompt)",
        "sum of all components      10.00 MiB",
        "peak of the prompt so far   9.00 MiB",
    ]


def test_the_report_has_every_component_with_its_levels_and_every_event():
    found = prompt_report(PAGE)
    assert (found["schema"], found["prompt_id"], found["began"], found["ended"]) == (1, "p1", 0.0, 10.0)
    assert (found["sum_bytes"], found["largest_bytes"], found["peak_bytes"]) == (10 * MIB, 8 * MIB, 9 * MIB)
    encoder = found["components"][1]
    assert encoder["levels"][:4] == [[0.0, 0, 0], [1, 0, 8 * MIB], [2, 8 * MIB, 0], [3, 0, 0]]
    assert (encoder["released_after"], encoder["reloads"], encoder["reload_seconds"]) == (["5"], 1, 1)
    assert [e["reason"] for e in found["events"] if e["event"] == "release"] == ["node 5 was its last user", "end of the prompt"]
