from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lazy_h3.memory.graph import ANY, Key, Node, NodeClass, Output
from lazy_h3.memory.resource import Resource
from lazy_h3.memory.session import GraphView, Session
from lazy_h3.memory.store import Store
from memory_models import PLENTY, Foreign, codec

NUM_BYTES = 1024
CLASSES = {
    "Loader": NodeClass(("MODEL",)),
    "Encode": NodeClass(("CONDITIONING",), carries=frozenset()),
    "Sample": NodeClass(("LATENT",)),
    "Decode": NodeClass(("IMAGE",)),
    "Save": NodeClass(()),
    "Switch": NodeClass(("*",)),
    "Expander": NodeClass(("LATENT",)),
    "Heavy": NodeClass(("LATENT",), takes_turns=True),
}


@dataclass
class Script:
    """A prompt whose nodes finish when the test says so. ``loads``: loader output -> resource, or ANY."""

    nodes: dict[str, Node]
    loads: dict[Output, Resource | Key]
    pending: set[str] = field(default_factory=set)
    constants: dict[str, list[Key]] = field(default_factory=dict)
    prompt_id: str = "prompt"
    num_views: int = 0
    num_may_run: int = 0

    def __post_init__(self) -> None:
        self.pending = self.pending or set(self.nodes)

    def version(self) -> Any:
        return len(self.nodes), len(self.constants)

    def view(self) -> GraphView:
        self.num_views += 1
        return GraphView(self.version(), dict(self.nodes), self.constants)

    def may_run(self) -> set[str]:
        self.num_may_run += 1
        return set(self.pending)

    def classes(self, class_type: str) -> NodeClass | None:
        return CLASSES.get(class_type)

    def sources(self, nodes: Mapping[str, Node]) -> dict[Output, Key]:
        return {output: getattr(load, "identity", load) for output, load in self.loads.items() if output[0] in nodes}


def graph(**nodes: Iterable[Any]) -> dict[str, Node]:
    """``_1=("Class", "link to node 2" as "2", ...)``: every string input is a link to slot 0 of that node."""
    return {
        name.lstrip("_"): Node(kind, {str(n): [i, 0] if isinstance(i, str) else i for n, i in enumerate(inputs)})
        for name, (kind, *inputs) in nodes.items()
    }


class Stage:
    """Plays a script: what runs, what each node uses, and who is resident after every event."""

    def __init__(self, store: Store, make: Callable[[str], Resource], touch: Callable[[Resource], None]) -> None:
        self.store = store
        self.resources: dict[str, Resource] = {}
        self._make = make
        self._touch = touch

    def __getitem__(self, name: str) -> Resource:
        if name not in self.resources:
            self.resources[name] = self._make(name)
        return self.resources[name]

    def names(self) -> str:
        """Of the resident resources, in alphabetical order."""
        return " ".join(sorted(resource.name for resource in self.store.resident()))

    def play(
        self,
        script: Script,
        events: str,
        uses: Mapping[str, str],
        keeps: Callable[[Resource], str | None] = lambda _: None,
    ) -> dict[str, str]:
        """``S7`` starts, ``X7`` executes, ``F7`` finishes, ``end`` ends. Gives who is resident after each event."""
        session = Session(script, self.store, keeps)
        session.begin()
        resident = {}
        for event in events.split():
            kind, node = event[0], event[1:]
            if event == "end":
                session.end()
            elif kind == "S":
                session.started(node)
            elif kind == "X":
                self._execute(uses.get(node, ""))
            else:
                session.ended(node)
                script.pending.discard(node)
            resident[event] = self.names()
        return resident

    def _execute(self, names: str) -> None:
        for name in names.split():
            self._touch(self[name])


@pytest.fixture
def store() -> Store:
    return Store(pretended_total=PLENTY)


@pytest.fixture(params=["component", "foreign", "foreign, filled by its owner"])
def stage(request, store, tmp_path) -> Stage:
    """Every session behaves the same with our components and with what somebody else fills and drops."""

    def component(name: str) -> Resource:
        return store.add(codec(tmp_path / f"{name}.safetensors", kind=name))

    def foreign(name: str) -> Resource:
        return Foreign(store, name, NUM_BYTES)

    def use(resource: Resource) -> None:
        with store.use(resource):
            assert resource.resident_parts() == resource.parts

    def load(resource: Resource) -> None:
        if not resource.resident_parts():
            resource.loaded_by_owner()

    make = component if request.param == "component" else foreign
    return Stage(store, make, load if "owner" in request.param else use)


