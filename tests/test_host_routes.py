"""The memory routes behind a real HTTP server, with the embedded host and with ComfyUI's table of routes."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from lazy_h3.host.comfy.routes import register
from lazy_h3.host.routes import MAX_BODY_BYTES, routes
from small_models import USERS, Stage, stage, text_to_video

MEMORY, RELEASE, PLAN = "/lazy_h3/memory", "/lazy_h3/release", "/lazy_h3/plan"
JSON = {"Content-Type": "application/json"}


def served(running: Stage, talk: Callable[[TestClient], Awaitable[Any]]) -> Any:
    """What ``talk`` returns, with a client of a server that has our routes."""

    async def serve() -> Any:
        app = web.Application()
        app.add_routes(routes(lambda: running.runtime))
        async with TestClient(TestServer(app)) as client:
            return await talk(client)

    return asyncio.run(serve())


def get(running: Stage, **headers: str) -> tuple[int, Any]:
    async def talk(client: TestClient) -> tuple[int, Any]:
        async with client.get(MEMORY, headers=headers) as response:
            return response.status, await response.json()

    return served(running, talk)


def post(running: Stage, body: Any, path: str = RELEASE, **headers: str) -> tuple[int, Any]:
    """``body``: bytes, or what becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def talk(client: TestClient) -> tuple[int, Any]:
        async with client.post(path, data=data, headers={**JSON, **headers}) as response:
            return response.status, await response.json()

    return served(running, talk)


@pytest.fixture
def running(tmp_path):
    with stage(tmp_path, policy="keep") as running:
        yield running


@pytest.fixture
def full(running):
    """With all four components kept."""
    running.succeed(text_to_video())
    return running


def name_of(running: Stage, kind: str) -> str:
    return next(name for name, found in running.runtime.catalogue.kinds.items() if found == kind)


def test_a_snapshot_before_anything_ran_has_the_pool_and_nothing_in_it(running):
    status, found = get(running)
    assert status == 200
    assert (found["schema"], found["seq"], found["components"], found["events"]) == (1, 0, [], [])
    (pool,) = found["pools"]
    assert (pool["name"], pool["unified"]) == ("cpu", True)
    assert pool["total_bytes"] > pool["free_bytes"] >= pool["available_bytes"] > 0
    assert (found["resident_bytes"], found["peak_bytes"], found["budget_bytes"]) == (0, 0, None)


def test_a_snapshot_has_every_component_as_it_is(full):
    full.runtime.store.release(full.runtime.store.resident()[0], "on purpose")
    _, found = get(full)
    components = {component["kind"]: component for component in found["components"]}
    assert components.keys() == USERS.keys()
    assert sum(component["bytes"] for component in components.values()) == found["resident_bytes"] == full.store.live_bytes()
    assert sorted(component["state"] for component in components.values()) == ["absent", "resident", "resident", "resident"]
    vae = components["video_vae"]
    assert vae["name"] == name_of(full, "video_vae")
    assert vae["path"].endswith("minimax_h3_video_vae_fp16.safetensors")
    assert (vae["parts"], vae["resident_parts"], vae["pool"]) == (["decoder", "encoder"], ["decoder"], "cpu")
    assert (vae["pinned"], vae["leaving"]) == (False, False)
    assert found["peak_bytes"] == full.ledger.peak_bytes


def test_a_snapshot_goes_on_where_the_messages_end(full):
    _, found = get(full)
    assert found["seq"] == found["events"][-1]["seq"] == len(full.ledger.events)
    assert [message["event"] for message in found["events"]] == [event.event for event in full.ledger.events]
    assert found["events"][-1]["t"] <= found["now"] <= full.ledger.now()


def test_one_component_is_released_between_prompts_on_a_helper_thread(full):
    threads = []
    full.store.on_change.append(lambda *_: threads.append(threading.current_thread()))
    name, before = name_of(full, "dit"), full.store.live_bytes()
    status, found = post(full, {"component": name})
    assert status == 200
    assert found == {"released": [{"component": name, "bytes": before - full.store.live_bytes()}], "marked": []}
    assert {resource.identity.kind for resource in full.store.resident()} == USERS.keys() - {"dit"}
    assert full.ledger.events[-1].reason == "asked for in the memory panel"
    assert threads
    assert threading.main_thread() not in threads


def test_all_components_are_released_at_once_and_the_second_time_there_is_nothing_left(full):
    _, found = post(full, {"component": None})
    assert {entry["component"] for entry in found["released"]} == set(full.runtime.catalogue.kinds)
    assert full.store.live_bytes() == 0
    assert post(full, {"component": None}) == (200, {"released": [], "marked": []})


def test_the_next_prompt_reads_what_it_needs_again(full):
    post(full, {"component": None})
    full.succeed(text_to_video({"7.seed": 1}))
    assert set(full.loaded()) == USERS.keys() - {"text_encoder"}


