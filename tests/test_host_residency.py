"""Our entries in the host's list of loaded models, while the host walks that list by numbers as ComfyUI does."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lazy_h3.host.embedded.model_management import ModelManagement
from small_models import USERS, Stage, stage, text_to_video


def unload_by_numbers(management: ModelManagement) -> None:
    """Unload everything, then take the entries out by the numbers they had: entries must not move meanwhile."""
    models = management.current_loaded_models
    numbers = list(range(len(models) - 1, -1, -1))
    unloaded = [number for number in numbers if models[number].model_unload(1e30)]
    gc.collect()
    for number in sorted(unloaded, reverse=True):
        models.pop(number)


def resident(running: Stage) -> set[str]:
    return {resource.kind for resource in running.store.resident()}


@pytest.fixture
def full(tmp_path: Any) -> Any:
    with stage(tmp_path, policy="keep") as running:
        running.succeed(text_to_video())
        assert resident(running) == set(USERS)
        yield running


def test_the_host_may_unload_all_of_them_by_their_numbers(full: Stage) -> None:
    """A patcher that died with its weights shortened the list under ComfyUI's feet, and its worker died of an IndexError."""
    management = full.host.model_management
    assert len(management.current_loaded_models) == len(USERS)
    unload_by_numbers(management)
    assert management.current_loaded_models == []
    assert resident(full) == set()
    assert full.store.live_bytes() == 0


def test_after_that_they_are_listed_again_when_they_are_filled_again(full: Stage) -> None:
    unload_by_numbers(full.host.model_management)
    full.succeed(text_to_video({"5.prompt": "another"}))
    assert resident(full) == set(USERS)
    assert len(full.host.model_management.current_loaded_models) == len(USERS)
    full.store.release_all("test", force=True)
    assert full.host.model_management.current_loaded_models == []


def test_pressure_frees_what_is_not_in_use(full: Stage) -> None:
    management = full.host.model_management
    management.set_free_memory(torch.device("cpu"), 0)
    management.free_memory(1 << 40, torch.device("cpu"))
    assert resident(full) == set()