def reasons(store: Store, kind: str = "release") -> list[tuple[str, str]]:
    return [(e.component, e.reason) for e in store.ledger.events if e.event == kind]


def text_to_video(stage: Stage) -> Script:
    nodes = graph(
        _1=("Loader", 1),
        _2=("Loader", 2),
        _3=("Encode", "1"),
        _4=("Sample", "2", "3"),
        _5=("Loader", 3),
        _6=("Decode", "5", "4"),
        _7=("Save", "6"),
    )
    return Script(nodes, {("1", 0): stage["te"], ("2", 0): stage["dit"], ("5", 0): stage["vae"]})


USES = {"3": "te", "4": "dit", "6": "vae"}


def test_in_a_chain_each_is_gone_after_its_last_user(stage, store):
    seen = stage.play(text_to_video(stage), "S1 F1 S2 F2 S5 F5 S3 X3 F3 S4 X4 F4 S6 X6 F6 S7 F7 end", USES)
    assert [seen[event] for event in ("F2", "X3", "F3", "X4", "F4", "X6", "F6", "F7", "end")] == [
        "", "te", "", "dit", "", "vae", "", "", "",
    ]  # fmt: skip
    assert reasons(store) == [
        ("te", "node 3 was its last user"),
        ("dit", "node 4 was its last user"),
        ("vae", "node 6 was its last user"),
    ]
    assert store.ledger.peak_bytes == NUM_BYTES


def test_it_stays_for_as_long_as_another_user_may_run(stage, store):
    script = Script(
        graph(_1=("Loader", 1), _2=("Sample", "1"), _3=("Sample", "1", "2"), _4=("Save", "3")), {("1", 0): stage["dit"]}
    )
    seen = stage.play(script, "S1 F1 S2 X2 F2 S3 X3 F3 S4 F4 end", {"2": "dit", "3": "dit"})
    assert (seen["F2"], seen["X3"], seen["F3"]) == ("dit", "dit", "")
    assert [e.event for e in store.ledger.events].count("load_begin") == 1


def test_a_cached_user_does_not_count(stage):
    script = text_to_video(stage)
    script.nodes["8"] = Node("Encode", {"x": ["1", 0]})
    script.pending = {"3", "4", "6", "7"}
    assert stage.play(script, "S3 X3 F3", USES)["F3"] == ""


def test_a_prompt_that_is_cached_throughout_touches_nothing(stage, store):
    script = text_to_video(stage)
    script.pending = {"7"}
    assert stage.play(script, "F7 end", USES)["end"] == ""
    assert list(store.ledger.events) == []


def test_the_last_user_may_be_a_node_of_another_pack(stage):
    script = Script(
        graph(_1=("Loader", 1), _2=("Sample", "1"), _3=("Somebody else's", "1"), _4=("Unknown", "3"), _5=("Save", "4")),
        {("1", 0): stage["dit"]},
    )
    seen = stage.play(script, "S1 F1 S2 X2 F2 S3 X3 F3 S4 X4 F4 S5 F5 end", {"2": "dit", "4": "dit"})
    assert (seen["F2"], seen["F3"], seen["F4"], seen["F5"]) == ("dit", "dit", "dit", "")


def test_a_switch_keeps_what_it_may_pass_on_and_the_other_branch_is_never_read(stage, store):
    nodes = graph(
        _1=("Loader", 1), _2=("Loader", 2), _3=("Switch", "1", "2"), _4=("Sample", "3"), _5=("Encode", "1"), _6=("Save", "4")
    )
    script = Script(nodes, {("1", 0): stage["a"], ("2", 0): stage["b"]}, pending={"1", "3", "4", "5", "6"})
    seen = stage.play(script, "S5 X5 F5 S3 S1 F1 S3 F3 S4 X4 F4 S6 F6 end", {"5": "a", "4": "a"})
    assert (seen["F5"], seen["F3"], seen["F4"]) == ("a", "a", "")
    assert {e.component for e in store.ledger.events} == {"a"}


