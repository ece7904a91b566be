"""Our settings in ComfyUI's real dialog: what the user saves is what the server does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from comfy_server import FOLDER, Server, started
from front_end import BROWSER, HAS_PLAYWRIGHT, opened

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="LAZY_H3_COMFYUI does not name the folder of a ComfyUI server"),
    pytest.mark.skipif(not HAS_PLAYWRIGHT or BROWSER is None, reason="no Playwright, or no Chromium in the path"),
    pytest.mark.timeout(600),
]
SET = "([id, value]) => app.extensionManager.setting.set(id, value)"
GET = "(id) => app.extensionManager.setting.get(id)"
SECONDS = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("comfyui"), tmp_path_factory.mktemp("models")) as running:
        yield running


def is_on(server: Server, name: str) -> Any:
    return server.get("/lazy_h3/settings")["settings"][name]


def becomes(server: Server, name: str, value: bool) -> bool:
    """Whether the server follows in time."""
    deadline = time.monotonic() + SECONDS
    while is_on(server, name) is not value and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_on(server, name) is value


@pytest.mark.parametrize(("id_", "name"), [("LazyH3.EveryPrompt", "every_prompt"), ("LazyH3.DropLoaders", "drop_loaders")])
def test_the_server_follows_the_dialog_and_what_was_saved_holds_on_the_next_page(server: Server, id_: str, name: str) -> None:
    with opened(server, False) as page:
        assert page.evaluate(GET, id_) is False
        page.evaluate(SET, [id_, True])
        assert becomes(server, name, True)
    server.post("/lazy_h3/settings", {name: False})
    with opened(server, False) as page:
        assert page.evaluate(GET, id_) is True
        assert becomes(server, name, True)
        page.evaluate(SET, [id_, False])
        assert becomes(server, name, False)
