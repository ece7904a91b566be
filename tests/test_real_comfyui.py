"""The pack in a real ComfyUI: what is released when, in every cache mode. Runs only where a server is at hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from comfy_server import CACHE_OPTIONS, FOLDER, Run, Server, started
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.commands.make_checkpoint import make_checkpoint
from lazy_h3.commands.presets import tiny

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="LAZY_H3_COMFYUI does not name the folder of a ComfyUI server"),
    pytest.mark.timeout(600),
]
TEXT_ENCODER, DIT, VIDEO_VAE, AUDIO_VAE = "text encoder", "diffusion transformer", "video VAE", "audio VAE"
EVERYTHING = [TEXT_ENCODER, DIT, VIDEO_VAE, AUDIO_VAE]

Prompt = dict[str, Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder, tiny())
    make_checkpoint(folder, tiny(), "folder")
    return folder


@pytest.fixture(scope="module", params=list(CACHE_OPTIONS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp(f"comfyui-{request.param}"), models, request.param) as running:
        running.cache = request.param
        yield running


@pytest.fixture
def fresh(server: Server) -> Server:
    """The server with all cached outputs forgotten."""
    server.free(unload_models=True, free_memory=True)
    return server


_counter = iter(range(10**6))


def workflow(**changes: Any) -> Prompt:
    """The small text-to-video graph, with a prompt that no run before has had. ``changes``: node_input=value."""
    prompt = json.loads(WORKFLOW.read_text("utf-8"))
    prompt["5"]["inputs"]["prompt"] = f"Take {next(_counter)} of a cat."
    prompt["6"]["inputs"] |= {"width": 64, "height": 64, "duration": 5}
    for target, value in changes.items():
        _, node, name = target.split("_", 2)
        prompt[node]["inputs"][name] = value
    return prompt


def twin_branches(prompt: Prompt) -> Prompt:
    """The graph with a second branch, nodes 105 to 111, that shares the loaders."""
    branch = {node: f"1{node.zfill(2)}" for node in ("5", "6", "7", "8", "9", "10", "11")}
    for node, twin in branch.items():
        prompt[twin] = json.loads(json.dumps(prompt[node]))
        inputs = prompt[twin]["inputs"]
        inputs |= {name: [branch.get(v[0], v[0]), v[1]] for name, v in inputs.items() if isinstance(v, list)}
    prompt["105"]["inputs"]["prompt"] = "Another."
    return prompt


def only_released_after(run: Run, last_users: dict[str, str]) -> bool:
    return run.releases() == {component: [node] for component, node in last_users.items()}


LAST_USERS = {TEXT_ENCODER: "5", DIT: "7", VIDEO_VAE: "8", AUDIO_VAE: "9"}


def test_each_component_is_loaded_once_and_released_after_its_last_user(fresh: Server) -> None:
    run = fresh.run(workflow())
    assert run.status == "execution_success", run.error()
    assert sorted(run.loads()) == sorted(EVERYTHING)
    assert run.loads()[:2] == [TEXT_ENCODER, DIT]
    assert only_released_after(run, LAST_USERS)
    assert run.resident_at_starts()["7"] == 0
    assert fresh.live_bytes() == 0


def test_loaders_listed_after_their_consumers_change_nothing(fresh: Server) -> None:
    prompt = dict(reversed(workflow().items()))
    run = fresh.run(prompt)
    assert run.status == "execution_success"
    assert only_released_after(run, LAST_USERS)


def test_a_prompt_that_is_all_cached_loads_nothing(fresh: Server) -> None:
    prompt = workflow()
    fresh.run(prompt)
    run = fresh.run(prompt)
    assert run.status == "execution_success"
    assert run.loads() == ([] if fresh.cache != "none" else run.loads())
    assert fresh.live_bytes() == 0


def test_a_new_seed_reads_the_transformer_but_not_the_text_encoder(fresh: Server) -> None:
    prompt = workflow()
    fresh.run(prompt)
    prompt["7"]["inputs"]["seed"] += 1
    run = fresh.run(prompt)
    expected = [DIT, VIDEO_VAE, AUDIO_VAE] if fresh.cache != "none" else EVERYTHING
    assert sorted(run.loads()) == sorted(expected)
    assert only_released_after(run, {name: LAST_USERS[name] for name in expected})


def test_a_node_of_another_pack_that_takes_a_handle_is_a_user_too(fresh: Server) -> None:
    prompt = workflow()
    prompt["12"] = {"class_type": "PreviewAny", "inputs": {"source": ["2", 0]}}
    run = fresh.run(prompt)
    assert run.status == "execution_success"
    assert set(run.releases()[DIT]) <= {"7", "12"}
    assert fresh.live_bytes() == 0


def test_behind_a_switch_only_the_chosen_branch_is_read(fresh: Server) -> None:
    if "ComfySwitchNode" not in fresh.get("/object_info"):
        pytest.skip("this ComfyUI has no switch node")
    prompt = workflow()
    prompt["21"] = copy.deepcopy(prompt["1"])
    prompt["21"]["inputs"]["dtype"] = "fp32"
    prompt["22"] = {"class_type": "ComfySwitchNode", "inputs": {"switch": True, "on_true": ["1", 0], "on_false": ["21", 0]}}
    prompt["5"]["inputs"]["text_encoder"] = ["22", 0]
    run = fresh.run(prompt)
    assert run.status == "execution_success"
    assert run.loads().count(TEXT_ENCODER) == 1
    assert run.releases()[TEXT_ENCODER] == ["5"]


def test_two_equal_loaders_share_one_component(fresh: Server) -> None:
    prompt = workflow()
    prompt["31"] = copy.deepcopy(prompt["2"])
    prompt["32"] = copy.deepcopy(prompt["7"])
    prompt["32"]["inputs"] |= {"dit": ["31", 0], "seed": 99}
    prompt["33"] = copy.deepcopy(prompt["9"])
    prompt["33"]["inputs"]["latent"] = ["32", 0]
    prompt["34"] = {"class_type": "PreviewAny", "inputs": {"source": ["33", 0]}}
    run = fresh.run(prompt)
    assert run.status == "execution_success"
    assert run.loads().count(DIT) == 1
    assert run.releases()[DIT] in (["7"], ["32"])


def test_two_branches_through_all_models_take_one_load_of_each(fresh: Server) -> None:
    prompt = twin_branches(workflow())
    run = fresh.run(prompt)
    assert run.status == "execution_success"
    assert sorted(run.loads()) == sorted(EVERYTHING)
    prompt["105"]["inputs"]["prompt"] = "Another still."
    again = fresh.run(prompt)
    assert sorted(again.loads()) == sorted(EVERYTHING)
    if fresh.cache != "none":
        ran = {data.get("node") for name, data in again.messages if name == "executing"}
        assert "105" in ran
        assert not {"5", "7"} & ran


def test_an_error_leaves_nothing_behind_and_the_next_prompt_runs(fresh: Server) -> None:
    prompt = workflow()
    prompt["11"]["inputs"]["filename_prefix"] = "../../outside"
    run = fresh.run(prompt)
    assert run.status == "execution_error"
    assert fresh.live_bytes() == 0
    assert fresh.run(workflow()).status == "execution_success"


def test_an_error_in_a_heavy_node_is_reported_as_it_is(fresh: Server) -> None:
    prompt = workflow()
    prompt["7"]["inputs"]["latent"] = ["41", 0]
    prompt["41"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
    run = fresh.run(prompt)
    assert run.status == "execution_error"
    assert "holds no sound" in run.error()
    assert fresh.live_bytes() == 0


def test_an_interrupt_in_sampling_stops_and_releases(fresh: Server) -> None:
    asked = []

    def interrupt(name: str, data: Mapping[str, Any]) -> None:
        if name == "progress" and data.get("node") == "7" and not asked:
            asked.append(fresh.post("/interrupt", {}))

    run = fresh.run(workflow(n_6_width=256, n_6_height=256, n_6_duration=22, n_7_steps=1000), during=interrupt)
    assert asked
    assert run.status == "execution_interrupted"
    assert fresh.live_bytes() == 0
    assert fresh.run(workflow()).status == "execution_success"


def test_a_partial_run_reads_only_what_its_targets_need(fresh: Server) -> None:
    prompt = workflow()
    prompt["51"] = {"class_type": "PreviewAny", "inputs": {"source": ["9", 0]}}
    run = fresh.run(prompt, partial_execution_targets=["51"])
    assert run.status == "execution_success"
    assert VIDEO_VAE not in run.loads()
    assert only_released_after(run, {TEXT_ENCODER: "5", DIT: "7", AUDIO_VAE: "9"})


def test_a_prompt_from_the_history_runs_as_the_first_time(fresh: Server) -> None:
    run = fresh.run(workflow())
    prompt = fresh.get(f"/history/{run.prompt_id}")[run.prompt_id]["prompt"][2]
    prompt["7"]["inputs"]["seed"] = 4711
    again = fresh.run(prompt)
    assert again.status == "execution_success"
    assert again.releases()[DIT] == ["7"]
    assert fresh.live_bytes() == 0


def test_components_of_a_folder_that_nobody_uses_are_never_read(fresh: Server) -> None:
    prompt = workflow()
    for node in ("1", "2", "3", "4", "10", "11"):
        del prompt[node]
    prompt["60"] = {"class_type": "LazyH3FolderLoader", "inputs": {"folder": "minimax_h3", "dtype": "as stored"}}
    for node, name, slot in (("5", "text_encoder", 0), ("7", "dit", 1), ("9", "audio_vae", 3)):
        prompt[node]["inputs"][name] = ["60", slot]
    del prompt["8"]
    prompt["61"] = {"class_type": "PreviewAny", "inputs": {"source": ["9", 0]}}
    run = fresh.run(prompt)
    assert run.status == "execution_success"
    assert sorted(run.loads()) == sorted([TEXT_ENCODER, DIT, AUDIO_VAE])
    assert fresh.live_bytes() == 0


def test_a_file_in_the_wrong_loader_names_the_right_one(fresh: Server) -> None:
    run = fresh.run(workflow(n_4_file="minimax_h3_video_vae_fp16.safetensors"))
    assert run.status == "execution_error"
    assert "use the node Load video VAE" in run.error()
    assert fresh.live_bytes() == 0


def test_unload_models_between_prompts_frees_what_is_kept_and_the_next_prompt_runs(fresh: Server) -> None:
    prompt = workflow()
    prompt["70"] = {"class_type": "LazyH3Policy", "inputs": {"policy": "keep"}}
    assert fresh.run(prompt).status == "execution_success"
    assert fresh.live_bytes() > 0
    fresh.free(unload_models=True)
    assert fresh.run(workflow()).status == "execution_success"
    assert fresh.live_bytes() == 0
