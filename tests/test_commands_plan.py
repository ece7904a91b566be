"""The command ``plan``: the plan that a run would follow, also where there are no files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.commands.plan import PlanRequest, plan_workflow, shown
from lazy_h3.commands.run import RunOptions, load_workflow
from lazy_h3.memory.units import shown_bytes
from memory_models import PLENTY
from small_models import tiny_models

GIB = 1 << 30
OFFICIAL = WORKFLOW.with_name("text_to_video_api.json")


def test_a_policy_node_counts_as_it_does_in_a_run(tmp_path):
    workflow = load_workflow(WORKFLOW)
    request = PlanRequest(RunOptions(tmp_path, [tiny_models()], memory=PLENTY))
    assert all(choice.is_kept for choice in plan_workflow(workflow, request).choices)
    workflow["policy"] = {"class_type": "LazyH3Policy", "inputs": {"policy": "free"}}
    assert not any(choice.is_kept for choice in plan_workflow(workflow, request).choices)


def published(out: Path, name: str, **options) -> PlanRequest:
    return PlanRequest(RunOptions(out, policy="free", **options), sizes=name)


@pytest.mark.parametrize(("name", "may_plan", "peak"), [("minimax-h3-r16", False, 46.9), ("minimax-h3", True, 38.3)])
def test_a_published_model_is_planned_for_a_machine_that_holds_it(tmp_path, name, may_plan, peak):
    plan = plan_workflow(load_workflow(OFFICIAL), published(tmp_path, name, may_stream=may_plan, may_fold=may_plan))
    assert plan.peak_bytes / GIB == pytest.approx(peak, abs=0.1)


def test_a_published_model_is_planned_for_the_machine_that_is_named(tmp_path):
    plan = plan_workflow(load_workflow(OFFICIAL), published(tmp_path, "minimax-h3-r16", memory=4 * GIB))
    assert plan.refusal is not None


@pytest.mark.parametrize("total", [48 * GIB, 96 * GIB])
@pytest.mark.parametrize("policy", ["free", "auto", "keep"])
def test_a_published_model_leaves_the_rest_of_the_machine_its_twelve_percent(tmp_path, total, policy):
    request = PlanRequest(RunOptions(tmp_path, policy=policy, memory=total), sizes="minimax-h3-r16")
    plan = plan_workflow(load_workflow(OFFICIAL), request)
    assert plan.refusal is None
    assert plan.peak_growth_bytes <= total - total * 12 // 100


def test_a_small_machine_keeps_two_gibibytes_whatever_is_planned(tmp_path):
    request = PlanRequest(RunOptions(tmp_path, policy="free", memory=16 * GIB), sizes="minimax-h3-r16-fp16-vae")
    plan = plan_workflow(load_workflow(OFFICIAL), request)
    assert plan.peak_growth_bytes <= 14 * GIB


def test_a_plan_without_limit_says_so_and_one_with_a_limit_does_not(tmp_path):
    workflow, base = load_workflow(OFFICIAL), RunOptions(tmp_path)
    free, *limited = (
        plan_workflow(workflow, PlanRequest(replace(base, **limits), sizes="minimax-h3-r16"))
        for limits in ({}, {"memory": 96 * GIB}, {"budget": 24 * GIB})
    )
    assert any("a machine without limit; --memory says which" in line for line in shown(free))
    assert all(plan.warnings == () for plan in limited)


@pytest.mark.parametrize(("steps", "hints"), [(49, ["--set 7.steps=8"]), (8, [])])
def test_fasth3_is_planned_with_a_warning_and_a_hint_at_its_steps(tmp_path, steps, hints):
    run = RunOptions(tmp_path, budget=24 * GIB, settings={"7.steps": str(steps)})
    warnings = plan_workflow(load_workflow(OFFICIAL), PlanRequest(run, sizes="fasth3")).warnings
    assert warnings[0] == "FastH3 can be planned and not be run yet"
    assert [warning.rpartition(": ")[2] for warning in warnings[1:]] == hints


@pytest.mark.parametrize("policy", ["auto", "free"])
def test_the_peak_says_how_much_of_it_is_kept_for_the_next_prompt(tmp_path, policy):
    run = RunOptions(tmp_path, [tiny_models()], memory=PLENTY, policy=policy)
    plan = plan_workflow(load_workflow(WORKFLOW), PlanRequest(run))
    (peak,) = (line for line in shown(plan) if line.startswith("predicted peak of weights"))
    kept = shown_bytes(sum(choice.resident_bytes for choice in plan.choices if choice.is_kept))
    assert peak.endswith(f", of which {kept} are kept for the next prompt" if policy == "auto" else " at node 8")