def test_two_equal_loaders_are_one_resource(stage):
    nodes = graph(_1=("Loader", 1), _11=("Loader", 1), _2=("Sample", "1"), _3=("Sample", "11"))
    script = Script(nodes, {("1", 0): stage["dit"], ("11", 0): stage["dit"]})
    seen = stage.play(script, "S11 F11 F1 S2 X2 F2 S3 X3 F3 end", {"2": "dit", "3": "dit"})
    assert (seen["F2"], seen["F3"]) == ("dit", "")


def test_an_expansion_by_link_is_followed_when_it_appears(stage):
    script = Script(graph(_1=("Loader", 1), _2=("Expander", "1"), _3=("Save", "2")), {("1", 0): stage["dit"]})
    session = Session(script, stage.store)
    session.begin()
    stage._execute("dit")
    script.nodes |= graph(**{"2.0.0.1": ("Sample", "1"), "2.0.0.2": ("Save", "2.0.0.1")})
    script.pending |= {"2.0.0.1", "2.0.0.2"}
    session.ended("2")
    assert stage.names() == "dit", "its expansion may still use it"
    script.pending.discard("2")
    session.ended("2.0.0.1")
    assert stage.names() == ""


def test_an_expansion_that_holds_the_resource_as_an_object_is_found(stage):
    script = Script(graph(_1=("Loader", 1), _2=("Expander", "1")), {("1", 0): stage["dit"]})
    session = Session(script, stage.store)
    session.begin()
    stage._execute("dit")
    script.nodes |= graph(**{"2.0.0.1": ("Sample", 0)})
    script.constants["2.0.0.1"] = [stage["dit"].identity]
    script.pending = {"2", "2.0.0.1"}
    session.ended("2")
    assert stage.names() == "dit"
    session.ended("2.0.0.1")
    assert stage.names() == ""


def test_nodes_that_vanish_count_as_gone(stage):
    """Loops inhibit nodes: they leave the pending set without a finish event."""
    nodes = graph(_1=("Loader", 1), _2=("Sample", "1"), _3=("Sample", "1"), _4=("Save", "2"), _5=("Save", "4"))
    script = Script(nodes, {("1", 0): stage["dit"]})
    session = Session(script, stage.store)
    session.begin()
    stage._execute("dit")
    session.ended("2")
    assert stage.names() == "dit"
    script.pending -= {"2", "3"}
    session.ended("4")
    assert stage.names() == ""


def test_a_node_that_runs_again_is_a_user_again(stage):
    script = Script(graph(_1=("Loader", 1), _2=("Sample", "1"), _3=("Save", "2")), {("1", 0): stage["dit"]})
    session = Session(script, stage.store)
    session.begin()
    stage._execute("dit")
    session.ended("2")
    assert stage.names() == ""
    session.started("2")
    stage._execute("dit")
    session.ended("3")
    assert stage.names() == "dit"
    session.ended("2")
    assert stage.names() == ""


def test_async_nodes_may_finish_in_any_order(stage):
    nodes = graph(_1=("Loader", 1), _2=("Sample", "1"), _4=("Sample", "1"), _6=("Save", "2"))
    script = Script(nodes, {("1", 0): stage["dit"]})
    seen = stage.play(script, "S1 F1 S4 S2 X2 X4 F4 F2 S6 F6 end", {"2": "dit", "4": "dit"})
    assert (seen["F4"], seen["F2"]) == ("dit", "")


def test_a_loader_with_computed_inputs_may_load_any_of_them(stage):
    """What it will load is not known before it runs, so its users are possible users of everything."""
    nodes = graph(_1=("Loader", 1), _2=("Sample", "1"), _7=("Switch", 0), _8=("Loader", "7"), _9=("Sample", "8"))
    script = Script(nodes, {("1", 0): stage["dit"], ("8", 0): ANY})
    seen = stage.play(script, "S1 F1 S2 X2 F2 S7 F7 S8 F8 S9 X9 F9 end", {"2": "dit", "9": "dit"})
    assert (seen["F2"], seen["F8"], seen["F9"]) == ("dit", "dit", "")


# How a prompt ends.