def paused(at: str) -> tuple[type, threading.Event, threading.Event]:
    """A node that passes a latent on when it is told to; and events: it has been reached, it may go on."""
    reached, go_on = threading.Event(), threading.Event()

    class Pause:
        RETURN_TYPES = ("LATENT",)
        FUNCTION = "wait"

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"latent": (at,)}}

        def wait(self, latent: Any) -> tuple[Any]:
            reached.set()
            assert go_on.wait(20)
            return (latent,)

    return Pause, reached, go_on


def test_while_a_prompt_runs_components_are_marked_and_go_on_its_own_thread(tmp_path):
    """Only the executor's thread may change the host's list of loaded models while it works with it."""
    pause, reached, go_on = paused("LATENT")
    prompt = text_to_video({"8.latent": ["pause", 0]})
    prompt["pause"] = {"class_type": "Pause", "inputs": {"latent": ["7", 0]}}
    with stage(tmp_path, policy="keep", classes={"Pause": pause}) as running:
        results, threads = [], []
        runner = threading.Thread(target=lambda: results.append(running.run(prompt)))
        runner.start()
        assert reached.wait(20)
        running.store.on_change.append(lambda resource, is_resident: is_resident or threads.append(threading.current_thread()))
        name = name_of(running, "dit")
        _, found = post(running, {"component": name})
        _, seen = get(running)
        go_on.set()
        runner.join()
        assert [entry["component"] for entry in found["marked"]] == [name]
        assert found["released"] == []
        assert [c["name"] for c in seen["components"] if c["leaving"]] == [name]
        assert results[0].status == "success"
        assert ("dit", "pause") in running.happened("release")
        assert "dit" not in {resource.identity.kind for resource in running.store.resident()}
        assert {thread.name.rpartition("_")[0] for thread in threads} == {"embedded-host"}


def test_a_component_in_use_is_marked_and_goes_when_its_user_is_done(full):
    (dit,) = [resource for resource in full.store.resident() if resource.identity.kind == "dit"]
    with full.store.use(dit):
        _, found = post(full, {"component": dit.name})
        assert [entry["component"] for entry in found["marked"]] == [dit.name]
        assert dit.live_bytes() > 0
    assert dit.live_bytes() == 0


@pytest.mark.parametrize(
    ("body", "headers", "status", "kind"),
    [
        ({"component": "no such"}, {}, 404, "unknown_component"),
        ({}, {}, 400, "missing_field"),
        ([], {}, 400, "missing_field"),
        ("text", {}, 400, "missing_field"),
        (None, {}, 400, "missing_field"),
        ({"component": None, "force": True}, {}, 400, "unknown_field"),
        ({"component": 7}, {}, 400, "wrong_type"),
        ({"component": ["dit"]}, {}, 400, "wrong_type"),
        (b"", {}, 400, "invalid_json"),
        (b"{", {}, 400, "invalid_json"),
        (b"\xff\xfe{", {}, 400, "invalid_json"),
        (b"[" * MAX_BODY_BYTES, {}, 400, "invalid_json"),
        (b" " * (MAX_BODY_BYTES + 1), {}, 413, "body_too_large"),
        ({"component": None}, {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"component": None}, {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
    ],
)
def test_a_request_that_is_no_release_is_refused_in_one_sentence_and_releases_nothing(running, body, headers, status, kind):
    running.succeed(text_to_video({"7.steps": 1}))
    before = running.store.live_bytes()
    found_status, found = post(running, body, **headers)
    assert (found_status, found["error"]["type"]) == (status, kind)
    assert found.keys() == {"error"}
    assert found["error"]["message"].endswith(".")
    assert "\n" not in found["error"]["message"]
    assert running.store.live_bytes() == before > 0


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),
        ({"Host": "localhost"}, True),
        ({"Host": "[::1]:8188"}, True),
        ({"Host": "127.1.2.3:8188"}, True),
        ({"Host": "spark.lan:8188"}, False),
        ({"Host": "localhost.evil.example"}, False),
        ({"Host": "[::1"}, False),
        ({"Host": "spark.lan:8188", "Origin": "http://spark.lan:8188"}, True),
        ({"Host": "Spark.lan", "Origin": "https://spark.LAN"}, True),
        ({"Host": "spark.lan:8188", "Referer": "http://spark.lan:8188/?page=1"}, True),
        ({"Host": "spark.lan:8188", "Origin": "http://spark.lan:8189"}, False),
        ({"Host": "127.0.0.1:8188", "Origin": "http://evil.example"}, False),
        ({"Host": "127.0.0.1:8188", "Origin": "http://localhost:8188"}, False),
        ({"Host": "127.0.0.1:8188", "Origin": "http://127.0.0.1:8188", "Referer": "http://evil.example"}, True),
        ({"Host": "127.0.0.1:8188", "Origin": "http://127.0.0.1:8188@evil.example"}, False),
        ({"Host": "127.0.0.1:8188", "Referer": "http://evil.example/"}, False),
        ({"Host": "127.0.0.1:8188", "Origin": "null"}, False),
        ({"Host": "127.0.0.1:8188", "Origin": "http://[evil"}, False),
    ],
    ids=str,
)
def test_only_this_machine_and_pages_of_the_same_server_are_answered(running, headers, is_allowed):
    for status, found in (get(running, **headers), post(running, {"component": None}, **headers)):
        assert status == (200 if is_allowed else 403)
        assert is_allowed or found["error"]["type"] == "forbidden"


