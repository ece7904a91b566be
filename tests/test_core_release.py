"""Objects of other loaders: as views of their files where that can be, else unloaded by core."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_core
import pytest
import torch
from fake_core import WIDTH, DynamicPatcher, Management, ModelPatcher, Network
from lazy_h3.host.comfy.core.dynamic import refuse_where_dynamic
from lazy_h3.host.comfy.core.loaders import CoreLoaders
from lazy_h3.host.comfy.core.mapped import MappedCheckpoint
from lazy_h3.host.comfy.core.model import CoreModel
from lazy_h3.host.comfy.core.patcher import LazyPatcherMixin
from lazy_h3.host.comfy.core.release import Releases
from lazy_h3.host.comfy.core.skeleton import CannotBeLazy
from lazy_h3.memory.graph import Node, NodeClass
from lazy_h3.memory.session import GraphView, Session
from lazy_h3.memory.store import Store
from lazy_h3.nodes.adapt import LazyH3LoraLoaderModelOnly, LazyH3UNETLoader
from lazy_h3.nodes.session_plan import SessionPlanner
from memory_models import PLENTY
from small_models import stage

CLASSES = {"Loader": NodeClass(("MODEL",)), "Sample": NodeClass(("LATENT",))}


class World:
    """A store, core as far as it matters, and the file of a network."""

    def __init__(self, path: Path, management: Management) -> None:
        self.store = Store(pretended_total=PLENTY)
        self.management = management
        self.loaders = CoreLoaders(self.store, lambda: None)
        self.releases = Releases(self.store, self.loaders, fake_core.host(management))
        self.path = path
        self.tensors = fake_core.write_network(path)

    def loaded(self) -> ModelPatcher:
        """What core's loader gives, loaded."""
        patcher = fake_core.load_diffusion_model(str(self.path))
        self.management.load(patcher)
        return patcher

    def names(self) -> list[str]:
        return [status.resource.name for status in self.store.statuses()]


class Script:
    """A prompt with one loader and its users."""

    prompt_id = "prompt"

    def __init__(self, key: Any, *users: str) -> None:
        self.nodes = {"1": Node("Loader", {}), **{user: Node("Sample", {"model": ["1", 0]}) for user in users}}
        self.pending = {"1", *users}
        self._key = key

    def version(self) -> int:
        return 0

    def view(self) -> GraphView:
        return GraphView(0, self.nodes, {})

    def may_run(self) -> set[str]:
        return self.pending

    def will_run(self, node: str) -> bool:
        return True

    def classes(self, class_type: str) -> NodeClass | None:
        return CLASSES.get(class_type)

    def sources(self, nodes: Any) -> Any:
        return {("1", 0): self._key}


@pytest.fixture(params=[True, False], ids=["with core's call", "before core had a call"])
def management(request):
    return Management(request.param)


@pytest.fixture
def world(tmp_path, monkeypatch, management):
    fake_core.install(monkeypatch, management)
    return World(tmp_path / "network.safetensors", management)


def weights_in_memory(module: torch.nn.Module, world: World) -> set[str]:
    """Weights that do not lie in the file's map."""
    core: Any = module.lazy_h3
    files: list[MappedCheckpoint] = core._files
    return {name for name, weight in module.named_parameters() if all(file.place_of(weight.data) is None for file in files)}


def test_a_stock_model_becomes_views_of_its_file_with_all_its_clones(world):
    patcher = world.loaded()
    earlier, module = patcher.clone(), patcher.model
    world.releases.after_last_use(patcher, ("key",))
    assert weights_in_memory(module, world) == set()
    assert {type(each).__mro__[1] for each in (patcher, earlier, patcher.clone())} == {LazyPatcherMixin}
    assert world.management.current_loaded_models == []
    assert world.names() == ["core MODEL (network)"]
    assert all(torch.equal(module.get_parameter(name), tensor) for name, tensor in world.tensors.items())
    assert torch.equal(module.sigmas, torch.linspace(0, 1, 5))


def test_it_is_filled_and_dropped_as_ours_are(world):
    patcher = world.loaded()
    world.releases.after_last_use(patcher, ("key",))
    (status,) = world.store.statuses()
    with world.store.use(status.resource):
        assert weights_in_memory(patcher.model, world) == {"first.weight", "bias"}
        assert torch.equal(patcher.model.bias, world.tensors["bias"])
    world.store.release(status.resource, "test")
    assert weights_in_memory(patcher.model, world) == set()
    assert world.store.live_bytes() == 0


