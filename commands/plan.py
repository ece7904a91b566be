"""``plan``: what a workflow would hold when, from its graph and headers alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..host.interface import Host
from ..memory.device import pool_status
from ..memory.graph import Node, link_of
from ..memory.plan import Plan
from ..memory.units import shown_bytes
from ..nodes.planning import PlanOptions, planned
from .make_checkpoint import make_checkpoint
from .presets import PUBLISHED
from .run import RunOptions, as_prompt, hosted

SIZES_DEVICE = torch.device("cuda", 0)  # a label: published files are planned for a device that computes every precision


@dataclass(frozen=True)
class PlanRequest:
    """What to plan. ``sizes``: a published model in place of files; it has only the budget to fit, not this machine."""

    run: RunOptions
    sizes: str | None = None


def plan_workflow(workflow: Mapping[str, Any], request: PlanRequest) -> Plan:
    """The plan of a workflow. Raises ValueError for an unknown model of ``sizes``, and as ``run`` does."""
    run = request.run
    with ExitStack() as stack:
        device, room = None, None
        if request.sizes is not None:
            run, device = _published(request, stack), SIZES_DEVICE
        host, shared = stack.enter_context(hosted(run, device))
        prompt = as_prompt(workflow, host, run.settings)
        nodes = {node: Node(spec["class_type"], spec.get("inputs", {})) for node, spec in prompt.items()}
        if request.sizes is None or run.memory is not None:
            room = pool_status(shared.device(), run.memory).available
        _check_files(nodes, shared.host)
        options = PlanOptions(room, run.budget, run.policy, run.may_stream, run.may_fold)
        return planned(nodes, shared.host, shared.catalogue.find, options)


def _check_files(nodes: Mapping[str, Node], host: Host) -> None:
    """Raises what a loader says of a file that it cannot load: a plan without it would be of another prompt."""
    for spec in nodes.values():
        cls: Any = host.node_class(spec.class_type)
        if hasattr(cls, "components") and not any(link_of(value) for value in spec.inputs.values()):
            cls.components(**spec.inputs)


def _published(request: PlanRequest, stack: ExitStack) -> RunOptions:
    """The run with the models of ``sizes``: headers with holes in place of weights."""
    if request.sizes not in PUBLISHED:
        raise ValueError(f"--sizes {request.sizes}: is no published model; choose one of {', '.join(PUBLISHED)}.")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lazy-h3-")))
    make_checkpoint(folder, PUBLISHED[request.sizes], hollow=True)
    return replace(request.run, out=folder / "output", models=[folder])


def shown(plan: Plan) -> Iterator[str]:
    """The plan as lines for people."""
    if plan.refusal is not None:
        yield f"refused: {plan.refusal.message}"
        return
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
    yield f"{'predicted peak of weights':{width}}  {shown_bytes(plan.peak_bytes):>10}  at node {plan.peak_node}"
    with_all = "with activations and results"
    yield f"{with_all:{width}}  {shown_bytes(plan.peak_growth_bytes):>10}  at node {plan.growth_node}"
    yield from (f"note: {warning}" for warning in plan.warnings)
