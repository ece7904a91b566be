"""What all nodes of the process share: the store, the catalogue of components, and the host they run in."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..host.attachment import Attachment
from ..host.comfy.core.cached import CachedLoaders
from ..host.comfy.core.loaders import CoreLoaders
from ..host.comfy.core.release import Releases
from ..host.comfy.host import ComfyHost, is_comfy_running
from ..host.events import EventFeed
from ..host.interface import Host, Progress
from ..host.residency import Residency
from ..host.settings import Settings, settings_of_process
from ..memory.component import Component
from ..memory.device import pool_status
from ..memory.graph import Node
from ..memory.handle import Handle
from ..memory.plan import Plan
from ..memory.resource import Resource
from ..memory.store import Store
from ..memory.units import parsed_bytes, shown_bytes
from ..memory.watch import FloorWatch
from .catalogue import Catalogue
from .policy import POLICIES, Policy, PromptPolicy, asked_for
from .prefetch import Prefetcher
from .session_plan import SessionPlanner

log = logging.getLogger("lazy_h3")

LOG_SECONDS = 2.0


class Runtime:
    """One host's components. ``policy``: what happens to a component after its last user (design: budget and policies).

    A policy node in the running prompt takes its place. ``take_turns``: whether heavy nodes of one prompt wait for each other, so
    that branches share one load of each model. ``may_stream``, ``may_fold`` and ``may_prefetch``: what plans may choose.
    ``feed`` tells the front end what the ledger records; ``settings`` are for what other loaders load.
    """

    def __init__(
        self,
        host: Host,
        store: Store | None = None,
        catalogue: Catalogue | None = None,
        policy: Policy = "auto",
        take_turns: bool = True,
        may_stream: bool = True,
        may_fold: bool = True,
        may_prefetch: bool = True,
        settings: Settings | None = None,
    ) -> None:
        self.host = host
        self.store = store or Store()
        self.catalogue = catalogue or Catalogue()
        self.policy = policy
        self.core_loaders = CoreLoaders(self.store, host.executing)
        self.releases = Releases(self.store, self.core_loaders, host)
        self.residency = Residency(self.store, host.management, host.patcher_base)
        self.attachment = Attachment(host, self.store, self._keeps, take_turns)
        self.settings = settings or Settings()
        self.attachment.followed = self.releases.followed
        self.attachment.after_node.append(CachedLoaders(partial(self.settings.is_on, "drop_loaders")))
        self.feed = EventFeed(host.send, lambda: self.attachment.prompt_id)
        self.store.on_fill.append(_FillProgress(host))
        self.watch = FloorWatch(self.store)
        self.store.ledger.observers.append(self.feed)
        self._prompt_policy = PromptPolicy()
        self._planner = SessionPlanner(self, may_stream, may_fold)
        self.store.decide = self._planner.decide
        self.store.on_use.append(self._planner.check_loaders)
        self.attachment.predicted_peak = self._planner.predicted_peak
        self._prefetcher = Prefetcher(self, self._planner) if may_prefetch else None

    def handle(self, component: Component) -> Handle:
        """The handle that goes on a wire."""
        return Handle(component, self.store)

    def device(self) -> torch.device:
        return self.host.device()

    def progress(self, total: int) -> Progress:
        """Progress of the executing node; raises the host's interrupt, and MemoryShort."""
        report = self.host.progress(total)

        def checked(done: int, total: int) -> None:
            self.watch.check()
            report(done, total)

        return checked

    def plan(self) -> Plan | None:
        """The plan of the running prompt, else of the last one."""
        return self._planner.plan()

    def plan_of(self, prompt: Mapping[str, Any]) -> Plan:
        """The plan of a prompt in API format that does not run yet."""
        nodes = {n: Node(s["class_type"], s["inputs"]) for n, s in prompt.items() if isinstance(s.get("inputs"), dict)}
        asked = asked_for(nodes)
        return self._planner.planned(nodes, asked[0] if asked else self.policy)

    def prompt_policy(self) -> Policy:
        """The policy that holds for the running prompt."""
        session = self.attachment.session
        asked = None if session is None else self._prompt_policy.of(session.prompt)
        return asked or self.policy

    def room(self) -> int:
        """Bytes for weights and activations together: what is free above the floor, and what our weights hold already."""
        available = pool_status(self.device(), self.store.pretended_total).available
        return available + self.store.live_bytes()

    def _keeps(self, resource: Resource) -> str | None:
        if getattr(resource, "goes_after_use", False):  # somebody asked for just that
            return None
        policy = self.prompt_policy()
        if policy == "auto":
            return self._planner.why_kept(resource)
        return "policy keep" if policy == "keep" else None


class _FillProgress:
    """Shows how far a fill is, and lets an interrupt through."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._next_log = 0.0

    def __call__(self, resource: Resource, done: int, total: int) -> None:
        self._host.raise_if_interrupted()
        if self._host.executing() is not None:
            self._host.progress(total)(done, total)
        now = time.monotonic()
        if done and now >= self._next_log:
            self._next_log = now + LOG_SECONDS
            log.info("%s: reading, %s of %s", resource.name, shown_bytes(done), shown_bytes(total))


_installed: list[Runtime] = []


def runtime() -> Runtime:
    """The runtime of the host that is executing; inside ComfyUI it is made at the first question."""
    if not _installed:
        if not is_comfy_running():
            raise RuntimeError("Lazy H3 nodes run inside ComfyUI or through the lazy-h3 command; no host is installed here.")
        _installed.append(_configured(ComfyHost()))
    return _installed[-1]


def _configured(host: Host) -> Runtime:
    """A runtime with what the environment says; a value that makes no sense is named and left out."""
    policy, budget = os.environ.get("LAZY_H3_POLICY", "auto"), os.environ.get("LAZY_H3_BUDGET")
    if policy not in POLICIES:
        log.warning("LAZY_H3_POLICY is %r, which is none of %s; auto holds.", policy, ", ".join(POLICIES))
        policy = "auto"
    try:
        limit = None if budget is None else parsed_bytes(budget)
    except ValueError as error:
        log.warning("LAZY_H3_BUDGET: %s", error)
        limit = None
    takes_turns = os.environ.get("LAZY_H3_TURNS", "on") != "off"
    return Runtime(host, Store(budget=limit), policy=policy, take_turns=takes_turns, settings=settings_of_process())


@contextmanager
def installed(new: Runtime) -> Iterator[Runtime]:
    """Inside the block, nodes of this process run in ``new``."""
    _installed.append(new)
    try:
        yield new
    finally:
        _installed.remove(new)
        new.attachment.close()
        new.store.release_all("the host is closing", force=True)
