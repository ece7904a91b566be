"""Who is asked to give up memory, and in which order (host contract, section 6)."""

import gc

import pytest
import torch
from embedded_nodes import Trace, chain, recording_host
from lazy_h3.host.embedded import get_executing_context, model_management
from lazy_h3.host.embedded.model_management import ModelManagement, ModelPatcher

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")  # only names: nothing is ever put there
MIB = 2**20


class Recorded(ModelPatcher):
    """Writes down its calls; can give up ``spare`` bytes without leaving."""

    def __init__(self, calls, name, size, device=FIRST, spare=0):
        super().__init__(torch.nn.Identity(), device, size=size)
        self.calls, self.name, self.spare = calls, name, spare

    def partially_load(self, device, extra_memory=0, force_patch_weights=False):
        self.calls.append(f"{self.name} load")
        return super().partially_load(device, extra_memory)

    def partially_unload(self, device, memory_to_free=0, force_patch_weights=False):
        self.calls.append(f"{self.name} unload {memory_to_free / MIB:g}")
        return min(self.spare, memory_to_free)

    def detach(self, unpatch_all=True):
        self.calls.append(f"{self.name} detach {unpatch_all} {get_executing_context()}")
        super().detach(unpatch_all)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def manager():
    manager = ModelManagement(FIRST)
    manager.set_free_memory(FIRST, 8000 * MIB)
    manager.set_free_memory(SECOND, 8000 * MIB)
    return manager


def names(manager):
    return [loaded.model.name for loaded in manager.current_loaded_models]


def test_loading_again_detaches_without_dropping_weights(manager, calls):
    model = Recorded(calls, "a", 100 * MIB)
    manager.load_models_gpu([model])
    manager.load_models_gpu([model])
    assert calls == ["a load", "a detach False None", "a load"]
    assert model.loaded_size() == model.size
    assert names(manager) == ["a"]


def test_pressure_asks_for_a_part_and_takes_everything_if_that_is_too_little(manager, calls):
    for spare in (0, 500 * MIB):
        manager.load_models_gpu([model := Recorded(calls, "a", 400 * MIB, spare=spare)])
        calls.clear()
        manager.set_free_memory(FIRST, 900 * MIB)
        left = manager.free_memory(1000 * MIB, FIRST)
        assert calls[0] == "a unload 100"
        assert calls[1:] == ([] if spare else ["a detach True None"])
        assert [loaded.model for loaded in left] == ([] if spare else [model])
        assert names(manager) == (["a"] if spare else [])


def test_more_than_a_model_has_is_taken_without_asking_for_a_part(manager, calls):
    manager.load_models_gpu([model := Recorded(calls, "a", 50 * MIB)])
    manager.set_free_memory(FIRST, 900 * MIB)
    manager.free_memory(1000 * MIB, FIRST)
    assert calls == ["a load", "a detach True None"]
    assert model.loaded_size() == 0


def test_loading_makes_room_on_its_device_only(manager, calls):
    models = [Recorded(calls, "a", 300 * MIB), Recorded(calls, "b", 300 * MIB, SECOND)]
    for model in models:
        manager.load_models_gpu([model])
    manager.set_free_memory(FIRST, 0)
    manager.set_free_memory(SECOND, 0)
    calls.clear()
    manager.load_models_gpu([new := Recorded(calls, "c", 100 * MIB)])
    assert calls == ["a detach True None", "c load"]
    assert names(manager) == ["c", "b"]
    assert new.loaded_size() == new.size


def test_kept_models_are_not_asked(manager, calls):
    models = [Recorded(calls, name, 100 * MIB) for name in "ab"]
    manager.load_models_gpu(models)
    calls.clear()
    manager.set_free_memory(FIRST, 0)
    manager.free_memory(1000 * MIB, FIRST, keep_loaded=[manager.current_loaded_models[0]])
    assert calls == ["b detach True None"]
    assert names(manager) == ["a"]


def test_enough_room_disturbs_nobody(manager, calls):
    manager.load_models_gpu([model := Recorded(calls, "a", 100 * MIB)])
    assert manager.free_memory(1000 * MIB, FIRST) == []
    assert calls == ["a load"]
    assert model.loaded_size() == model.size


def test_without_smart_memory_every_load_empties_the_device(manager, calls):
    manager.load_models_gpu([first := Recorded(calls, "a", 100 * MIB)])
    manager.disable_smart_memory = True
    manager.load_models_gpu([second := Recorded(calls, "b", 100 * MIB)])
    assert calls == ["a load", "a detach True None", "b load"]
    assert (first.loaded_size(), second.loaded_size()) == (0, second.size)


def test_patchers_are_held_weakly_and_dead_ones_leave_the_list(manager, calls):
    manager.load_models_gpu([Recorded(calls, "a", 100 * MIB)])
    gc.collect()
    assert manager.current_loaded_models == []


@pytest.fixture
def host():
    with recording_host(Trace()) as host:
        yield host


def test_free_detaches_every_model_of_the_host_without_context(host, calls):
    for device in (FIRST, SECOND):
        host.model_management.set_free_memory(device, 8000 * MIB)
    host.model_management.load_models_gpu(models := [Recorded(calls, "a", MIB), Recorded(calls, "b", MIB, SECOND)])
    calls.clear()
    host.run(chain())
    host.free(unload_models=True)
    assert sorted(calls) == ["a detach True None", "b detach True None"]
    assert [model.loaded_size() for model in models] == [0, 0]


def test_module_speaks_of_the_current_host(host):
    assert model_management.current_loaded_models is host.model_management.current_loaded_models
    with pytest.raises(AttributeError):
        _ = model_management.no_such_function
