"""Lazy models in ComfyUI's memory management, without a server: partial loads, pressure, clones, damaged files, real sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from comfy_server import FOLDER, core_process

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="LAZY_H3_COMFYUI does not name the folder of a ComfyUI server"),
    pytest.mark.timeout(300),
]
MEGABYTE = 1 << 20
STAGING = 32 * MEGABYTE  # the most that a reader's threads take while they convert; nothing to large files, much to small ones


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core-models")
    core_process("tiny", "write", folder, "tiny")
    return folder


@pytest.mark.parametrize(
    "scenario", ["partial_loads", "moved_away", "pressure", "lives", "dtypes", "idle_on_the_device", "read_only"]
)
def test_all_is_well_in(models: Path, scenario: str) -> None:
    found = core_process("tiny", scenario, models)
    assert found
    assert [name for name, is_so in found.items() if not is_so] == []


def test_files_that_change_or_are_none_are_named(models: Path, tmp_path: Path) -> None:
    found = core_process("tiny", "damage", models, tmp_path)
    assert "dit.safetensors" in found["replaced"]
    assert "was replaced on disk" in found["replaced"]
    assert found["nothing is left"]
    assert found["loaded anew"]
    for name in ("cut", "empty", "noise"):
        assert found[name].startswith("CheckpointError: ")
        assert f"{name}.safetensors" in found[name]


def test_at_the_peak_there_is_one_resource_in_memory(models: Path) -> None:
    found = core_process("tiny", "peak", models)
    assert found["largest"] > 40 * MEGABYTE
    assert found["peak"] <= 1.1 * found["largest"] + STAGING
    assert found["end"] <= 8 * MEGABYTE


def test_files_of_published_sizes_become_models_at_once_and_without_memory(tmp_path: Path) -> None:
    core_process("full", "write_hollow", tmp_path)
    found = core_process("full", "build", tmp_path)
    by_size = sorted(found.values(), key=lambda one: -one["file"])
    assert [round(one["file"] / 1e9) for one in by_size[:3]] == [66, 52, 5]
    for name, one in found.items():
        assert one["seconds"] < 1, name
        assert one["growth"] < 100 * MEGABYTE, name
        assert one["live"] == 0, name
        assert one["weights"] >= 0.99 * one["file"], name
