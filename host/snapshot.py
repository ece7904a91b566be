"""What memory looks like from outside: JSON documents, and the same as text for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..memory import device as devices
from ..memory.account import Account, accounts
from ..memory.ledger import Page
from ..memory.plan import Choice, Plan, Refusal, Stage
from ..memory.resource import Resource
from ..memory.store import Store
from ..memory.table import Status
from ..memory.units import shown_bytes
from .events import SCHEMA, EventFeed


def snapshot(store: Store, feed: EventFeed, device: torch.device) -> dict[str, Any]:
    """Everything a memory panel needs to begin, or to go on after it missed messages.

    ``seq``: number of the last message that is contained; ``now``: the clock of the events; ``events``: the last few messages.
    ``device``: where models compute; its pool is listed in any case. Asks the GPU driver, so not for a server's event loop.
    """
    seq, events = feed.latest()  # first: what happens from here on comes as messages with higher numbers
    statuses = store.statuses()
    pools = dict.fromkeys([device, *(status.resource.device for status in statuses)])
    return {
        "schema": SCHEMA,
        "seq": seq,
        "now": store.ledger.now(),
        "pools": [_pool(pool, store.pretended_total) for pool in pools],
        "components": [_component(status) for status in statuses],
        "resident_bytes": store.live_bytes(),
        "peak_bytes": store.ledger.page().peak_bytes,
        "budget_bytes": store.budget,
        "events": events,
    }


def prompt_report(page: Page) -> dict[str, Any]:
    """One prompt: its components with their levels over time ``[t, resident bytes, bytes being read]``, and its events."""
    known = accounts(page)
    sizes = [account.bytes for account in known]
    return {
        "schema": SCHEMA,
        "prompt_id": page.prompt_id,
        "began": page.began,
        "ended": page.ended,
        "peak_bytes": page.peak_bytes,
        "sum_bytes": sum(sizes),
        "largest_bytes": max(sizes, default=0),
        "components": [_account(account) for account in known],
        "events": [event.as_dict() for event in page.events],
    }


def prompt_table(page: Page) -> str:
    """A table of components, with the peak beside the sum."""
    known = accounts(page)
    if not known:
        return "No component was in memory in this prompt."
    lines = [("component", "size", "read", "released"), *map(_line, known)]
    lines.append(("sum of all components", shown_bytes(sum(account.bytes for account in known)), "", ""))
    lines.append(("peak of the prompt so far", shown_bytes(page.peak_bytes), "", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    rows = (f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:{widths[2]}}  {d}".rstrip() for a, b, c, d in lines)
    return "\n".join(rows)


def summary_line(page: Page, predicted_bytes: int | None = None) -> str:
    """A prompt in one line: its peak beside the plan's, what was freed where, and what was read more than once."""
    known = accounts(page)
    title = f"Lazy H3, prompt {page.prompt_id}"
    if not known:
        return f"{title}: no component was in memory."
    freed = "; ".join(f"{account.name} {fate(account)}" for account in known)
    plan = "" if predicted_bytes is None else f" ({_error(page.peak_bytes, predicted_bytes)} the plan)"
    return f"{title}: peak {shown_bytes(page.peak_bytes)}{plan}; {freed}; {_loads(known)}."


def _error(measured: int, predicted: int) -> str:
    return "as in" if measured == predicted else f"{100 * (measured / predicted - 1):+.1f} % from" if predicted else "not in"


def fate(account: Account) -> str:
    """Where a component was released, or that it stays."""
    ends = list(_ends(account))
    return f"{', '.join(ends[:-1])} and {ends[-1]}" if len(ends) > 1 else ends[0]


def _ends(account: Account) -> Iterator[str]:
    for event in account.releases:
        yield f"freed after node {event.node}" if event.node is not None else f"freed ({event.reason})"
    if account.resident_bytes:
        yield "still resident"
    elif not account.releases:
        yield "never resident"


def _loads(known: list[Account]) -> str:
    loads, seconds = sum(account.loads for account in known), sum(account.load_seconds for account in known)
    again, again_seconds = sum(account.reloads for account in known), sum(account.reload_seconds for account in known)
    reloads = f", {again}x again in {again_seconds:.1f} s" if again else ""
    return f"read {loads}x in {seconds:.1f} s{reloads}" if loads else "nothing was read"


def _line(account: Account) -> tuple[str, str, str, str]:
    loads = f"{account.loads}x in {account.load_seconds:.2f} s"
    return account.name, shown_bytes(account.bytes), loads, fate(account)


def _account(account: Account) -> dict[str, Any]:
    return {
        "name": account.name,
        "bytes": account.bytes,
        "resident_bytes": account.resident_bytes,
        "loads": account.loads,
        "load_seconds": account.load_seconds,
        "reloads": account.reloads,
        "reload_seconds": account.reload_seconds,
        "released_after": account.released_after,
        "levels": [[level.t, level.resident, level.loading] for level in account.levels],
    }


def _pool(device: torch.device, pretended_total: int | None) -> dict[str, Any]:
    status = devices.pool_status(device, pretended_total)
    return {
        "name": str(device),
        "total_bytes": status.total,
        "free_bytes": status.free,
        "available_bytes": status.available,
        "unified": status.unified,
    }


def _component(status: Status) -> dict[str, Any]:
    resource = status.resource
    return {
        "kind": resource.identity.kind,
        "name": resource.name,
        "path": _path(resource),
        "pool": str(resource.device),
        "bytes": resource.live_bytes(),
        "parts": sorted(resource.parts),
        "resident_parts": sorted(resource.resident_parts()),
        "state": status.state,
        "pinned": status.is_pinned,
        "leaving": status.is_leaving,
    }


def _path(resource: Resource) -> str | None:
    """The file, or the folder of several; None for a resource without files."""
    paths = [str(file.path) for file in resource.identity.files]
    if not paths:
        return None
    return paths[0] if len(paths) == 1 else os.path.dirname(paths[0])


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan, as ``plan --json`` prints it and the route answers."""
    refusal = plan.refusal
    return {
        "status": "ok" if refusal is None else "refused",
        "order": [stage.node for stage in plan.stages],
        "activation_bytes": {stage.node: stage.activation_bytes for stage in plan.stages},
        "components": [_choice(choice, plan.stages) for choice in plan.choices],
        "sum_bytes": sum(item.total_bytes for item in plan.items),
        "predicted_peak_bytes": plan.peak_bytes if refusal is None else None,
        "peak_node": plan.peak_node,
        "predicted_growth_bytes": plan.peak_growth_bytes if refusal is None else None,
        "growth_node": plan.growth_node,
        "refusal": None if refusal is None else _refusal(refusal),
        "warnings": list(plan.warnings),
    }


def _choice(choice: Choice, stages: Sequence[Stage]) -> dict[str, Any]:
    return {
        "name": choice.item.name,
        "mode": choice.mode,
        "bytes": choice.resident_bytes,
        "held_blocks": choice.num_held,
        "from": stages[choice.first].node,
        "read_ahead_at": None if choice.prefetch_at is None else stages[choice.prefetch_at].node,
        "to": stages[choice.last].node,
        "kept": choice.is_kept,
        "read_bytes": choice.read_bytes,
        "reason": choice.reason,
    }


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {
        "component": refusal.name,
        "node": refusal.node,
        "need_bytes": refusal.need_bytes,
        "have_bytes": refusal.have_bytes,
        "message": refusal.message,
    }
