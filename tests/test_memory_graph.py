from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from lazy_h3.memory.graph import ANY, PLAIN_TYPES, Key, Node, NodeClass, Trail, link_of, trails

LOADER = ("loader", 0)
CLASSES = {
    "Loader": NodeClass(("MODEL",)),
    "FolderLoader": NodeClass(("TEXT_ENCODER", "DIT")),
    "Encode": NodeClass(("CONDITIONING",), carries=frozenset()),
    "Sample": NodeClass(("LATENT",)),
    "Decode": NodeClass(("IMAGE",)),
    "Save": NodeClass(()),
    "Switch": NodeClass(("*",)),
    "Reroute": NodeClass(("*",)),
    "Lora": NodeClass(("MODEL", "CLIP")),
    "Both": NodeClass(("IMAGE", "MODEL")),
    "Second only": NodeClass(("MODEL", "MODEL"), carries=frozenset({1})),
}


def graph(**nodes: tuple[Any, ...]) -> dict[str, Node]:
    """``name=(class, input, ...)``: a tuple (node, slot) is a link, everything else a constant."""
    return {
        name: Node(kind, {f"in{n}": list(v) if isinstance(v, tuple) else v for n, v in enumerate(inputs)})
        for name, (kind, *inputs) in nodes.items()
    }


def followed(
    nodes: Mapping[str, Node],
    sources: Mapping[tuple[str, int], Key] | None = None,
    constants: Mapping[str, list[Key]] | None = None,
) -> dict[Key, Trail]:
    return trails(nodes, CLASSES.get, {LOADER: "dit"} if sources is None else sources, constants)


def test_a_linear_chain_ends_where_only_pictures_go_on():
    nodes = graph(
        loader=("Loader", "model.safetensors"),
        sample=("Sample", LOADER, 1234),
        decode=("Decode", ("sample", 0)),
        save=("Save", ("decode", 0)),
    )
    assert followed(nodes) == {"dit": Trail({"sample": "direct wire"})}


def test_every_user_of_a_loader_is_a_consumer():
    nodes = graph(loader=("Loader",), a=("Sample", LOADER), b=("Sample", LOADER), c=("Sample", ("a", 0)))
    assert followed(nodes)["dit"].consumers == {"a": "direct wire", "b": "direct wire"}


def test_a_loader_may_be_listed_after_its_consumers():
    nodes = dict(reversed(graph(loader=("Loader",), a=("Lora", LOADER), b=("Sample", ("a", 0))).items()))
    assert followed(nodes)["dit"].consumers == {"a": "direct wire", "b": "passed through"}


@pytest.mark.parametrize("carrier", ["Switch", "Reroute", "Lora"])
def test_a_resource_travels_through_nodes_that_can_carry_it(carrier):
    nodes = graph(loader=("Loader",), through=(carrier, LOADER), again=(carrier, ("through", 0)), use=("Sample", ("again", 0)))
    assert followed(nodes)["dit"].consumers == {
        "through": "direct wire",
        "again": "passed through",
        "use": "passed through",
    }


def test_both_branches_of_a_switch_are_followed_with_their_own_resource():
    nodes = graph(
        loader=("Loader", "a"), other=("Loader", "b"), switch=("Switch", LOADER, ("other", 0)), use=("Sample", ("switch", 0))
    )
    found = followed(nodes, {LOADER: "a", ("other", 0): "b"})
    assert found["a"].consumers == found["b"].consumers == {"switch": "direct wire", "use": "passed through"}


def test_slots_are_followed_one_by_one():
    nodes = graph(
        loader=("FolderLoader",),
        encode=("Encode", ("loader", 0)),
        sample=("Sample", ("loader", 1), ("encode", 0)),
        both=("Both", ("loader", 1)),
        picture=("Save", ("both", 0)),
        model=("Save", ("both", 1)),
    )
    found = followed(nodes, {("loader", 0): "text encoder", ("loader", 1): "dit"})
    assert found["text encoder"].consumers == {"encode": "direct wire"}
    assert found["dit"].consumers == {"sample": "direct wire", "both": "direct wire", "model": "passed through"}


