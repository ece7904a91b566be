from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from lazy_h3.memory.skeleton import WeightsNotLoaded, emptied, make_lazy
from memory_models import Codec, CodecConfig, One
from torch import Tensor, nn

FLOAT = torch.float32


def skeleton_of(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        module = build().eval()
    emptied(module, lambda _: FLOAT)
    return module


def empty_weight(*shape: int) -> nn.Parameter:
    return skeleton_of(lambda: One(*shape)).weight


def pixels(num_dims: int) -> Tensor:
    return torch.ones(1, 4, *[6] * num_dims)


ROWS = torch.ones(2, 3, 4)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 4), ROWS),
    "linear without bias": (lambda: nn.Linear(4, 4, bias=False), ROWS),
    "bilinear": (lambda: nn.Bilinear(4, 4, 2), ROWS),
    "conv 1d": (lambda: nn.Conv1d(4, 4, 3), pixels(1)),
    "conv 2d": (lambda: nn.Conv2d(4, 4, 3), pixels(2)),
    "conv 2d, reflected": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), pixels(2)),
    "conv 2d, grouped": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), pixels(2)),
    "conv 3d": (lambda: nn.Conv3d(4, 4, 3), pixels(3)),
    "conv 1d transposed": (lambda: nn.ConvTranspose1d(4, 4, 3), pixels(1)),
    "conv 2d transposed": (lambda: nn.ConvTranspose2d(4, 4, 3), pixels(2)),
    "conv 3d transposed": (lambda: nn.ConvTranspose3d(4, 4, 3), pixels(3)),
    "embedding": (lambda: nn.Embedding(5, 4), torch.tensor([0, 1])),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 4), torch.tensor([[0, 1]])),
    "group norm": (lambda: nn.GroupNorm(2, 4), pixels(2)),
    "layer norm": (lambda: nn.LayerNorm(4), ROWS),
    "rms norm": (lambda: nn.RMSNorm(4), ROWS),
    "batch norm": (lambda: nn.BatchNorm2d(4), pixels(2)),
    "prelu": (lambda: nn.PReLU(4), pixels(2)),
    "attention": (lambda: nn.MultiheadAttention(4, 2), ROWS),
    "lstm": (lambda: nn.LSTM(4, 4), ROWS),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_empty_layer_refuses_to_compute(kind, mode):
    """With plain meta weights several of these give uninitialised memory instead of an error."""
    build, x = LAYERS[kind]
    layer = skeleton_of(build)
    arguments = {"bilinear": (x, x), "attention": (x, x, x)}.get(kind, (x,))
    with mode(), pytest.raises(WeightsNotLoaded, match="Weights are not loaded"):
        layer(*arguments)


X = torch.ones(4, 4)
FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "F.linear": lambda w: F.linear(X, w),
    "F.linear bias": lambda w: F.linear(X, X, w),
    "F.conv1d": lambda w: F.conv1d(X[None], w[:, :, None] if w.dim() == 2 else w),
    "F.embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "F.layer_norm": lambda w: F.layer_norm(X, (4, 4), w),
    "F.group_norm": lambda w: F.group_norm(X, 2, w),
    "F.rms_norm": lambda w: F.rms_norm(X, (4, 4), w),
    "F.pad": lambda w: F.pad(w, (1, 1)),
    "F.interpolate": lambda w: F.interpolate(w, 3),
    "F.silu": F.silu,
    "F.softmax": lambda w: F.softmax(w, -1),
    "F.normalize": F.normalize,
    "attention query": lambda w: F.scaled_dot_product_attention(w, X, X),
    "attention key": lambda w: F.scaled_dot_product_attention(X, w, X),
    "attention value": lambda w: F.scaled_dot_product_attention(X, X, w),
    "attention mask": lambda w: F.scaled_dot_product_attention(X, X, X, attn_mask=w),
    "torch.bmm": lambda w: torch.bmm(X[None], w),
    "torch.baddbmm": lambda w: torch.baddbmm(w, X[None], X[None]),
    "torch.matmul": lambda w: torch.matmul(w, X),
    "torch.einsum": lambda w: torch.einsum("ij,jk->ik", X, w),
    "torch.addmm": lambda w: torch.addmm(w, X, X),
    "torch.cat": lambda w: torch.cat([X, w]),
    "torch.stack": lambda w: torch.stack((w, w)),
    "torch.where": lambda w: torch.where(X > 0, X, w),
    "torch.lerp": lambda w: torch.lerp(X, X, w),
    "torch.equal": lambda w: torch.equal(X, w),
    "torch.isfinite": torch.isfinite,
    "torch.zeros_like": torch.zeros_like,
    "out=": lambda w: torch.add(X, X, out=w),
    "aten": lambda w: torch.ops.aten.mm(X, w),
    "aten overload": lambda w: torch.ops.aten.mm.default(X, w),
    "w + x": lambda w: w + X,
    "x + w": lambda w: X + w,
    "w * 2": lambda w: w * 2,
    "2 - w": lambda w: 2 - w,
    "x / w": lambda w: X / w,
    "x @ w": lambda w: X @ w,
    "w @ x": lambda w: w @ X,
    "w ** 2": lambda w: w**2,
    "-w": lambda w: -w,
    "w == x": lambda w: w == X,
    "x < w": lambda w: w > X,
    "x += w": lambda w: X.clone().add_(w),
    "x *= w": lambda w: X.clone().mul_(w),
    "x.copy_(w)": lambda w: X.clone().copy_(w),
    "w.copy_(x)": lambda w: w.copy_(X),
    "x[0] = w": lambda w: X.clone().__setitem__(0, w),
    "w[0]": lambda w: w[0],
    "w[0] = 1": lambda w: w.__setitem__(0, 1),
    "x[w]": lambda w: X[w],
    "for row in w": list,
    "w.T": lambda w: w.T,
    "w.view": lambda w: w.view(-1),
    "w.reshape": lambda w: w.reshape(2, 8),
    "w.expand": lambda w: w.expand(2, 4, 4),
    "w.chunk": lambda w: w.chunk(2),
    "w.to(dtype)": lambda w: w.to(torch.bfloat16),
    "w.to(device)": lambda w: w.to("cpu"),
    "w.cpu": lambda w: w.cpu(),
    "w.float": lambda w: w.half(),
    "w.clone": lambda w: w.clone(),
    "w.contiguous": lambda w: w.contiguous(),
    "w.detach": lambda w: w.detach(),
    "w.data": lambda w: w.data,
    "w.data_ptr": lambda w: w.data_ptr(),
    "w.untyped_storage": lambda w: w.untyped_storage(),
    "w.numpy": lambda w: w.numpy(),
    "w.tolist": lambda w: w.tolist(),
    "w.sum": lambda w: w.sum(),
    "w.item": lambda w: w.item(),
    "w.requires_grad_": lambda w: w.requires_grad_(),
    "float(w)": float,
    "bool(w)": bool,
    "pickle": pickle.dumps,
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_weight_refuses_every_use(name):
    with pytest.raises(WeightsNotLoaded, match="Weights are not loaded"):
        FUNCTIONS[name](empty_weight(4, 4))


