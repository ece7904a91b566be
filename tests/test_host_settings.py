"""The settings, their routes, and the hook that makes every queued prompt lazy while one of them is on."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from lazy_h3.host.comfy.queue import EveryPrompt
from lazy_h3.host.routes import routes
from lazy_h3.host.settings import VARIABLES, Settings

ROUTE = "/lazy_h3/settings"
OFF = dict.fromkeys(VARIABLES, False)


class FakeServer:
    """ComfyUI's list of handlers."""

    def __init__(self) -> None:
        self.on_prompt_handlers: list[Callable[[Any], Any]] = []

    def add_on_prompt_handler(self, handler: Callable[[Any], Any]) -> None:
        self.on_prompt_handlers.append(handler)


@pytest.fixture
def server(monkeypatch):
    running = FakeServer()
    module: Any = ModuleType("server")
    module.PromptServer = SimpleNamespace(instance=running)
    monkeypatch.setitem(sys.modules, "server", module)
    return running


def served(settings: Settings, talk: Callable[[TestClient], Awaitable[Any]]) -> Any:
    async def serve() -> Any:
        app = web.Application()
        app.add_routes(routes(lambda: SimpleNamespace(settings=settings)))
        async with TestClient(TestServer(app)) as client:
            return await talk(client)

    return asyncio.run(serve())


def post(settings: Settings, body: Any, **headers: str) -> tuple[int, Any]:
    async def talk(client: TestClient) -> tuple[int, Any]:
        async with client.post(ROUTE, json=body, headers=headers) as response:
            return response.status, await response.json()

    return served(settings, talk)


def test_everything_is_off_by_default():
    assert Settings().document() == {"settings": OFF, "fixed": []}


def test_what_the_environment_says_holds_whatever_the_front_end_sends():
    settings = Settings({"LAZY_H3_EVERY_PROMPT": "on", "LAZY_H3_DROP_LOADERS": "off"})
    settings.change({"every_prompt": False, "drop_loaders": True, "evict_dynamic": True})
    on = {"every_prompt": True, "drop_loaders": False, "evict_dynamic": True}
    assert settings.document() == {"settings": on, "fixed": ["drop_loaders", "every_prompt"]}


def test_a_value_that_makes_no_sense_is_named_and_left_off(caplog):
    caplog.set_level(logging.WARNING, "lazy_h3")
    assert not Settings({"LAZY_H3_EVERY_PROMPT": "yes"}).is_on("every_prompt")
    assert "LAZY_H3_EVERY_PROMPT is 'yes', which is neither on nor off; off holds." in caplog.text


def test_an_unknown_setting_changes_nothing():
    settings = Settings()
    with pytest.raises(KeyError, match="colour"):
        settings.change({"every_prompt": True, "colour": True})
    assert settings.document()["settings"] == OFF


def test_the_routes_show_and_change_what_is_on():
    settings = Settings()
    assert post(settings, {"drop_loaders": True}) == (200, settings.document())
    assert settings.is_on("drop_loaders")

    async def get(client: TestClient) -> Any:
        async with client.get(ROUTE) as response:
            return await response.json()

    assert served(settings, get) == {"settings": {**OFF, "drop_loaders": True}, "fixed": []}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ([True], "wrong_type"),
        ({"every_prompt": "on"}, "wrong_type"),
        ({"every_prompt": 1}, "wrong_type"),
        ({"every_prompt": True, "colour": True}, "unknown_field"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_changes_nothing(body, kind):
    settings = Settings()
    status, answer = post(settings, body)
    assert (status, answer["error"]["type"]) == (400, kind)
    assert settings.document()["settings"] == OFF


def test_a_page_of_another_server_is_refused():
    settings = Settings()
    status, answer = post(settings, {"every_prompt": True}, Origin="http://elsewhere")
    assert (status, answer["error"]["type"]) == (403, "forbidden")
    assert not settings.is_on("every_prompt")


def test_the_handler_is_entered_only_while_the_setting_is_on(server):
    settings = Settings()
    EveryPrompt(settings)
    assert server.on_prompt_handlers == []
    for _ in range(2):
        settings.change({"every_prompt": True})
        assert len(server.on_prompt_handlers) == 1
    settings.change({"every_prompt": False})
    assert server.on_prompt_handlers == []


def test_the_handler_is_there_from_the_first_prompt_on_if_the_environment_says_so(server):
    EveryPrompt(Settings({"LAZY_H3_EVERY_PROMPT": "on"}))
    assert len(server.on_prompt_handlers) == 1


def test_without_a_server_nothing_happens(monkeypatch):
    monkeypatch.delitem(sys.modules, "server", raising=False)
    EveryPrompt(Settings({"LAZY_H3_EVERY_PROMPT": "on"}))


def test_a_queued_prompt_gets_lazy_loaders_and_says_once_what_is_left_alone(server, caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    EveryPrompt(Settings({"LAZY_H3_EVERY_PROMPT": "on"}))
    (handler,) = server.on_prompt_handlers
    prompt = {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": "a.safetensors"}},
        "2": {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "a.gguf"}},
        "3": {"class_type": "VAEDecode", "inputs": {"vae": ["1", 0]}},
    }
    request = {"prompt": prompt, "client_id": "me"}
    for _ in range(2):
        converted = handler(request)
    assert [node["class_type"] for node in converted["prompt"].values()] == ["LazyH3VAELoader", "UnetLoaderGGUF", "VAEDecode"]
    assert converted["prompt"]["1"]["inputs"] == prompt["1"]["inputs"]
    assert converted["client_id"] == "me"
    assert request["prompt"]["1"]["class_type"] == "VAELoader"
    assert caplog.text.count("UnetLoaderGGUF") == 1


@pytest.mark.parametrize("request_", [{}, {"prompt": None}, {"prompt": ["1"]}])
def test_a_request_without_a_prompt_stays_as_it_is(request_):
    assert EveryPrompt(Settings()).converted(request_) is request_
