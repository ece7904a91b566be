"""The memory routes, for every server that has the front end: plain aiohttp handlers.

``GET /lazy_h3/memory`` answers a snapshot. ``POST /lazy_h3/release`` with ``{"component": name or null}`` releases one component
or all of them. ``POST /lazy_h3/plan`` with ``{"prompt": ...}`` in API format plans it from headers alone. ``GET
/lazy_h3/settings`` answers what is on; ``POST`` with ``{name: true or false}`` changes what the environment has not fixed. All
answer only to this machine and to pages of the same server; everything else is refused with ``{"error": {"type", "message"}}``.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from ..memory.plan import Plan
from ..memory.store import Store
from ..memory.table import Status
from .attachment import Attachment
from .events import EventFeed
from .interface import Host
from .settings import VARIABLES, Settings
from .snapshot import plan_document, snapshot

log = logging.getLogger("lazy_h3")

MAX_BODY_BYTES = 4096
MAX_PROMPT_BYTES = 8 << 20
REASON = "asked for in the memory panel"

Handler = Callable[[web.Request], Awaitable[web.Response]]


class Source(Protocol):
    """What the routes show and act on."""

    host: Host
    store: Store
    attachment: Attachment
    feed: EventFeed
    settings: Settings

    def plan_of(self, prompt: Mapping[str, Any]) -> Plan: ...


class RequestRefused(Exception):
    """Becomes an error answer of this status and type."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def routes(source: Callable[[], Source]) -> list[web.RouteDef]:
    """The routes; ``source`` is asked at each request."""

    async def memory(_: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(_snapshot, source()))

    async def release(request: web.Request) -> web.Response:
        name = _component_of(await _json_of(request))
        return web.json_response(await asyncio.to_thread(release_components, source(), name))

    async def plan(request: web.Request) -> web.Response:
        prompt = _prompt_of(await _json_of(request, MAX_PROMPT_BYTES))
        return web.json_response(await asyncio.to_thread(_planned, source(), prompt))

    async def settings(_: web.Request) -> web.Response:
        return web.json_response(source().settings.document())

    async def change_settings(request: web.Request) -> web.Response:
        source().settings.change(_settings_of(await _json_of(request)))
        return web.json_response(source().settings.document())

    return [
        web.get("/lazy_h3/memory", _guarded(memory)),
        web.post("/lazy_h3/release", _guarded(release)),
        web.post("/lazy_h3/plan", _guarded(plan)),
        web.get("/lazy_h3/settings", _guarded(settings)),
        web.post("/lazy_h3/settings", _guarded(change_settings)),
    ]


