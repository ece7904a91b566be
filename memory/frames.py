"""An exception must not keep weights alive: its traceback holds every local variable of the frames it came through."""

from __future__ import annotations

import traceback


def forget_locals(error: BaseException) -> None:
    """Drop the local variables of all finished frames in the tracebacks of ``error`` and of what caused it."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
