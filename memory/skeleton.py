"""A module without weights that refuses to compute, and knows the way to be filled.

Plain ``meta`` parameters do not stop a computation: a convolution with a meta weight and a CPU input returns uninitialised
memory without an error. So an emptied slot holds a tensor whose every use but questions of shape raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Acquire = Callable[[frozenset[str]], AbstractContextManager[Any]]


class WeightsNotLoaded(RuntimeError):
    """A released weight was used in a computation."""


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_QUESTIONS = frozenset(
    {
        *(_getter(n) for n in ("shape", "dtype", "device", "layout", "ndim", "is_meta", "requires_grad", "is_leaf", "grad_fn")),
        *(_getter(n) for n in ("itemsize", "nbytes", "grad", "is_cuda", "is_cpu", "is_quantized", "is_sparse")),
        *(getattr(Tensor, n) for n in ("size", "dim", "numel", "stride", "element_size", "storage_offset", "is_contiguous")),
        *(getattr(Tensor, n) for n in ("is_floating_point", "is_complex", "is_inference", "__len__", "nelement", "ndimension")),
    }
)


class _Empty:
    """Mixed into a meta tensor: answers questions about it and refuses everything else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise WeightsNotLoaded(
            f"Weights are not loaded: {getattr(func, '__name__', func)} was called on a released weight; "
            "call the component through its handle (with handle.use() as model), which loads them."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = self
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WeightsNotLoaded("Weights are not loaded: a released weight cannot be saved; fill the component first.")


class EmptyParameter(_Empty, nn.Parameter):  # type: ignore[misc]
    """Stands in a parameter's place while its weights are released."""


class EmptyBuffer(_Empty, Tensor):  # type: ignore[misc]
    """Stands in a buffer's place while its values are released."""


@dataclass(frozen=True)
class Slot:
    """A place for one weight: ``attribute`` of ``owner``. ``shape`` and ``dtype`` are those of the resident tensor."""

    name: str
    owner: nn.Module
    attribute: str
    is_parameter: bool
    shape: torch.Size
    dtype: torch.dtype
    empty: Tensor

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def tensor(self) -> Tensor | None:
        """What is in the place now; None if somebody deleted it."""
        return self._table.get(self.attribute)

    @property
    def is_filled(self) -> bool:
        return self.tensor is not self.empty

    @property
    def _table(self) -> dict[str, Tensor | None]:
        return self.owner._parameters if self.is_parameter else self.owner._buffers  # type: ignore[return-value]

    def put(self, tensor: Tensor) -> Tensor:
        """Assign a filled tensor; returns the object that now stands there."""
        is_ready = isinstance(tensor, nn.Parameter) or not self.is_parameter
        placed = tensor if is_ready else nn.Parameter(tensor, requires_grad=False)
        self._table[self.attribute] = placed
        return placed

    def clear(self) -> None:
        self._table[self.attribute] = self.empty


def emptied(module: nn.Module, dtype_of: Callable[[str], torch.dtype]) -> dict[str, Slot]:
    """Put a refusing stand-in in every place of a module built on the meta device; returns the places by name.

    Raises ValueError for a tensor that is not on meta: it would be neither filled nor released.
    """
    slots = {}
    with torch.inference_mode(False):
        for name, owner, attribute, tensor in _places(module):
            if tensor.device.type != "meta":
                raise ValueError(f"{name} was computed while the skeleton was built; compute it at run time instead.")
            slots[name] = _emptied_slot(name, owner, attribute, tensor, dtype_of(name))
    for slot in slots.values():
        slot.clear()
    return slots


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for attribute, tensor in table.items():
                if tensor is not None:
                    yield f"{prefix}.{attribute}".lstrip("."), owner, attribute, tensor


def _emptied_slot(name: str, owner: nn.Module, attribute: str, tensor: Tensor, dtype: torch.dtype) -> Slot:
    is_parameter = attribute in owner._parameters
    blank = torch.empty(tensor.shape, dtype=dtype, device="meta")
    empty: Tensor = blank.as_subclass(EmptyBuffer)
    if is_parameter:
        empty = torch.Tensor._make_subclass(EmptyParameter, blank, False)
    return Slot(name, owner, attribute, is_parameter, tensor.shape, dtype, empty)


def make_lazy(module: nn.Module, entry_points: dict[str, tuple[str, ...]], acquire: Acquire) -> None:
    """Give ``module`` a subclass of its own class whose entry points acquire their parts first and whose conversions do nothing.

    ``isinstance`` stays true. ``.to()``, ``.half()``, ``.cpu()`` and the like return the module unchanged: device and dtype
    belong to the component's identity, and on a skeleton they would fail or silently retype the fp32 islands.
    """
    original = type(module)
    members: dict[str, Any] = {name: _acquiring(getattr(original, name), frozenset(p)) for name, p in entry_points.items()}
    members["_apply"] = _unchanged
    module.__class__ = type(f"Lazy{original.__name__}", (original,), members)
    module.__dict__["_acquire"] = acquire


def _unchanged(self: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return self


def _acquiring(method: Callable[..., Any], parts: frozenset[str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._acquire(parts):
            result = method(self, *args, **kwargs)
        return _iterated(self._acquire, parts, result) if isinstance(result, Iterator) else result

    return call


def _iterated(acquire: Acquire, parts: frozenset[str], results: Iterator[Any]) -> Iterator[Any]:
    """What a method computes bit by bit needs its parts for as long as it is asked for more."""
    with acquire(parts):
        yield from results
