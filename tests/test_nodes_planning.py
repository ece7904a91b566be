"""Plans of stock graphs: what core's nodes will ask core's loaders for, from the wiring alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lazy_h3.host.prompt import Unmade
from lazy_h3.memory.checkpoint import FileIdentity
from lazy_h3.memory.graph import Key, Node
from lazy_h3.memory.plan import Plan
from lazy_h3.memory.resource import Identity
from lazy_h3.nodes.planning import PlanOptions, planned

SIZES = {"MODEL": 600, "CLIP": 500, "VAE": 100}


def identity(kind: str) -> Identity:
    return Identity(f"core {kind}", (FileIdentity(f"/models/{kind.lower()}.safetensors", SIZES[kind], 0),))


def node_class(*outputs: str, loads: str | None = None) -> type:
    own = {} if loads is None else {"lazy_h3_resources": staticmethod(lambda **_: {0: identity(loads)})}
    return type("Class", (), {"RETURN_TYPES": outputs, "INPUT_TYPES": classmethod(lambda _: {"required": {}}), **own})


CLASSES = {
    **{f"Load{kind}": node_class(kind, loads=kind) for kind in SIZES},
    "Shift": node_class("MODEL"),
    "Guider": node_class("GUIDER"),
    "Scheduler": node_class("SIGMAS"),
    "Keyframe": node_class("CONDITIONING", "LATENT"),
    "Sample": node_class("LATENT"),
    "Decode": node_class("IMAGE"),
    "Save": node_class(),
}
GRAPH = {
    "model": ("LoadMODEL", []),
    "clip": ("LoadCLIP", []),
    "vae": ("LoadVAE", []),
    "shift": ("Shift", ["model"]),
    "scheduler": ("Scheduler", ["shift"]),
    "keyframe": ("Keyframe", ["clip", "vae"]),
    "guider": ("Guider", ["shift", "keyframe"]),
    "sample": ("Sample", ["guider", "scheduler"]),
    "decode": ("Decode", ["sample", "vae"]),
    "save": ("Save", ["decode"]),
}


def plan(**options: Any) -> Plan:
    nodes = {name: Node(kind, {str(n): [link, 0] for n, link in enumerate(links)}) for name, (kind, links) in GRAPH.items()}
    host: Any = SimpleNamespace(node_class=CLASSES.get)

    def find(key: Key) -> Unmade:
        assert isinstance(key, Identity)
        return Unmade(key, torch.device("cpu"))

    return planned(nodes, host, find, PlanOptions(**options))


def test_nodes_that_only_pass_a_model_on_need_no_weights():
    assert [stage.node for stage in plan(policy="free").stages] == ["keyframe", "sample", "decode"]


def test_the_text_encoder_goes_after_the_node_that_encodes_and_the_vae_leaves_in_between():
    found = plan(policy="free")
    assert (found.peak_bytes, found.peak_node) == (600, "keyframe")
    ends = {choice.item.key: (found.stages[choice.first].node, found.stages[choice.last].node) for choice in found.choices}
    assert ends == {
        identity("CLIP"): ("keyframe", "keyframe"),
        identity("VAE"): ("keyframe", "decode"),
        identity("MODEL"): ("sample", "sample"),
    }
    assert found.choice(identity("VAE")).read_bytes == 2 * SIZES["VAE"]


def test_what_has_room_is_kept_and_what_cannot_fit_is_refused_by_name():
    assert all(choice.is_kept for choice in plan(policy="auto", room=1200).choices)
    assert plan(policy="free", room=600).refusal is None
    assert "core MODEL (model) needs at least" in plan(policy="free", room=599).refusal.message
