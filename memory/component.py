"""A model component: a skeleton that is filled from its checkpoint and emptied again, part by part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .checkpoint import Checkpoint, CheckpointError
from .fingerprint import Fingerprint
from .reader import STORED_DTYPES, Copy, Reader
from .resource import Cost, FillRequest, Identity, Mode, Parts
from .skeleton import Slot, WeightsNotLoaded, emptied, make_lazy
from .transforms import Cast


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


class Component:
    """One model on one device, as a resource.

    ``build`` makes the module (called once, on the meta device). The module declares PARTS (part -> parameter-name prefixes),
    ENTRY_POINTS (method -> parts) and REPEATED (module lists whose children can be streamed). ``recipes`` has one recipe for
    every parameter and buffer. ``acquire(parts)`` is what entry points enter; the store sets it, before that they raise.

    Raises CheckpointError if the recipes do not fit the checkpoint: before any weights are read.
    """

    def __init__(
        self,
        *,
        kind: str,
        checkpoint: Checkpoint,
        build: Callable[[], nn.Module],
        recipes: Mapping[str, Recipe],
        cast: Cast,
        device: torch.device,
        name: str | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.kind = kind
        self.name = name or kind
        self.checkpoint = checkpoint
        self.device = device
        self.reader = reader or Reader()
        self.identity = Identity(kind, checkpoint.files, (str(device), cast.key))
        with torch.device("meta"):
            self.module = build().eval()
        self._slots = emptied(self.module, cast.dtype_of)
        self._recipes = recipes
        self._plan_by_part = _slots_by_part(self._slots, self.module.PARTS)  # type: ignore[arg-type]
        self._prints: dict[str, Fingerprint] = {}
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self._check_recipes()
        self.acquire: Callable[[Parts], AbstractContextManager[Any]] = self._require_filled
        make_lazy(self.module, self.module.ENTRY_POINTS, _through(weakref.ref(self)))  # type: ignore[arg-type]

    @property
    def parts(self) -> Parts:
        return frozenset(self._plan_by_part)

    def repeated(self) -> Iterator[nn.ModuleList]:
        """The lists of alike blocks."""
        return (self.module.get_submodule(name) for name in self.module.REPEATED)  # type: ignore[misc, union-attr]

    def nbytes(self, parts: Parts | None = None) -> int:
        """Resident bytes of the parts (default: all of them)."""
        return sum(slot.nbytes for slot in self._slots_of(self.parts if parts is None else parts))

    def costs(self, parts: Parts) -> Mapping[Mode, Cost]:
        slots = self._slots_of(parts)
        staging = 0 if all(self._is_read_in_place(slot) for slot in slots) else self.reader.staging_bytes
        return {"whole": Cost(self.nbytes(parts), staging + max((self._extra_bytes(slot) for slot in slots), default=0))}

    def resident_parts(self) -> Parts:
        return frozenset(p for p, slots in self._plan_by_part.items() if all(slot.name in self._prints for slot in slots))

    def fill(self, request: FillRequest) -> None:
        """Read the missing weights of the parts. Raises CheckpointError, or what ``on_bytes`` raises; then nothing is kept."""
        self.checkpoint.verify_unchanged()
        missing = [slot for slot in self._slots_of(request.parts) if slot.name not in self._prints]
        try:
            with torch.inference_mode(False):  # inference tensors have no version counter, and recompile at every refill
                tensors = {slot.name: torch.empty(slot.shape, dtype=slot.dtype, device=self.device) for slot in missing}
                self._track(tensors.values())
                self._read(tensors, request)
                self.checkpoint.verify_unchanged()  # nor was it while it was read
                for slot in missing:
                    self._prints[slot.name] = Fingerprint.of(slot.put(tensors.pop(slot.name)))
        except BaseException:
            self._empty(missing)
            raise

    def drop(self) -> None:
        """Put the empty stand-ins back; nothing of ours holds a weight afterwards."""
        self._empty(self._slots.values())

    def shrink(self, nbytes: int) -> int:
        """A whole component cannot give back a piece of itself."""
        return 0

    def live_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._living())

    def dirty(self) -> str | None:
        """The first weight that is not as it was filled, in words."""
        present = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, known in self._prints.items():
            difference = known.difference(present.get(name))
            if difference is not None:
                return f"{name} {difference}"
        strangers = present.keys() - self._slots.keys()
        return f"{min(strangers)} was added" if strangers else None

    def _empty(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.clear()
            self._prints.pop(slot.name, None)

    def _slots_of(self, parts: Parts) -> list[Slot]:
        unknown = parts - self.parts
        if unknown:
            raise ValueError(
                f"{self.checkpoint.path}: this {self.name} has no {', '.join(sorted(unknown))}; it has {sorted(self.parts)}."
            )
        return list({slot.name: slot for part in sorted(parts) for slot in self._plan_by_part[part]}.values())

    def _extra_bytes(self, slot: Slot) -> int:
        return sum(self.checkpoint.tensors[name].nbytes for name in self._recipes[slot.name].extra)

    def _is_read_in_place(self, slot: Slot) -> bool:
        """Whether bytes go from the file straight into the weight."""
        stored = {STORED_DTYPES[self.checkpoint.tensors[rows.source].dtype] for rows in self._recipes[slot.name].rows}
        return self.device.type == "cpu" and stored <= {slot.dtype}

    def _track(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        new = [(StorageWeakRef(s), s.nbytes()) for s in storages]  # type: ignore[no-untyped-call]
        self._storages = [*self._living(), *new]

    def _living(self) -> list[tuple[StorageWeakRef, int]]:
        return [(storage, n) for storage, n in self._storages if not storage.expired()]  # type: ignore[no-untyped-call]

    def _read(self, tensors: Mapping[str, Tensor], request: FillRequest) -> None:
        self.reader.read([copy for name, tensor in tensors.items() for copy in self._copies(name, tensor)], request.on_bytes)
        for name, tensor in tensors.items():
            recipe = self._recipes[name]
            if recipe.values is not None:
                tensor.copy_(torch.tensor(recipe.values).view(tensor.shape))
            if recipe.finish is not None:
                recipe.finish(tensor, self._extra_tensors(recipe))

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
        tensors = {e.name: torch.empty(e.shape, dtype=STORED_DTYPES[e.dtype], device=self.device) for e in entries}
        self.reader.read([Copy(e, 0, e.nbytes, tensors[e.name].view(-1)) for e in entries])
        return tensors

    def _check_recipes(self) -> None:
        for name, slot in self._slots.items():
            if name not in self._recipes:
                raise CheckpointError(f"{self.checkpoint.path}: nothing says how to fill {name}.")
            self._check_recipe(slot, self._recipes[name])

    def _check_recipe(self, slot: Slot, recipe: Recipe) -> None:
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

    def _require_filled(self, parts: Parts) -> AbstractContextManager[Any]:
        if not parts <= self.resident_parts():
            raise WeightsNotLoaded(
                f"{self.name}: weights are not loaded, and the component belongs to no store that could load them."
            )
        return nullcontext()


def _slots_by_part(slots: Mapping[str, Slot], declared: Mapping[str, tuple[str, ...]]) -> dict[str, list[Slot]]:
    """Slots of every declared part that has any. Raises ValueError for a slot in no part: it would never be filled."""
    by_part = {part: [s for n, s in slots.items() if n.startswith(prefixes)] for part, prefixes in declared.items()}
    by_part = {part: members for part, members in by_part.items() if members}
    homeless = slots.keys() - {slot.name for members in by_part.values() for slot in members}
    if homeless:
        raise ValueError(f"{min(homeless)} belongs to no part of {sorted(by_part)}.")
    return by_part


def _through(component: weakref.ref[Component]) -> Callable[[Parts], AbstractContextManager[Any]]:
    """Enter the component's ``acquire`` without keeping the component alive through its module."""

    def acquire(parts: Parts) -> AbstractContextManager[Any]:
        alive = component()
        if alive is None:
            raise WeightsNotLoaded(
                "Weights are not loaded: the component of this module is gone; take a new handle from its loader."
            )
        return alive.acquire(parts)

    return acquire