@pytest.mark.parametrize("events", ["S1 F1 S3 X3 end", "S1 F1 S3 X3 F3 S4 X4 end", "end", "S6 X6 end end end"])
def test_at_the_end_nothing_is_left_however_it_comes(stage, events):
    assert stage.play(text_to_video(stage), events, {**USES, "3": "te dit", "4": "dit vae"})["end"] == ""
    assert stage.store.live_bytes() == 0


def test_pins_that_a_failed_node_left_are_dropped_at_the_end(stage, store):
    script = text_to_video(stage)
    session = Session(script, store)
    session.begin()
    stage._execute("dit")
    abandoned = store.use(stage["dit"], owner=("node", "prompt", "4"))
    abandoned.__enter__()
    other = store.use(stage["dit"], owner=("node", "other prompt", "4"))
    other.__enter__()
    session.end()
    assert stage.names() == "dit", "the other prompt's pin holds"
    other.__exit__(None, None, None)
    assert stage.names() == ""
    abandoned.__exit__(None, None, None)


def test_a_task_that_still_runs_in_a_helper_thread_releases_on_its_own_exit(stage, store):
    script = text_to_video(stage)
    session = Session(script, store)
    session.begin()
    is_in, may_leave = threading.Event(), threading.Event()

    def task() -> None:
        with store.use(stage["dit"]):
            is_in.set()
            may_leave.wait(10)

    stage._execute("dit")
    helper = threading.Thread(target=task)
    helper.start()
    assert is_in.wait(10)
    session.end()
    assert stage.names() == "dit"
    may_leave.set()
    helper.join()
    assert stage.names() == ""


def test_after_its_end_a_session_does_nothing_to_the_next_prompt(stage, store):
    session = Session(text_to_video(stage), store)
    session.begin()
    session.end()
    session.end()
    stage._execute("dit")
    session.started("4")
    session.ended("4")
    session.end()
    assert stage.names() == "dit"


def test_the_next_prompt_fills_again_and_leaves_no_trace_of_the_last(stage, store):
    for _ in range(3):
        seen = stage.play(text_to_video(stage), "S3 X3 F3 S4 X4 F4 S6 X6 F6 S7 F7 end", USES)
        assert (seen["X4"], seen["end"]) == ("dit", "")
    loads = [e.component for e in store.ledger.events if e.event == "load_end"]
    assert loads == ["te", "dit", "vae"] * 3


# What the policy keeps, and what nobody needs.


def test_the_policy_keeps_beyond_the_last_user_and_the_end(stage, store):
    def keeps(resource: Resource) -> str | None:
        return "fits beside the rest" if resource is stage["te"] else None

    seen = stage.play(text_to_video(stage), "S3 X3 F3 S4 X4 F4 S6 X6 F6 S7 F7 end", USES, keeps)
    assert (seen["F3"], seen["F4"], seen["end"]) == ("te", "te", "te")
    assert reasons(store, "keep") == [("te", "fits beside the rest")]
    script = text_to_video(stage)
    script.pending = {"4", "6", "7"}
    seen = stage.play(script, "S4 X4 F4 end", USES)
    assert seen["end"] == ""
    assert ("te", "node 4 was its last user") in reasons(store)


def test_what_an_earlier_prompt_left_goes_when_this_one_does_not_use_it(stage, store):
    stage._execute("old")
    seen = stage.play(text_to_video(stage), "S1 F1 S3 X3 F3 end", USES)
    assert seen["F1"] == ""
    assert reasons(store)[0] == ("old", "no node of this prompt uses it")


def test_a_policy_that_fails_keeps_nothing(stage, caplog):
    def keeps(resource: Resource) -> str | None:
        raise ArithmeticError

    seen = stage.play(text_to_video(stage), "S3 X3 F3 S4 X4 end", USES, keeps)
    assert (seen["F3"], seen["end"]) == ("", "")
    assert "the policy failed for te" in caplog.text


def test_a_loader_that_nobody_uses_is_mentioned_once_and_never_read(stage, store, caplog):
    nodes = graph(_1=("Loader", 1), _2=("Loader", 2), _3=("Sample", "2"))
    script = Script(nodes, {("1", 0): stage["te"], ("2", 0): stage["dit"]})
    stage.play(script, "S1 F1 S2 F2 S3 X3 F3 end", {"3": "dit"})
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == [f"Lazy H3: {stage['te'].identity.kind} is loaded by a node but used by none; it is never read."]
    assert {e.component for e in store.ledger.events} == {"dit"}


