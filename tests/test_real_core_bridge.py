"""Stock graphs with lazy loaders in a real ComfyUI: the same frames and sound, and weights only while they are used."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import core_graphs as graphs
import pytest
import torch
from comfy_server import CACHE_OPTIONS, FOLDER, Run, Server, core_process, started
from core_graphs import Prompt, lazily, text_to_video
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="LAZY_H3_COMFYUI does not name the folder of a ComfyUI server"),
    pytest.mark.timeout(600),
]
COMFY_PACK = Path(__file__).parent / "comfy_pack"
DIT, ENCODER, VIDEO, AUDIO = (
    f"core {kind} (small_{name})" for kind, name in (("MODEL", "dit"), ("CLIP", "te"), ("VAE", "video_vae"), ("VAE", "audio_vae"))
)
EVERYTHING = {ENCODER: 1, DIT: 1, VIDEO: 1, AUDIO: 1}
FLOAT8 = "small_dit_float8_e4m3fn.safetensors"
INT8 = "small_dit_int8_tensorwise.safetensors"
NOISE = 8 << 20  # bytes by which an idle process grows and shrinks

CASES: dict[str, Callable[[], Prompt]] = {
    "plain": text_to_video,
    "another seed": lambda: text_to_video(seed=2),
    "another prompt": lambda: text_to_video(prompt="A dog."),
    "LoRA": lambda: graphs.with_lora(text_to_video()),
    "LoRA of no strength": lambda: graphs.with_lora(text_to_video(), strength=0.0),
    "two samplers": lambda: graphs.two_samplers(text_to_video()),
    "two samplers, one with a LoRA": lambda: graphs.two_samplers(graphs.with_lora(text_to_video())),
    "switch to the first": lambda: graphs.switched(text_to_video(), True),
    "switch to the second": lambda: graphs.switched(text_to_video(), False),
    "keyframe": lambda: graphs.keyframe(text_to_video()),
    "hooks": lambda: graphs.with_hooks(text_to_video()),
    "merge": lambda: graphs.merged(text_to_video()),
    "bypass LoRA": lambda: graphs.with_bypass_lora(text_to_video()),
    "fp8": lambda: graphs.with_file(text_to_video(), FLOAT8),
    "fp8 and LoRA": lambda: graphs.with_lora(graphs.with_file(text_to_video(), FLOAT8)),
    "int8": lambda: graphs.with_file(text_to_video(), INT8),
    "int8 and LoRA": lambda: graphs.with_lora(graphs.with_file(text_to_video(), INT8)),
}
IN_EVERY_CACHE = ("plain", "two samplers, one with a LoRA", "switch to the second", "keyframe", "merge")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core-models")
    core_process("tiny", "write", folder, "tiny")
    return folder


@pytest.fixture(scope="module", params=list(CACHE_OPTIONS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    base = tmp_path_factory.mktemp(f"core-{request.param}")
    with started(base, models, request.param, packs=(COMFY_PACK,), environment={"LAZY_H3_CORE_SCALE": "tiny"}) as running:
        running.cache, running.base = request.param, base
        yield running


def fresh(server: Server) -> Server:
    """The server with all cached outputs forgotten."""
    server.free(unload_models=True, free_memory=True)
    return server


def digests(server: Server, run: Run) -> dict[str, str]:
    """Of frames and waveform. Fails with the run's own message."""
    assert run.status == "execution_success", run.error()
    (found,) = server.get(f"/history/{run.prompt_id}")[run.prompt_id]["outputs"]["15"]["digests"]
    return json.loads(found)


def loads(run: Run) -> Counter[str]:
    """Resource -> how often its weights were read."""
    return Counter(data["component"] for data in run.memory("load_end") if data["bytes"])


def releases(run: Run) -> dict[str, list[str | None]]:
    """Resource -> nodes after which it was released."""
    released: dict[str, list[str | None]] = {}
    for data in run.memory("release"):
        released.setdefault(data["component"], []).append(data["node"])
    return released


