"""ComfyUI's real front end in a browser, for tests. Needs Playwright and a Chromium that is named or in the path."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from comfy_server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

BROWSER = os.environ.get("LAZY_H3_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Notification.ShowVersionUpdates": False,
    "Comfy.Workflow.Persist": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Minimap.Visible": False,
}
READY = "() => window.app?.extensionManager && window.app?.graph && !document.querySelector('#splash-loader')"
OUR_COMMAND = "() => app.extensions.some((extension) => extension.name === 'LazyH3.Convert')"


@contextmanager
def opened(server: Server, vue_nodes: bool) -> Iterator[Page]:
    """The page of a server, ready. What it asks of other machines is refused; an error in the page fails the test."""
    from playwright.sync_api import sync_playwright

    server.post("/settings", {**SETTINGS, "Comfy.VueNodes.Enabled": vue_nodes})
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 860})
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.route("**/*", lambda route: _only_of(server, route))
            page.goto(server.url)
            page.wait_for_function(READY, timeout=90_000)
            page.wait_for_function(OUR_COMMAND, timeout=30_000)
            yield page
        finally:
            browser.close()
    assert errors == []


def _only_of(server: Server, route: Route) -> Any:
    own = route.request.url.startswith((server.url, "data:", "blob:"))
    return route.continue_() if own else route.abort()
