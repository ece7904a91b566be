from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from lazy_h3.memory.handle import Handle
from lazy_h3.memory.store import Store
from memory_models import PLENTY, BytesRead, Codec, CodecConfig, codec


@pytest.fixture
def store() -> Store:
    return Store(pretended_total=PLENTY)


@pytest.fixture
def count() -> BytesRead:
    return BytesRead()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "codec.safetensors"


@pytest.fixture
def handle(store, path, count) -> Handle:
    return Handle(codec(path, reader=count.reader), store)


def test_looking_at_a_handle_loads_nothing(handle, path, count):
    """Error reports print inputs, caches copy them, and graphs are built from geometry alone."""
    assert handle.kind == "codec"
    assert handle.config == CodecConfig()
    assert isinstance(handle.component.module, Codec)
    assert str(handle) == repr(handle) == f"<codec of {path}>"
    assert copy.copy(handle) is handle
    assert copy.deepcopy({"model": [handle]})["model"][0] is handle
    assert handle.is_dynamic() is True
    assert handle in {handle}
    assert count.total == 0
    assert handle.component.resident_parts() == frozenset()


def test_a_host_that_probes_a_handle_finds_no_model_in_it(handle):
    assert not hasattr(handle, "patcher")
    assert not hasattr(handle, "get_models")
    assert not hasattr(handle, "__dict__")


def test_use_gives_the_module_with_its_weights(handle, store, count):
    x = torch.randn(2, 8)
    with handle.use() as model, torch.inference_mode():
        assert model is handle.component.module
        assert store.is_pinned(handle.component)
        assert model(x).shape == (2, 8)
    assert count.total == handle.component.nbytes()
    assert not store.is_pinned(handle.component)
    handle.release("last user")
    assert store.live_bytes() == 0


def test_use_fills_only_the_named_parts(handle, store, count):
    with handle.use("encoder") as model:
        model.encode(torch.ones(1, 8))
        assert count.total == handle.component.nbytes(frozenset({"encoder"}))
        with handle.use("decoder", "encoder"):
            assert count.total == handle.component.nbytes()


def test_an_unknown_part_is_refused_and_pins_nothing(handle, store):
    with pytest.raises(ValueError, match="this codec has no vision"), handle.use("vision"):
        pytest.fail("was filled")
    assert not store.is_pinned(handle.component)


def test_a_nodes_pins_are_its_own(handle, store):
    with handle.use(node=("prompt", "7")):
        store.unpin_node("prompt", "8")
        assert store.is_pinned(handle.component)
        store.unpin_node("prompt", "7")
        assert not store.is_pinned(handle.component)


def test_two_loaders_of_one_file_share_its_weights(store, path, count):
    first = Handle(codec(path, reader=count.reader), store)
    second = Handle(codec(path, reader=count.reader), store)
    assert first.component is second.component
    with first.use(), second.use():
        pass
    assert count.total == first.component.nbytes()


def test_a_handle_keeps_its_component_and_nothing_else_does(store, path):
    handle = Handle(codec(path), store)
    component = weakref.ref(handle.component)
    gc.collect()
    assert component() is not None
    del handle
    gc.collect()
    assert component() is None


def test_a_handle_survives_release_and_reload(handle, store):
    x = torch.randn(2, 8)
    with handle.use() as model:
        before = model(x)
    handle.release("last user")
    with handle.use() as model:
        assert torch.equal(model(x), before)
