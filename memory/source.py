"""Where a component's weights come from: its checkpoint, read by recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .checkpoint import Checkpoint, CheckpointError
from .frames import forget_locals
from .reader import STORED_DTYPES, Copy, OnBytes, Reader
from .skeleton import Slot


class RowRange(Protocol):
    """Rows of a stored tensor; ``count`` None is all from ``start``."""

    @property
    def source(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int | None: ...


class Recipe(Protocol):
    """How a parameter is put together: rows one after the other, then ``finish(parameter, extra)``; or constant ``values``."""

    @property
    def rows(self) -> Sequence[RowRange]: ...
    @property
    def extra(self) -> Sequence[str]: ...
    @property
    def finish(self) -> Callable[[Tensor, Mapping[str, Tensor]], None] | None: ...
    @property
    def values(self) -> Sequence[float] | None: ...


class WeightSource:
    """Reads slots of a skeleton from a checkpoint. ``stream``: the CUDA stream for copies, None for the current one.

    Raises CheckpointError, when made, if the recipes do not fit the checkpoint and the slots: before any weights are read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipes: Mapping[str, Recipe],
        reader: Reader,
        device: torch.device,
        slots: Mapping[str, Slot],
    ) -> None:
        self.checkpoint = checkpoint
        self.reader = reader
        self.device = device
        self._recipes = recipes
        for name, slot in slots.items():
            if name not in recipes:
                raise CheckpointError(f"{checkpoint.path}: nothing says how to fill {name}.")
            self._check(slot, recipes[name])

    def read(self, tensors: Mapping[str, Tensor], on_bytes: OnBytes | None = None, stream: Any = None) -> None:
        """Read slots by name into tensors of their shape and dtype.

        Raises CheckpointError, also if the file is no longer the one whose header was read, or what ``on_bytes`` raises.
        """
        self._perform([copy for name, tensor in tensors.items() for copy in self._copies(name, tensor)], on_bytes, stream)
        for name, tensor in tensors.items():
            recipe = self._recipes[name]
            if recipe.values is not None:
                tensor.copy_(torch.tensor(recipe.values).view(tensor.shape))
            if recipe.finish is not None:
                recipe.finish(tensor, self._extra_tensors(recipe))

    def blank(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Room for what is read: no inference tensor, for other threads could not write to it and compiled blocks recompile."""
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def transient_bytes(self, slots: Sequence[Slot]) -> int:
        """What reading these slots takes beside them for a moment: staging, and the tensors that a recipe needs on top."""
        staging = 0 if all(map(self._is_read_in_place, slots)) else self.reader.staging_bytes
        return staging + max((self._extra_bytes(slot) for slot in slots), default=0)

    def can_gather(self, slot: Slot) -> bool:
        """Whether the slot has rows, and each is a row of one stored tensor."""
        recipe = self._recipes[slot.name]
        return bool(slot.shape) and len(recipe.rows) == 1 and recipe.finish is None

    def gathered(self, slot: Slot, numbers: Sequence[int]) -> Tensor:
        """The rows of these numbers, in their order. Raises CheckpointError as ``read`` does."""
        (rows,) = self._recipes[slot.name].rows
        entry = self.checkpoint.tensors[rows.source]
        result = self.blank((len(numbers), *slot.shape[1:]), slot.dtype)
        places = zip(numbers, result, strict=True)
        self._perform([Copy(entry, (rows.start + n) * entry.row_bytes, entry.row_bytes, row.view(-1)) for n, row in places])
        return result

    def _perform(self, copies: Sequence[Copy], on_bytes: OnBytes | None = None, stream: Any = None) -> None:
        try:
            self.reader.read(copies, on_bytes, stream)
        except BaseException as error:
            forget_locals(error)  # else they refer to the error, it to them, and both to the weights
            raise
        self.checkpoint.verify_unchanged()

    def _extra_bytes(self, slot: Slot) -> int:
        return sum(self.checkpoint.tensors[name].nbytes for name in self._recipes[slot.name].extra)

    def _is_read_in_place(self, slot: Slot) -> bool:
        """Whether bytes go from the file straight into the weight."""
        stored = {STORED_DTYPES[self.checkpoint.tensors[rows.source].dtype] for rows in self._recipes[slot.name].rows}
        return self.device.type == "cpu" and stored <= {slot.dtype}

    def _copies(self, name: str, tensor: Tensor) -> Iterator[Copy]:
        flat = tensor.view(-1)
        position = 0
        for rows in self._recipes[name].rows:
            entry = self.checkpoint.tensors[rows.source]
            nbytes = self._num_rows(rows) * entry.row_bytes
            length = nbytes // STORED_DTYPES[entry.dtype].itemsize
            yield Copy(entry, rows.start * entry.row_bytes, nbytes, flat[position : position + length])
            position += length

    def _extra_tensors(self, recipe: Recipe) -> dict[str, Tensor]:
        entries = [self.checkpoint.tensors[name] for name in recipe.extra]
        tensors = {e.name: self.blank(e.shape, STORED_DTYPES[e.dtype]) for e in entries}
        self._perform([Copy(e, 0, e.nbytes, tensors[e.name].view(-1)) for e in entries])
        return tensors

    def _check(self, slot: Slot, recipe: Recipe) -> None:
        where = f"{self.checkpoint.path}: {slot.name}"
        if recipe.values is not None:
            if len(recipe.values) != slot.shape.numel():
                raise CheckpointError(f"{where} needs {slot.shape.numel()} values, its configuration gives {len(recipe.values)}.")
            return
        for source in [*(rows.source for rows in recipe.rows), *recipe.extra]:
            entry = self.checkpoint.tensors.get(source)
            if entry is None:
                raise CheckpointError(f"{where} needs the tensor {source}, which the file lacks; download it again.")
            if not STORED_DTYPES.get(entry.dtype, torch.bool).is_floating_point:
                raise CheckpointError(f"{where} is stored as {entry.dtype} in {source}, which cannot be cast to {slot.dtype}.")
        if not self._has_shape(recipe.rows, slot.shape):
            shapes = [list(self.checkpoint.tensors[rows.source].shape) for rows in recipe.rows]
            raise CheckpointError(f"{where} should have the shape {list(slot.shape)}, the file has {shapes}.")

    def _has_shape(self, ranges: Sequence[RowRange], shape: torch.Size) -> bool:
        """Whether the ranges lie within their stored tensors and, one below the other, have this shape."""
        stored = [self.checkpoint.tensors[rows.source].shape for rows in ranges]
        if not shape:
            return stored == [()]
        if any(whole[1:] != shape[1:] or not whole for whole in stored):
            return False
        is_within = all(rows.start + self._num_rows(rows) <= whole[0] for rows, whole in zip(ranges, stored, strict=True))
        return is_within and sum(map(self._num_rows, ranges)) == shape[0]

    def _num_rows(self, rows: RowRange) -> int:
        if rows.count is not None:
            return rows.count
        shape = self.checkpoint.tensors[rows.source].shape
        return (shape[0] if shape else 1) - rows.start
