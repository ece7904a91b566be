"""Cached outputs of other loaders go after their last use, and never while a node that may still run could want them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from lazy_h3.host.comfy.core.cached import CachedLoaders
from lazy_h3.memory.graph import Key, Node, NodeClass, Output
from lazy_h3.memory.session import GraphView

CLASSES = {
    "Checkpoint": NodeClass(("MODEL", "CLIP")),
    "Ours": NodeClass(("MODEL",)),
    "Lora": NodeClass(("MODEL",)),
    "Guider": NodeClass(("GUIDER",)),
    "Encode": NodeClass(("CONDITIONING",)),
    "Sample": NodeClass(("LATENT",)),
}
GRAPH = {
    "1": Node("Checkpoint", {"name": "a"}),
    "2": Node("Lora", {"model": ["1", 0]}),
    "3": Node("Encode", {"clip": ["1", 1]}),
    "4": Node("Guider", {"model": ["2", 0], "positive": ["3", 0]}),
    "5": Node("Sample", {"guider": ["4", 0]}),
}


class LRUCache:
    """With the tables of the host's; the key of a node is its signature: equal loaders have one."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.cache_key_set = SimpleNamespace(get_data_key=lambda node: repr(nodes[node]) if node in nodes else None)
        self.cache = {repr(spec): object() for spec in nodes.values()}
        self.used_generation = dict.fromkeys(self.cache, 1)
        self.children: dict[str, Any] = {}


class NullCache:
    """Has nothing."""


class RedisCache:
    """Nobody has seen it before."""


class Run:
    """A prompt whose nodes finish in order; also the session that the follower is told of."""

    prompt_id = "prompt"

    def __init__(self, nodes: dict[str, Node], outputs: Any, is_on: bool = True, ours: dict[Output, Key] | None = None) -> None:
        self.nodes = nodes
        self.outputs = outputs
        self.caches = SimpleNamespace(outputs=outputs)
        self.pending = set(nodes)
        self.finished: set[str] = set()
        self.prompt = self
        self._follower = CachedLoaders(lambda: is_on)
        self._ours = ours or {}

    def view(self) -> GraphView:
        return GraphView(0, self.nodes, {})

    def may_run(self) -> set[str]:
        return self.pending

    def classes(self, class_type: str) -> NodeClass | None:
        return CLASSES.get(class_type)

    def sources(self, nodes: Any) -> dict[Output, Key]:
        return self._ours

    def finish(self, *nodes: str) -> list[str]:
        """Nodes whose outputs are still cached."""
        for node in nodes:
            self.finished.add(node)
            self.execute_async()
            self.pending.discard(node)  # as the host: only afterwards
        return [n for n, spec in self.nodes.items() if repr(spec) in getattr(self.outputs, "cache", {})]

    def execute_async(self) -> None:
        """By this name the host's executor is found on the stack, with its caches."""
        self._follower(self)


def test_loader_and_carriers_go_after_the_last_user_and_nothing_else():
    run = Run(GRAPH, LRUCache(GRAPH))
    assert run.finish("1", "2") == ["1", "2", "3", "4", "5"]
    assert run.finish("3", "4") == [
        "2",
        "3",
        "4",
        "5",
    ]  # of the loader, nobody takes the CLIP any more, and others have the MODEL
    assert run.finish("5") == ["3", "5"]
    assert run.outputs.used_generation.keys() == run.outputs.cache.keys()


def test_they_go_early_where_the_last_user_is_cached():
    run = Run(GRAPH, LRUCache(GRAPH))
    run.pending = {"6"}
    run.nodes = {**GRAPH, "6": Node("Sample", {})}
    assert run.finish("6") == ["3", "5"]


def test_an_entry_that_an_equal_loader_shares_stays_while_that_one_is_needed():
    nodes = {**GRAPH, "11": Node("Checkpoint", {"name": "a"}), "12": Node("Sample", {"model": ["11", 0]})}
    run = Run(nodes, LRUCache(nodes))
    assert {"1", "11"} <= {*run.finish("1", "2", "3", "4", "5")}
    assert not {"1", "11"} & {*run.finish("11", "12")}


def test_a_loader_with_several_outputs_waits_for_all_of_them():
    nodes = {**GRAPH, "6": Node("Encode", {"clip": ["1", 1]})}
    run = Run(nodes, LRUCache(nodes))
    assert "1" in run.finish("1", "2", "3", "4", "5")
    assert "1" not in run.finish("6")


def test_what_our_own_loaders_give_stays_cached():
    nodes = {"1": Node("Ours", {}), "2": Node("Sample", {"model": ["1", 0]})}
    run = Run(nodes, LRUCache(nodes), ours={("1", 0): "ours"})
    assert run.finish("1", "2") == ["1", "2"]


def test_nothing_goes_while_the_setting_is_off():
    run = Run(GRAPH, LRUCache(GRAPH), is_on=False)
    assert run.finish(*GRAPH) == [*GRAPH]


def test_a_host_that_caches_nothing_is_no_stranger(caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    Run(GRAPH, NullCache()).finish(*GRAPH)
    assert caplog.text == ""


@pytest.mark.parametrize("outputs", [RedisCache(), None], ids=["class", "no cache"])
def test_an_unfamiliar_cache_is_left_alone_which_is_said_once(caplog, outputs):
    caplog.set_level(logging.WARNING, "lazy_h3")
    run = Run(GRAPH, outputs)
    run.finish(*GRAPH)
    run.finish(*GRAPH)
    assert caplog.text.count("cached loaders are not dropped, since this version of ComfyUI is unfamiliar") == 1


def test_a_familiar_cache_without_its_keys_is_left_alone(caplog):
    caplog.set_level(logging.WARNING, "lazy_h3")
    outputs = LRUCache(GRAPH)
    del outputs.cache_key_set
    run = Run(GRAPH, outputs)
    assert run.finish(*GRAPH) == [*GRAPH]
    assert "unfamiliar" in caplog.text
