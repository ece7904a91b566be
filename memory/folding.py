"""Sub-modules that are known functions of a few known inputs, kept as their values instead of their weights.

A model names such sub-modules (FOLDABLE): each is applied row by row to the same features, which depend on nothing but a *point*
(for H3: a clean-time of the schedule). Their weights are read, applied to the features of all points, and dropped, one sub-module
at a time. A row that is not among the known ones is never guessed: the weights are read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from .reader import OnBytes
from .skeleton import Slot
from .source import WeightSource
from .storages import LivingStorages

Points = tuple[float, ...]


class KnownRows:
    """Features [K, k] of all points; the place of a row among them is found by its bits."""

    def __init__(self, features: Tensor) -> None:
        self.features = features
        self._asked: tuple[Tensor | None, Tensor | None] = None, None

    def places(self, rows: Tensor) -> Tensor | None:
        """Index of each row of [M, k], or None if one is not known. All sub-modules of a step ask with the same tensor."""
        asked = self._asked  # read once: steps of other threads may ask meanwhile
        if asked[0] is not rows:
            is_equal = (rows[:, None] == self.features[None]).all(-1)  # [M, K]
            places = is_equal.int().argmax(1) if bool(is_equal.any(1).all()) else None
            self._asked = asked = rows, places
        return asked[1]


class FoldedModule:
    """One sub-module, answered from a table of its values [K, ...]."""

    def __init__(self, module: nn.Module, slots: Sequence[Slot], source: WeightSource, storages: LivingStorages) -> None:
        self._module = module
        self.slots = slots
        self._source = source
        self._storages = storages
        self._values: tuple[KnownRows, Tensor] | None = None
        self._turn = threading.Lock()  # weights are in place for one caller at a time

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def fold(self, known: KnownRows, on_bytes: OnBytes | None = None) -> None:
        """Compute the table for these rows and answer from it from now on; reads the weights once and keeps none."""
        with torch.inference_mode(False), torch.no_grad():
            table = self._applied(known.features, on_bytes).clone()
        self._storages.add([table])
        self._values = known, table
        self._module.__dict__["forward"] = self._answer

    def unfold(self) -> None:
        self._module.__dict__.pop("forward", None)
        self._values = None

    def _answer(self, rows: Tensor) -> Tensor:
        assert self._values is not None
        known, table = self._values
        places = known.places(rows)
        return self._applied(rows) if places is None else table[places]

    def _applied(self, rows: Tensor, on_bytes: OnBytes | None = None) -> Tensor:
        """The sub-module itself on these rows, with its weights in place for this call alone."""
        original: Callable[[Tensor], Tensor] = type(self._module).forward.__get__(self._module)
        with self._turn:
            try:
                self._read(on_bytes)
                return original(rows)
            finally:
                for slot in self.slots:
                    slot.clear()

    def _read(self, on_bytes: OnBytes | None) -> None:
        tensors = {slot.name: self._source.blank(slot.shape, slot.dtype) for slot in self.slots}
        self._storages.add(tensors.values())
        self._source.read(tensors, on_bytes)
        for slot in self.slots:
            slot.put(tensors[slot.name])


class Folding:
    """All foldable sub-modules among some slots of a module. ``points``: what they will be asked for."""

    def __init__(
        self, module: nn.Module, slots: Sequence[Slot], source: WeightSource, storages: LivingStorages, points: Points
    ) -> None:
        self._module = module
        self._points = points
        leaf = getattr(module, "FOLDABLE", None)
        owners = [(name, m) for name, m in module.named_modules() if name.rpartition(".")[2] == leaf] if leaf and points else []
        members = {name: [slot for slot in slots if slot.name.startswith(f"{name}.")] for name, _ in owners}
        self._modules = [FoldedModule(m, members[name], source, storages) for name, m in owners if members[name]]
        self.slots = [slot for name, _ in owners for slot in members[name]]
        if not self.pays_for(points):
            self._modules, self.slots = [], []

    @property
    def slot_names(self) -> set[str]:
        """Slots that are never filled while this is in force."""
        return {slot.name for slot in self.slots}

    @property
    def weight_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @property
    def table_bytes(self) -> int:
        return self.table_bytes_for(self._points)

    @property
    def peak_bytes(self) -> int:
        """The most that folding takes beside its inputs: all tables and the largest sub-module."""
        return self.table_bytes + max((folded.nbytes for folded in self._modules), default=0)

    def covers(self, points: Points) -> bool:
        return set(points) <= set(self._points)

    def pays_for(self, points: Points) -> bool:
        """Whether the tables for these points take less than the weights."""
        return self.table_bytes_for(points) < self.weight_bytes

    def fold(self, points: Points | None = None, on_bytes: OnBytes | None = None) -> None:
        """Compute all tables, for other points if any are given. What the features need must be filled.

        ``on_bytes(done, total)`` may raise to cancel. Who computes meanwhile gets right answers, and so does everybody if this
        fails halfway: each sub-module knows its rows.
        """
        points = tuple(dict.fromkeys(self._points if points is None else points))
        if self._modules:
            features = self._module.fold_inputs(torch.tensor(points))  # type: ignore[operator]
            known = KnownRows(features)
            for done, folded in zip(self._bytes_before(), self._modules, strict=True):
                folded.fold(known, on_bytes and partial(_note_part, on_bytes, done, self.weight_bytes))
        self._points = points

    def unfold(self) -> None:
        for folded in self._modules:
            folded.unfold()

    def _bytes_before(self) -> Iterator[int]:
        """For each sub-module, the bytes of those that are folded before it."""
        return accumulate((folded.nbytes for folded in self._modules[:-1]), initial=0)

    def table_bytes_for(self, points: Points) -> int:
        """One value for each row of the weights and each point."""
        rows = sum(slot.shape[0] * slot.dtype.itemsize for slot in self.slots if len(slot.shape) == 2)
        return rows * len(set(points))


def _note_part(on_bytes: OnBytes, before: int, total: int, done: int, _: int) -> None:
    """Progress of one part as progress of all."""
    on_bytes(before + done, total)
