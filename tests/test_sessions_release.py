"""Releases that come at a bad moment: with stray references, half loaded, from the host in the middle of a run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from embedded_nodes import node, node_class
from lazy_h3.memory.skeleton import WeightsNotLoaded
from session_cases import (
    ANY,
    CACHES,
    CPU,
    Prompt,
    Scene,
    branch,
    chain,
    loaders,
    quick_collections,  # noqa: F401  (a fixture)
    scene,
    signal,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EVERYTHING = 1 << 60


def expected(prompt: Prompt) -> dict[str, Tensor]:
    """What the prompt shows when nothing is ever released."""
    with scene(policy="keep") as calm:
        calm.succeed(prompt)
        return dict(calm.kept)


def assert_shown(played: Scene, wanted: dict[str, Tensor]) -> None:
    assert played.kept.keys() == wanted.keys()
    assert all(torch.equal(played.kept[name], value) for name, value in wanted.items())


def assert_empty(played: Scene) -> None:
    assert played.store.live_bytes() == 0
    assert played.store.resident() == []
    assert played.host.model_management.current_loaded_models == []


# Somebody else holds a reference to a module.


def hoarding(hoard: list[Any]) -> type:
    """A node that keeps the whole module and one of its blocks for ever."""

    def take(self, model, value):
        with model.use() as module:
            hoard[:] = [module, module.decoder.blocks[0]]
        return (value,)

    return node_class(take, {"model": ANY, "value": ANY}, ("LATENT",))


HOARDED = {**chain(), "8": node("Hoards", model=["1", 0], value="a cat"), "4": node("Encode", model=["1", 0], value=["8", 0])}


def test_weights_of_a_module_that_somebody_holds_are_gone_all_the_same():
    hoard: list[Any] = []
    with scene() as played:
        played.host.node_classes["Hoards"] = hoarding(hoard)
        played.succeed(HOARDED)
        block = hoard[1]
        assert played.record.stays("te") == [("F8", "F4")]
        assert_empty(played)
        with pytest.raises(WeightsNotLoaded, match="call the component through its handle"):
            block(signal("a cat"))
        assert played.store.live_bytes() == 0


def test_a_module_that_somebody_calls_after_its_release_is_filled_again():
    hoard: list[Any] = []
    with scene() as played:
        played.host.node_classes["Hoards"] = hoarding(hoard)
        played.succeed(HOARDED)
        module, block = hoard
        x = signal("a cat")
        with played.resources.wire("te").use() as filled:
            right = filled(x)
        played.store.release_all("a test")
        assert torch.equal(module(x), right)
        assert played.store.resident() == [played.resources["te"]]
        block(x)  # is filled now
        played.succeed({"1": node("Many", values="no model"), "2": node("Show", value=["1", 0])})
        played.succeed(chain("another text"))
        assert played.reasons()["te"] == "node 4 was its last user"
        assert_empty(played)


@pytest.mark.parametrize("cache", CACHES)
def test_a_module_called_later_in_the_same_prompt_is_filled_and_released_again(cache):
    hoard: list[Any] = []

    def call(self, value):
        result = hoard[0](signal(value))
        played.executing()
        return (result,)

    with scene(cache=cache) as played:
        played.host.node_classes |= {"Hoards": hoarding(hoard), "Calls": node_class(call, {"value": ANY}, ("LATENT",))}
        late = {"9": node("Calls", value=["6", 0]), "10": node("Show", value=["9", 0])}
        played.succeed({**HOARDED, **late})
        assert len(played.record.stays("te")) == 2
        assert played.record.stays("te")[1][1] == "F9"
        assert_empty(played)


def test_a_block_called_after_its_release_fails_its_node_and_nothing_else():
    hoard: list[Any] = []

    def call(self, value):
        return (hoard[1](signal(value)),)

    with scene() as played:
        played.host.node_classes |= {"Hoards": hoarding(hoard), "Calls": node_class(call, {"value": ANY})}
        result = played.run({**HOARDED, "9": node("Calls", value=["5", 0]), "10": node("Show", value=["9", 0])})
        assert (result.status, result.error.type, result.error.node_id) == ("error", "WeightsNotLoaded", "9")
        assert_empty(played)
        played.succeed(chain())


# Half loaded, and absent.


class Allocations(TorchDispatchMode):
    """The most bytes that tensors made inside the block held together."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage.data_ptr() for storage in storages_of((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = [storage for storage in storages_of(result) if storage.data_ptr() not in given]
        self._made += [(StorageWeakRef(storage), storage.nbytes()) for storage in made]
        living = {storage.cdata: nbytes for storage, nbytes in self._made if not storage.expired()}
        self.peak = max(self.peak, sum(living.values()))
        return result


