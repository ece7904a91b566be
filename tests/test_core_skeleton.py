"""Modules that are built without weights, and know where each would come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_h3.host.comfy.core.mapped import MappedCheckpoint, place_of
from lazy_h3.host.comfy.core.skeleton import CannotBeLazy, CoreSlot, plain, recording, slots_of
from lazy_h3.memory.checkpoint import open_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTH = 4


class Layer(nn.Module):
    """As core's layers: weights are made uninitialised."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.second = Layer()
        self.register_buffer("mean", torch.empty(WIDTH))
        self.register_buffer("sigmas", torch.linspace(0, 1, 5))


class CastLayer(Layer):
    """As core's layers of mixed precision: takes the tensors that it is given, cast, in the place of copying them."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        weight = state_dict.pop(f"{prefix}weight").to(device=torch.device("meta"), dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = state_dict.pop(f"{prefix}scale").to(dtype=torch.float32)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Quantised(Tensor):
    """Made of two tensors, and copies one of them when it is detached, as comfy-kitchen's do."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.stored, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Quantised:
        return Quantised(parts["stored"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return cls(args[0].stored, args[0].scale.clone())


class Checkpoint:
    """The file of a Model, and the Model that is built of it."""

    def __init__(self, folder: Path, leave_out: str = "") -> None:
        generator = torch.Generator().manual_seed(0)
        names = [name for name in Model().state_dict() if name not in ("sigmas", leave_out)]
        shapes = Model().state_dict()
        self.tensors = {name: torch.randn(shapes[name].shape, generator=generator) for name in names}
        save_file(self.tensors, folder / "model.safetensors")
        self.mapped = MappedCheckpoint(open_checkpoint(folder / "model.safetensors"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


def built(model: nn.Module, mapped: MappedCheckpoint, loaded: dict[str, Tensor] | None = None) -> list[CoreSlot]:
    """Load the views as core does, and find the slots."""
    with recording() as recorder:
        model.load_state_dict(dict(mapped.views) if loaded is None else loaded, strict=False)
    return slots_of(model, recorder, [mapped])


def modelled() -> Model:
    with recording():
        return Model()


def loaded_slots(checkpoint: Checkpoint) -> tuple[Model, list[CoreSlot]]:
    with recording() as recorder:
        model = Model()
        model.load_state_dict(dict(checkpoint.mapped.views), strict=False)
    return model, slots_of(model, recorder, [checkpoint.mapped])


def test_weights_are_views_of_the_file_after_building(checkpoint: Checkpoint) -> None:
    model, slots = loaded_slots(checkpoint)
    assert len(slots) == len(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        weight = model.state_dict()[name]
        assert torch.equal(weight, tensor)
        assert place_of(weight, [checkpoint.mapped]) is not None


def test_inside_the_block_uninitialised_tensors_take_no_memory(checkpoint: Checkpoint) -> None:
    with recording():
        assert torch.empty(3).is_meta
        assert not torch.empty(3, device="cpu").is_meta
    assert not torch.empty(3).is_meta


def test_constants_are_made_as_ever_and_have_no_slot(checkpoint: Checkpoint) -> None:
    model, slots = loaded_slots(checkpoint)
    assert torch.equal(model.sigmas, torch.linspace(0, 1, 5))
    assert all(name != "sigmas" for slot in slots for _, name in slot.places)


def test_copies_between_tensors_with_values_are_made(checkpoint: Checkpoint) -> None:
    with recording():
        target = torch.zeros(3)
        target.copy_(torch.ones(3))
    assert target.eq(1).all()


def test_a_weight_that_the_file_does_not_have_cannot_be_lazy(tmp_path: Path) -> None:
    with pytest.raises(CannotBeLazy, match=r"second\.bias is not in its file"):
        loaded_slots(Checkpoint(tmp_path, leave_out="second.bias"))


def test_a_weight_that_is_computed_on_the_way_cannot_be_lazy(checkpoint: Checkpoint) -> None:
    model = modelled()
    changed = {**checkpoint.mapped.views, "first.weight": checkpoint.mapped.views["first.weight"] * 2}
    with pytest.raises(CannotBeLazy, match=r"first\.weight is converted"):
        built(model, checkpoint.mapped, changed)


def test_a_weight_that_is_a_slice_of_a_stored_one_is_found_there(tmp_path: Path) -> None:
    save_file({"fused": torch.randn(2 * WIDTH, WIDTH), "bias": torch.zeros(WIDTH)}, tmp_path / "fused.safetensors")
    mapped = MappedCheckpoint(open_checkpoint(tmp_path / "fused.safetensors"))
    with recording() as recorder:
        layer = Layer()
        layer.load_state_dict({"weight": mapped.views["fused"][WIDTH:], "bias": mapped.views["bias"]})
    (weight,) = [slot for slot in slots_of(layer, recorder, [mapped]) if slot.places[0][1] == "weight"]
    place = place_of(weight.view, [mapped])
    assert place is not None
    assert place[1] == WIDTH * WIDTH * 4


def test_tied_weights_have_one_slot_and_stay_tied(checkpoint: Checkpoint) -> None:
    with recording() as recorder:
        model = Model()
        model.second.weight = model.first.weight
        model.load_state_dict(dict(checkpoint.mapped.views), strict=False)
    slots = slots_of(model, recorder, [checkpoint.mapped])
    (tied,) = [slot for slot in slots if len(slot.places) == 2]
    assert model.first.weight is model.second.weight
    tied.put(torch.ones(WIDTH, WIDTH))
    assert model.first.weight is model.second.weight
    assert model.second.weight.eq(1).all()


def test_every_put_makes_a_new_parameter(checkpoint: Checkpoint) -> None:
    model, slots = loaded_slots(checkpoint)
    before = model.first.weight
    model.double()  # rewrites the data of the parameters that are there
    for slot in slots:
        slot.put(slot.view)
    assert model.first.weight is not before
    assert torch.equal(model.first.weight, checkpoint.tensors["first.weight"])
    assert not model.first.weight.requires_grad


def test_buffers_stay_buffers(checkpoint: Checkpoint) -> None:
    model, _ = loaded_slots(checkpoint)
    assert "mean" in model._buffers
    assert torch.equal(model.mean, checkpoint.tensors["mean"])


def test_a_weight_of_another_dtype_than_the_file_is_counted_as_it_is_used(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(WIDTH, WIDTH).bfloat16(), "bias": torch.zeros(WIDTH)}, tmp_path / "half.safetensors")
    mapped = MappedCheckpoint(open_checkpoint(tmp_path / "half.safetensors"))
    with recording() as recorder:
        layer = Layer()
        layer.load_state_dict(dict(mapped.views))
    slots = {slot.places[0][1]: slot for slot in slots_of(layer, recorder, [mapped])}
    assert (slots["weight"].dtype, slots["weight"].view.dtype) == (torch.float32, torch.bfloat16)
    assert slots["weight"].nbytes == WIDTH * WIDTH * 4
    assert slots["weight"].is_exact


def test_a_weight_that_core_holds_as_it_is_stored_is_kept(checkpoint: Checkpoint) -> None:
    model = modelled()
    model.first.weight = nn.Parameter(checkpoint.mapped.views["first.weight"], requires_grad=False)
    others = {name: view for name, view in checkpoint.mapped.views.items() if name != "first.weight"}
    slots = built(model, checkpoint.mapped, others)
    assert [slot.places[0] for slot in slots if slot.is_kept] == [(model.first, "weight")]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_matrix_that_is_cast_in_place_of_being_copied_takes_no_memory(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {"weight": torch.randn(WIDTH, WIDTH).to(stored), "bias": torch.zeros(WIDTH), "scale": torch.ones(1).bfloat16()}
    save_file(tensors, tmp_path / "cast.safetensors")
    mapped = MappedCheckpoint(open_checkpoint(tmp_path / "cast.safetensors"))
    with recording([mapped]) as recorder:
        layer = CastLayer()
        layer.load_state_dict(dict(mapped.views), strict=False)
    slots = {slot.places[0][1]: slot for slot in slots_of(layer, recorder, [mapped])}
    assert torch.equal(layer.weight, tensors["weight"])
    assert (slots["weight"].dtype, slots["weight"].is_kept) == (torch.float32, stored == torch.float32)
    assert torch.equal(layer.scale, torch.ones(1))


def test_a_part_of_a_quantised_weight_that_is_cast_cannot_be_lazy(checkpoint: Checkpoint) -> None:
    view = checkpoint.mapped.views["first.weight"]
    with recording([checkpoint.mapped]) as recorder:
        model = Layer()
        model.load_state_dict({"weight": view, "bias": checkpoint.mapped.views["first.bias"]})
        model.weight = nn.Parameter(Quantised(view, view.to(dtype=torch.float64)), requires_grad=False)
    with pytest.raises(CannotBeLazy, match="weight is converted"):
        slots_of(model, recorder, [checkpoint.mapped])


def test_all_parts_of_a_quantised_weight_stay_in_the_file(checkpoint: Checkpoint) -> None:
    views = checkpoint.mapped.views
    with recording([checkpoint.mapped]) as recorder:
        model = Layer()
        model.load_state_dict({"weight": views["first.weight"], "bias": views["first.bias"]})
        model.weight = nn.Parameter(Quantised(views["second.weight"], views["mean"]), requires_grad=False)
    (slot,) = [slot for slot in slots_of(model, recorder, [checkpoint.mapped]) if slot.is_kept]
    for weight in (slot.view, model.weight):
        assert all(place_of(part, [checkpoint.mapped]) is not None for part in plain(weight))
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight is not slot.view


def test_plain_tensors_are_made_of_themselves() -> None:
    tensor = torch.ones(2)
    assert plain(tensor) == [tensor]
