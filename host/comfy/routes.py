"""Our routes on ComfyUI's server."""

from __future__ import annotations

import sys
from collections.abc import Callable

from aiohttp import web

from ..routes import Source, routes


def register(source: Callable[[], Source]) -> None:
    """Add the memory routes while ComfyUI collects those of its packs. Without a server, as in the command line, does nothing.

    A route that is there already (a second copy of the pack) stays: the server would not start with two.
    """
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    instance = getattr(server, "instance", None)
    if instance is None:
        return
    known = {(route.method, route.path) for route in instance.routes if isinstance(route, web.RouteDef)}
    for route in routes(source):
        if (route.method, route.path) not in known:
            instance.routes.route(route.method, route.path)(route.handler)