def storages_of(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def releasing_midway(played: Scene, by: str) -> list[int]:
    """Release the text encoder, once, while it is being read; gives the bytes that were alive then."""
    seen: list[int] = []

    def release(name: str) -> None:
        if name == "te" and not seen:
            seen.append(played.resources[name].live_bytes())
            played.store.release(played.resources[name], "asked for halfway")

    if by == "reader":
        played.resources.before_piece = release
    else:
        played.store.on_fill.append(lambda resource, *_: release(resource.name))
    return seen


@pytest.mark.parametrize("by", ["reader", "user"])
def test_what_is_released_half_loaded_serves_its_user_and_goes_with_him(by):
    wanted = expected(chain())
    with scene() as played:
        seen = releasing_midway(played, by)
        played.succeed(chain())
        assert seen == [played.resources["te"].nbytes()]
        assert played.record.stays("te") == [("X4", "F4")]
        assert played.reasons()["te"] == "asked for halfway"
        assert_shown(played, wanted)
        assert_empty(played)


def test_it_goes_although_the_next_user_is_known():
    with scene() as played:
        releasing_midway(played, "reader")
        played.succeed({**loaders(["te"]), **uses("te", "4", "a cat"), **uses("te", "5", ["4", 0])})
        assert played.loaded() == ["te", "te"]
        assert_empty(played)


def uses(model: str, name: str, value: Any) -> Prompt:
    return {name: node("Uses", model=["1", 0], value=value), f"{name}s": node("Show", value=[name, 0])}


def test_what_its_owner_is_loading_is_released_when_the_load_ends():
    with scene("foreign") as played:
        resource = played.resources["te"]
        with played.store.filling(resource, resource.nbytes):
            played.store.release(resource, "asked for halfway")
            resource._allocate()
            assert resource.live_bytes() > 0
        assert_empty(played)


def test_a_release_takes_no_more_memory_than_one_tensor_and_another_one_does_nothing():
    with scene() as played:
        resource = played.resources["te"]
        largest = max(tensor.nbytes for tensor in resource.module.state_dict(keep_vars=True).values())
        with played.resources.wire("te").use():
            pass
        with Allocations() as first:
            played.store.release(resource, "a test")
        assert first.peak <= largest
        assert_empty(played)
        num_events = len(played.store.ledger.events)
        with Allocations() as second:
            played.store.release(resource, "a test")
        assert second.peak == 0
        assert len(played.store.ledger.events) == num_events


def test_allocations_are_seen():
    """The check of the check."""
    with Allocations() as mode:
        kept = torch.zeros(100)
        torch.zeros(10)
    assert mode.peak == kept.nbytes + 40


# The host wants its memory back.


def press(played: Scene) -> None:
    """The host needs everything there is."""
    played.host.model_management.free_memory(EVERYTHING, CPU)


def unload(played: Scene) -> None:
    """As the host does when a node ran out of memory."""
    played.host.model_management.unload_all_models()


def free(played: Scene) -> None:
    """As the button "unload models" does; hosts get to it when the prompt has ended."""
    played.host.free(unload_models=True)


def free_everything(played: Scene) -> None:
    """With the cached outputs, and so with the handles."""
    played.host.free(free_memory=True)


@pytest.mark.parametrize("policy", ["free", "keep", "auto"])
@pytest.mark.parametrize("action", [press, unload, free, free_everything])
def test_a_host_that_wants_memory_while_a_model_computes_gets_it_afterwards(action, policy):
    prompts = [chain(), {**chain(), **branch("a dog")}]
    wanted = [expected(prompt) for prompt in prompts]
    with scene(policy=policy) as played:
        pinned: list[bool] = []

        def during(name: str) -> None:
            if name == "5":
                action(played)
                pinned.append(played.store.is_pinned(played.resources["dit"]))
                assert played.resources["dit"].live_bytes() > 0

        played.during = during
        played.succeed(prompts[0])
        assert pinned == [True]
        assert_shown(played, wanted[0])
        assert played.resources["dit"].live_bytes() == 0
        played.during = lambda name: None
        played.succeed(prompts[1])
        assert_shown(played, wanted[1])
        assert "dit" in played.loaded()


@pytest.mark.parametrize("kind", ["component", "foreign"])
@pytest.mark.parametrize("action", [press, unload])
def test_a_host_that_wants_memory_between_two_users_has_it_read_again(action, kind):
    def presses(self, value):
        action(played)
        assert played.store.live_bytes() == 0
        return (value,)

    prompt = {
        **loaders(),
        **branch("a cat"),
        "8": node("Presses", value=["4", 0]),
        "9": node("Encode", model=["1", 0], value=["8", 0]),
    }
    prompt["5"]["inputs"]["value"] = ["9", 0]
    with scene(kind) as calm:
        calm.host.node_classes["Presses"] = calm.host.node_classes["Passes"]
        calm.succeed(prompt)
        wanted = dict(calm.kept)
        assert calm.loaded() == ["te", "dit", "vae"]
    with scene(kind) as played:
        played.host.node_classes["Presses"] = node_class(presses, {"value": ANY})
        played.succeed(prompt)
        assert_shown(played, wanted)
        assert played.loaded() == ["te", "te", "dit", "vae"]
        assert_empty(played)


def test_what_its_owner_drops_between_two_users_is_loaded_again_and_released():
    with scene("foreign") as played:
        played.during = lambda name: played.resources["te"].unloaded_by_owner() if name == "5" else None
        played.succeed({**chain(), "6": node("Decode", model=["1", 0], value=["5", 0])})
        assert [event for event, _ in played.record.stays("te")] == ["X4", "X6"]
        assert_empty(played)


def test_nobody_is_listed_twice_and_who_is_resident_is_listed():
    listed: list[tuple[str, ...]] = []

    def during(name: str) -> None:
        models = played.host.model_management.current_loaded_models
        listed.append(tuple(sorted(entry.model.resource.name for entry in models)))

    with scene(policy="keep") as played:
        played.during = during
        played.succeed(chain())
        played.succeed({**chain(), **branch("a dog")})
        assert listed == [("te",), ("dit", "te"), ("dit", "te", "vae"), *[("dit", "te", "vae")] * 3]


# What is left of a prompt.


def test_no_session_outlives_the_next_prompt_and_no_handler_hears_of_it():
    with scene() as played:
        seen: list[Any] = []
        played.during = lambda name: seen.append(played.runtime.attachment.session)
        played.succeed(chain())
        kind = type(seen[0])
        seen.clear()
        played.succeed({"1": node("Many", values="no model"), "2": node("Show", value=["1", 0])})
        assert "lazy_h3" not in played.host.progress.handlers
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) is kind]
