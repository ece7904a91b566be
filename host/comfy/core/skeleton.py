"""Core's module built without weights: who would get which weight is written down instead of being done."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .mapped import MappedCheckpoint, place_of

Where = tuple[weakref.ref[nn.Module], str]


class CannotBeLazy(Exception):
    """A model that core must load by itself, and why. One sentence without a full stop."""


@dataclass(frozen=True)
class CoreSlot:
    """A weight of core's module: where it stands (more than once if it is tied), its bytes in the file, and how it is held.

    ``where`` is weak: what is known of a module hangs on it, and a circle would outlive its last user (core bridge, trap 8).
    ``is_kept``: as a view also while it is in use, as core itself holds weights of mixed precision (core bridge, trap 4).
    """

    where: tuple[Where, ...]
    view: Tensor
    dtype: torch.dtype
    is_kept: bool = False

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        """Those whose module is alive."""
        return [(module, name) for reference, name in self.where if (module := reference()) is not None]

    @property
    def nbytes(self) -> int:
        """While it is in use."""
        return sum(t.nbytes for t in plain(self.view)) if self.is_kept else self.view.numel() * self.dtype.itemsize

    @property
    def growth(self) -> int:
        """Bytes that it takes more in use than in the file."""
        return 0 if self.is_kept else self.nbytes - self.view.nbytes

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded on the way from the file. Types of eight bits are taken to round."""
        if self.view.dtype == self.dtype:
            return True
        is_wide = min(self.view.dtype.itemsize, self.dtype.itemsize) > 1
        return is_wide and torch.promote_types(self.view.dtype, self.dtype) == self.dtype

    @property
    def tensor(self) -> Tensor:
        """What stands there now."""
        module, name = self.places[0]
        return getattr(module, name)

    def put(self, tensor: Tensor) -> None:
        """As a new Parameter: ``Module.to`` rewrites the data of those that are there (core bridge, trap 2)."""
        parameter = _parameter(tensor)
        for module, name in self.places:
            if name in module._parameters:
                module._parameters[name] = parameter
            else:
                module._buffers[name] = tensor


class Recorder(TorchFunctionMode):
    """Sends what is made uninitialised to meta, and notes copies to meta in place of making them.

    Constants (sigmas, rotary tables, statistics) are made as ever: they come from other functions. Core's layers of mixed
    precision copy nothing: they take what is in ``files``, cast by ``Tensor.to``, which is noted for matrices, too.
    """

    def __init__(self, files: Sequence[MappedCheckpoint] = ()) -> None:
        super().__init__()
        self._files = files
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}  # id of a meta tensor -> itself and what was copied to it
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # storage of a meta tensor -> itself and what it was cast from

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": "meta"})
        if func is Tensor.copy_ and args[0].is_meta and not args[1].is_meta:
            self._sources[id(args[0])] = args[0], args[1]
            return args[0]
        if func is Tensor.to and len(args) == 1 and kwargs.keys() <= {"device", "dtype"} and self._is_stored(args[0]):
            return self._cast(args[0], kwargs.get("dtype") or args[0].dtype)
        if func is Tensor.detach and is_composed(args[0]):
            return _shared(args[0])
        return func(*args, **kwargs)

    def source_of(self, tensor: Tensor) -> Tensor | None:
        known = self._sources.get(id(tensor)) or self._casts.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def _is_stored(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and not tensor.is_meta and place_of(tensor, self._files) is not None

    def _cast(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        """What is stored stays where it is, whichever device it is for; scales, which core computes with, are cast at once."""
        if view.dtype == dtype or view.dim() < 2:
            return view.to(dtype)
        cast = torch.empty_like(view, dtype=dtype, device="meta")
        self._casts[cast.untyped_storage()._cdata] = cast, view  # a Parameter that is made of it is another tensor
        return cast


def slots_of(root: nn.Module, recorder: Recorder, files: Sequence[MappedCheckpoint]) -> list[CoreSlot]:
    """Slots of all weights that come from the files; puts their views in place.

    Raises CannotBeLazy if one that has no values yet has no source, or one that is not in the files: made by core on the way.
    """
    where: dict[int, list[Where]] = defaultdict(list)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, module, attribute, tensor in _weights(root):
        where[id(tensor)].append((weakref.ref(module), attribute))
        found[id(tensor)] = name, tensor
    slots = [slot for key, (name, t) in found.items() if (slot := _slot(name, t, tuple(where[key]), recorder, files)) is not None]
    for slot in slots:
        slot.put(slot.view)
    return slots


def is_composed(tensor: Tensor) -> bool:
    """Whether it is made of other tensors, as quantised ones are."""
    return hasattr(tensor, "__tensor_flatten__")


def plain(tensor: Tensor) -> list[Tensor]:
    """The tensors that a quantised one is made of; any other is made of itself."""
    if not is_composed(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain(getattr(tensor, name))]


def _shared(tensor: Any) -> Tensor:
    """Another quantised tensor of the same bytes; its own ``detach`` would copy the scales."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    shared: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return shared


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Of the same bytes, also of a quantised tensor."""
    if not is_composed(tensor):
        return nn.Parameter(tensor, requires_grad=False)
    parameter: Any = _shared(tensor)
    parameter._is_param = True  # all that nn.Parameter adds to a sub-class of Tensor
    return parameter


def _slot(
    name: str, tensor: Tensor, where: tuple[Where, ...], recorder: Recorder, files: Sequence[MappedCheckpoint]
) -> CoreSlot | None:
    """None for a constant that core has made."""
    if any(part.is_meta for part in plain(tensor)) and not tensor.is_meta:
        raise CannotBeLazy(f"its weight {name} is converted while it is loaded")
    if not tensor.is_meta:
        is_in_files = any(place_of(part, files) is not None for part in plain(tensor))
        view = _shared(tensor) if is_composed(tensor) else tensor.data
        return CoreSlot(where, view, tensor.dtype, is_kept=True) if is_in_files else None
    view = recorder.source_of(tensor)
    if view is None:
        raise CannotBeLazy(f"its weight {name} is not in its file")
    if place_of(view, files) is None:
        raise CannotBeLazy(f"its weight {name} is converted while it is loaded")
    return CoreSlot(where, view.view(tensor.shape), tensor.dtype)


def _weights(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for prefix, module in root.named_modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{attribute}".lstrip("."), module, attribute, tensor


@contextmanager
def recording(files: Sequence[MappedCheckpoint] = ()) -> Iterator[Recorder]:
    """Inside the block, core builds without weights, of what is in the files."""
    with warnings.catch_warnings(), Recorder(files) as recorder:
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        yield recorder