def test_an_empty_buffer_refuses_as_well():
    buffer = skeleton_of(lambda: One(4, is_buffer=True)).weight
    assert not isinstance(buffer, nn.Parameter)
    with pytest.raises(WeightsNotLoaded):
        torch.ones(4) + buffer


@pytest.mark.parametrize("is_buffer", [False, True])
def test_questions_of_shape_dtype_and_device_are_answered(is_buffer):
    weight = skeleton_of(lambda: One(3, 5, is_buffer=is_buffer)).weight
    assert isinstance(weight, Tensor)
    assert isinstance(weight, nn.Parameter) is not is_buffer
    assert weight.shape == (3, 5)
    assert weight.size() == (3, 5)
    assert weight.size(1) == 5
    assert weight.stride() == (5, 1)
    assert (weight.ndim, weight.dim(), len(weight)) == (2, 2, 3)
    assert (weight.numel(), weight.nelement(), weight.element_size(), weight.nbytes) == (15, 15, 4, 60)
    assert (weight.dtype, weight.device.type, weight.is_meta, weight.is_cuda) == (FLOAT, "meta", True, False)
    assert (weight.requires_grad, weight.grad) == (False, None)
    assert weight.is_floating_point()
    assert not weight.is_complex()
    assert not weight.is_inference()
    assert weight.is_contiguous()
    assert "shape=(3, 5)" in repr(weight)
    assert str(weight) == repr(weight)
    assert copy.deepcopy(weight) is weight
    assert {weight: 1}[weight] == 1


def test_a_module_of_empty_weights_can_be_described_but_not_saved():
    module = skeleton_of(lambda: nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)))
    assert [name for name, _ in module.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert sum(p.numel() for p in module.parameters()) == 14
    assert "Linear(in_features=4, out_features=2" in repr(module)
    for save in (module.state_dict, lambda: pickle.dumps(module)):
        with pytest.raises(WeightsNotLoaded):
            save()


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_weights_cannot_be_put_into_a_skeleton_behind_the_stores_back():
    module = skeleton_of(lambda: nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="Weights are not loaded"):
        module.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})


def test_a_copy_of_a_skeleton_is_empty_too():
    module = copy.deepcopy(skeleton_of(lambda: nn.Linear(4, 4)))
    with pytest.raises(WeightsNotLoaded):
        module(ROWS)


def test_a_tensor_that_was_computed_while_building_is_refused():
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.arange(4, device="cpu"))

    with pytest.raises(ValueError, match="frequencies was computed while the skeleton was built"):
        skeleton_of(Computed)


