"""Two devices with pools of their own: making room on one never touches what is on the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from embedded_nodes import node
from lazy_h3.host.embedded.model_management import ModelPatcher
from lazy_h3.memory.store import MemoryRefused
from memory_models import CPU
from session_cases import Prompt, Scene, branch, chain, loaders, scene

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
DEVICES = {"te": FIRST, "dit": SECOND, "vae": FIRST, "spare": SECOND}
EVERYTHING = 1 << 60
PLENTY = 1 << 50
ALL = {"te": FIRST, "dit": SECOND, "vae": FIRST}


@pytest.fixture
def played() -> Iterator[Scene]:
    """Everything is kept, and each device pretends to have room."""
    with scene("foreign", policy="keep", devices=DEVICES) as played:
        for device in (FIRST, SECOND):
            played.host.model_management.set_free_memory(device, PLENTY)
        yield played


def resident(played: Scene) -> dict[str, torch.device]:
    return {resource.name: resource.device for resource in played.store.resident()}


def without(device: torch.device) -> dict[str, torch.device]:
    return {name: where for name, where in ALL.items() if where != device}


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
def test_a_host_that_wants_room_on_one_device_empties_that_one_only(played, device):
    played.succeed(chain())
    assert resident(played) == ALL
    played.host.model_management.free_memory(EVERYTHING, device)
    assert resident(played) == without(device)
    played.succeed({**chain(), **branch("a dog")})
    assert sorted(played.loaded()) == sorted(name for name, where in ALL.items() if where == device)


@pytest.mark.parametrize(("device", "at", "lost"), [(FIRST, "5", "te"), (SECOND, "6", "dit")], ids=["first", "second"])
def test_in_the_middle_of_a_run_too(played, device, at, lost):
    played.during = lambda name: name == at and played.host.model_management.free_memory(EVERYTHING, device)
    played.succeed(chain())
    assert resident(played) == {name: where for name, where in ALL.items() if name != lost}


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
def test_a_model_of_the_host_takes_the_room_of_its_device_only(played, device):
    played.succeed(chain())
    management = played.host.model_management
    management.set_free_memory(device, 0)
    other = ModelPatcher(torch.nn.Module(), device, CPU, size=1000)
    management.load_models_gpu([other])
    assert resident(played) == without(device)
    ours = [entry for entry in management.current_loaded_models if entry.model is not other]
    assert sorted(entry.model.resource.name for entry in ours) == sorted(without(device))


def test_what_is_filled_asks_the_host_for_room_on_its_own_device(played, monkeypatch):
    asked: list[torch.device] = []
    management = played.host.model_management
    free_memory = management.free_memory

    def spy(nbytes: float, device: torch.device, keep_loaded: Any = ()) -> Any:
        asked.append(device)
        return free_memory(nbytes, device, keep_loaded)

    played.succeed(chain())
    monkeypatch.setattr(management, "free_memory", spy)
    played.succeed(spare_prompt())
    assert asked[0] == SECOND
    assert set(asked) == {SECOND}


def spare_prompt() -> Prompt:
    return {**loaders(["spare"]), "4": node("Sample", model=["1", 0], value="a cow"), "5": node("Show", value=["4", 0])}


def test_a_budget_is_spent_for_each_device_by_itself():
    """Each pool has room for two; a third on the second device takes the place of the one there, and of none on the first."""
    with scene("foreign", policy="keep", devices=DEVICES) as played:
        size = played.resources["te"].nbytes
        played.store.budget = 2 * size
        played.succeed(chain())
        assert resident(played) == ALL
        played.store.budget = size
        played.succeed(spare_prompt())
        assert resident(played) == {"te": FIRST, "vae": FIRST, "spare": SECOND}
        assert played.reasons() == {"dit": "room for spare"}


def test_what_is_in_use_on_one_device_may_have_no_room_although_the_other_is_empty():
    with scene("foreign", devices=DEVICES) as played:
        size = played.resources["dit"].nbytes
        played.store.budget = size
        with (
            played.store.use(played.resources["dit"]),
            pytest.raises(MemoryRefused, match="raise the budget"),
            played.store.use(played.resources["spare"]),
        ):
            pass
        with played.store.use(played.resources["dit"]), played.store.use(played.resources["te"]):
            assert resident(played) == {"dit": SECOND, "te": FIRST}


def test_with_policy_free_each_goes_with_its_last_user_whatever_its_device():
    with scene("foreign", devices=DEVICES) as played:
        played.succeed(chain())
        assert [played.record.stays(name) for name in ALL] == [[("X4", "F4")], [("X5", "F5")], [("X6", "F6")]]
        assert resident(played) == {}
