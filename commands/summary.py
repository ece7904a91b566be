"""The run report as a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from ..memory.units import shown_bytes
from .report import Report


def summary(report: Report) -> Iterator[str]:
    """A table of components, the peak beside the sum, and the files written."""
    data = report.as_dict()
    width = max((len(c["name"]) for c in data["components"]), default=0)
    for component in data["components"]:
        released = f"released after node {', '.join(component['released_after'])}" if component["released_after"] else "kept"
        yield (
            f"{component['name']:{width}}  {shown_bytes(component['bytes']):>11}  "
            f"loaded {component['loads']}x in {component['load_seconds']:.2f} s, {released}"
        )
    if data["components"]:
        yield f"{'sum of all':{width}}  {shown_bytes(data['sum_bytes']):>11}"
        yield f"{'peak resident weights':{width}}  {shown_bytes(data['peak_resident_bytes']):>11}"
    memory = f"{shown_bytes(data['rss_before_bytes'])} before, {shown_bytes(data['rss_peak_bytes'])} at its peak"
    yield f"process memory: {memory}, {shown_bytes(data['rss_after_bytes'])} after; {data['seconds']:.1f} s in all"
    for output in data["outputs"]:
        yield f"{output['kind']}: {output['path']}"