def test_a_slot_puts_and_clears_one_weight():
    with torch.device("meta"):
        module = Codec(CodecConfig())
    slots = emptied(module, lambda name: Codec.storage_dtype(name, torch.bfloat16))
    assert slots.keys() == module.state_dict(keep_vars=True).keys()
    slot = slots["decoder.blocks.1.linear.weight"]
    assert (slot.shape, slot.dtype, slot.nbytes, slot.is_filled) == ((8, 8), torch.bfloat16, 128, False)
    filled = slot.put(torch.ones(8, 8))
    assert module.decoder.blocks[1].linear.weight is filled is slot.tensor
    assert isinstance(filled, nn.Parameter)
    assert not filled.requires_grad
    slot.clear()
    assert module.decoder.blocks[1].linear.weight is slot.empty
    assert slots["mean"].put(torch.ones(8)) is module.mean
    assert not isinstance(module.mean, nn.Parameter)


class Gate:
    """Records which parts are held while something runs."""

    def __init__(self) -> None:
        self.held: list[frozenset[str]] = []
        self.history: list[frozenset[str]] = []

    @contextmanager
    def acquire(self, parts: frozenset[str]) -> Iterator[None]:
        self.held.append(parts)
        self.history.append(parts)
        try:
            yield
        finally:
            self.held.remove(parts)


class Talker(nn.Module):
    """Says what is held while it works."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"a": ("",), "b": ("",)}
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "forward": ("a", "b"),
        "encode": ("a",),
        "stream": ("b",),
        "listed": ("a",),
        "fail": ("a",),
    }
    gate: ClassVar[Gate]

    def forward(self) -> list[frozenset[str]]:
        """Says it once."""
        return list(self.gate.held)

    def encode(self) -> list[frozenset[str]]:
        return self.forward()

    def stream(self) -> Iterator[list[frozenset[str]]]:
        for _ in range(3):
            yield list(self.gate.held)

    def listed(self) -> list[frozenset[str]]:
        return list(self.stream())[-1]

    def fail(self) -> None:
        raise ArithmeticError

    def other(self) -> list[frozenset[str]]:
        return list(self.gate.held)


@pytest.fixture
def talker() -> Talker:
    module = Talker()
    module.gate = Gate()
    make_lazy(module, Talker.ENTRY_POINTS, module.gate.acquire)
    return module


A, B, AB = frozenset("a"), frozenset("b"), frozenset("ab")


def test_entry_points_hold_their_parts_while_they_run(talker):
    assert talker() == [AB]
    assert talker.forward() == [AB]
    assert talker.encode() == [A, AB]
    assert talker.listed() == [A, B]
    assert talker.other() == []
    with pytest.raises(ArithmeticError):
        talker.fail()
    assert talker.gate.held == []


def test_a_generator_holds_its_parts_until_it_is_done(talker):
    stream = talker.stream()
    assert next(stream) == [B]
    assert talker.gate.held == [B]
    assert list(stream) == [[B], [B]]
    assert talker.gate.held == []


def test_an_abandoned_generator_holds_nothing(talker):
    stream = talker.stream()
    next(stream)
    stream.close()
    assert talker.gate.held == []
    del stream
    stream = talker.stream()
    next(stream)
    del stream
    assert talker.gate.held == []


def test_a_lazy_module_is_still_what_it_was(talker):
    assert isinstance(talker, Talker)
    assert isinstance(talker, nn.Module)
    assert type(talker).__name__ == "LazyTalker"
    assert type(talker).forward.__doc__ == "Says it once."
    assert type(Talker()) is Talker
    assert talker.gate.history == []


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to(device)": lambda m: m.to("cpu"),
    "to(meta)": lambda m: m.to("meta"),
    "to(dtype)": lambda m: m.to(torch.bfloat16),
    "to(device, dtype)": lambda m: m.to("cpu", torch.float16, non_blocking=True),
    "to(memory_format)": lambda m: m.to(memory_format=torch.channels_last),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "type": lambda m: m.type(torch.float16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "cpu": lambda m: m.cpu(),
    "cuda": lambda m: m.cuda(),
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("is_filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_of_the_root_change_nothing(name, is_filled):
    with torch.device("meta"):
        module = Codec(CodecConfig())
    slots = emptied(module, lambda _: FLOAT)
    make_lazy(module, {}, Gate().acquire)
    if is_filled:
        for slot in slots.values():
            slot.put(torch.ones(slot.shape))
    before = {name: (id(tensor), tensor.dtype, tensor.device) for name, tensor in module.state_dict(keep_vars=True).items()}
    assert CONVERSIONS[name](module) is module
    after = {name: (id(tensor), tensor.dtype, tensor.device) for name, tensor in module.state_dict(keep_vars=True).items()}
    assert after == before


@pytest.mark.parametrize("name", ["to(dtype)", "half", "cpu", "type"])
def test_conversions_of_an_empty_submodule_raise(name):
    module = skeleton_of(lambda: Codec(CodecConfig()))
    with pytest.raises(WeightsNotLoaded):
        CONVERSIONS[name](module.encoder)