def test_a_loader_that_does_not_run_is_not_mentioned(stage, caplog):
    nodes = graph(_1=("Loader", 1), _2=("Loader", 2), _3=("Sample", "2"))
    script = Script(nodes, {("1", 0): stage["te"], ("2", 0): stage["dit"]}, pending={"2", "3"})
    stage.play(script, "S2 F2 S3 X3 F3 end", {"3": "dit"})
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_what_was_changed_by_hand_is_mentioned_once_a_prompt_and_stays(store, tmp_path, caplog):
    component = store.add(codec(tmp_path / "x.safetensors", kind="dit"))
    with store.use(component):
        component.module.encoder.weight.data.add_(1)
    samplers = dict.fromkeys(map(str, range(2, 30)), ("Sample", "1"))
    script = Script(graph(_1=("Loader", 1), **samplers), {("1", 0): component})
    session = Session(script, store)
    session.begin()
    for node in sorted(script.pending):
        session.ended(node)
        session.ended(node)
    session.end()
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
    assert store.resident() == [component]


# Nothing that goes wrong here reaches the prompt.


class Failing(Script):
    """Any question may raise."""

    fails: Callable[[str], bool] = staticmethod(lambda question: False)

    def _answer(self, question: str) -> Any:
        if self.fails(question):
            raise ArithmeticError(question)
        return getattr(super(), question)

    def version(self) -> Any:
        return self._answer("version")()

    def view(self) -> GraphView:
        return self._answer("view")()

    def may_run(self) -> set[str]:
        return self._answer("may_run")()

    def classes(self, class_type: str) -> NodeClass | None:
        return self._answer("classes")(class_type)

    def sources(self, nodes: Mapping[str, Node]) -> dict[Output, Key]:
        return self._answer("sources")(nodes)


@pytest.mark.parametrize("question", ["version", "view", "may_run", "classes", "sources"])
def test_a_prompt_that_cannot_be_read_changes_only_the_time_of_release(stage, question, caplog):
    plain = text_to_video(stage)
    script = Failing(plain.nodes, plain.loads)
    script.fails = question.__eq__
    seen = stage.play(script, "S1 F1 S2 F2 S3 X3 F3 S4 X4 F4 S6 X6 F6 S7 F7 end", USES)
    assert seen["F6"] == "dit te vae"
    assert seen["end"] == ""
    assert caplog.text.count("the analysis of prompt prompt failed; weights are released at its end") == 1


@pytest.mark.parametrize("question", ["version", "view", "may_run", "sources"])
def test_a_prompt_that_can_be_read_again_is_followed_again(stage, question):
    plain = text_to_video(stage)
    script = Failing(plain.nodes, plain.loads)
    session = Session(script, stage.store)
    script.fails = question.__eq__
    session.begin()
    stage._execute("te")
    session.ended("3")
    assert stage.names() == "te"
    script.fails = lambda _: False
    stage._execute("dit")
    session.ended("4")
    assert stage.names() == ""


def test_one_resource_that_fails_does_not_hold_up_the_others(store, caplog):
    class Broken(Foreign):
        def dirty(self) -> str | None:
            raise ArithmeticError

    resources = [Foreign(store, "a"), Broken(store, "b"), Foreign(store, "c")]
    for resource in resources:
        resource.loaded_by_owner()
    session = Session(Script({}, {}), store)
    session.begin()
    session.end()
    assert store.resident() == [resources[1]]
    assert "failed" in caplog.text


def random_script(stage: Stage, rng: random.Random) -> tuple[Failing, dict[str, str]]:
    """Any graph, any pending set, any uses: also by nodes that the graph does not connect to the resource."""
    names = ["te", "dit", "vae"]
    ids = [str(n) for n in range(rng.randint(1, 12))]
    classes = [*CLASSES, "Not installed"]
    nodes = {}
    for n, node in enumerate(ids):
        links = {str(k): [rng.choice([*ids, "gone"]), rng.randint(0, 2)] for k in range(rng.randint(0, 3))}
        nodes[node] = Node("Loader" if n < 3 else rng.choice(classes), links)
    loads = {(node, 0): rng.choice([stage[rng.choice(names)], ANY]) for node in ids[:3]}
    script = Failing(nodes, loads, pending=set(rng.sample(ids, rng.randint(1, len(ids)))))
    return script, {node: " ".join(rng.sample(names, rng.randint(0, 2))) for node in ids}