def test_a_class_that_declares_its_carrying_slots_is_taken_at_its_word():
    nodes = graph(loader=("Loader",), two=("Second only", LOADER), first=("Save", ("two", 0)), second=("Save", ("two", 1)))
    assert followed(nodes)["dit"].consumers == {"two": "direct wire", "second": "passed through"}


def test_an_unknown_class_may_carry_anything_anywhere():
    nodes = graph(
        loader=("Loader",), mystery=("Not installed", LOADER), use=("Sample", ("mystery", 7)), after=("Save", ("use", 0))
    )
    assert followed(nodes)["dit"].consumers == {"mystery": "unknown class", "use": "passed through"}


def test_a_slot_beyond_the_declared_ones_may_carry():
    nodes = graph(loader=("Loader",), decode=("Decode", LOADER), use=("Save", ("decode", 3)))
    assert followed(nodes)["dit"].consumers == {"decode": "direct wire", "use": "passed through"}


@pytest.mark.parametrize("plain", sorted(PLAIN_TYPES))
def test_a_plain_type_ends_the_trail(plain):
    classes = {**CLASSES, "Foreign": NodeClass((plain,))}
    nodes = graph(loader=("Loader",), foreign=("Foreign", LOADER), use=("Save", ("foreign", 0)))
    assert trails(nodes, classes.get, {LOADER: "dit"})["dit"].consumers == {"foreign": "direct wire"}


@pytest.mark.parametrize("kind", ["MODEL", "CLIP", "VAE", "CONDITIONING", "GUIDER", "*", "LAZYH3_DIT", "['a', 'b']"])
def test_any_other_type_carries_on(kind):
    classes = {**CLASSES, "Foreign": NodeClass((kind,))}
    nodes = graph(loader=("Loader",), foreign=("Foreign", LOADER), use=("Save", ("foreign", 0)))
    assert trails(nodes, classes.get, {LOADER: "dit"})["dit"].consumers.keys() == {"foreign", "use"}


def test_two_loaders_of_one_resource_are_one_trail():
    nodes = graph(loader=("Loader",), twin=("Loader",), a=("Sample", LOADER), b=("Sample", ("twin", 0)))
    assert followed(nodes, {LOADER: "dit", ("twin", 0): "dit"})["dit"].consumers.keys() == {"a", "b"}


def test_a_resource_that_nobody_uses_has_an_empty_trail():
    assert followed(graph(loader=("Loader",), other=("Save", 1))) == {"dit": Trail({})}


def test_a_constant_of_an_expansion_starts_a_trail_at_its_holder():
    nodes = graph(held=("Lora", object()), use=("Sample", ("held", 0)), other=("Save", 2))
    found = followed(nodes, {}, {"held": ["dit", "vae"]})
    assert found["dit"].consumers == found["vae"].consumers
    assert found["dit"].consumers == {"held": "constant in an expansion", "use": "passed through"}


def test_a_resource_may_be_wired_and_held_at_once():
    nodes = graph(loader=("Loader",), a=("Sample", LOADER), held=("Switch", object()), b=("Sample", ("held", 0)))
    assert followed(nodes, {LOADER: "dit"}, {"held": ["dit"]})["dit"].consumers == {
        "a": "direct wire",
        "held": "constant in an expansion",
        "b": "passed through",
    }


def test_a_holder_that_is_not_in_the_graph_is_still_a_consumer():
    assert followed({}, {}, {"2.0.0.1": ["dit"]}) == {"dit": Trail({"2.0.0.1": "constant in an expansion"})}


def test_a_loader_with_computed_inputs_may_load_anything():
    nodes = graph(name=("Switch", 1), loader=("Loader", ("name", 0)), use=("Sample", LOADER))
    assert followed(nodes, {LOADER: ANY})[ANY].consumers == {"use": "direct wire"}