def _planned(source: Source, prompt: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return plan_document(source.plan_of(prompt))
    except Exception as error:  # prompts that no validation has seen may hold anything
        log.info("Lazy H3: a prompt could not be planned.", exc_info=True)
        raise RequestRefused(400, "cannot_plan", f"This prompt cannot be planned ({error}); complete its inputs.") from error


def _snapshot(source: Source) -> dict[str, Any]:
    return snapshot(source.store, source.feed, source.host.device())


def release_components(source: Source, name: str | None) -> dict[str, list[dict[str, Any]]]:
    """Release the component of this name (None: every one) and say what is gone and what will go.

    Between prompts it is dropped here. While a prompt runs, the executor's thread owns the host's list of loaded models, so the
    component is only marked, and goes when a node finishes and nobody uses it. Raises RequestRefused for an unknown name.
    """
    statuses = [status for status in source.store.statuses() if name in (None, status.resource.name)]
    if name is not None and not statuses:
        raise RequestRefused(404, "unknown_component", f"No component is called {name!r}; GET /lazy_h3/memory lists their names.")
    resident = {status.resource.identity: _brief(status) for status in statuses if status.state != "absent"}
    release = source.store.release if source.attachment.is_idle() else source.store.release_later
    for status in statuses:
        release(status.resource, REASON, force=True)
    left = {status.resource.identity for status in source.store.statuses() if status.state != "absent"}
    return {
        "released": [brief for identity, brief in resident.items() if identity not in left],
        "marked": [brief for identity, brief in resident.items() if identity in left],
    }


def _brief(status: Status) -> dict[str, Any]:
    return {"component": status.resource.name, "bytes": status.resource.live_bytes()}


def _guarded(handler: Handler) -> Handler:
    """The handler behind the check of who asks; refusals become answers."""

    @functools.wraps(handler)
    async def guarded(request: web.Request) -> web.Response:
        try:
            _check_sender(request)
            return await handler(request)
        except RequestRefused as error:
            return web.json_response({"error": {"type": error.kind, "message": str(error)}}, status=error.status)

    return guarded


def _check_sender(request: web.Request) -> None:
    """A page must come from this server (its Origin, or its Referer where browsers send no Origin); others from this machine."""
    page = request.headers.get("Origin") or request.headers.get("Referer")
    host = request.headers.get("Host", "").lower()
    is_allowed = _is_loopback(host) if page is None else bool(host) and _netloc(page) == host
    if not is_allowed:
        sender = f"a request to {host!r}" if page is None else f"a page of {page!r}"
        message = (
            f"Memory is no business of {sender}; open this server's own page, or ask by a loopback address such as 127.0.0.1."
        )
        raise RequestRefused(403, "forbidden", message)


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    """Whether the Host header names this machine to itself."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _json_of(request: web.Request, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """The body as JSON. Raises RequestRefused if it is of another type, too long, or no JSON."""
    if request.content_type != "application/json":
        message = f"The body is {request.content_type}; send application/json."
        raise RequestRefused(415, "unsupported_media_type", message)
    try:
        return json.loads(await request.clone(client_max_size=max_bytes).read())
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestRefused(413, "body_too_large", f"The body is longer than {max_bytes} bytes.") from error
    except web.RequestPayloadError as error:
        raise RequestRefused(400, "invalid_encoding", "The body is not in its Content-Encoding; send it plain.") from error
    except (ValueError, RecursionError) as error:  # also for text in another encoding
        raise RequestRefused(400, "invalid_json", "The body is no JSON; send a JSON object.") from error


def _prompt_of(body: Any) -> Mapping[str, Any]:
    """The prompt in a plan request. Entries without a class (nodes that the front end does not know) are left out.

    Raises RequestRefused for anything but ``{"prompt": {node: {"class_type", "inputs"}}}``.
    """
    prompt = body.get("prompt") if isinstance(body, dict) else None
    if not isinstance(prompt, dict):
        raise RequestRefused(400, "missing_field", 'The body has no "prompt"; send {"prompt": ...} in API format.')
    return {n: s for n, s in prompt.items() if isinstance(s, dict) and isinstance(s.get("class_type"), str)}


def _settings_of(body: Any) -> Mapping[str, bool]:
    """The settings in a request. Raises RequestRefused for anything but known names with true or false."""
    if not isinstance(body, dict):
        raise RequestRefused(400, "wrong_type", "The body is no object; send {name: true or false}.")
    for name, value in body.items():
        if name not in VARIABLES:
            raise RequestRefused(400, "unknown_field", f"{name[:40]!r} is no setting; there are {', '.join(VARIABLES)}.")
        if not isinstance(value, bool):
            raise RequestRefused(400, "wrong_type", f'"{name}" is {json.dumps(value)[:40]}; send true or false.')
    return body


def _component_of(body: Any) -> str | None:
    """The name in a release request. Raises RequestRefused for anything but ``{"component": text or null}``."""
    if not isinstance(body, dict) or "component" not in body:
        raise RequestRefused(400, "missing_field", 'The body has no "component"; send {"component": null}, or a name for null.')
    unknown = sorted(body.keys() - {"component"})
    if unknown:
        raise RequestRefused(400, "unknown_field", f'{unknown[0]!r} is no field of a release; the only one is "component".')
    name = body["component"]
    if name is not None and not isinstance(name, str):
        raise RequestRefused(400, "wrong_type", f'"component" is {json.dumps(name)[:40]}; send the name of a component, or null.')
    return name
