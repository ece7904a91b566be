"""Ledger events as messages: what they hold, in which order they leave, and that nobody is hurt when they do not."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lazy_h3.host.comfy.host import ComfyHost
from lazy_h3.host.embedded.host import EmbeddedHost
from lazy_h3.host.embedded.port import EmbeddedPort
from lazy_h3.host.events import MAX_RECENT, MESSAGE, EventFeed
from lazy_h3.memory.ledger import Ledger
from lazy_h3.memory.store import Store
from lazy_h3.nodes import NODE_CLASS_MAPPINGS
from lazy_h3.nodes.runtime import Runtime, installed
from small_models import CPU, keeper, text_to_video, tiny_models

FIELDS = {"schema", "seq", "prompt_id", "node", "component", "event", "bytes", "resident_bytes", "t"}


def fed(ledger: Ledger, send: Any, prompt_id: Any = lambda: "p") -> EventFeed:
    feed = EventFeed(send, prompt_id)
    ledger.observers.append(feed)
    return feed


def test_a_message_has_the_fields_of_the_contract():
    ledger, sent = Ledger(), []
    ledger.measure = lambda: 700
    fed(ledger, lambda *message: sent.append(message))
    event = ledger.record("release", "dit", 500, "because", node="7")
    assert sent == [
        (
            "lazy_h3.memory",
            {
                "schema": 1,
                "seq": 1,
                "prompt_id": "p",
                "node": "7",
                "component": "dit",
                "event": "release",
                "bytes": 500,
                "resident_bytes": 700,
                "t": event.t,
            },
        )
    ]


def test_messages_of_many_threads_leave_in_the_order_of_their_numbers():
    ledger, sent = Ledger(), []
    fed(ledger, lambda _, data: sent.append(data["seq"]))
    threads = [threading.Thread(target=lambda: [ledger.record("pin", "x", 0) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent == list(range(1, 801))


def test_the_last_few_messages_are_kept_for_whoever_missed_them():
    ledger, sent = Ledger(), []
    feed = fed(ledger, lambda _, data: sent.append(data))
    assert feed.latest() == (0, [])
    for _ in range(MAX_RECENT + 10):
        ledger.record("pin", "x", 0)
    assert feed.latest() == (MAX_RECENT + 10, sent[-MAX_RECENT:])


def test_a_front_end_that_cannot_be_reached_is_mentioned_once_and_hurts_nobody(caplog):
    def send(*_: Any) -> None:
        raise ConnectionError("gone")

    ledger = Ledger()
    feed = fed(ledger, send)
    for _ in range(3):
        ledger.record("pin", "x", 0)
    assert len(ledger.events) == feed.latest()[0] == 3
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert "only the display is affected" in caplog.text


def test_a_run_sends_every_event_with_its_prompt_also_those_at_its_end(tmp_path):
    sent: list[tuple[str, dict[str, Any]]] = []
    classes = {**NODE_CLASS_MAPPINGS, "Keep": keeper({})}
    with EmbeddedHost(classes, models=tiny_models(), output_directory=tmp_path, seed=0) as host:
        port = EmbeddedPort(host, CPU, lambda name, data: sent.append((name, data)))
        with installed(Runtime(port, Store(), policy="keep")) as runtime:
            prompt = text_to_video()
            prompt["policy"] = {"class_type": "LazyH3Policy", "inputs": {"policy": "free"}}
            result = host.run(prompt)
            runtime.store.release_all("between prompts")
            assert [data["event"] for _, data in sent] == [event.event for event in runtime.store.ledger.events]
    assert {name for name, _ in sent} == {MESSAGE}
    assert all(data.keys() == FIELDS for _, data in sent)
    assert {data["prompt_id"] for _, data in sent} == {result.prompt_id}
    assert {data["event"] for _, data in sent} == {"load_begin", "load_end", "pin", "unpin", "release"}


def test_what_is_released_when_a_prompt_fails_belongs_to_it_and_what_comes_later_to_none(tmp_path):
    sent: list[dict[str, Any]] = []

    class Fails:
        RETURN_TYPES = ()
        FUNCTION = "fail"
        OUTPUT_NODE = True

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"latent": ("LATENT",), "dit": ("*",)}}

        def fail(self, latent: Any, dit: Any) -> None:
            raise ArithmeticError("on purpose")

    prompt = {node: spec for node, spec in text_to_video().items() if node in "124567"}
    prompt["fails"] = {"class_type": "Fails", "inputs": {"latent": ["7", 0], "dit": ["2", 0]}}
    with (
        EmbeddedHost({**NODE_CLASS_MAPPINGS, "Fails": Fails}, models=tiny_models(), output_directory=tmp_path) as host,
        installed(Runtime(EmbeddedPort(host, CPU, lambda _, data: sent.append(data)), policy="free")) as runtime,
    ):
        result = host.run(prompt)
        assert result.error.type == "ArithmeticError"
        assert (sent[-1]["event"], sent[-1]["node"], sent[-1]["prompt_id"]) == ("release", None, result.prompt_id)
        runtime.store.ledger.record("refuse", "x", 0)
        assert sent[-1]["prompt_id"] is None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """ComfyUI's module, without an instance of the server."""
    module = ModuleType("server")
    module.PromptServer = type("PromptServer", (), {})
    monkeypatch.setitem(sys.modules, "server", module)
    return module


def test_comfyui_sends_to_all_clients(server):
    sent = []
    server.PromptServer.instance = SimpleNamespace(send_sync=lambda *message: sent.append(message))
    ComfyHost().send(MESSAGE, {"seq": 1})
    assert sent == [(MESSAGE, {"seq": 1}, None)]


def test_comfyui_without_a_server_sends_to_nobody(server):
    ComfyHost().send(MESSAGE, {"seq": 1})
    assert not hasattr(server.PromptServer, "instance")