def test_a_cycle_ends():
    nodes = graph(loader=("Loader", ("b", 0)), a=("Switch", LOADER, ("b", 0)), b=("Switch", ("a", 0)), use=("Save", ("b", 0)))
    assert followed(nodes)["dit"].consumers.keys() == {"loader", "a", "b", "use"}


def test_links_to_nodes_that_are_not_there_lead_nowhere():
    nodes = graph(loader=("Loader",), a=("Sample", ("gone", 0), LOADER))
    assert followed(nodes)["dit"].consumers == {"a": "direct wire"}


@pytest.mark.parametrize(
    ("value", "link"),
    [
        (["7", 0], ("7", 0)),
        (["12:3", 2.0], ("12:3", 2)),
        (("2.0.0.1", 1), ("2.0.0.1", 1)),
        (["7", True], None),
        (["7", "0"], None),
        ([7, 0], None),
        (["7"], None),
        (["7", 0, 0], None),
        (["7", 0.5], None),
        (["7", float("nan")], None),
        (["7", float("inf")], None),
        ("70", None),
        (7, None),
        (None, None),
        ({"7": 0}, None),
    ],
)
def test_a_link_is_a_node_and_a_slot(value, link):
    assert link_of(value) == link


class Counting:
    """Classes that carry everything, and how often they were asked."""

    def __init__(self) -> None:
        self.num_questions = 0

    def __call__(self, class_type: str) -> NodeClass:
        counting = self

        class Carrying(NodeClass):
            def may_carry(self, slot: int, plain: frozenset[str] = PLAIN_TYPES) -> bool:
                counting.num_questions += 1
                return True

        return Carrying(("*",))


def tangled(num_nodes: int) -> dict[str, Node]:
    """Each node has four wires from nodes before it."""
    rng = random.Random(0)
    names = ["loader"]
    nodes = {"loader": Node("Loader", {})}
    for n in range(num_nodes):
        nodes[str(n)] = Node("Switch", {str(k): [rng.choice(names[-50:]), rng.randrange(3)] for k in range(4)})
        names.append(str(n))
    return nodes


def hub(num_wires: int) -> dict[str, Node]:
    """As many wires into one node as out of it."""
    nodes = {"loader": Node("Loader", {})}
    nodes |= {f"in{n}": Node("Switch", {"x": ["loader", 0]}) for n in range(num_wires)}
    nodes["hub"] = Node("Switch", {str(n): [f"in{n}", 0] for n in range(num_wires)})
    return nodes | {f"out{n}": Node("Save", {"x": ["hub", n]}) for n in range(num_wires)}


@pytest.mark.parametrize("build", [tangled, hub])
def test_following_costs_no_more_than_linear(build):
    """Each output that is used is asked about once, however many wires lead to its node."""
    for size in (20, 200, 2000):
        nodes = build(size)
        classes = Counting()
        found = trails(nodes, classes, {("loader", slot): "dit" for slot in range(3)})
        used = {link for node in nodes.values() for link in map(link_of, node.inputs.values())}
        assert len(found["dit"].consumers) > len(nodes) // 2
        assert classes.num_questions <= len(used)


def test_what_carries_nothing_of_a_resource_may_differ_from_resource_to_resource():
    nodes = {
        "a": Node("Loader", {}),
        "b": Node("Loader", {}),
        "c": Node("Condition", {"x": ["a", 0], "y": ["b", 0]}),
        "d": Node("Sample", {"x": ["c", 0]}),
    }
    classes = {"Loader": NodeClass(("MODEL",)), "Condition": NodeClass(("CONDITIONING",)), "Sample": NodeClass(("LATENT",))}
    sources = {("a", 0): "core's", ("b", 0): "ours"}
    plain = {"core's": PLAIN_TYPES | {"CONDITIONING"}, "ours": PLAIN_TYPES}
    found = trails(nodes, classes.get, sources, plain=plain.__getitem__)
    assert set(found["core's"].consumers) == {"c"}
    assert set(found["ours"].consumers) == {"c", "d"}
