"""In every kind of prompt and cache, and whatever the host shows, a component goes with the last node that may use it."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from embedded_nodes import node
from session_cases import (
    CACHES,
    Prompt,
    Record,
    Scene,
    branch,
    chain,
    loaders,
    quick_collections,  # noqa: F401  (a fixture)
    scene,
)

UNUSED = "a component that nobody consumes"


@dataclass(frozen=True)
class Row:
    """One kind of prompt.

    ``gone``: component -> its users. It is read once and is gone at the finish of the last of them that finishes; without any
    that does, and without an entry, it is never read. ``"4/7 5"``: node 4 is out of question when 4 or 7 has finished. ``"end"``:
    at the end of the prompt. ``instead``: what differs where the executor shows less, or without a cache (by sight or cache).
    ``at_once``: how many components are in memory together at most. ``before``: prompts that run first, so that caches are warm.
    """

    prompt: Prompt
    gone: Mapping[str, str]
    instead: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    at_once: int = 1
    before: tuple[Prompt, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    status: str = "success"
    is_resubmitted: bool = False

    def expected(self, cache: str, sees: str) -> dict[str, str]:
        return {**self.gone, **self.instead.get(sees, {}), **self.instead.get(cache, {})}


TWO_TEXTS = {
    "1": node("Load", name="te"),
    "4": node("Encode", model=["1", 0], value="a cat"),
    "5": node("Show", value=["4", 0]),
    "6": node("Encode", model=["1", 0], value="a dog"),
    "7": node("Show", value=["6", 0]),
}
ONE_TEXT = {name: TWO_TEXTS[name] for name in "145"}
ONE_BRANCH = {**loaders(), **branch("a cat")}
LATE_BRANCH = {"8": node("Passes", value="a dog"), **branch(["8", 0], 14)}  # hosts would run the first branch to its end before
CHAIN_USERS = {"te": "4", "dit": "5", "vae": "6"}


def failing(bad: str, **inputs: Any) -> Prompt:
    """The chain with a node of another pack between encoder and sampler."""
    return {**chain(), "8": node(bad, value=["4", 0], **inputs), "5": node("Sample", model=["2", 0], value=["8", 0])}


ROWS = {
    "linear chain": Row(chain(), CHAIN_USERS),
    "loaders listed after their consumers": Row(dict(reversed(chain().items())), CHAIN_USERS),
    "one consumer cached and one new": Row(
        TWO_TEXTS,
        {"te": "4 6"},
        instead={"queued": {"te": "4/5 6"}},  # that 4 is cached shows when the cached output behind it finishes
        before=(ONE_TEXT,),
    ),
    "everything cached": Row(chain(), CHAIN_USERS, before=(chain(),)),
    "last consumer of another pack": Row(
        {
            "1": node("Load", name="te"),
            "4": node("Encode", model=["1", 0], value="a cat"),
            "5": node("Uses", model=["1", 0], value=["4", 0]),
            "6": node("Show", value=["5", 0]),
        },
        {"te": "4 5"},
    ),
    "through a core switch": Row(
        {
            **loaders(["te", "spare"]),
            "3": node("ComfySwitchNode", switch=False, on_false=["1", 0], on_true=["2", 0]),
            "4": node("Encode", model=["3", 0], value="a cat"),
            "5": node("Show", value=["4", 0]),
            "6": node("Encode", model=["1", 0], value="a dog"),
            "7": node("Show", value=["6", 0]),
        },
        {"te": "4 6"},
    ),
    "a branch that a core switch does not take": Row(
        {
            **loaders(["te", "spare", "dit"]),
            "4": node("Encode", model=["1", 0], value="a cat"),
            "5": node("Encode", model=["2", 0], value="a dog"),
            "6": node("ComfySwitchNode", switch=False, on_false=["4", 0], on_true=["5", 0]),
            "7": node("Sample", model=["3", 0], value=["6", 0]),
            "8": node("Show", value=["7", 0]),
        },
        {"te": "4", "dit": "7"},
    ),
    "a switch that decides late and takes the branch": Row(
        {
            **ONE_TEXT,
            "2": node("After", value=False, other=["4", 0]),
            "3": node("ComfySwitchNode", switch=["2", 0], on_false=["6", 0], on_true="nothing"),
            "6": node("Encode", model=["1", 0], value="a dog"),
            "7": node("Show", value=["3", 0]),
        },
        {"te": "4 6"},
    ),
    "a switch that decides late against the branch": Row(
        {
            **ONE_TEXT,
            "2": node("After", value=True, other=["4", 0]),
            "3": node("ComfySwitchNode", switch=["2", 0], on_false=["6", 0], on_true="nothing"),
            "6": node("Encode", model=["1", 0], value="a dog"),
            "7": node("Show", value=["3", 0]),
        },
        {"te": "4 3"},
    ),
    "a switch that decides late for what is cached": Row(
        {
            "1": node("Load", name="te"),
            "2": node("After", value=False, other=["4", 0]),
            "3": node("ComfySwitchNode", switch=["2", 0], on_false=["6", 0], on_true="nothing"),
            "4": node("Encode", model=["1", 0], value="a cow"),
            "6": node("Encode", model=["1", 0], value="a dog"),
            "7": node("Show", value=["3", 0]),
        },
        {"te": "4 6"},
        instead={"queued": {"te": "4 6/3"}},
        before=(TWO_TEXTS,),
    ),
    "pass-through and reroute": Row(
        {
            "1": node("Load", name="te"),
            "2": node("Passes", value=["1", 0]),
            "3": node("Reroute", value=["2", 0]),
            "4": node("Encode", model=["3", 0], value="a cat"),
            "5": node("Show", value=["4", 0]),
            "6": node("After", value=["3", 0], other=["4", 0]),
            "7": node("Show", value=["6", 0]),
        },
        {"te": "4 6 7"},  # whoever is handed the model may use it
    ),
    "two equal loaders": Row(
        {**TWO_TEXTS, "11": node("Load", name="te"), "6": node("Encode", model=["11", 0], value="a dog")}, {"te": "4 6"}
    ),
    "expansion by link": Row(
        {**chain(), "5": node("ExpandsByLink", model=["2", 0], value=["4", 0])}, {"te": "4", "dit": "5.0.0.1", "vae": "6"}
    ),
    "expansion by object": Row(
        {**chain(), "5": node("ExpandsByObject", model=["2", 0], value=["4", 0])}, {"te": "4", "dit": "5.0.0.1", "vae": "6"}
    ),
    "expansion by link that uses what was used before": Row(
        {**chain(), "5": node("ExpandsByLink", model=["1", 0], value=["4", 0])}, {"te": "4 5.0.0.1", "vae": "6"}
    ),
    "expansion by object that uses what was used before": Row(
        {**chain(), "5": node("ExpandsByObject", model=["1", 0], value=["4", 0])}, {"te": "4 5.0.0.1", "vae": "6"}
    ),
    "expansion with an output of its own": Row(
        {**chain(), "5": node("ExpandsToOutput", model=["1", 0], value=["4", 0])}, {"te": "4 5.0.0.1", "vae": "6"}
    ),
    "expansion into a loader": Row(
        {**chain(), "1": node("ExpandsToLoader", name="te"), "6": node("Encode", model=["1", 0], value=["5", 0])},
        {"te": "4 6", "dit": "5"},
        at_once=2,
    ),
    "loop by expansion": Row(
        {**chain(), "5": node("Repeats", model=["2", 0], value=["4", 0], times=3)},
        {"te": "4", "dit": "5.0.0.2.0.0.2.0.0.1", "vae": "6"},
    ),
    "list inputs": Row(
        {
            **chain(),
            "8": node("Many", values="cat dog cow"),
            "4": node("Encode", model=["1", 0], value=["8", 0]),
            "9": node("Together", values=["5", 0]),
            "6": node("Decode", model=["3", 0], value=["9", 0]),
        },
        CHAIN_USERS,
    ),
    "async nodes": Row(
        {
            "1": node("Load", name="te"),
            "2": node("UsesLate", model=["1", 0], value="a cat", seconds=0.005),
            "3": node("UsesLate", model=["1", 0], value="a dog", seconds=0.0),
            "4": node("Uses", model=["1", 0], value="a cow"),
            **{f"{n}s": node("Show", value=[n, 0]) for n in "234"},
        },
        {"te": "2 3 4"},
    ),
    "blocker": Row({**chain(), "8": node("Blocks", value=["4", 0]), **failing("Blocks")}, {"te": "4"}),
    "exception in a node of another pack": Row(failing("Fails"), {"te": "4"}, status="error"),
    "exception while a model is in use": Row(failing("FailsInside", model=["1", 0]), {"te": "end"}, status="error"),
    "interrupt in a node of another pack": Row(failing("Stops"), {"te": "4"}, status="interrupted"),
    "interrupt while a model is in use": Row(failing("StopsInside", model=["1", 0]), {"te": "end"}, status="interrupted"),
    "partial execution": Row(TWO_TEXTS, {"te": "4"}, instead={"nothing": {"te": "end"}}, options={"outputs": ["5"]}),
    "vanished nodes": Row(
        {
            **ONE_TEXT,
            "2": node("Inhibits", value=["4", 0], nodes="6 7"),
            "3": node("Passes", value=["2", 0]),
            "6": node("Encode", model=["1", 0], value=["3", 0]),
            "7": node("Show", value=["6", 0]),
            "8": node("Show", value=["3", 0]),
        },
        {"te": "4 2"},
        instead={"queued": {"te": "end"}, "nothing": {"te": "end"}},  # the output 7 was queued and never finishes
    ),
    UNUSED: Row({**ONE_TEXT, "1": node("LoadBoth", name="te", other="spare")}, {"te": "4"}),
    "used again much later": Row({**chain(), "3": node("Load", name="te")}, {"te": "4 6", "dit": "5"}, at_once=2),
    "two branches that share all models": Row({**ONE_BRANCH, **LATE_BRANCH}, {"te": "4 14", "dit": "5 15", "vae": "6 16"}),
    "two branches of which one is cached": Row(
        {**ONE_BRANCH, **LATE_BRANCH},
        {"te": "4 14", "dit": "5 15", "vae": "6 16"},
        instead={"queued": {"te": "4/7 14", "dit": "5/7 15", "vae": "6/7 16"}},
        before=(ONE_BRANCH,),
    ),
    "resubmitted from history": Row(chain(), CHAIN_USERS, is_resubmitted=True),
    "resubmitted from history with another text": Row(
        {**chain(), **branch("a dog")}, CHAIN_USERS, before=(chain(),), is_resubmitted=True
    ),
}


def last_user(users: str, record: Record) -> str | None:
    """The event at which the last of the users is out of question."""
    events = record.events()
    if users == "end":
        return "end"
    finishes = [[events.index(f"F{n}") for n in group.split("/") if f"F{n}" in events] for group in users.split()]
    decisive = [min(places) for places in finishes if places]
    return events[max(decisive)] if decisive else None


def check(row: Row, played: Scene, cache: str, sees: str) -> None:
    """Who is in memory at which event, against the row."""
    record, expected = played.record, row.expected(cache, sees)
    for name in played.resources:
        last = last_user(expected[name], record) if name in expected else None
        gone = [stay[1] for stay in record.stays(name)]
        assert gone == ([] if last is None else [last]), (name, record.stays(name), record.events())
        assert played.loaded().count(name) == len(gone)
    assert max(len([n for n in moment.nbytes.values() if n]) for moment in record.moments) <= row.at_once, record.events()
    assert not any(record.moments[-1].nbytes.values())
    assert played.store.live_bytes() == 0
    assert played.store.resident() == []
    assert played.host.model_management.current_loaded_models == []
    assert played.runtime.attachment.session is None


def play(row: Row, kind: Any, cache: str, sees: str) -> None:
    seed = zlib.crc32(f"{row.prompt} {kind} {cache} {sees}".encode())  # other orders of outputs in other modes
    with scene(kind, cache=cache, sees=sees, seed=seed) as played:
        prompt = row.prompt
        for earlier in row.before:
            recorded = played.succeed(earlier).prompt
            if row.is_resubmitted:
                prompt = as_recorded(prompt, recorded)
        if row.is_resubmitted and not row.before:
            with scene(kind, cache=cache, seed=seed) as other:
                prompt = as_recorded(prompt, other.succeed(prompt).prompt)
        result = played.run(prompt, **row.options)
        assert result.status == row.status, result.error
        check(row, played, cache, sees)
        if row.status != "success":
            played.succeed({**chain(), **branch("quite another text")})
            check(ROWS["linear chain"], played, cache, sees)


def as_recorded(prompt: Prompt, recorded: Prompt) -> Prompt:
    """With the fingerprints that a host has written beside the nodes; they keep it from asking again."""
    fingerprints = {n: {"is_changed": spec["is_changed"]} for n, spec in recorded.items() if "is_changed" in spec}
    return {n: {**spec, **fingerprints.get(n, {})} for n, spec in prompt.items()}


@pytest.mark.parametrize(("kind", "sees"), [("component", "list"), ("component", "queued"), ("foreign", "list")])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("row", ROWS)
def test_each_component_goes_with_its_last_user(row, cache, sees, kind):
    play(ROWS[row], kind, cache, sees)


@pytest.mark.parametrize("kind", ["component", "foreign"])
@pytest.mark.parametrize("row", ["linear chain", "partial execution", "vanished nodes", "everything cached", "expansion by link"])
def test_a_host_that_shows_nothing_makes_releases_later_at_most(row, kind):
    play(ROWS[row], kind, "ram", "nothing")


def test_a_component_that_nobody_consumes_is_mentioned_once(caplog):
    with scene() as played:
        played.succeed(ROWS[UNUSED].prompt)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert warnings == ["Lazy H3: spare is loaded by a node but used by none; it is never read."]


@pytest.mark.parametrize("row", [row for row in ROWS if row != UNUSED])
def test_no_other_prompt_is_warned_of(row, caplog):
    with scene() as played:
        played.run(ROWS[row].prompt, **ROWS[row].options)
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
