"""The benchmark of activations on the tiny model: what it compares, not how close it comes."""

from __future__ import annotations

import json

import pytest
from lazy_h3.commands import bench_activations
from lazy_h3.commands.bench_activations import CALIBRATION, TINY, UNSEEN, distinct_workflows, measure, resized, shown
from lazy_h3.commands.demo import WORKFLOW
from small_models import SAMPLER, tiny_models

MIB = 1 << 20


@pytest.fixture
def tiny_everywhere(monkeypatch):
    monkeypatch.setattr(bench_activations, "demo_models", tiny_models)
    monkeypatch.setattr(bench_activations, "BUDGET_PART", 1)  # the tiny VAEs are no fifth of the whole


def test_every_example_workflow_is_run_and_the_same_prompt_once():
    found = distinct_workflows()
    names = {name for names in found for name in names.split(", ")}
    assert names == {path.stem for path in WORKFLOW.parent.glob("text_to_video*.json")}
    assert len(found) < len(names)


def test_a_resized_prompt_keeps_what_has_no_part_in_its_size():
    prompt = json.loads(WORKFLOW.read_text("utf-8"))
    changed = resized(prompt, TINY)
    assert changed["6"]["inputs"] == {"width": TINY.width, "height": TINY.height, "duration": TINY.frames, "unit": "frames"}
    assert changed[SAMPLER]["inputs"] == prompt[SAMPLER]["inputs"] | {"steps": 2}
    assert all(changed[node]["inputs"] == prompt[node]["inputs"] for node in prompt.keys() - {"6", SAMPLER})


def test_a_measured_run_says_what_was_predicted_and_what_was(tiny_everywhere):
    found = measure(tiny_models(), WORKFLOW, TINY)
    assert found["predicted_weights_bytes"] == pytest.approx(found["weights_bytes"], rel=bench_activations.WEIGHTS_ERROR)
    assert found["predicted_growth_bytes"] > found["predicted_weights_bytes"] > 0
    assert found["anonymous_before_bytes"] > 0


@pytest.mark.parametrize(
    ("predicted", "grown", "failing"),
    [(130, 131, []), (130, 160, ["growth within 15 %"]), (120, 120, ["30 % more"]), (170, 131, ["growth within 15 %"])],
)
def test_each_bound_is_checked_at_each_size(tiny_everywhere, monkeypatch, predicted, grown, failing):
    """A run that grew by 100 MiB of weights, as predicted, and by so much in all."""
    found = {"predicted_weights_bytes": 100 * MIB, "weights_bytes": 100 * MIB, "predicted_growth_bytes": predicted * MIB}
    monkeypatch.setattr(bench_activations, "watched", lambda _: (found | {"predicted_at_node": "8"}, grown * MIB))
    monkeypatch.setattr(bench_activations, "replica_models", lambda *_: tiny_models())
    result = bench_activations.bench_activations(tiny_models(), 50)
    failed = [check for check, passed in result["checks"].items() if not passed]
    assert result["ok"] == (not failing)
    assert all(any(bound in check for bound in failing) for check in failed)
    assert {bound for bound in failing if any(bound in check for check in failed)} == set(failing)
    assert len(result["rows"]) == len(distinct_workflows()) * len((*CALIBRATION, UNSEEN))
    lines = list(shown(result))
    assert len(lines) == len(result["rows"]) + len(result["checks"])
    assert f"{predicted / grown - 1:+.1%}" in lines[0]