def disturb(script: Failing, stage: Stage, rng: random.Random) -> None:
    """What hosts do meanwhile: nodes vanish, appear, expand; questions fail."""
    action = rng.randrange(4)
    if action == 0 and script.pending:
        script.pending.discard(rng.choice(sorted(script.pending)))
    elif action == 1:
        script.pending.add(rng.choice([*script.nodes, "never was"]))
    elif action == 2:
        new = f"x{len(script.nodes)}"
        script.nodes[new] = Node(rng.choice([*CLASSES, "Not installed"]), {"x": [rng.choice(list(script.nodes)), 0]})
        script.constants[new] = [stage[rng.choice(["te", "dit"])].identity]
    else:
        failing = rng.choice(["version", "view", "may_run", "classes", "sources", "nothing"])
        script.fails = failing.__eq__


@pytest.mark.parametrize("seed", range(30))
def test_events_in_any_order_never_raise_and_leave_nothing(stage, seed):
    rng = random.Random(seed)
    script, uses = random_script(stage, rng)
    keeps = rng.choice([lambda _: None, lambda _: 1 // rng.randrange(2) and None])
    session = Session(script, stage.store, keeps)
    for _ in range(40):
        node = rng.choice([*script.nodes, "never was"])
        rng.choice([session.begin, lambda n=node: session.started(n), lambda n=node: session.ended(n)])()
        if rng.random() < 0.4:
            stage._execute(uses.get(node, ""))
        if rng.random() < 0.2:
            disturb(script, stage, rng)
    session.end()
    assert stage.names() == ""
    assert stage.store.live_bytes() == 0


def test_an_early_release_never_changes_a_result(store, tmp_path):
    """Events that lie about what is finished: each use reads the weights again and computes the same."""
    component = store.add(codec(tmp_path / "x.safetensors"))
    x = torch.randn(2, 8)
    expected = component.module(x)
    session = Session(Script(graph(_1=("Loader", 1), _2=("Sample", "1")), {("1", 0): component}), store)
    session.begin()
    for _ in range(3):
        session.ended("2")
        assert store.resident() == []
        assert torch.equal(component.module(x), expected)
    with store.use(component) as held:
        session.ended("2")
        assert torch.equal(held.module(x), expected)
    assert store.resident() == []


# Whose turn it is.


def two_branches(stage: Stage) -> Failing:
    """Each encodes and then samples, with the same two models."""
    nodes = graph(
        _1=("Loader", 1), _2=("Loader", 2),
        _3=("Heavy", "1"), _4=("Heavy", "2", "3"),
        _5=("Heavy", "1"), _6=("Heavy", "2", "5"),
    )  # fmt: skip
    return Failing(nodes, {("1", 0): stage["te"], ("2", 0): stage["dit"]}, pending={"3", "4", "5", "6"})


def run_branch_by_branch(stage: Stage, script: Failing, takes_turns: bool = True) -> None:
    """As hosts do: the first branch runs on while the second has not begun; a heavy node yields while it waits."""
    session = Session(script, stage.store, takes_turns=takes_turns)
    uses = {"3": "te", "4": "dit", "5": "te", "6": "dit"}

    async def node(name: str, after: str | None) -> None:
        while after is not None and after in script.pending:
            await asyncio.sleep(0)
        session.started(name)
        await session.turn(name, lambda: None)
        stage._execute(uses[name])
        session.ended(name)
        script.pending.discard(name)

    async def main() -> None:
        session.begin()
        await asyncio.gather(node("3", None), node("4", "3"), node("5", "4" if not takes_turns else None), node("6", "5"))
        session.end()

    asyncio.run(asyncio.wait_for(main(), 20))


def num_loads(store: Store) -> int:
    return [e.event for e in store.ledger.events].count("load_end")


def test_branches_that_take_turns_share_one_load_of_each_model(stage, store):
    store.budget = NUM_BYTES
    run_branch_by_branch(stage, two_branches(stage))
    assert num_loads(store) == 2
    assert reasons(store) == [("te", "node 5 was its last user"), ("dit", "node 6 was its last user")]


def test_taking_turns_can_be_turned_off(stage, store):
    store.budget = NUM_BYTES
    run_branch_by_branch(stage, two_branches(stage), takes_turns=False)
    assert num_loads(store) == 4
    assert store.resident() == []


@pytest.mark.parametrize("question", ["version", "view", "may_run", "sources"])
def test_an_order_that_is_unknown_holds_nobody_up(stage, store, question, caplog):
    script = two_branches(stage)
    script.fails = question.__eq__
    run_branch_by_branch(stage, script)
    assert script.pending == set()
    assert store.resident() == []
    assert "failed" in caplog.text


# What it costs.


def long_script(stage: Stage, num_nodes: int) -> Script:
    nodes = graph(_1=("Loader", 1), _2=("Sample", "1"))
    nodes |= {str(n): Node("Switch", {"x": [str(n - 1), 0]}) for n in range(3, num_nodes + 1)}
    return Script(nodes, {("1", 0): stage["dit"]})


def test_the_graph_is_read_once_and_again_only_when_it_grew(stage):
    script = long_script(stage, 2000)
    session = Session(script, stage.store)
    session.begin()
    stage._execute("dit")
    for node in list(script.nodes):
        session.started(node)
        session.ended(node)
        script.pending.discard(node)
    assert script.num_views == 1
    stage._execute("dit")
    script.nodes["new"] = Node("Sample", {"x": ["1", 0]})
    session.ended("7")
    session.ended("8")
    assert script.num_views == 2


def test_events_ask_nothing_while_nothing_is_resident(stage):
    script = long_script(stage, 2000)
    session = Session(script, stage.store)
    session.begin()
    session.started(next(iter(script.nodes)))
    asked = script.num_may_run
    for node in list(script.nodes):
        session.started(node)
        session.ended(node)
    assert script.num_may_run == asked


# What the host holds makes room between its users.


class Hosted(Foreign):
    is_hosted = True


def keyframes(store: Store, nbytes: int = NUM_BYTES) -> tuple[Session, Script, Hosted, Hosted]:
    """A small model that is used early and late, and a larger one in between."""
    vae, dit = Hosted(store, "vae", nbytes), Hosted(store, "dit", NUM_BYTES)
    nodes = graph(_1=("Loader",), _2=("Loader",), _3=("Decode", "1"), _4=("Sample", "2"), _5=("Decode", "1", "4"))
    script = Script(nodes, {("1", 0): vae, ("2", 0): dit})
    return Session(script, store), script, vae, dit


def held(session: Session, node: str, resource: Hosted) -> None:
    """The node runs and has its host fill the resource, which asks the session first as the attachment has it."""
    session.started(node)
    session.about_to_fill(resource, resource.nbytes)
    session.store.hold(resource, ("node", session.prompt_id, node))
    session.ended(node)
    session.prompt.pending.discard(node)


def test_a_hosted_resource_makes_room_until_its_next_user(store):
    session, _, vae, dit = keyframes(store)
    session.begin()
    held(session, "3", vae)
    assert vae.live_bytes()
    session.started("4")
    session.about_to_fill(dit, dit.nbytes)
    assert vae.live_bytes() == 0
    held(session, "4", dit)
    held(session, "5", vae)
    assert (vae.num_fills, dit.num_fills) == (2, 1)
    assert store.resident() == []


def test_it_stays_if_reading_it_again_costs_more_than_it_saves(store):
    session, _, vae, dit = keyframes(store, nbytes=2 * NUM_BYTES)
    session.begin()
    held(session, "3", vae)
    held(session, "4", dit)
    assert vae.live_bytes()
    held(session, "5", vae)
    assert vae.num_fills == 1


def test_it_stays_if_it_is_in_use_or_kept(store):
    session, _, vae, dit = keyframes(store)
    session.begin()
    session.started("3")
    store.hold(vae, ("node", session.prompt_id, "3"))
    session.about_to_fill(dit, dit.nbytes)
    assert vae.live_bytes()
    session.ended("3")
    session._keeps = lambda _: "policy keep"
    session.about_to_fill(dit, dit.nbytes)
    assert vae.live_bytes()
