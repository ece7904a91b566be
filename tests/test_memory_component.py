from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lazy_h3.h3.formats.recipe import (
    Recipe,
    Rows,
    concatenated,
    constant,
    copied,
    halves_swapped,
    interleaved,
    weight_norm_folded,
)
from lazy_h3.memory.checkpoint import CheckpointError
from lazy_h3.memory.component import Component
from lazy_h3.memory.fingerprint import Fingerprint
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import FillRequest, Parts, Resource
from lazy_h3.memory.skeleton import WeightsNotLoaded
from memory_models import BytesRead, Codec, CodecConfig, One, codec, component_of, random_weights, written
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

ALL: Parts = frozenset({"encoder", "decoder"})
ENCODER: Parts = frozenset({"encoder"})
DECODER: Parts = frozenset({"decoder"})


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "codec.safetensors"


def filled(component: Component, parts: Parts | None = None) -> Component:
    component.fill(FillRequest(component.parts if parts is None else parts))
    return component


def state(module: nn.Module) -> dict[str, Tensor]:
    return module.state_dict(keep_vars=True)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_component_is_a_resource(path):
    assert isinstance(codec(path), Resource)


def test_a_new_component_holds_no_weights_and_has_read_none(path):
    count = BytesRead()
    component = codec(path, reader=count.reader)
    assert count.total == 0
    assert component.live_bytes() == 0
    assert component.resident_parts() == frozenset()
    assert {tensor.device.type for tensor in state(component.module).values()} == {"meta"}
    assert component.nbytes() == sum(tensor.nbytes for tensor in load_file(path).values())
    assert component.nbytes(ENCODER) == (64 + 8 + 8) * 4
    assert component.costs(ALL)["whole"].resident == component.nbytes()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_every_weight_is_the_files_own_in_the_dtype_of_the_storage_rule(path, stored, compute):
    component = filled(codec(path, stored=stored, compute=compute))
    file = load_file(path)
    held = state(component.module)
    assert held.keys() == file.keys()
    for name, tensor in held.items():
        dtype = Codec.storage_dtype(name, compute)
        assert tensor.dtype == dtype
        assert bits(tensor) == bits(file[name].to(dtype))
        assert isinstance(tensor, nn.Parameter) is (name != "mean")


def test_every_byte_is_read_once(path):
    count = BytesRead()
    component = codec(path, reader=count.reader)
    filled(component, ENCODER)
    assert count.total == component.nbytes(ENCODER)
    filled(component, DECODER)
    assert count.total == component.nbytes()
    filled(component, ALL)
    assert count.total == component.nbytes()


def test_parts_are_filled_separately_and_share_what_they_share(path):
    component = filled(codec(path), ENCODER)
    assert component.resident_parts() == ENCODER
    assert component.live_bytes() == component.nbytes(ENCODER)
    assert component.module.decoder.blocks[0].linear.weight.is_meta
    mean = component.module.mean
    x = torch.randn(3, 8)
    file = load_file(path)
    expected = torch.nn.functional.linear(x - file["mean"], file["encoder.weight"], file["encoder.bias"])
    assert torch.equal(component.module.encode(x), expected)
    with pytest.raises(WeightsNotLoaded):
        component.module(x)
    filled(component, DECODER)
    assert component.resident_parts() == ALL
    assert component.module.mean is mean
    assert component.live_bytes() == component.nbytes()


def test_an_unknown_part_is_refused_by_name(path):
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: this codec has no vision; it has \['decoder', 'encoder'\]"):
        filled(codec(path), frozenset({"vision"}))


