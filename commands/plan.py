"""``plan``: what a workflow would hold when, from its graph and headers alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..host.prompt import openings
from ..memory.graph import Node
from ..memory.plan import Plan
from ..memory.units import shown_bytes
from .make_checkpoint import make_checkpoint
from .presets import PUBLISHED
from .run import RunOptions, as_prompt, hosted

BOUNDLESS = 1 << 60  # bytes: unless a memory is named, a published model has only the budget to fit
SIZES_DEVICE = torch.device("mps")  # a label: published files are planned for one memory, and for all of their precisions
SAMPLER = "LazyH3Sampler"
FASTH3_STEPS = 8


@dataclass(frozen=True)
class PlanRequest:
    """What to plan. ``sizes``: a published model in place of files; it has only the budget to fit, not this machine."""

    run: RunOptions
    sizes: str | None = None


def plan_workflow(workflow: Mapping[str, Any], request: PlanRequest) -> Plan:
    """The plan of a workflow. Raises ValueError for an unknown model of ``sizes``, and as ``run`` does."""
    run, device = request.run, None
    with ExitStack() as stack:
        if request.sizes is not None:
            run, device = _published(request, stack), SIZES_DEVICE
        host, shared = stack.enter_context(hosted(run, device))
        prompt = as_prompt(workflow, host, run.settings)
        unknown = [spec["class_type"] for spec in prompt.values() if spec["class_type"] not in host.node_classes]
        if unknown:
            raise ValueError(
                f"The workflow uses the node {unknown[0]}, which only ComfyUI knows; plan it there: POST /lazy_h3/plan."
            )
        for load in openings({n: Node(spec["class_type"], spec["inputs"]) for n, spec in prompt.items()}, shared.host):
            load()  # a plan without a file that cannot be loaded would be of another prompt
        return shared.plan_of(prompt).warned([*_notes(prompt, request)])


def _notes(prompt: Mapping[str, Any], request: PlanRequest) -> Iterator[str]:
    """What a plan by ``sizes`` takes for granted."""
    if request.sizes is None:
        return
    if request.run.memory is None and request.run.budget is None:
        yield "planned for a machine without limit; --memory says which, --budget what the weights may take"
    if PUBLISHED[request.sizes].dit.has_gate:
        yield "FastH3 can be planned and not be run yet"
        samplers = (node for node, spec in prompt.items() if spec["class_type"] == SAMPLER)
        slow = [node for node in samplers if prompt[node]["inputs"].get("steps") != FASTH3_STEPS]
        if slow:
            settings = " ".join(f"--set {node}.steps={FASTH3_STEPS}" for node in slow)
            yield f"FastH3 is made for {FASTH3_STEPS} steps, and the workflow has others: {settings}"


def _published(request: PlanRequest, stack: ExitStack) -> RunOptions:
    """The run with the models of ``sizes``: headers with holes in place of weights."""
    if request.sizes not in PUBLISHED:
        raise ValueError(f"--sizes {request.sizes}: is not a published model; choose one of {', '.join(PUBLISHED)}.")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lazy-h3-")))
    make_checkpoint(folder, PUBLISHED[request.sizes], hollow=True)
    memory = BOUNDLESS if request.run.memory is None else request.run.memory
    return replace(request.run, out=folder / "output", models=[folder], memory=memory)


def shown(plan: Plan) -> Iterator[str]:
    """The plan as lines for people; a refusal is an error, with a line of its own."""
    if plan.refusal is None:
        yield from _table(plan)
    yield from (f"note: {warning}" for warning in plan.warnings)


def _table(plan: Plan) -> Iterator[str]:
    width = max((len(choice.item.name) for choice in plan.choices), default=0)
    for choice in plan.choices:
        nodes = f"nodes {plan.stages[choice.first].node} to {plan.stages[choice.last].node}"
        if choice.prefetch_at is not None:
            nodes += f", read ahead at node {plan.stages[choice.prefetch_at].node}"
        after = "then kept" if choice.is_kept else "then freed"
        yield (
            f"{choice.item.name:{width}}  {shown_bytes(choice.resident_bytes):>10}  {choice.mode}, {nodes}, {after}, "
            f"reads {shown_bytes(choice.read_bytes)}: {choice.reason}"
        )
    yield f"{'sum of all weights':{width}}  {shown_bytes(sum(item.total_bytes for item in plan.items)):>10}"
    kept = sum(choice.resident_bytes for choice in plan.choices if choice.is_kept)
    why = f", of which {shown_bytes(kept)} are kept for the next prompt" if kept else ""
    yield f"{'predicted peak of weights':{width}}  {shown_bytes(plan.peak_bytes):>10}  at node {plan.peak_node}{why}"
    with_all = "with activations and results"
    yield f"{with_all:{width}}  {shown_bytes(plan.peak_growth_bytes):>10}  at node {plan.growth_node}"
