"""The plan of the running prompt, made when its first weights are asked for, and what it decides about each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

from ..host.prompt import Unmade, is_core, openings
from ..memory.graph import Key, Node
from ..memory.plan import Choice, Plan, Policy, Stage
from ..memory.resource import Hints, Parts, Resource
from ..memory.store import Decision, MemoryRefused
from .planning import PlanOptions, planned

if TYPE_CHECKING:
    from .runtime import Runtime

log = logging.getLogger("lazy_h3")


class SessionPlanner:
    """Plans each session once, and again when an expansion adds to its graph. A plan that fails decides nothing."""

    def __init__(self, shared: Runtime, may_stream: bool, may_fold: bool) -> None:
        self._shared = shared
        self._may_stream = may_stream
        self._may_fold = may_fold
        self._of: tuple[Any, Any] | None = None
        self._plan: Plan | None = None
        self._failing: list[Callable[[], object]] = []  # loaders that will run and fail: each call says why

    def plan(self) -> Plan | None:
        """The plan of the running prompt; None where no prompt runs or it cannot be planned."""
        session = self._shared.attachment.session
        if session is None:
            return self._plan
        try:
            known = session.prompt_id, session.prompt.version()
            if self._of != known:
                self._of, self._plan, self._failing = known, None, []
                self._plan = self._made(session)
        except Exception:
            log.exception("Lazy H3: prompt %s could not be planned; each component is held as it fits.", session.prompt_id)
            self._plan = None
        return self._plan

    def check_loaders(self, resource: Resource) -> None:
        """Before a use: raises what a loader that is still to run will say of its file, now and not after hours of sampling."""
        if self._shared.attachment.session is not None:
            self.plan()
            for load in self._failing:
                load()

    def decide(self, resource: Resource, parts: Parts, hints: Hints) -> Decision | None:
        """Mode and grant of a fill. Raises MemoryRefused, before anything is read, if the prompt as a whole cannot fit."""
        plan = self.plan() if self._shared.attachment.session is not None else None
        if plan is None:
            return None
        if plan.refusal is not None:
            refusal = plan.refusal
            raise MemoryRefused(refusal.name, refusal.need_bytes, refusal.have_bytes, refusal.message)
        choice = plan.choice(resource.identity)
        return None if choice is None else Decision(choice.mode, choice.grant, choice.item.points, choice.reason)

    def ahead(self, node: str) -> list[tuple[Choice, Stage]]:
        """What may be read while a node computes, with that node's stage: only what is certain to be used."""
        session, plan = self._shared.attachment.session, self.plan()
        number = None if plan is None else next((n for n, stage in enumerate(plan.stages) if stage.node == node), None)
        if session is None or plan is None or number is None:
            return []
        coming = [choice for choice in plan.choices if choice.begin <= number < choice.first]
        return [(c, plan.stages[number]) for c in coming if session.prompt.will_run(plan.stages[c.first].node)]

    def predicted_peak(self) -> int | None:
        """Bytes of weights at the peak of the open prompt; None where nothing of it was planned."""
        session = self._shared.attachment.session
        is_of_this = session is not None and self._of is not None and self._of[0] == session.prompt_id
        return self._plan.peak_bytes if is_of_this and self._plan is not None and self._plan.choices else None

    def why_kept(self, resource: Resource) -> str | None:
        """Why the plan keeps a resource for the next prompt; None where it goes."""
        plan = self.plan()
        if plan is None:
            return None
        choice = plan.choice(resource.identity)
        if choice is None:
            is_in_pool = resource.device.type == self._shared.device().type  # of others, nobody knows what room they have
            return "this prompt has room beside it" if is_in_pool else None
        return "it fits beside everything that must overlap" if choice.is_kept else None

    def _made(self, session: Any) -> Plan:
        nodes = session.prompt.view().nodes
        certain = {node: spec for node, spec in nodes.items() if session.prompt.will_run(node)}
        self._failing = [load for load in openings(certain, self._shared.host) if _fails(load)]
        plan = self.planned(nodes, self._shared.prompt_policy(), session.prompt.may_run())
        for warning in plan.warnings:
            log.warning("Lazy H3: %s", warning)
        return plan

    def planned(self, nodes: Mapping[str, Node], policy: Policy, may_run: Container[str] | None = None) -> Plan:
        """The plan of these nodes, on this machine as it is now."""
        shared = self._shared
        options = PlanOptions(shared.room(), shared.store.budget, policy, self._may_stream, self._may_fold)
        return planned(nodes, shared.host, self._find, options, may_run)

    def _find(self, key: Key) -> Any:
        """What is planned for. The host's own models only where there is one pool: a GPU's memory is the host's to plan."""
        shared = self._shared
        if is_core(key) and shared.device().type != "cpu":
            return None
        found = shared.catalogue.find(key) or shared.store.find(key)  # type: ignore[arg-type]
        return found or (Unmade(key, shared.device()) if is_core(key) and key.files else None)


def _fails(load: Callable[[], object]) -> bool:
    try:
        load()
    except (OSError, ValueError):
        return True
    return False