def test_each_object_is_a_resource_of_its_own(world):
    first, second = world.loaded(), world.loaded()
    world.releases.after_last_use(first, ("key",))
    world.releases.after_last_use(second, ("other key",))
    one, other = (status.resource for status in world.store.statuses())
    assert one.identity != other.identity
    assert (one.origins, other.origins) == (("key",), ("other key",))


def test_a_second_node_on_an_object_makes_no_second_resource(world):
    patcher = world.loaded()
    for key in ("key", "another"):
        world.releases.after_last_use(patcher.clone(), (key,))
    (status,) = world.store.statuses()
    assert status.resource.origins == ("another",)


def changed(patcher: ModelPatcher) -> ModelPatcher:
    patcher.model.first.weight.mul_(2)
    return patcher


def extended(patcher: ModelPatcher) -> ModelPatcher:
    patcher.model.register_buffer("more", torch.ones(1))
    return patcher


def converted(patcher: ModelPatcher) -> ModelPatcher:
    patcher.model.to(torch.float64)
    return patcher


def without_factory(patcher: ModelPatcher) -> ModelPatcher:
    patcher.cached_patcher_init = None
    return patcher


def with_another_factory(patcher: ModelPatcher) -> ModelPatcher:
    def load_diffusion_model() -> None:
        """Of the same name."""

    patcher.cached_patcher_init = load_diffusion_model, ()
    return patcher


def of_another_format(patcher: ModelPatcher) -> ModelPatcher:
    patcher.cached_patcher_init = patcher.cached_patcher_init[0], ("network.gguf", {})
    return patcher


class ForeignPatcher(ModelPatcher):
    """Another pack's."""


def of_another_class(patcher: ModelPatcher) -> ModelPatcher:
    patcher.__class__ = ForeignPatcher
    return patcher


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (changed, "its weight first.weight is not as in its file"),
        (extended, "its weight more is not as in its file"),
        (converted, "is not as in its file"),
        (without_factory, "its loader does not say how it was made"),
        (with_another_factory, "its loader does not say how it was made"),
        (of_another_format, "network.gguf is no safetensors file"),
        (of_another_class, "its patcher is a ForeignPatcher"),
    ],
)
def test_any_other_object_stays_as_it_is_and_is_unloaded_by_core(world, caplog, spoilt, reason):
    caplog.set_level(logging.INFO, "lazy_h3")
    patcher, again = spoilt(world.loaded()), spoilt(world.loaded())
    kind, weight = type(patcher), patcher.model.bias
    world.releases.after_last_use(patcher, ("key",))
    world.releases.after_last_use(again, ("key",))
    assert (type(patcher), patcher.model.bias is weight) == (kind, True)
    assert reason in caplog.text
    assert caplog.text.count("its weights stay in RAM") == 1
    world.management.load(patcher)
    world.store.settle()
    resource = next(r for r in world.store.resident() if r.resident_parts())
    world.store.release(resource, "test")
    assert patcher not in [entry.model for entry in world.management.current_loaded_models]


