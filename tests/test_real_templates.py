"""The official templates in a real ComfyUI: opened and made lazy in its front end, queued, and run in small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfy_server import FOLDER, Run, Server, core_process, started
from core_graphs import Prompt
from front_end import BROWSER, HAS_PLAYWRIGHT
from official_templates import FORMATS, HASH, TEMPLATES, is_installed, queued_prompts, small, write_pictures

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="LAZY_H3_COMFYUI does not name the folder of a ComfyUI server"),
    pytest.mark.skipif(not HAS_PLAYWRIGHT or BROWSER is None, reason="no Playwright, or no Chromium (LAZY_H3_BROWSER)"),
    pytest.mark.skipif(not is_installed(), reason="the package comfyui-workflow-templates-json is not installed"),
    pytest.mark.timeout(600),
]
COMFY_PACK = Path(__file__).parent / "comfy_pack"
CONDITIONERS = dict(zip(TEMPLATES, ("MiniMaxH3ImageToVideo", "MiniMaxH3ImageToVideo", "MiniMaxH3ReferenceToVideo"), strict=True))
Case = tuple[str, str, bool]  # template, form of its files, whether the branch with the LoRA is taken
CASES: list[Case] = [
    *((name, form, False) for name in TEMPLATES for form in ("plain", "as named")),
    *((name, "as named", True) for name in TEMPLATES),
    *((TEMPLATES[0], form, False) for form in ("fp8", "int8")),
]

Prompts = dict[str, tuple[Prompt, Prompt]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models, base = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("comfyui")
    core_process("tiny", "write", models, "tiny")
    core_process("tiny", "write_template_files", models)
    with started(base, models, packs=(COMFY_PACK,), environment={"LAZY_H3_CORE_SCALE": "tiny"}) as running:
        running.base = base
        yield running


@pytest.fixture(scope="module")
def prompts(server: Server) -> Prompts:
    found = queued_prompts(server)
    for stock, _ in found.values():
        write_pictures(server.base / "input", stock)
    return found


def outputs(server: Server, run: Run) -> tuple[dict[str, str], Path]:
    """Digests of frames and sound, and the saved video. Fails with the run's own message."""
    assert run.status == "execution_success", run.error()
    found = server.get(f"/history/{run.prompt_id}")[run.prompt_id]["outputs"]
    (digests,) = found.pop(HASH)["digests"]
    (saved,) = found.values()
    (video,) = saved["images"]
    return json.loads(digests), server.base / video["type"] / video["subfolder"] / video["filename"]


def last_users(run: Run, prompt: Prompt) -> dict[str, str]:
    """Resource -> class of the node after which it was released for good."""
    released = {data["component"]: data["node"] for data in run.memory("release")}
    return {component: prompt[node]["class_type"] if node else "the end" for component, node in released.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_loaders_of_a_queued_template_are_lazy(prompts: Prompts, name: str) -> None:
    stock, lazy = prompts[name]
    loaders = {node: spec["class_type"] for node, spec in stock.items() if "Loader" in spec["class_type"]}
    assert sorted(loaders.values()) == ["CLIPLoader", "LoraLoaderModelOnly", "UNETLoader", "VAELoader", "VAELoader"]
    assert {node: lazy[node]["class_type"] for node in loaders} == {node: f"LazyH3{kind}" for node, kind in loaders.items()}


_stock: dict[Case, dict[str, str]] = {}


def stock_digests(server: Server, prompts: Prompts, case: Case) -> dict[str, str]:
    """Of the template with core's own loaders."""
    if case not in _stock:
        name, form, is_turbo = case
        _stock[case], _ = outputs(server, server.run(small(prompts[name][0], form, is_turbo)))
    return _stock[case]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0][-3:]}, {case[1]}{', LoRA' if case[2] else ''}")
def test_a_lazy_template_gives_what_the_stock_one_gives(server: Server, prompts: Prompts, case: Case) -> None:
    name, form, is_turbo = case
    expected = stock_digests(server, prompts, case)
    lazy = small(prompts[name][1], form, is_turbo)
    server.post("/free", {"unload_models": True, "free_memory": True})
    run = server.run(lazy)
    digests, video = outputs(server, run)
    assert digests == expected
    assert video.stat().st_size
    transformer, encoder = FORMATS[form]
    assert last_users(run, lazy) == {
        f"core CLIP ({encoder})": CONDITIONERS[name],
        f"core MODEL ({transformer})": "SamplerCustomAdvanced",
        "core VAE (small_video_vae)": "VAEDecode",
        "core VAE (small_audio_vae)": "VAEDecodeAudio",
    }
    assert server.live_bytes() == 0


def test_cases_differ_from_each_other(server: Server, prompts: Prompts) -> None:
    """Otherwise equal digests would say little."""
    found = [stock_digests(server, prompts, case) for case in CASES]
    for key in ("images", "waveform"):
        assert len({digests[key] for digests in found}) == len(CASES)
