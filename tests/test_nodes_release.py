"""The release node in a prompt: who it is for, and whom it leaves alone."""

from __future__ import annotations

import copy
import logging
from typing import Any

import fake_core
import pytest
from lazy_h3.nodes.release import LazyH3ReleaseAfterLastUse
from small_models import ENCODE, stage, text_to_video

RELEASE = "20"


class Model:
    """Core's MODEL, made by a loader and passed through a node that patches it."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"
    made: Any = None

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"name": ("STRING", {"default": ""})}}

    def make(self, name: str) -> tuple[Any]:
        return (Model.made,)


class Patch(Model):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def make(self, model: Any) -> tuple[Any]:
        return (model.clone(),)


class Sample:
    RETURN_TYPES = ()
    FUNCTION = "sample"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "seed": ("INT", {"default": 0})}}

    def sample(self, model: Any, seed: int) -> dict[str, Any]:
        Sample.management.load(model)
        return {}


@pytest.fixture
def running(tmp_path, monkeypatch):
    management = fake_core.Management()
    fake_core.install(monkeypatch, management)
    Model.made = fake_core.ModelPatcher(fake_core.Network())  # does not say how it was made
    Sample.management = management
    with stage(tmp_path, policy="keep", classes={"Model": Model, "Patch": Patch, "Sample": Sample}) as running:
        monkeypatch.setattr(type(running.runtime.host), "management", management)
        running.management = management
        yield running


def prompt(**seeds: int) -> dict[str, Any]:
    """Two samplers, one of which is wired past the release node."""
    return {
        "1": {"class_type": "Model", "inputs": {"name": "a"}},
        "2": {"class_type": "Patch", "inputs": {"model": ["1", 0]}},
        RELEASE: {"class_type": "LazyH3ReleaseAfterLastUse", "inputs": {"anything": ["2", 0]}},
        "3": {"class_type": "Sample", "inputs": {"model": [RELEASE, 0], "seed": seeds.get("first", 0)}},
        "4": {"class_type": "Sample", "inputs": {"model": ["1", 0], "seed": seeds.get("second", 0)}},
    }


def released(running: Any) -> list[str | None]:
    return [e.node for e in running.ledger.of_run(running.ledger.run) if e.event == "release"]


def finished(running: Any) -> list[str | None]:
    return [e.node for e in running.ledger.of_run(running.ledger.run) if e.event == "unpin"]


def test_it_goes_after_its_last_user_whatever_the_policy(running):
    running.succeed(prompt())
    assert released(running) == [finished(running)[-1]]
    assert {"3", "4"} >= {*released(running)}
    assert running.management.current_loaded_models == []


def test_a_cached_release_node_still_counts(running):
    running.succeed(prompt())
    running.succeed(prompt(second=1))
    assert released(running) == ["4"]
    running.succeed(prompt(first=2, second=2))
    assert len(released(running)) == 1
    assert running.management.current_loaded_models == []


def test_other_values_are_passed_on_as_they_are(running, caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    changed = prompt()
    changed["5"] = {"class_type": "Keep", "inputs": {"value": ["6", 0]}}
    changed["6"] = {"class_type": "LazyH3ReleaseAfterLastUse", "inputs": {"anything": 7}}
    running.succeed(changed)
    assert running.kept["5"] == 7
    assert "A int has no weights" in caplog.text


def test_our_own_handles_need_it_not_and_take_no_harm(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    changed = copy.deepcopy(text_to_video())
    changed[RELEASE] = {
        "class_type": "LazyH3ReleaseAfterLastUse",
        "inputs": {"anything": changed[ENCODE]["inputs"]["text_encoder"]},
    }
    changed[ENCODE]["inputs"]["text_encoder"] = [RELEASE, 0]
    with stage(tmp_path) as running:
        running.succeed(changed)
        assert ("text_encoder", ENCODE) in running.happened("release")
        assert running.store.resident() == []
    assert "no weights" not in caplog.text


def test_it_is_cached_like_any_other_node(running):
    with_node = LazyH3ReleaseAfterLastUse.IS_CHANGED(anything=None)
    assert with_node == LazyH3ReleaseAfterLastUse.IS_CHANGED()
    assert with_node == with_node  # no NaN, which would run everything after it again  # noqa: PLR0124


def test_in_a_prompt_without_the_node_its_users_are_known_all_the_same(running):
    running.succeed(prompt())
    without = {node: spec for node, spec in prompt(first=1, second=1).items() if node != RELEASE}
    without["3"]["inputs"]["model"] = ["2", 0]
    without["5"] = {"class_type": "LazyH3MemoryReport", "inputs": {}}  # a node of ours that is asked before the prompt runs
    running.succeed(without)
    assert len(released(running)) == 1
    assert {*released(running)} <= {"3", "4"}
    assert running.management.current_loaded_models == []