def test_a_prompt_is_planned_from_headers_alone(running):
    status, found = post(running, {"prompt": text_to_video()}, PLAN)
    assert status == 200
    assert found["status"] == "ok"
    assert len(found["components"]) == len(USERS)
    assert 0 < found["predicted_peak_bytes"] <= found["sum_bytes"]
    assert running.runtime.store.live_bytes() == 0


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"1": {}},
        {"1": {"class_type": "Unknown", "inputs": {"x": ["1", 0]}}},
        {"1": {"class_type": "LazyH3Sampler", "inputs": {}}},
        {"1": {"class_type": "LazyH3DiTLoader", "inputs": {"file": 7}}},
        {"1": {"class_type": 5, "inputs": {}}, "2": None},
    ],
    ids=str,
)
def test_planning_never_fails_the_server_on_any_prompt(running, prompt):
    status, found = post(running, {"prompt": prompt}, PLAN)
    assert status in (200, 400)
    assert status == 200 or found["error"]["type"] == "cannot_plan"


OUTSIDE = {
    "7.steps": 10_000_000,
    "7.denoise": 1e-9,
    "7.video_shift": float("nan"),
    "7.schedule": "zigzag",
    "6.width": 10**30,
    "6.duration": "long",
    "6.height": None,
}


@pytest.mark.parametrize("target", OUTSIDE)
def test_a_value_that_no_node_takes_is_refused_before_anything_is_computed_from_it(running, target):
    status, found = post(running, {"prompt": text_to_video({target: OUTSIDE[target]})}, PLAN)
    node, name = target.split(".")
    assert (status, found["error"]["type"]) == (400, "cannot_plan")
    assert f"node {node} (LazyH3" in found["error"]["message"]
    assert f"{name} is {OUTSIDE[target]!r:.40}" in found["error"]["message"]


def test_numbers_may_be_text_and_inputs_that_no_node_declares_do_not_matter(running):
    _, plain = post(running, {"prompt": text_to_video()}, PLAN)
    _, found = post(running, {"prompt": text_to_video({"6.width": "32", "6.colour": "red", "7.steps": "1"})}, PLAN)
    assert found["predicted_peak_bytes"] == plain["predicted_peak_bytes"]
    assert found["status"] == "ok"


def test_a_chain_of_latents_of_any_length_is_followed_to_its_start(running):
    count = 3000
    chain = {f"c{i}": {"class_type": "Unknown", "inputs": {"latent": [f"c{i - 1}" if i else "6", 0]}} for i in range(count)}
    status, found = post(running, {"prompt": text_to_video({"7.latent": [f"c{count - 1}", 0]}) | chain}, PLAN)
    assert status == 200
    assert not [warning for warning in found["warnings"] if "unknown size" in warning]


@pytest.mark.parametrize("path", [RELEASE, PLAN])
def test_a_body_that_is_not_in_its_encoding_is_refused_in_one_sentence(running, path):
    status, found = post(running, b"{}", path, **{"Content-Encoding": "gzip"})
    assert (status, found["error"]["type"]) == (400, "invalid_encoding")


@pytest.mark.parametrize("body", [{}, [], {"prompt": []}, b"{", {"prompt": None}], ids=str)
def test_a_plan_request_without_a_prompt_is_refused_in_one_sentence(running, body):
    status, found = post(running, body, PLAN)
    assert status == 400
    assert found["error"]["message"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """ComfyUI's module, with an instance of the server that only has a table of routes."""
    module = ModuleType("server")
    module.PromptServer = SimpleNamespace(instance=SimpleNamespace(routes=web.RouteTableDef()))
    monkeypatch.setitem(sys.modules, "server", module)
    return module


def test_comfyui_gets_the_routes_once_however_often_the_pack_is_there(server, full):
    table = server.PromptServer.instance.routes
    table.static("/extensions/other", ".")
    for _ in range(2):
        register(lambda: full.runtime)
    assert [(r.method, r.path) for r in table if isinstance(r, web.RouteDef)] == [
        ("GET", MEMORY),
        ("POST", RELEASE),
        ("POST", PLAN),
        ("GET", "/lazy_h3/settings"),
        ("POST", "/lazy_h3/settings"),
    ]

    async def ask() -> Any:
        app = web.Application()
        app.add_routes([route for route in table if isinstance(route, web.RouteDef)])
        async with TestClient(TestServer(app)) as client, client.get(MEMORY) as response:
            return await response.json()

    assert len(asyncio.run(ask())["components"]) == len(USERS)


def test_without_comfyui_there_is_nothing_to_register_with(monkeypatch):
    def never() -> Any:
        pytest.fail("was asked for a source")

    monkeypatch.delitem(sys.modules, "server", raising=False)
    register(never)
    monkeypatch.setitem(sys.modules, "server", ModuleType("server"))
    register(never)
