"""Other loaders in a real ComfyUI: released after their last use by a node or by a setting, with the same frames and sound."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import core_graphs as graphs
import pytest
from comfy_server import FOLDER, Run, Server, core_process, started
from core_graphs import LOADER_NODES, Prompt, released, text_to_video

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="LAZY_H3_COMFYUI does not name the folder of a ComfyUI server"),
    pytest.mark.timeout(600),
]
TESTS = Path(__file__).parent
PACKS = (TESTS / "comfy_pack", TESTS / "foreign_pack")
SCALE = {"LAZY_H3_CORE_SCALE": "tiny"}
EVERY_PROMPT = "LAZY_H3_EVERY_PROMPT"
SETTINGS = {EVERY_PROMPT: "on", "LAZY_H3_DROP_LOADERS": "on"}
USERS = {"core CLIP": ["6"], "core MODEL": ["11"], "core VAE": ["13", "14"]}
FOREIGN = "ForeignPatcher of MiniMaxH3"
STOCK_TENSORS = 50 << 20  # bytes that the stock graph leaves in memory, at least

CASES: dict[str, Callable[[], Prompt]] = {
    "plain": text_to_video,
    "two samplers, one with a LoRA": lambda: graphs.two_samplers(graphs.with_lora(text_to_video())),
    "switch": lambda: graphs.switched(text_to_video(), True),
    "fp8": lambda: graphs.with_file(text_to_video(), "small_dit_float8_e4m3fn.safetensors"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models-of-others")
    core_process("tiny", "write", folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("release")
    with started(base, models, policy="auto", packs=PACKS, environment=SCALE) as running:
        running.log = base / "server.log"
        yield running


@pytest.fixture(scope="module", params=["ram", "classic", "none"])
def server_with_settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Server]:
    base = tmp_path_factory.mktemp(f"settings-{request.param}")
    environment = {name: value for name, value in SETTINGS.items() if request.param != "none" or name != EVERY_PROMPT}
    with started(base, models, request.param, packs=PACKS, environment={**SCALE, **environment}) as running:
        running.log, running.cache = base / "server.log", request.param
        yield running


def fresh(server: Server) -> Server:
    """The server with all cached outputs forgotten."""
    server.free(unload_models=True, free_memory=True)
    return server


def foreign(prompt: Prompt) -> Prompt:
    """With the transformer from another pack's loader."""
    prompt["1"] = {"class_type": "ForeignLoader", "inputs": {"unet_name": "small_dit.safetensors"}}
    return prompt


def digests(server: Server, run: Run) -> dict[str, str]:
    """Of frames and waveform. Fails with the run's own message."""
    assert run.status == "execution_success", run.error()
    (found,) = server.get(f"/history/{run.prompt_id}")[run.prompt_id]["outputs"]["15"]["digests"]
    return json.loads(found)


def releases(run: Run) -> dict[str, list[str]]:
    """Resource without its file -> nodes after which it was released, sorted."""
    return {name: sorted(map(str, nodes)) for name, nodes in run.releases().items()}


def executed(run: Run) -> set[str]:
    return {data["node"] for name, data in run.messages if name == "executing" and data.get("node")}


def tensors(server: Server) -> int:
    """Bytes of tensors in anonymous memory, the server's own few included."""
    return server.get("/test/memory")[-1]["tensors"]


def log_lines(server: Any, text: str) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if text in line]


@pytest.mark.parametrize("case", CASES)
def test_frames_and_sound_are_those_of_the_stock_graph(server: Server, case: str) -> None:
    expected = digests(server, fresh(server).run(CASES[case]()))
    run = server.run(released(CASES[case]()))
    assert digests(server, run) == expected
    names = [data["component"] for data in run.memory("load_end")]
    assert len(names) == len({*names}) == 4
    assert server.live_bytes() == 0


def test_each_object_becomes_views_of_its_file_and_is_released_after_its_last_user(server: Server) -> None:
    fresh(server).run(text_to_video())
    before = tensors(server)
    run = server.run(released(text_to_video()))
    assert releases(run) == USERS
    assert before > STOCK_TENSORS > 5 * tensors(server)


def test_a_second_run_takes_loaders_and_release_nodes_from_the_cache(server: Server) -> None:
    fresh(server).run(released(text_to_video()))
    run = server.run(released(text_to_video(seed=2)))
    assert not executed(run) & {*LOADER_NODES, "2", "6", *(f"r{node}" for node in LOADER_NODES)}
    assert releases(run) == {name: nodes for name, nodes in USERS.items() if name != "core CLIP"}
    assert server.live_bytes() == 0