def saved_tensors(server: Server, name: str) -> dict[str, tuple[str, bytes]]:
    """Tensor -> its dtype and bytes, in the file that a save node with this prefix wrote first."""
    with safe_open(server.base / f"output/diffusion_models/{name}_00001_.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key).contiguous() for key in file.keys()}  # noqa: SIM118
    return {key: (str(t.dtype), t.view(-1).view(torch.uint8).numpy().tobytes()) for key, t in tensors.items()}


_stock: dict[str, dict[str, str]] = {}


def stock_digests(server: Server, case: str) -> dict[str, str]:
    """Of core's own loaders, which give the same in every cache mode."""
    if case not in _stock:
        _stock[case] = digests(server, server.run(CASES[case]()))
    return _stock[case]


def only_default_cache(server: Server) -> None:
    if server.cache != "ram":
        pytest.skip("the cache mode makes no difference to it")


@pytest.mark.parametrize("case", CASES)
def test_frames_and_sound_are_those_of_the_stock_graph(server: Server, case: str) -> None:
    if case not in IN_EVERY_CACHE:
        only_default_cache(server)
    expected = stock_digests(server, case)
    run = server.run(lazily(CASES[case]()))
    assert digests(server, run) == expected
    assert set(loads(run).values()) == {1}
    assert server.live_bytes() == 0


def test_cases_differ_from_each_other(server: Server) -> None:
    """Otherwise equal digests would say little: what a case adds must change the frames or the sound."""
    only_default_cache(server)
    alike: dict[str, set[str]] = {}
    for case in CASES:
        alike.setdefault(json.dumps(stock_digests(server, case)), set()).add(case)
    assert [cases for cases in alike.values() if len(cases) > 1] == [
        {"plain", "LoRA of no strength", "switch to the first"},
        {"switch to the second", "fp8"},
    ]


def test_each_resource_is_read_once_and_released_after_its_last_user(server: Server) -> None:
    run = fresh(server).run(lazily(text_to_video(prompt="Once.")))
    assert run.status == "execution_success", run.error()
    assert loads(run) == EVERYTHING
    assert releases(run) == {ENCODER: ["6"], DIT: ["11"], VIDEO: ["13"], AUDIO: ["14"]}
    assert run.resident_at_starts()["11"] == 0
    assert server.live_bytes() == 0


def test_a_new_seed_reads_no_text_encoder(server: Server) -> None:
    fresh(server).run(lazily(text_to_video(prompt="Again.")))
    run = server.run(lazily(text_to_video(prompt="Again.", seed=5)))
    expected = {DIT: 1, VIDEO: 1, AUDIO: 1} if server.cache != "none" else EVERYTHING
    assert loads(run) == expected
    assert server.live_bytes() == 0


def test_what_is_larger_than_what_comes_in_between_waits_for_its_second_user(server: Server) -> None:
    run = fresh(server).run(lazily(graphs.keyframe(text_to_video(prompt="From a frame."))))
    assert run.status == "execution_success", run.error()
    assert loads(run) == EVERYTHING
    assert releases(run)[VIDEO] == ["13"]
    assert server.live_bytes() == 0


def test_after_an_exception_nothing_is_left_and_the_next_run_is_right(server: Server) -> None:
    expected = stock_digests(server, "plain")
    run = fresh(server).run(lazily(graphs.failing(text_to_video(prompt="Fails."))))
    assert run.status == "execution_error"
    assert "fails on purpose" in run.error()
    assert server.live_bytes() == 0
    assert digests(server, server.run(lazily(text_to_video()))) == expected


def test_after_an_interrupt_nothing_is_left_and_the_next_run_is_right(server: Server) -> None:
    expected = stock_digests(server, "plain")
    asked = []

    def interrupt(name: str, data: Mapping[str, Any]) -> None:
        if name == "progress" and data.get("node") == "11" and not asked:
            asked.append(server.post("/interrupt", {}))

    run = fresh(server).run(lazily(text_to_video(prompt="Stops.", steps=1000)), during=interrupt)
    assert run.status == "execution_interrupted"
    assert server.live_bytes() == 0
    assert digests(server, server.run(lazily(text_to_video()))) == expected


@pytest.mark.parametrize("what", ["unload_models", "free_memory"])
def test_what_is_freed_between_runs_and_during_them_changes_nothing(server: Server, what: str) -> None:
    expected = stock_digests(server, "LoRA"), stock_digests(server, "another seed")
    freed = []

    def free(name: str, data: Mapping[str, Any]) -> None:
        if name == "progress" and data.get("node") == "11" and not freed:
            freed.append(server.post("/free", {what: True}))

    during = fresh(server).run(lazily(CASES["LoRA"]()), during=free)
    assert digests(server, during) == expected[0]
    assert freed
    server.post("/free", {what: True})
    assert digests(server, server.run(lazily(CASES["another seed"]()))) == expected[1]
    assert server.live_bytes() == 0


def test_a_file_that_is_replaced_between_runs_is_read_anew(server: Server, models: Path) -> None:
    only_default_cache(server)
    expected = stock_digests(server, "fp8"), stock_digests(server, "plain")
    folder = models / "diffusion_models"
    prompt = lazily(graphs.with_file(text_to_video(), "replaced.safetensors"))
    for name, digest in zip((FLOAT8, "small_dit.safetensors"), expected, strict=True):
        shutil.copy(folder / name, folder / "new")
        (folder / "new").replace(folder / "replaced.safetensors")
        assert digests(server, server.run(prompt)) == digest
    assert server.live_bytes() == 0


def test_what_cannot_be_lazy_is_loaded_as_stock_loads_it(server: Server, models: Path) -> None:
    only_default_cache(server)
    torch.save(load_file(models / "diffusion_models/small_dit.safetensors"), models / "diffusion_models/pickled.pt")
    run = server.run(lazily(graphs.with_file(text_to_video(), "pickled.pt")))
    assert digests(server, run) == stock_digests(server, "plain")
    assert not any("MODEL" in name for name in loads(run))
    assert server.live_bytes() == 0


def test_a_vae_that_is_no_file_is_loaded_as_stock_loads_it(server: Server) -> None:
    only_default_cache(server)
    run = server.run(lazily(graphs.pixel_space()))
    assert run.status == "execution_success", run.error()
    assert loads(run) == {}


def test_a_damaged_file_fails_as_with_stock_and_leaves_nothing(server: Server, models: Path) -> None:
    only_default_cache(server)
    whole = (models / "diffusion_models/small_dit.safetensors").read_bytes()
    (models / "diffusion_models/cut.safetensors").write_bytes(whole[: len(whole) // 2])
    prompt = graphs.with_file(text_to_video(), "cut.safetensors")
    errors = {server.run(each).error() for each in (prompt, lazily(prompt))}
    assert len(errors) == 1
    assert errors != {""}
    assert server.live_bytes() == 0


def test_saved_tensors_are_those_that_core_saves(server: Server) -> None:
    only_default_cache(server)
    expected = stock_digests(server, "LoRA")
    for name, change in (("stock", dict), ("lazy", lazily)):
        run = server.run(change(graphs.saved(text_to_video(), name)))
        assert digests(server, run) == expected
    assert saved_tensors(server, "lazy") == saved_tensors(server, "stock")
    assert server.live_bytes() == 0


def test_weights_that_are_used_for_the_first_time_by_a_save_are_read_for_it(server: Server) -> None:
    only_default_cache(server)
    for name, change in (("alone_stock", dict), ("alone_lazy", lazily)):
        prompt = graphs.saved(text_to_video(), name)
        run = server.run(change({node: prompt[node] for node in ("1", "20", "27")}))
        assert run.status == "execution_success", run.error()
    assert saved_tensors(server, "alone_lazy") == saved_tensors(server, "alone_stock")
    assert server.live_bytes() == 0


def test_runs_do_not_grow_the_process(server: Server) -> None:
    prompt = lazily(graphs.with_lora(text_to_video(prompt="Grows.")))
    held = []
    for seed in range(5):
        prompt["9"]["inputs"]["noise_seed"] = seed
        assert server.run(prompt).status == "execution_success"
        last = server.get("/test/memory")[-1]
        held.append((last["anonymous"], last["tensors"]))
    assert held[4][0] - held[1][0] < NOISE, held
    assert held[4][1] - held[1][1] < 1 << 20, held


def test_a_prompt_without_our_nodes_makes_no_call_into_the_pack(server: Server) -> None:
    only_default_cache(server)
    assert server.run(text_to_video(prompt="Without.")).status == "execution_success"  # ends what was attached to the run before
    server.post("/test/calls", {"watched": "/lazy-h3/"})
    assert server.run(text_to_video(prompt="Without.", seed=8)).status == "execution_success"
    assert server.post("/test/calls", {"watched": "/lazy-h3/"}) == {}
    assert server.run(lazily(text_to_video(prompt="With."))).status == "execution_success"
    assert server.post("/test/calls", {"watched": ""})["attachment.py:touch"]  # calls would have been seen
