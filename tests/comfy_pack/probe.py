"""What a server's process holds at every finish of a node, and which calls a pack receives. Changes core in its process alone."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

SCANS = "LAZY_H3_PROBE_TENSORS" in os.environ  # whether living tensors are looked for at every node, which is slow
SAMPLE_SECONDS = 0.005

_peak = [0]  # anonymous bytes, at most, since it was asked for
_moments: list[dict[str, Any]] = []
_calls: Counter[str] = Counter()
_watched: list[str] = []  # part of the path of the code whose calls are counted


def install() -> None:
    """Record from now on; routes /test/memory and /test/calls give out what was recorded, and forget it."""
    import execution
    from aiohttp import web
    from comfy_execution.progress import ProgressRegistry
    from server import PromptServer

    finish, execute = ProgressRegistry.finish_progress, execution.PromptExecutor.execute

    def finish_progress(self: Any, node_id: str) -> None:
        finish(self, node_id)
        node = self.dynprompt.get_node(node_id)
        _moments.append({"node": node_id, "class": node["class_type"], **(memory() if SCANS else _pages())})

    def execute_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        sys.setprofile(_count if _watched else None)
        try:
            return execute(self, *args, **kwargs)
        finally:
            sys.setprofile(None)

    ProgressRegistry.finish_progress = finish_progress
    execution.PromptExecutor.execute = execute_watched
    if SCANS:
        threading.Thread(target=_watch_peak, daemon=True).start()
    routes = PromptServer.instance.routes

    @routes.get("/test/memory")
    async def told(request: Any) -> Any:
        moments = [*_moments, {"node": None, "class": None, **memory()}]
        _moments.clear()
        return web.json_response(moments)

    @routes.post("/test/calls")
    async def watch(request: Any) -> Any:
        """``watched``: part of a path, or nothing to stop. Answers what was counted until now."""
        counted = dict(_calls)
        _calls.clear()
        _watched[:] = filter(None, [(await request.json())["watched"]])
        sys.setprofile(_count if _watched else None)
        return web.json_response(counted)


def memory() -> dict[str, int]:
    """Bytes: anonymous and mapped pages of this process, now and at most since the last call, and tensors in anonymous memory."""
    pages = _pages()
    peak, _peak[0] = max(_peak[0], pages["anonymous"]), 0
    return {**pages, "peak": peak, "tensors": _anonymous_tensors()}


def _watch_peak() -> None:
    waiting = threading.Event()
    while not waiting.wait(SAMPLE_SECONDS):
        _peak[0] = max(_peak[0], _pages()["anonymous"])


def _pages() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {"anonymous": int(fields["RssAnon"].split()[0]) << 10, "mapped": int(fields["RssFile"].split()[0]) << 10}


def _anonymous_tensors() -> int:
    """All storages that are alive, but for those in a mapped file."""
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            mapped.append(tuple(int(end, 16) for end in span.split("-")))
    storages = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(n for start, n in storages.items() if not any(first <= start < last for first, last in mapped))


def _count(frame: Any, event: str, argument: Any) -> None:
    if event == "call" and _watched and _watched[0] in frame.f_code.co_filename:
        _calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1
