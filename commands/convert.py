"""``convert``: a workflow file with lazy loaders in the place of ComfyUI's own, or the other way round."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..host.convert import Conversion, Found, Target, convert, twins
from .run import load_workflow


def convert_file(path: Path, out: Path | None, target: Target) -> tuple[Path, Conversion]:
    """Write the converted workflow, beside the file unless ``out`` names another place.

    Raises ValueError for what is no workflow, and for a file that is there already and that nobody named.
    """
    done = convert(load_workflow(path), target)
    place = out or path.with_name(f"{path.stem}_{target}.json")
    if out is None and place.exists():
        raise ValueError(f"{place}: is there already; name the file to write with --out.")
    is_indented = "\n" in path.read_text("utf-8").strip()
    place.write_text(json.dumps(done.workflow, ensure_ascii=False, indent=2 if is_indented else None), "utf-8")
    return place, done


def shown(place: Path, done: Conversion, target: Target) -> Iterator[str]:
    """The report as lines for people."""
    yield f"Loaders replaced: {len(done.replaced)}, left alone: {len(done.left_alone)}. Written to {place}"
    for found in done.replaced:
        yield f"  {_named(found)} is now {twins(target)[found.kind]}" + (f"; {found.remark}" if found.remark else "")
    for found in done.left_alone:
        yield f"  left alone: {_named(found)} {found.remark}"


def _named(found: Found) -> str:
    return f"{found.node} {found.kind}" + (f" (in {found.place})" if found.place else "")
