"""Where an object is from, read from the wiring of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from lazy_h3.host.origins import Wiring, is_of_another, released
from lazy_h3.memory.graph import ANY, Node, NodeClass

CLASSES = {
    "Checkpoint": NodeClass(("MODEL", "CLIP", "VAE")),
    "Unet": NodeClass(("MODEL",)),
    "Lora": NodeClass(("MODEL", "CLIP")),
    "Switch": NodeClass(("COMFY_MATCHTYPE_V3",)),
    "Release": NodeClass(("*",)),
    "Encode": NodeClass(("CONDITIONING",)),
    "Sample": NodeClass(("LATENT",)),
}


def wiring(known: dict[Any, Any] | None = None, **nodes: tuple[str, dict[str, Any]]) -> Wiring:
    """``_1=("Class", {input: value})``: a string value is a link to slot 0 of that node."""
    made = {
        name.lstrip("_"): Node(kind, {k: [v, 0] if isinstance(v, str) else v for k, v in inputs.items()})
        for name, (kind, inputs) in nodes.items()
    }
    return Wiring(made, CLASSES.get, known or {})


def origins(graph: Wiring, node: str, slot: int = 0) -> Iterable[tuple[str, int]]:
    return sorted(graph.origins((node, slot)))


def test_an_object_is_followed_upstream_through_nodes_that_patch_it():
    graph = wiring(_1=("Checkpoint", {"name": 1}), _2=("Lora", {"model": "1", "clip": ["1", 1]}), _3=("Release", {"x": ["2", 1]}))
    assert origins(graph, "2") == [("1", 0)]
    assert origins(graph, "2", 1) == [("1", 1)]
    assert origins(graph, "3") == [("1", 1)]


def test_where_types_do_not_tell_all_that_may_come_out_is_followed():
    graph = wiring(
        _1=("Unet", {"name": 1}),
        _2=("Unet", {"name": 2}),
        _3=("Encode", {"text": 1}),
        _4=("Switch", {"on": "1", "off": "2", "by": "3"}),
        _5=("Lora", {"model": "4"}),
    )
    assert origins(graph, "4") == origins(graph, "5") == [("1", 0), ("2", 0)]


def test_an_output_without_a_known_class_is_an_origin_by_itself():
    graph = wiring(_1=("Foreign", {"name": 1}), _2=("Lora", {"model": "1"}))
    assert origins(graph, "2") == [("1", 0)]
    assert origins(graph, "gone") == []


def test_an_object_that_comes_by_two_ways_has_one_origin():
    graph = wiring(
        _1=("Unet", {"name": 1}),
        _2=("Lora", {"model": "1"}),
        _3=("Lora", {"model": "1"}),
        _4=("Switch", {"on": "2", "off": "3"}),
    )
    assert origins(graph, "4") == [("1", 0)]


def test_a_circle_ends():
    graph = wiring(_1=("Lora", {"model": "2"}), _2=("Lora", {"model": "1"}))
    assert origins(graph, "1") == []


def test_keys_are_equal_for_equal_loaders_alone():
    graph = wiring(
        _1=("Unet", {"name": 1, "dtype": "default"}),
        _2=("Unet", {"dtype": "default", "name": 1}),
        _3=("Unet", {"name": 2, "dtype": "default"}),
        _4=("Checkpoint", {"name": 1, "dtype": "default"}),
    )
    keys = [graph.key((node, 0)) for node in "1234"]
    assert keys[0] == keys[1]
    assert len({*keys, graph.key(("4", 1))}) == 4
    assert all(map(is_of_another, keys))
    assert not any(one.is_sibling_of(other) for one in keys for other in keys)


@pytest.mark.parametrize(("name", "is_equal"), [(1, True), (2, False)])
def test_a_key_depends_on_all_that_a_loader_is_given(name, is_equal):
    graph = wiring(
        _1=("Encode", {"text": 1}), _2=("Foreign", {"x": "1"}), _3=("Encode", {"text": name}), _4=("Foreign", {"x": "3"})
    )
    assert (graph.key(("2", 0)) == graph.key(("4", 0))) is is_equal


def test_a_loader_that_is_known_keeps_its_key():
    graph = wiring({("1", 0): "ours"}, _1=("Unet", {"name": 1}), _2=("Lora", {"model": "1"}))
    assert graph.origins(("2", 0)) == {("1", 0): "ours"}
    assert not is_of_another("ours")


def test_loaders_give_out_models_that_come_from_nowhere_else():
    graph = wiring(
        {("1", 0): "ours"},
        _1=("Unet", {"name": 1}),
        _2=("Checkpoint", {"name": 1}),
        _3=("Lora", {"model": ["2", 0], "clip": ["2", 1]}),
        _4=("Encode", {"clip": ["3", 1]}),
        _5=("Sample", {"model": "3", "x": "4"}),
    )
    assert sorted(graph.loaders()) == [("2", 0), ("2", 1), ("2", 2)]


def test_sources_are_what_is_wired_to_a_release_node():
    nodes = {"1": Node("Unet", {"name": 1}), "2": Node("Unet", {"name": ["9", 0]}), "3": Node("Release", {"x": ["1", 0], "y": 3})}
    graph = Wiring(nodes, CLASSES.get, {("2", 0): ANY})
    assert released(nodes, [("3", "x"), ("3", "y")], graph) == {("1", 0): graph.key(("1", 0))}
    nodes["3"] = Node("Release", {"x": ["2", 0]})
    assert released(nodes, [("3", "x")], Wiring(nodes, CLASSES.get, {("2", 0): ANY})) == {}
