"""The run report as a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..memory.units import shown_bytes
from .report import Report

KEPT = "kept"
REPORT = "report.json"


def summary(report: Report, folder: Path | None = None) -> Iterator[str]:
    """A table of components, the peak beside the sum, and the files written; ``folder``: where the report is."""
    data = report.as_dict()
    width = max((len(c["name"]) for c in data["components"]), default=0)
    for component in data["components"]:
        yield (
            f"{component['name']:{width}}  {shown_bytes(component['bytes']):>11}  "
            f"{_came(component)}, {_end_of(component, report)}"
        )
    if data["components"]:
        yield f"{'sum of what was held':{width}}  {shown_bytes(data['sum_bytes']):>11}"
        yield f"{'peak resident weights':{width}}  {shown_bytes(data['peak_resident_bytes']):>11}"
    memory = f"{shown_bytes(data['rss_before_bytes'])} before, {shown_bytes(data['rss_peak_bytes'])} at its peak"
    kept = sum(component["bytes"] for component in data["components"] if _end_of(component, report) == KEPT)
    after = f"{shown_bytes(data['rss_after_bytes'])} after" + (f", with {shown_bytes(kept)} of weights kept" if kept else "")
    yield f"process memory: {memory}, {after}; {data['seconds']:.1f} s in all"
    if folder is not None:
        yield f"report: {folder / REPORT}"
    for output in data["outputs"]:
        yield f"{output['kind']}: {output['path']}"


def _came(component: dict[str, Any]) -> str:
    """How it came into memory. A stream is read while its user computes, so that it has no seconds of its own."""
    if component["mode"] == "streamed":
        return "streamed"
    return f"loaded {component['loads']}x in {component['load_seconds']:.2f} s"


def _end_of(component: dict[str, Any], report: Report) -> str:
    """Where its weights went at last. What was kept for a next run goes with the host, which says nothing about the run."""
    ends = [e for e in report.ledger.events if e.component == component["name"] and e.event in ("release", "keep")]
    if len(ends) > 1 and ends[-1].node is None and ends[-2].event == "keep":
        ends.pop()
    if not ends or ends[-1].event == "keep":
        return KEPT
    if ends[-1].node is None:
        return f"released ({ends[-1].reason})"
    return f"released after node {', '.join(component['released_after'])}"