def test_a_clone_of_another_class_keeps_the_others_as_they_are(world, caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    patcher = world.loaded()
    clone = of_another_class(patcher.clone())
    world.releases.after_last_use(patcher, ("key",))
    assert type(patcher) is ModelPatcher
    assert type(clone).__name__ in caplog.text


def test_core_is_asked_for_all_devices_and_for_this_object_alone(world):
    patcher = of_another_class(world.loaded())
    world.releases.after_last_use(patcher, ("key",))
    world.store.settle()
    world.store.release_all("test")
    assert world.management.current_loaded_models == []
    assert all(call == {"unload_additional_models": False, "all_devices": True} for call in world.management.calls)


def test_an_object_without_weights_is_passed_over_with_a_word(world, caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    for value in ("text", 1, "more text"):
        world.releases.after_last_use(value, ("key",))
    assert caplog.text.count("has no weights that ComfyUI could unload") == 2
    assert world.names() == []


def test_patchers_are_found_in_all_that_core_makes(world):
    class Holder:
        patcher = world.loaded()

    class Several:
        def get_models(self) -> list[ModelPatcher]:
            return [several]

    several = world.loaded()
    world.releases.after_last_use(Holder(), ("key",))
    world.releases.after_last_use(Several(), ("key",))
    assert len(world.names()) == 2


@pytest.mark.parametrize("spoilt", [lambda patcher: patcher, of_another_class], ids=["views", "unloaded"])
def test_a_session_releases_it_after_its_last_user(world, spoilt):
    patcher = spoilt(world.loaded())
    script = Script("key", "2", "3")
    session = Session(script, world.store)
    session.begin()
    session.started("1")
    world.releases.after_last_use(patcher, ("key",))
    script.pending -= {"1"}
    session.ended("1")
    resident = []
    for node in ("2", "3"):
        session.started(node)
        use(patcher, world, node)
        resident.append(len(world.store.resident()))
        script.pending -= {node}
        session.ended(node)
        resident.append(len(world.store.resident()))
    assert resident[1:] == [1, 1, 0]


def use(patcher: Any, world: World, node: str) -> None:
    """As core does: ours fill and are pinned, others are just listed."""
    if isinstance(patcher, LazyPatcherMixin):
        world.store.hold(patcher.model.lazy_h3, ("node", "prompt", node))
    elif not world.management.current_loaded_models:
        world.management.load(patcher)


def test_what_a_running_node_may_use_goes_only_when_it_has_finished(world):
    patcher = of_another_class(world.loaded())
    world.releases.after_last_use(patcher, ("key",))
    stock = world.loaded()
    world.releases.after_last_use(stock, ("other",))
    script = Script("key", "2")
    session = Session(script, world.store)
    session.begin()
    script.pending -= {"1"}
    session.ended("1")
    session.started("2")
    world.management.load(patcher)
    world.store.settle()
    session.about_to_fill(stock.model.lazy_h3, PLENTY)
    world.store.release_all("memory is short")
    assert [r.origins for r in world.store.resident()] == [("key",)]
    session.ended("2")
    assert world.store.resident() == []


def test_an_object_that_is_gone_leaves_no_resource(world):
    for spoilt in (of_another_class, lambda patcher: patcher):
        world.releases.after_last_use(spoilt(world.loaded()), ("key",))
        world.management.current_loaded_models.clear()
    gc.collect()
    world.store.settle()
    assert world.names() == []


def test_a_lazy_model_goes_with_its_last_user_and_needs_no_garbage_collector(world):
    model = world.loaders.model(world.path, {})  # one of its weights stands in the root
    known = [weakref.ref(each) for each in (model.model, model.model.lazy_h3)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in known] == [None, None]
    finally:
        gc.enable()


def on_gpu(world: World) -> tuple[torch.nn.Module, CoreModel]:
    """A lazy model as it would be on a host with a GPU, and its module."""
    module = world.loaders.model(world.path, {}).model
    cpu = module.lazy_h3
    gpu = torch.device("meta")  # anything but a CPU
    slots = [replace(slot, dtype=torch.bfloat16) if slot.tensor is module.bias else slot for slot in cpu._slots]
    return module, CoreModel(cpu.identity, cpu.name, gpu, module, cpu._files, slots, world.management)


def test_the_memory_of_a_gpu_is_neither_counted_nor_refused(world):
    module, core = on_gpu(world)
    store = Store(pretended_total=1)  # full: core makes room itself
    with store.use(core):
        assert weights_in_memory(module, world) == {"bias"}  # converted; core's own copy to the GPU reads the others


def test_who_merges_with_an_idle_model_does_not_keep_its_weights_on_the_gpu(world):
    module, core = on_gpu(world)
    weight = module.first.weight
    taken = core.exact_views()[id(weight)]
    weight.data = torch.zeros(WIDTH, WIDTH)  # as Module.to does, for all who hold it
    assert torch.equal(taken, world.tensors["first.weight"])


def test_where_core_pages_weights_in_by_itself_its_loaders_are_used_unchanged(world, monkeypatch):
    gpu = torch.device("meta")  # anything but a CPU
    refuse_where_dynamic("MODEL", gpu)
    fake_core.install(monkeypatch, world.management, DynamicPatcher)
    refuse_where_dynamic("MODEL")
    with pytest.raises(CannotBeLazy, match="dynamic VRAM"):
        refuse_where_dynamic("MODEL", gpu)
    with pytest.raises(CannotBeLazy, match="dynamic VRAM"):
        world.loaders.with_lora(DynamicPatcher(Network()), world.path, 1.0)


class CoreLoaderNode:
    """Core's node on a host that pages weights in."""

    FUNCTION = "load_unet"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"unet_name": ("STRING",), "weight_dtype": ("STRING",)}}

    def load_unet(self, unet_name: str, weight_dtype: str) -> tuple[Any, ...]:
        return (DynamicPatcher(Network()),)