class HalfBuilt(One):
    """As a text encoder without its vision tower."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"language": ("weight",), "vision": ("visual.",)}


def test_a_part_without_a_weight_is_no_part(tmp_path):
    """Else it would be resident while everything is absent, and a failed fill would count as done."""
    path = written(tmp_path / "x.safetensors", {"weight": torch.ones(2)})
    component = component_of(path, lambda: HalfBuilt(2))
    assert component.parts == {"language"}
    assert component.resident_parts() == frozenset()
    filled(component)
    component.drop()
    assert component.resident_parts() == frozenset()


class Homeless(One):
    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"all": ("other.",)}


def test_a_weight_that_no_part_would_fill_is_found_at_once(tmp_path):
    path = written(tmp_path / "x.safetensors", {"weight": torch.ones(2)})
    with pytest.raises(ValueError, match="weight belongs to no part"):
        component_of(path, lambda: Homeless(2))


def test_drop_leaves_nothing_and_a_refill_gives_the_same(path):
    component = filled(codec(path, compute=torch.bfloat16))
    before = {name: bits(tensor) for name, tensor in state(component.module).items()}
    old = [weakref.ref(tensor) for tensor in state(component.module).values()]
    component.drop()
    assert component.live_bytes() == 0
    assert all(ref() is None for ref in old)
    assert {tensor.device.type for tensor in state(component.module).values()} == {"meta"}
    with pytest.raises(WeightsNotLoaded, match="codec: weights are not loaded"):
        component.module(torch.ones(1, 8))
    filled(component)
    assert {name: bits(tensor) for name, tensor in state(component.module).items()} == before


def test_each_cpu_weight_has_a_storage_of_its_own_on_a_64_byte_boundary(path):
    component = filled(codec(path, width=9))
    tensors = list(state(component.module).values())
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("on_thread", [False, True], ids=["main thread", "helper thread"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=["direct", "cast"])
def test_weights_have_version_counters_even_when_filled_in_inference_mode(path, on_thread, stored):
    component = codec(path, stored=stored)

    def fill() -> None:
        with torch.inference_mode():
            filled(component)

    in_thread(fill) if on_thread else fill()
    for tensor in state(component.module).values():
        assert not tensor.is_inference()
        assert not tensor.requires_grad
        assert tensor._version >= 0
    with torch.inference_mode():
        assert component.module(torch.ones(1, 8)).is_inference()


def test_a_compiled_block_stays_compiled_across_release_and_reload(path):
    torch.compiler.reset()
    num_compilations = 0

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        nonlocal num_compilations
        num_compilations += 1
        return graph.forward

    component = codec(path)
    block = torch.compile(component.module.decoder.blocks[0], backend=backend)
    x = torch.ones(2, 8)
    outputs = []
    for _ in range(3):
        filled(component)
        with torch.inference_mode():
            outputs.append(block(x))
        component.drop()
        with pytest.raises(Exception, match="Weights are not loaded"), torch.inference_mode():  # the compiler wraps our error
            block(x)
    assert num_compilations == 1
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_geometry_is_known_without_weights(path):
    count = BytesRead()
    component = codec(path, reader=count.reader)
    assert isinstance(component.module, Codec)
    assert component.module.config == CodecConfig()
    assert [len(blocks) for blocks in component.repeated()] == [2]
    assert component.module.encoder.weight.shape == (8, 8)
    assert component.module.encoder.weight.dtype == torch.float32
    assert sum(p.numel() for p in component.module.parameters()) > 0
    assert count.total == 0


def test_identity_tells_files_dtypes_and_kinds_apart(path):
    one, same = codec(path), codec(path)
    half, other_kind = codec(path, compute=torch.bfloat16), codec(path, kind="other")
    assert one.identity == same.identity
    assert hash(one.identity) == hash(same.identity)
    assert len({one.identity, half.identity, other_kind.identity}) == 3
    assert one.identity.is_sibling_of(half.identity)
    assert not one.identity.is_sibling_of(same.identity)
    elsewhere = codec(path.with_name("copy.safetensors"))
    assert elsewhere.identity != one.identity
    assert not elsewhere.identity.is_sibling_of(one.identity)


# How a parameter is put together. The expected side is plain torch on the stored tensors.

ROWS = torch.arange(48, dtype=torch.float32).view(12, 4)
QKV = {name: torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n, name in enumerate("qkv")}


def norm_folded(v: Tensor, g: Tensor) -> Tensor:
    return g * v / v.flatten(1).norm(dim=1).view(-1, *[1] * (v.dim() - 1))


V = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(5))
G = torch.rand(5, 1, 1, generator=torch.Generator().manual_seed(6))
RECIPES: dict[str, tuple[Recipe, dict[str, Tensor], Tensor]] = {
    "copied": (copied("x"), {"x": ROWS}, ROWS),
    "a row range": (Recipe((Rows("x", 3, 4),)), {"x": ROWS}, ROWS[3:7]),
    "rows from a start": (Recipe((Rows("x", 9),)), {"x": ROWS}, ROWS[9:]),
    "rows in any order": (
        Recipe((Rows("x", 8, 2), Rows("x", 0, 1), Rows("x", 8, 2))),
        {"x": ROWS},
        torch.cat([ROWS[8:10], ROWS[:1], ROWS[8:10]]),
    ),
    "split q, k, v": (concatenated(("q", "k", "v"), 6), QKV, torch.cat([QKV["q"], QKV["k"], QKV["v"]])),
    "interleaved per head": (
        interleaved(("q", "k", "v"), 2, 3),
        QKV,
        torch.stack([QKV[n].view(3, 2, 4) for n in "qkv"], dim=1).reshape(18, 4),
    ),
    "swapped halves": (halves_swapped("x", 12), {"x": ROWS}, torch.cat([ROWS[6:], ROWS[:6]])),
    "swapped halves of a bias": (halves_swapped("x", 12), {"x": ROWS[:, 0].clone()}, torch.cat([ROWS[6:, 0], ROWS[:6, 0]])),
    "a constant": (constant((1.5, -2.25, 1e-3)), {}, torch.tensor([1.5, -2.25, 1e-3])),
    "a scalar": (copied("x"), {"x": torch.tensor(2.5)}, torch.tensor(2.5)),
    "an empty tensor": (copied("x"), {"x": torch.empty(0, 4)}, torch.empty(0, 4)),
    "weight norm": (weight_norm_folded("v", "g"), {"v": V, "g": G}, norm_folded(V, G)),
}


@pytest.mark.parametrize("is_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_is_followed_exactly(tmp_path, case, is_buffer):
    recipe, tensors, expected = RECIPES[case]
    path = written(tmp_path / "x.safetensors", tensors)
    reader = Reader(num_threads=3, chunk_bytes=40)
    component = component_of(path, lambda: One(*expected.shape, is_buffer=is_buffer), recipes={"weight": recipe}, reader=reader)
    weight = filled(component).module.weight
    assert weight.shape == expected.shape
    if recipe.finish is None:
        assert bits(weight) == bits(expected)
    else:
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_is_followed_in_another_dtype(tmp_path, case):
    recipe, tensors, expected = RECIPES[case]
    path = written(tmp_path / "x.safetensors", {name: tensor.double() for name, tensor in tensors.items()})
    component = component_of(path, lambda: One(*expected.shape), recipes={"weight": recipe}, compute=torch.bfloat16)
    weight = filled(component).module.weight
    assert weight.dtype == torch.bfloat16
    tolerance = 0 if recipe.finish is None else 2**-6
    torch.testing.assert_close(weight.detach(), expected.bfloat16(), rtol=tolerance, atol=0)


def test_finishing_sees_its_extra_tensors_and_costs_them(tmp_path):
    seen = {}

    def finish(parameter: Tensor, extra: dict[str, Tensor]) -> None:
        seen.update(extra)
        parameter.add_(extra["bias"])

    path = written(tmp_path / "x.safetensors", {"x": torch.ones(3), "bias": torch.arange(3.0)})
    component = component_of(path, lambda: One(3), recipes={"weight": Recipe((Rows("x"),), ("bias",), finish)})
    assert component.costs(component.parts)["whole"].transient == 12
    assert torch.equal(filled(component).module.weight, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(seen["bias"], torch.arange(3.0))
    assert component.dirty() is None
    assert component.live_bytes() == 12


def test_a_cast_costs_its_staging_buffers(path):
    reader = Reader(num_threads=2, chunk_bytes=1000)
    assert codec(path, reader=reader).costs(ALL)["whole"].transient == 0
    assert codec(path, compute=torch.bfloat16, reader=reader).costs(ALL)["whole"].transient == 2000


UNFIT: dict[str, tuple[tuple[int, ...], Recipe | None, dict[str, Tensor], str]] = {
    "a missing tensor": ((2,), copied("y"), {"x": torch.ones(2)}, "weight needs the tensor y, which the file lacks"),
    "no recipe": ((2,), None, {"x": torch.ones(2)}, "nothing says how to fill weight"),
    "too few rows": ((3, 2), copied("x"), {"x": torch.ones(2, 2)}, r"shape \[3, 2\], the file has \[\[2, 2\]\]"),
    "too many rows": ((1, 2), copied("x"), {"x": torch.ones(2, 2)}, r"shape \[1, 2\], the file has \[\[2, 2\]\]"),
    "a transposed matrix": ((2, 3), copied("x"), {"x": torch.ones(3, 2)}, r"shape \[2, 3\], the file has \[\[3, 2\]\]"),
    "another rank": ((6,), copied("x"), {"x": torch.ones(2, 3)}, r"shape \[6\], the file has \[\[2, 3\]\]"),
    "a scalar for a vector": ((1,), copied("x"), {"x": torch.tensor(1.0)}, r"shape \[1\], the file has \[\[\]\]"),
    "a vector for a scalar": ((), copied("x"), {"x": torch.ones(1)}, r"shape \[\], the file has \[\[1\]\]"),
    "rows beyond the tensor": ((2, 2), Recipe((Rows("x", 1, 2),)), {"x": torch.ones(2, 2)}, r"shape \[2, 2\]"),
    "a start beyond the tensor": ((2, 2), Recipe((Rows("x", 5),)), {"x": torch.ones(2, 2)}, r"shape \[2, 2\]"),
    "rows of unequal width": (
        (2, 2),
        Recipe((Rows("x"), Rows("y"))),
        {"x": torch.ones(1, 2), "y": torch.ones(1, 3)},
        r"the file has \[\[1, 2\], \[1, 3\]\]",
    ),
    "the wrong number of constants": ((3,), constant((1.0, 2.0)), {"x": torch.ones(1)}, "needs 3 values.* gives 2"),
    "integers for numbers": ((2,), copied("x"), {"x": torch.ones(2, dtype=torch.int64)}, "is stored as I64 in x"),
    "booleans for numbers": ((2,), copied("x"), {"x": torch.ones(2, dtype=torch.bool)}, "is stored as BOOL in x"),
    "unsigned integers": ((2,), copied("x"), {"x": torch.ones(2, dtype=torch.uint16)}, "is stored as U16 in x"),
    "a missing extra tensor": (
        (2,),
        Recipe((Rows("x"),), ("g",), lambda parameter, extra: None),
        {"x": torch.ones(2)},
        "weight needs the tensor g",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_found_before_weights_are_read(tmp_path, case):
    shape, recipe, tensors, problem = UNFIT[case]
    path = written(tmp_path / "x.safetensors", tensors)
    count = BytesRead()
    recipes = {} if recipe is None else {"weight": recipe}
    with pytest.raises(CheckpointError, match=problem) as caught:
        component_of(path, lambda: One(*shape), recipes=recipes, reader=count.reader)
    assert str(caught.value).startswith(f"{path}: ")
    assert count.total == 0


# A fill that fails leaves nothing.


def cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


def test_a_file_that_was_replaced_since_its_header_was_read_is_refused_before_reading(path):
    count = BytesRead()
    component = codec(path, reader=count.reader)
    written(path, random_weights(lambda: Codec(CodecConfig()), seed=1))
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was replaced on disk since it was opened; run the loader node again"):
        filled(component)
    assert count.total == 0
    assert component.live_bytes() == 0


def test_a_file_that_is_replaced_between_release_and_reload_is_refused(path):
    component = filled(codec(path))
    component.drop()
    cut(path, 4)
    with pytest.raises(CheckpointError, match="was replaced on disk"):
        filled(component)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        filled(component)
    assert component.resident_parts() == frozenset()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["direct", "cast"])
def test_a_file_that_is_cut_short_while_it_is_read_leaves_the_component_empty(path, compute):
    codec(path)
    reader = Reader(num_threads=2, chunk_bytes=64, before_chunk=lambda _: cut(path, 256) if path.stat().st_size > 1400 else None)
    component = codec(path, compute=compute, reader=reader)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: (ends inside tensor|was replaced)"):
        filled(component)
    assert component.resident_parts() == frozenset()
    assert {tensor.device.type for tensor in state(component.module).values()} == {"meta"}
    gc.collect()
    assert component.live_bytes() == 0


def test_a_file_that_changes_while_it_is_read_is_refused(path):
    """Its size stays, so every byte can be read: half old, half new."""
    codec(path)
    reader = Reader(num_threads=1, before_chunk=lambda _: os.utime(path, ns=(5, 5)))
    component = codec(path, reader=reader)
    with pytest.raises(CheckpointError, match="was replaced on disk"):
        filled(component)
    assert component.resident_parts() == frozenset()


def test_a_failure_between_two_weights_leaves_neither(path, monkeypatch):
    component = codec(path)
    original = Fingerprint.of
    calls = []

    def failing(tensor: Tensor) -> Fingerprint:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return original(tensor)

    monkeypatch.setattr(Fingerprint, "of", failing)
    with pytest.raises(MemoryError):
        filled(component)
    assert {tensor.device.type for tensor in state(component.module).values()} == {"meta"}
    assert component.live_bytes() == 0
    monkeypatch.undo()
    assert torch.isfinite(filled(component).module(torch.ones(1, 8))).all()


def test_a_failed_fill_keeps_the_parts_that_were_there(path):
    component = filled(codec(path), ENCODER)
    before = {name: id(tensor) for name, tensor in state(component.module.encoder).items()}
    cut(path, 4)
    with pytest.raises(CheckpointError):
        filled(component, DECODER)
    assert component.resident_parts() == ENCODER
    assert {name: id(tensor) for name, tensor in state(component.module.encoder).items()} == before
    assert component.dirty() is None


# Who changed a weight by hand is found.

NAME = "decoder.blocks.1.linear.weight"


def target(component: Component) -> nn.Linear:
    return component.module.decoder.blocks[1].linear


def edit_in_inference_mode(component: Component) -> None:
    with torch.inference_mode():
        target(component).weight.mul_(1.5)


def edit_last_element(component: Component) -> None:
    with torch.no_grad():
        target(component).weight[-1, -1] += 1


def add_parameter(component: Component) -> None:
    target(component).lora = nn.Parameter(torch.ones(2))


def replace_parameter(component: Component) -> None:
    target(component).weight = nn.Parameter(target(component).weight.detach().clone(), requires_grad=False)


def replace_submodule(component: Component) -> None:
    component.module.decoder.blocks[1].linear = nn.Linear(8, 8)


def delete_parameter(component: Component) -> None:
    del target(component).weight


def set_data(component: Component) -> None:
    target(component).weight.data = target(component).weight.detach().clone()


def set_none(component: Component) -> None:
    target(component).weight = None


def load_same_state(component: Component) -> None:
    component.module.load_state_dict({name: tensor.clone() for name, tensor in component.module.state_dict().items()})


EDITS: dict[str, tuple[Callable[[Component], object], str]] = {
    "a new parameter": (add_parameter, "decoder.blocks.1.linear.lora was added"),
    "a replaced parameter": (replace_parameter, f"{NAME} was replaced"),
    "a replaced submodule": (replace_submodule, f"{NAME} was replaced"),
    "a deleted parameter": (delete_parameter, f"{NAME} was deleted"),
    "a parameter set to None": (set_none, f"{NAME} was deleted"),
    "an edit in place": (edit_in_inference_mode, f"{NAME} was edited in place"),
    "an edit of one element": (edit_last_element, f"{NAME} was edited in place"),
    "an edit through .data": (lambda c: target(c).weight.data.add_(0.5), f"{NAME} was edited in place"),
    "other data": (set_data, f"{NAME} points to other data"),
    "data of another dtype": (
        lambda c: setattr(target(c).weight, "data", target(c).weight.data.double()),
        rf"{NAME} was converted to torch.float64 \(8, 8\)",
    ),
    "data of another shape": (
        lambda c: setattr(target(c).weight, "data", target(c).weight.data[:4]),
        rf"{NAME} was converted to torch.float32 \(4, 8\)",
    ),
    "a conversion of a submodule": (
        lambda c: target(c).to(torch.bfloat16),
        rf"{NAME} was (replaced|converted to torch.bfloat16 \(8, 8\))",
    ),
    "a state dict": (load_same_state, "was edited in place"),
    "a buffer": (lambda c: c.module.mean.add_(1), "mean was edited in place"),
    "a buffer through .data": (lambda c: c.module.mean.data.add_(1), "mean was edited in place"),
    "a new buffer": (lambda c: c.module.register_buffer("extra", torch.ones(1)), "extra was added"),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_change_by_hand_is_found_and_named(path, case):
    component = filled(codec(path))
    assert component.dirty() is None
    change, words = EDITS[case]
    change(component)
    assert re.search(words, component.dirty() or "nothing")


@pytest.mark.parametrize("where", [0, 0.37, 0.999])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 1000])
def test_an_edit_of_many_elements_through_data_is_found_wherever_it_is(tmp_path, count, where):
    """The samples reach to the end of a tensor: two strides of it cannot change unseen."""
    path = written(tmp_path / "x.safetensors", {"weight": torch.ones(count)})
    component = filled(component_of(path, lambda: One(count)))
    width = 2 * -(-count // 64)
    start = min(int(where * count), max(0, count - width))
    component.module.weight.data[start : start + width] += 1
    assert component.dirty() == "weight was edited in place"


def test_using_a_component_is_no_change(path):
    component = filled(codec(path))
    x = torch.randn(3, 8)
    with torch.inference_mode():
        component.module(x)
        component.module.encode(x)
        list(component.module.stream(x))
    component.module.to(torch.float16).cpu().eval()
    component.module.register_forward_hook(lambda *_: None)
    component.module.state_dict()
    assert component.dirty() is None


def test_a_part_that_is_not_filled_is_not_changed(path):
    assert filled(codec(path), ENCODER).dirty() is None


# Somebody else's references.


@pytest.mark.parametrize(
    "take",
    [
        lambda weight: weight,
        lambda weight: weight.detach(),
        lambda weight: weight.data,
        lambda weight: weight[0],
        lambda weight: weight.T[2:3],
        lambda weight: nn.Parameter(weight, requires_grad=False),
        lambda weight: weight.numpy(),
        lambda weight: weight.untyped_storage(),
    ],
    ids=["parameter", "detached", "data", "row", "view", "another parameter", "numpy", "storage"],
)
def test_a_stray_reference_shows_in_live_bytes_until_it_is_gone(path, take):
    component = filled(codec(path))
    stray = take(component.module.encoder.weight)
    component.drop()
    assert component.live_bytes() == 8 * 8 * 4
    del stray
    assert component.live_bytes() == 0


def test_measuring_does_not_undo_what_a_fill_notes_meanwhile(path, monkeypatch):
    """Any thread may measure; here a fill runs in the middle of it."""
    component = filled(codec(path), ENCODER)
    original = StorageWeakRef.expired

    def expired(storage: StorageWeakRef) -> bool:
        monkeypatch.undo()
        filled(component, DECODER)
        return original(storage)

    monkeypatch.setattr(StorageWeakRef, "expired", expired)
    component.live_bytes()
    assert component.live_bytes() == component.nbytes()


def test_the_module_outlives_its_component_and_says_so(path):
    component = codec(path)
    module = component.module
    component.acquire = None  # as the store does: the only reference of a component to itself
    del component
    gc.collect()
    with pytest.raises(WeightsNotLoaded, match="the component of this module is gone"):
        module(torch.ones(1, 8))
    with pytest.raises(WeightsNotLoaded):
        module.encoder(torch.ones(1, 8))


def test_progress_of_a_fill_covers_all_its_bytes(path):
    component = codec(path)
    calls = []
    component.fill(FillRequest(ALL, on_bytes=lambda done, total: calls.append((done, total))))
    assert calls[-1] == (component.nbytes(), component.nbytes())


def test_an_interrupted_fill_leaves_the_component_empty(path):
    component = codec(path)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        component.fill(FillRequest(ALL, on_bytes=interrupt))
    assert component.resident_parts() == frozenset()
    gc.collect()
    assert component.live_bytes() == 0