def test_nodes_that_are_wired_past_the_release_node_count_as_users(server: Server) -> None:
    prompt = graphs.two_samplers(graphs.with_lora(text_to_video()))
    late = released(prompt)
    late["107"]["inputs"]["model"] = ["1", 0]
    run = fresh(server).run(late)
    assert releases(run)["core MODEL"] == ["111"]


def test_two_release_nodes_make_one_resource(server: Server) -> None:
    run = fresh(server).run(released(released(text_to_video()), ["1"], "again"))
    assert run.status == "execution_success", run.error()
    assert releases(run) == USERS


def test_an_error_leaves_nothing_and_the_next_run_is_right(server: Server) -> None:
    expected = digests(server, fresh(server).run(text_to_video()))
    assert server.run(released(graphs.failing(text_to_video()))).status == "execution_error"
    assert server.live_bytes() == 0
    assert digests(server, server.run(released(text_to_video()))) == expected


def test_an_object_with_a_patcher_of_its_own_is_unloaded_and_never_turned_into_views(server: Server) -> None:
    expected = digests(server, fresh(server).run(text_to_video()))
    for _ in range(2):
        run = server.run(released(foreign(text_to_video()), ["1"]))
        assert digests(server, run) == expected
    run = server.run(released(foreign(text_to_video(seed=3)), ["1"]))
    assert releases(run) == {FOREIGN: ["11"]}
    (line,) = log_lines(server, "weights stay in RAM")
    assert "since its patcher is a ForeignPatcher." in line


def test_every_prompt_is_made_lazy_while_the_setting_is_on(server: Server) -> None:
    off = {"every_prompt": False, "drop_loaders": False, "evict_dynamic": False}
    assert server.get("/lazy_h3/settings") == {"settings": off, "fixed": []}
    expected = digests(server, fresh(server).run(text_to_video()))
    assert server.post("/lazy_h3/settings", {"every_prompt": True})["settings"] == {**off, "every_prompt": True}
    run = server.run(text_to_video())
    assert digests(server, run) == expected
    assert sorted(run.loads()) == ["core CLIP", "core MODEL", "core VAE", "core VAE"]
    server.post("/lazy_h3/settings", {"every_prompt": False})
    run = fresh(server).run(text_to_video())
    assert digests(server, run) == expected
    assert run.loads() == []


def test_cached_loaders_are_dropped_with_their_carriers_and_nothing_else(server_with_settings: Server) -> None:
    server = server_with_settings
    prompt = graphs.two_samplers(graphs.with_lora(foreign(text_to_video())))
    first = server.run(prompt)
    assert "core VAE" in first.loads() or server.cache == "none"  # there, no loader was made lazy
    prompt["9"]["inputs"]["noise_seed"] = prompt["109"]["inputs"]["noise_seed"] = 5
    second = server.run(prompt)
    assert {"1", "20", "5", "7"} <= executed(second)
    if server.cache != "none":
        assert not executed(second) & {"2", "3", "4", "6", "8"}
    assert bool(log_lines(server, "are dropped")) is (server.cache != "none")
    assert not log_lines(server, "unfamiliar")
    prompt["9"]["inputs"]["noise_seed"], prompt["109"]["inputs"]["noise_seed"] = 1, 77
    assert digests(server, server.run(prompt)) == digests(server, first)
    assert digests(server, first) != digests(server, second)
    assert server.live_bytes() == 0


def test_an_object_that_is_still_needed_stays_cached(server_with_settings: Server) -> None:
    """Two equal loaders have one cache entry, and a third node takes from it late."""
    server = server_with_settings
    prompt = graphs.two_samplers(foreign(text_to_video()))
    prompt["101"] = copy.deepcopy(prompt["1"])
    prompt["107"]["inputs"]["model"] = ["101", 0]
    prompt["111"]["inputs"]["latent_image"] = ["11", 0]
    run = server.run(prompt)
    assert run.status == "execution_success", run.error()


def test_release_nodes_work_where_nothing_is_cached(server_with_settings: Server) -> None:
    server = server_with_settings
    if server.cache != "none":
        pytest.skip("stock loaders become lazy by the setting")
    expected = digests(server, server.run(text_to_video()))
    for prompt in (text_to_video(), foreign(text_to_video()), text_to_video()):
        run = server.run(released(prompt))
        assert digests(server, run) == expected
        model = FOREIGN if prompt["1"]["class_type"] == "ForeignLoader" else "core MODEL"
        assert releases(run) == {"core CLIP": ["6"], "core VAE": ["13", "14"], model: ["11"]}
        assert server.live_bytes() == 0