@pytest.mark.parametrize("is_on", [True, False], ids=["evicted", "left alone"])
def test_what_core_pages_in_is_evicted_after_the_last_user_of_our_loader_if_that_is_on(tmp_path, monkeypatch, is_on):
    management = Management()
    management.device = torch.device("meta")  # anything but a CPU
    fake_core.install(monkeypatch, management, DynamicPatcher)
    path = tmp_path / "network.safetensors"
    fake_core.write_network(path)
    with stage(tmp_path) as running:
        shared = running.runtime
        monkeypatch.setattr(shared.host, "node_class", lambda name: {"UNETLoader": CoreLoaderNode}[name])
        monkeypatch.setattr(shared.host, "model_path", lambda folder, name: path)
        monkeypatch.setattr(type(shared.host), "management", management)
        shared.settings.change({"evict_dynamic": is_on})
        widgets = {"unet_name": path.name, "weight_dtype": "default"}
        (model,) = LazyH3UNETLoader().load(**widgets)
        management.load(model)
        shared.store.settle()
        expected = [tuple(LazyH3UNETLoader.lazy_h3_resources(**widgets).values())] if is_on else []
        assert [resource.origins for resource in shared.store.resident()] == expected
        shared.store.release_all("test")
        assert bool(management.current_loaded_models) is not is_on


@pytest.mark.parametrize(("device", "num_planned"), [("cpu", 1), ("meta", 0)])
def test_what_core_loads_is_planned_only_where_it_takes_the_memory_that_is_planned(tmp_path, monkeypatch, device, num_planned):
    path = tmp_path / "network.safetensors"
    fake_core.write_network(path)
    sampler = type("Sampler", (), {"RETURN_TYPES": ("LATENT",), "INPUT_TYPES": classmethod(lambda _: {"required": {}})})
    classes = {"UNETLoader": CoreLoaderNode, "LazyH3UNETLoader": LazyH3UNETLoader, "Sampler": sampler}
    prompt = {
        "1": {"class_type": "LazyH3UNETLoader", "inputs": {"unet_name": path.name, "weight_dtype": "default"}},
        "2": {"class_type": "Sampler", "inputs": {"model": ["1", 0]}},
    }
    with stage(tmp_path) as running:
        host = running.runtime.host
        monkeypatch.setattr(host, "node_class", classes.get)
        monkeypatch.setattr(host, "model_path", lambda folder, name: path)
        monkeypatch.setattr(host, "device", lambda: torch.device(device))
        assert len(running.runtime.plan_of(prompt).choices) == num_planned


@pytest.mark.parametrize(("device", "is_kept"), [("cpu", True), ("meta", False)])
def test_what_nobody_plans_is_kept_only_in_the_memory_that_is_planned(tmp_path, monkeypatch, device, is_kept):
    resource: Any = SimpleNamespace(identity=None, device=torch.device("cpu"))
    with stage(tmp_path) as running:
        planner, plan = SessionPlanner(running.runtime, True, True), running.runtime.plan_of({})
        monkeypatch.setattr(planner, "plan", lambda: plan)
        monkeypatch.setattr(running.runtime.host, "device", lambda: torch.device(device))
        assert bool(planner.why_kept(resource)) is is_kept


def test_a_lora_is_read_again_when_its_file_was_replaced(tmp_path, monkeypatch):
    path = tmp_path / "lora.safetensors"
    path.write_bytes(b"first")
    with stage(tmp_path) as running:
        monkeypatch.setattr(running.runtime.host, "model_path", lambda folder, name: path)
        widgets = {"model": None, "lora_name": path.name, "strength_model": 1.0}
        first = LazyH3LoraLoaderModelOnly.IS_CHANGED(**widgets)
        assert LazyH3LoraLoaderModelOnly.IS_CHANGED(**widgets) == first
        path.write_bytes(b"second")
        assert LazyH3LoraLoaderModelOnly.IS_CHANGED(**widgets) != first
        assert LazyH3LoraLoaderModelOnly.IS_CHANGED(**{**widgets, "lora_name": None}) == ""  # linked: not known yet


def test_only_models_that_core_pages_in_are_evicted_after_our_own_loaders(world, caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    dynamic = DynamicPatcher(Network())
    world.releases.evict_after_last_use(world.loaded(), ("key",))
    world.releases.evict_after_last_use(dynamic, ("key",))
    assert world.names() == ["DynamicPatcher of Network"]
    assert "stay in RAM" not in caplog.text
