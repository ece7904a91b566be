"""Heavy nodes of one prompt wait for each other, on a host that runs branch by branch; and nobody waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from embedded_nodes import node, node_class
from lazy_h3.memory import turns
from session_cases import (
    ANY,
    CACHES,
    TEXT,
    Prompt,
    Scene,
    branch,
    loaders,
    quick_collections,  # noqa: F401  (a fixture)
    scene,
)

BRANCHES = {
    **loaders(),
    **branch("a cat"),
    **{"8": node("Passes", value="a dog"), **branch(["8", 0], 14)},
    **{"9": node("Passes", value="a cow"), **branch(["9", 0], 24)},
}  # without turns, each branch runs to its end before the next begins: a host prefers nodes that wait by themselves
ONE_AT_A_TIME = 1


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ROUND_SECONDS", 0.002)


def num_together(played: Scene) -> int:
    """How many models were in memory at once, at most."""
    return max(len([n for n in moment.nbytes.values() if n]) for moment in played.record.moments)


def computed(played: Scene) -> str:
    """Nodes in the order in which they computed."""
    return " ".join(event[1:] for event in played.record.events("X"))


def shown(played: Scene) -> dict[str, torch.Tensor]:
    return dict(played.kept)


@pytest.mark.parametrize("sees", ["list", "queued", "nothing"])
@pytest.mark.parametrize("cache", CACHES)
def test_three_branches_through_three_models_take_three_phases(cache, sees):
    with scene(cache=cache, sees=sees) as played:
        played.store.budget = played.resources["te"].nbytes()  # a model, and no other
        played.succeed(BRANCHES)
        assert played.loaded() == ["te", "dit", "vae"]
        assert num_together(played) == ONE_AT_A_TIME
        assert sorted(computed(played).split()[:3]) == ["14", "24", "4"]
        assert sorted(computed(played).split()[3:6]) == ["15", "25", "5"]


def test_without_turns_each_branch_loads_for_itself():
    with scene(take_turns=False) as played:
        played.store.budget = played.resources["te"].nbytes()
        played.succeed(BRANCHES)
        assert played.loaded() == ["te", "dit", "vae"] * 3
        assert num_together(played) == ONE_AT_A_TIME  # by the budget, at the price of six loads


def test_turns_change_no_result():
    with scene() as one, scene(take_turns=False) as other:
        one.succeed(BRANCHES)
        other.succeed(BRANCHES)
        assert one.kept.keys() == other.kept.keys()
        assert all(torch.equal(shown(one)[name], shown(other)[name]) for name in one.kept)


@pytest.mark.parametrize("cache", CACHES)
def test_a_heavy_node_that_is_mapped_over_a_list_waits_once_for_each_item(cache):
    """The sampler 5 has three inputs and waits for the encoder 14, whose text comes late."""
    prompt = {
        **loaders(["te", "dit"]),
        "3": node("Many", values="cat dog cow"),
        "4": node("Encode", model=["1", 0], value=["3", 0]),
        "5": node("Sample", model=["2", 0], value=["4", 0]),
        "6": node("Together", values=["5", 0]),
        "7": node("Show", value=["6", 0]),
        "8": node("Waits", value="late", seconds=0.01),
        "14": node("Encode", model=["1", 0], value=["8", 0]),
        "15": node("Sample", model=["2", 0], value=["14", 0]),
        "17": node("Show", value=["15", 0]),
    }
    with scene(cache=cache) as played:
        played.succeed(prompt)
        assert computed(played) in ("4 4 4 14 5 5 5 15", "4 4 4 14 15 5 5 5")
        assert num_together(played) == ONE_AT_A_TIME


# Somebody who should go first never comes.


def undecided(first: Prompt) -> Prompt:
    """9 takes a branch when 4 has run, behind another switch; the heavy 8 of that branch stands before 4 in any order."""
    return {
        **loaders(["te", "dit"]),
        "8": node("Encode", model=["2", 0], value="a dog"),
        **first,
        "5": node("ComfySwitchNode", switch=True, on_true=["4", 0], on_false="nothing"),
        "6": node("After", value=False, other=["5", 0]),
        "9": node("ComfySwitchNode", switch=["6", 0], on_true=["8", 0], on_false="nothing"),
        "10": node("Show", value=["9", 0]),
        "11": node("Show", value=["5", 0]),
    }


@pytest.mark.parametrize("sees", ["list", "queued", "nothing"])
@pytest.mark.parametrize("cache", ["ram", "none"])
def test_a_heavy_node_does_not_wait_for_ever_for_one_in_a_branch_that_is_not_taken(cache, sees):
    with scene(cache=cache, sees=sees) as played:
        played.succeed(undecided({"4": node("Encode", model=["1", 0], value="a cat")}))
        assert computed(played) == "4"
        assert played.loaded() == ["te"]


def test_nor_does_a_heavy_child_of_an_expansion():
    with scene() as played:
        played.succeed(undecided({"4": node("ExpandsByLink", model=["1", 0], value="a cat")}))
        assert computed(played) == "4 4.0.0.1"


def test_a_heavy_child_goes_before_those_that_wait_for_its_parent(monkeypatch):
    """The decoder 6 needs what the loop 5 gives out, so its children come first in any order."""
    monkeypatch.setattr(turns, "PATIENT_ROUNDS", 1 << 30)
    loop = {"5": node("Repeats", model=["2", 0], value=["4", 0], times=5)}
    with scene() as played:
        played.succeed({**loaders(), "6": branch("")["6"], **branch("a cat"), **loop})
        assert len(computed(played).split()) == 1 + 2 * 5 + 1
        assert computed(played).split()[-1] == "6"


def test_nor_does_it_while_a_node_of_another_pack_is_started_and_waits_for_it(short_rounds):
    """An async node that wants a lazy input looks as if it were at work: then it takes a while longer."""

    async def choose(self: Any, value: Any = None) -> tuple[Any]:
        return (value,)

    def wants(self: Any, value: Any = None) -> list[str]:
        return ["value"] if value is None else []

    lazy = node_class(choose, {"value": ("*", {"lazy": True})}, check_lazy_status=wants)
    prompt = undecided({"4": node("Encode", model=["1", 0], value="a cat")})
    prompt["5"] = node("Chooses", value=["4", 0])
    with scene() as played:
        played.host.node_classes["Chooses"] = lazy
        played.succeed(prompt)
        assert computed(played) == "4"


def test_a_slow_node_of_another_pack_makes_nobody_lose_patience(short_rounds):
    """The encoder 14 comes last, because its text takes long; the sampler 5 waits for it."""
    late = {"8": node("Waits", value="a dog", seconds=0.05), **branch(["8", 0], 14)}
    with scene() as played:
        played.succeed({**loaders(), **branch("a cat"), **late})
        assert computed(played).split()[:2] == ["4", "14"]
        assert played.loaded() == ["te", "dit", "vae"]


def test_an_earlier_node_that_vanishes_lets_the_others_go():
    """A loop takes the encoder 8 out of the prompt while the sampler 5 waits for it."""
    prompt = {
        **loaders(["te", "dit"]),
        "4": node("Encode", model=["1", 0], value="a cat"),
        "5": node("Sample", model=["2", 0], value=["4", 0]),
        "6": node("Show", value=["5", 0]),
        "7": node("Inhibits", value=["4", 0], nodes="8 9"),
        "10": node("Passes", value=["7", 0]),
        "8": node("Encode", model=["1", 0], value=["10", 0]),
        "9": node("Show", value=["8", 0]),
        "11": node("Show", value=["10", 0]),
    }
    with scene() as played:
        played.succeed(prompt)
        assert computed(played) == "4 5"
        assert num_together(played) == ONE_AT_A_TIME


@pytest.mark.parametrize(("bad", "status"), [("Fails", "error"), ("Stops", "interrupted")])
def test_when_an_earlier_node_fails_those_that_wait_end_with_the_prompt(bad, status):
    late = {"8": node("Waits", value="a dog", seconds=0.01), "9": node(bad, value=["8", 0]), **branch(["9", 0], 14)}
    with scene() as played:
        assert played.run({**loaders(), **branch("a cat"), **late}).status == status
        assert computed(played) == "4"
        assert played.store.resident() == []
        played.succeed(BRANCHES)


def test_an_interrupt_reaches_a_node_that_waits():
    """Nobody else looks for it meanwhile: the other node sleeps."""

    async def sleeps(self: Any, value: Any, text: str) -> tuple[Any]:
        await asyncio.sleep(0.02)
        played.host.interrupt()
        await asyncio.sleep(60)
        return (value,)

    late = {"8": node("Sleeps", value="a dog", text=""), **branch(["8", 0], 14)}
    with scene() as played:
        played.host.node_classes["Sleeps"] = node_class(sleeps, {"value": ANY, "text": TEXT})
        result = played.run({**loaders(), **branch("a cat"), **late})
        assert (result.status, result.error.node_id) == ("interrupted", "5")
        assert played.store.resident() == []
