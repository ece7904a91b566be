from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import pytest
from lazy_h3.memory import turns
from lazy_h3.memory.graph import Key, Node
from lazy_h3.memory.turns import Turnstile, grouped_order


def wired(**parents: Iterable[str]) -> dict[str, Node]:
    return {name: Node("Any", {str(n): [parent, 0] for n, parent in enumerate(links)}) for name, links in parents.items()}


def needs_of(**resources: str) -> dict[str, frozenset[Key]]:
    return {name: frozenset(keys.split()) for name, keys in resources.items()}


def ancestors(nodes: dict[str, Node], node: str) -> set[str]:
    """Every node that it needs, directly or not."""
    found: set[str] = set()
    pending = [node]
    while pending:
        parents = {link[0] for link in nodes[pending.pop()].inputs.values()}
        pending += parents - found
        found |= parents
    return found


def num_loads(order: list[str], needs: dict[str, frozenset[Key]]) -> int:
    """How often the needs change on the way: one load each, if nothing is kept."""
    wanted = [needs[node] for node in order]
    return sum(before != after for before, after in zip([None, *wanted], wanted, strict=False))


def test_branches_through_shared_models_take_one_phase_per_model():
    branches = range(4)
    nodes = wired(
        **{f"e{n}": [] for n in branches}, **{f"s{n}": [f"e{n}"] for n in branches}, **{f"d{n}": [f"s{n}"] for n in branches}
    )
    needs = needs_of(
        **{f"e{n}": "te" for n in branches}, **{f"s{n}": "dit" for n in branches}, **{f"d{n}": "vae" for n in branches}
    )
    for seed in range(5):
        shuffled = dict(random.Random(seed).sample(list(needs.items()), len(needs)))
        order = grouped_order(nodes, shuffled)
        assert sorted(order) == sorted(needs)
        assert num_loads(order, needs) == 3


def test_a_node_never_comes_before_what_it_needs_through_light_nodes():
    nodes = wired(encode=[], light=["encode"], sample=["light"], again=["sample"], late=["again"])
    needs = needs_of(late="te", encode="te", sample="dit")
    assert grouped_order(nodes, needs) == ["encode", "sample", "late"]


def test_a_need_that_can_be_finished_is_preferred():
    """ "a" has one node that must wait, so "b", which has none, goes first and "a" is loaded once."""
    nodes = wired(a0=[], b0=[], a1=["b0"])
    needs = needs_of(a0="a", b0="b", a1="a")
    assert grouped_order(nodes, needs) == ["b0", "a0", "a1"]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_follows_the_wiring(seed):
    rng = random.Random(seed)
    names = [str(n) for n in range(40)]
    nodes = wired(**{name: rng.sample(names[:n], min(n, rng.randint(0, 3))) for n, name in enumerate(names)})
    heavy = rng.sample(names, 12)
    needs = {node: frozenset(rng.sample(["te", "dit", "vae"], rng.randint(1, 2))) for node in heavy}
    order = grouped_order(nodes, needs)
    assert sorted(order) == sorted(heavy)
    for place, node in enumerate(order):
        assert not ancestors(nodes, node) & set(order[place:])


def test_a_cycle_has_some_order():
    nodes = wired(a=["b"], b=["a"], c=["b"])
    assert sorted(grouped_order(nodes, needs_of(a="x", b="y", c="x"))) == ["a", "b", "c"]


def test_no_heavy_nodes_no_order():
    assert grouped_order(wired(a=[], b=["a"]), {}) == []


class Hall:
    """Heavy nodes in an order, and who is running."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.running: set[str] = set()
        self.finished: list[str] = []
        self.checks = 0
        self.turnstile = Turnstile(self.earlier, lambda: self.running)

    def earlier(self, node: str) -> set[str]:
        return set(self.order[: self.order.index(node)]) - set(self.finished)

    def check(self) -> None:
        self.checks += 1

    async def run(self, node: str, work: Callable[[], object] = lambda: None) -> None:
        self.running.add(node)
        self.turnstile.wake()
        try:
            await self.turnstile.turn(node, lambda: self.check())
            work()
            self.finished.append(node)
        finally:
            self.running.discard(node)
            self.turnstile.wake()


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch) -> None:
    monkeypatch.setattr(turns, "ROUND_SECONDS", 0.01)


@pytest.mark.parametrize("started", ["abc", "cba", "bca"])
def test_nodes_go_in_order_whatever_the_order_in_which_they_start(started):
    hall = Hall("abc")

    async def main() -> None:
        await asyncio.gather(*(hall.run(node) for node in started))

    asyncio.run(main())
    assert hall.finished == ["a", "b", "c"]


def test_the_first_does_not_wait_or_ask():
    hall = Hall("ab")
    asyncio.run(hall.run("a"))
    assert (hall.finished, hall.checks) == (["a"], 0)


def test_an_interrupt_ends_the_wait_and_lets_the_others_go():
    hall = Hall("abc")

    async def main() -> None:
        hall.running.add("a")
        waiting = asyncio.ensure_future(hall.run("c"))
        await asyncio.sleep(0.03)
        hall.check = interrupt
        with pytest.raises(KeyError):
            await waiting
        hall.check = lambda: None
        hall.finished.append("a")
        await hall.run("b")

    def interrupt() -> None:
        raise KeyError

    asyncio.run(asyncio.wait_for(main(), 10))
    assert hall.finished == ["a", "b"]


def test_if_only_waiting_nodes_are_left_the_first_of_them_goes():
    """ "a" never starts: an unused branch, or a host that does things in another order."""
    hall = Hall("abc")

    async def main() -> None:
        await asyncio.gather(hall.run("c"), hall.run("b"))

    asyncio.run(asyncio.wait_for(main(), 10))
    assert hall.finished == ["b", "c"]


def test_while_another_node_runs_nobody_loses_patience():
    hall = Hall("ab")

    async def main() -> None:
        hall.running.add("slow foreign node")
        waiting = asyncio.ensure_future(hall.run("b"))
        while hall.checks < 5:
            await asyncio.sleep(0.005)
        assert hall.finished == []
        hall.running.discard("slow foreign node")
        await waiting

    asyncio.run(asyncio.wait_for(main(), 10))
    assert hall.finished == ["b"]
