"""Sub-modules that are known functions of a few known inputs, kept as their values instead of their weights.

A model names such sub-modules (FOLDABLE): each is applied row by row to the same features, which depend on nothing but a *point*
(for H3: a clean-time of the schedule). Their weights are read, applied to the features of all points, and dropped, one sub-module
at a time. A row that is not among the known ones is never guessed: the weights are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .skeleton import Slot
from .source import WeightSource
from .storages import LivingStorages

Points = tuple[float, ...]


@dataclass
class KnownRows:
    """Features [K, k] of all points; the place of a row among them is found by its bits."""

    features: Tensor
    _asked: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def places(self, rows: Tensor) -> Tensor:
        """Index of each row of [M, k], -1 where it is not known. All sub-modules of a step ask with the same tensor."""
        if self._asked is None or self._asked[0] is not rows:
            is_equal = (rows[:, None] == self.features[None]).all(-1)
            self._asked = rows, torch.where(is_equal.any(1), is_equal.int().argmax(1), -1)
        return self._asked[1]


class FoldedModule:
    """One sub-module, answered from a table of its values [K, ...]."""

    def __init__(self, module: nn.Module, slots: Sequence[Slot], source: WeightSource, storages: LivingStorages) -> None:
        self._module = module
        self.slots = slots
        self._source = source
        self._storages = storages
        self._known: KnownRows | None = None
        self._table: Tensor | None = None

    def fold(self, known: KnownRows) -> None:
        """Compute the table for these rows and answer from it from now on; reads the weights once and keeps none."""
        with torch.inference_mode(False), torch.no_grad():
            table = self._applied(known.features).clone()
        self._storages.add([table])
        self._known, self._table = known, table
        self._module.__dict__["forward"] = self._answer

    def unfold(self) -> None:
        self._module.__dict__.pop("forward", None)
        self._known = self._table = None

    def _answer(self, rows: Tensor) -> Tensor:
        assert self._known is not None
        assert self._table is not None
        places = self._known.places(rows)
        if bool((places < 0).any()):
            return self._applied(rows)
        return self._table[places]

    def _applied(self, rows: Tensor) -> Tensor:
        """The sub-module itself on these rows, with its weights in place for this call alone."""
        with torch.inference_mode(False):
            tensors = {s.name: torch.empty(s.shape, dtype=s.dtype, device=self._source.device) for s in self.slots}
            self._storages.add(tensors.values())
            self._source.read(tensors)
            for slot in self.slots:
                slot.put(tensors.pop(slot.name))
        try:
            original: Callable[[Tensor], Tensor] = type(self._module).forward.__get__(self._module)
            return original(rows)
        finally:
            for slot in self.slots:
                slot.clear()


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
        if self.table_bytes >= self.weight_bytes:
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
        """One value for each row of the weights and each point."""
        rows = sum(slot.shape[0] * slot.dtype.itemsize for slot in self.slots if len(slot.shape) == 2)
        return rows * len(self._points)

    @property
    def transient_bytes(self) -> int:
        """The largest sub-module, which is in memory while it is folded."""
        return max((sum(slot.nbytes for slot in m.slots) for m in self._modules), default=0)

    def covers(self, points: Points) -> bool:
        return set(points) <= set(self._points)

    def fold(self) -> None:
        """Compute all tables. What the features need must be filled."""
        if self._modules:
            features = self._module.fold_inputs(torch.tensor(self._points))  # type: ignore[operator]
            known = KnownRows(features)
            for folded in self._modules:
                folded.fold(known)

    def unfold(self) -> None:
        for folded in self._modules:
            folded.unfold()
