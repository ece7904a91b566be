"""A model component: a skeleton that is filled from its checkpoint and emptied again, part by part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .checkpoint import Checkpoint
from .fingerprint import Fingerprint
from .folding import Folding, Points
from .reader import OnBytes, Reader
from .resource import Cost, FillRequest, Identity, Mode, Parts
from .skeleton import Slot, WeightsNotLoaded, emptied, make_lazy
from .source import Recipe, WeightSource
from .storages import LivingStorages
from .streaming import StreamedFill
from .transforms import Cast


class Component:
    """One model on one device, as a resource.

    ``build`` makes the module (called once, on the meta device). The module declares PARTS (part -> parameter-name prefixes),
    ENTRY_POINTS (method -> parts) and REPEATED (module lists whose children can be streamed). ``recipes`` has one recipe for
    every parameter and buffer. ``config``: the numbers that ``build`` uses, where the files do not tell them. ``acquire(parts)``
    is what entry points enter; the store sets it, before that they raise.

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
        config: Hashable = None,
    ) -> None:
        self.kind = kind
        self.name = name or kind
        self.checkpoint = checkpoint
        self.device = device
        self.compute = cast.compute
        self.reader = reader or Reader()
        self.identity = Identity(kind, checkpoint.files, (str(device), cast.key, config))
        with torch.device("meta"):
            self.module = build().eval()
        self._slots = emptied(self.module, cast.dtype_of)
        self._slots_by_part = _slots_by_part(self._slots, self.module.PARTS)  # type: ignore[arg-type]
        self._source = WeightSource(checkpoint, recipes, self.reader, device, self._slots)
        self._storages = LivingStorages()
        self._prints: dict[str, Fingerprint] = {}  # of weights that are in place for good
        self._streamed: list[StreamedFill] = []
        self._foldings: list[Folding] = []
        self.acquire: Callable[[Parts], AbstractContextManager[Any]] = self._require_filled
        make_lazy(self.module, self.module.ENTRY_POINTS, _through(weakref.ref(self)))  # type: ignore[arg-type]

    @property
    def parts(self) -> Parts:
        return frozenset(self._slots_by_part)

    def repeated(self) -> Iterator[nn.ModuleList]:
        """The lists of alike blocks that this model has."""
        modules: dict[str, Any] = dict(self.module.named_modules())
        return (modules[name] for name in self.module.REPEATED if name in modules)  # type: ignore[union-attr]

    def nbytes(self, parts: Parts | None = None) -> int:
        """Resident bytes of the parts (default: all of them)."""
        return sum(slot.nbytes for slot in self._slots_of(self.parts if parts is None else parts))

    def costs(self, parts: Parts, points: Points = ()) -> Mapping[Mode, Cost]:
        slots = self._slots_of(parts)
        transient = self._source.transient_bytes(slots)
        folding = self._folding(slots, points)
        rest = [slot for slot in slots if slot.name not in folding.slot_names]
        while_folding = folding.peak_bytes + sum(slot.nbytes for slot in self._fold_inputs(rest))
        costs: dict[Mode, Cost] = {"whole": Cost(sum(slot.nbytes for slot in rest))}
        streamed = StreamedFill(self.module, rest, self._source, self._storages)
        if streamed.is_possible:
            costs["streamed"] = streamed.cost()
        for mode, cost in costs.items():
            resident, read = cost.resident + folding.table_bytes, cost.read_bytes(0) + folding.weight_bytes
            more = max(0, while_folding - resident)
            costs[mode] = replace(cost, resident=resident, transient=transient + more, read=read)
        return costs

    def resident_parts(self) -> Parts:
        present = self._present()
        return frozenset(p for p, slots in self._slots_by_part.items() if all(slot.name in present for slot in slots))

    def fill(self, request: FillRequest) -> None:
        """Read the missing weights of the parts. Raises CheckpointError, or what ``on_bytes`` raises; then nothing is kept."""
        self.checkpoint.verify_unchanged()
        missing = self._missing(request.parts)
        folding = self._folding(missing, request.points)
        rest = [slot for slot in missing if slot.name not in folding.slot_names]
        streamed = StreamedFill(self.module, rest, self._source, self._storages)
        is_streamed = request.mode == "streamed" and streamed.is_possible
        grant = None if request.grant is None else request.grant - folding.table_bytes
        staying = streamed.staying(grant) if is_streamed else rest
        try:
            self._fold(folding, staying, request.on_bytes)
            self._read([slot for slot in staying if slot.name not in self._prints], request.on_bytes)
            if is_streamed:
                self._streamed.append(streamed)
                streamed.open(request.num_passes, request.prefetch)
        except BaseException:
            self._empty(staying)
            self._end(streamed)
            self._unfold(folding)
            raise

    def is_ready_for(self, points: Points) -> bool:
        return all(folding.covers(points) for folding in self._foldings)

    def refold_cost(self, points: Points) -> Cost | None:
        """Bytes that ``expect`` adds, and the largest sub-module for a moment; None where folding does not pay any more."""
        other = [folding for folding in self._foldings if not folding.covers(points)]
        if not all(folding.pays_for(points) for folding in other):
            return None
        growth = sum(folding.table_bytes_for(points) - folding.table_bytes for folding in other)
        return Cost(max(0, growth), max((folding.peak_bytes - folding.table_bytes for folding in other), default=0))

    def expect(self, points: Points) -> None:
        """Be ready for these points: where sub-modules are folded for others, only their weights are read again.

        Where folding does not pay for them, the weights are missing afterwards. Raises CheckpointError.
        """
        for folding in tuple(self._foldings):
            if points and not folding.covers(points):
                if folding.pays_for(points):
                    folding.fold(points)
                else:
                    self._unfold(folding)

    def drop(self) -> None:
        """Put the empty stand-ins back; nothing of ours holds a weight afterwards."""
        for streamed in reversed(self._streamed[:]):  # a block may be framed more than once: the last frame goes first
            self._end(streamed)
        for folding in tuple(self._foldings):
            self._unfold(folding)
        self._empty(self._slots.values())

    def shrink(self, nbytes: int) -> int:
        """A whole component cannot give back a piece of itself."""
        return 0

    def live_bytes(self) -> int:
        return self._storages.nbytes()

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
        return list({slot.name: slot for part in sorted(parts) for slot in self._slots_by_part[part]}.values())

    def _missing(self, parts: Parts) -> list[Slot]:
        present = self._present()
        return [slot for slot in self._slots_of(parts) if slot.name not in present]

    def _present(self) -> set[str]:
        """Names of weights that are in place, or that come by themselves."""
        passing = {name for streamed in self._streamed for name in streamed.passing}
        return self._prints.keys() | passing | {name for folding in self._foldings for name in folding.slot_names}

    def _read(self, slots: Iterable[Slot], on_bytes: OnBytes | None) -> None:
        with torch.inference_mode(False):  # inference tensors have no version counter, and recompile at every refill
            tensors = {slot.name: torch.empty(slot.shape, dtype=slot.dtype, device=self.device) for slot in slots}
            self._storages.add(tensors.values())
            self._source.read(tensors, on_bytes)
            for slot in slots:
                self._prints[slot.name] = Fingerprint.of(slot.put(tensors.pop(slot.name)))

    def _folding(self, slots: Sequence[Slot], points: Points) -> Folding:
        return Folding(self.module, slots, self._source, self._storages, points)

    def _fold(self, folding: Folding, staying: Sequence[Slot], on_bytes: OnBytes | None) -> None:
        """Fold first, while little else is in memory: a sub-module's weights take the room that other weights get afterwards."""
        if not folding.slot_names:
            return
        self._read(self._fold_inputs(staying), on_bytes)
        self._foldings.append(folding)
        folding.fold(on_bytes=on_bytes)

    def _fold_inputs(self, slots: Iterable[Slot]) -> list[Slot]:
        """The slots that the features of foldable sub-modules are computed with."""
        prefixes: tuple[str, ...] = getattr(self.module, "FOLD_INPUTS", ())
        return [slot for slot in slots if slot.name.startswith(prefixes)]

    def _unfold(self, folding: Folding) -> None:
        folding.unfold()
        if folding in self._foldings:
            self._foldings.remove(folding)

    def _end(self, streamed: StreamedFill) -> None:
        streamed.close()
        if streamed in self._streamed:
            self._streamed.remove(streamed)

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
