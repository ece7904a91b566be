"""One of core's models as a resource: filled by copies of its file's tensors, idle as views of the file."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....memory.reader import Copy, OnBytes, Reader
from ....memory.resource import Cost, FillRequest, Identity, Mode, Parts
from ....memory.storages import LivingStorages
from . import mapped
from .mapped import MappedCheckpoint, place_of
from .skeleton import CoreSlot, plain

WEIGHTS = frozenset({"weights"})


class CoreModel:
    """The weights of core's module, on which it hangs: all clones of a patcher share it. ``device``: where core loads it."""

    is_hosted = True  # core lists it itself, and makes room for it

    def __init__(
        self,
        identity: Identity,
        name: str,
        device: torch.device,
        module: nn.Module,
        files: Sequence[MappedCheckpoint],
        slots: Sequence[CoreSlot],
        management: Any,
    ) -> None:
        self.identity = identity
        self.name = name
        self.device = device
        weights = {id(slot.tensor) for slot in slots}
        constants = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in weights]
        self._not_ours = frozenset(_storage(part) for t in (*constants, *(slot.view for slot in slots)) for part in plain(t))
        self._module = weakref.ref(module)
        self._files = files
        self._slots = slots
        self._copied = [slot for slot in slots if self._is_copied(slot)]
        self._viewed = [slot for slot in slots if slot.is_kept and not mapped.IS_READ_ONLY]
        self._management = management
        self.model_size = management.module_size(module) + sum(slot.growth * len(slot.places) for slot in slots)
        self._storages = LivingStorages()
        self._last_patcher: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self._reader = Reader()
        self._is_filled = False
        module.lazy_h3 = self  # type: ignore[assignment]

    @property
    def parts(self) -> Parts:
        return WEIGHTS

    def nbytes(self, parts: Parts | None = None) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def costs(self, parts: Parts, points: tuple[float, ...] = ()) -> Mapping[Mode, Cost]:
        if self.device.type != "cpu":
            return {"whole": Cost(0)}  # a GPU's memory is core's to plan, and what passes through the host's is not in its pool
        converts = any(slot.dtype != slot.view.dtype for slot in self._copied)
        return {"whole": Cost(self.nbytes(), self._reader.staging_bytes if converts else 0)}

    def resident_parts(self) -> Parts:
        return WEIGHTS if self._is_filled else frozenset()

    def fill(self, request: FillRequest) -> None:
        """Raises CheckpointError if the file has changed, or what ``on_bytes`` raises; then the views are back."""
        for file in self._files:
            file.checkpoint.verify_unchanged()
        try:
            self._read(request.on_bytes)
        except BaseException:
            self.put_views()
            raise
        self._is_filled = True

    def drop(self) -> None:
        """Have core unload it, whoever of its patchers loaded it."""
        for entry in [e for e in self._management.current_loaded_models if self._is_ours(e.model)]:
            entry.model_unload()
            self._management.current_loaded_models[:] = [e for e in self._management.current_loaded_models if e is not entry]
        patcher = self._last_patcher()
        if self._is_filled and patcher is not None:  # core lists a model only after it has loaded it
            patcher.detach()
        self.put_views()

    def put_views(self) -> None:
        """Nothing in memory but what the file's pages hold, and they are given back."""
        for slot in self._slots:
            slot.put(slot.view)
        self._is_filled = False
        for file in self._files:
            file.forget_pages()

    def shrink(self, nbytes: int) -> int:
        return 0

    def live_bytes(self) -> int:
        """Copies that are alive, and views that are in use."""
        return self._storages.nbytes() + (sum(slot.nbytes for slot in self._viewed) if self._is_filled else 0)

    def dirty(self) -> None:
        """Core patches filled weights as it likes, and restores them itself."""

    @property
    def is_exact(self) -> bool:
        """Whether the views are as good as what is made of them: the same values."""
        return all(slot.is_exact for slot in self._slots)

    def exact_views(self) -> dict[int, torch.Tensor]:
        """Id of a weight that stands in the module -> its view, where that is as good: the same values."""
        exact = (slot for slot in self._slots if slot.is_exact)
        return {id(getattr(module, name)): slot.view for slot in exact for module, name in slot.places}

    def note_loader(self, patcher: Any) -> None:
        """The patcher is about to load or patch the weights."""
        self._last_patcher = weakref.ref(patcher)

    def note_placed_weights(self) -> None:
        """A patcher has loaded the weights: what it put there counts as ours."""
        weights = (part for parameter in self._module().parameters() for part in plain(parameter))
        self._storages.add(weight for weight in weights if not weight.is_meta and _storage(weight) not in self._not_ours)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module has weights of its own, which nobody fills or drops."""

    def _is_copied(self, slot: CoreSlot) -> bool:
        """On CPUs, since results depend on alignment (core bridge, trap 4); elsewhere core copies to the device itself."""
        must_be = self.device.type == "cpu" or slot.dtype != slot.view.dtype or mapped.IS_READ_ONLY
        return must_be and not slot.is_kept

    def _read(self, on_bytes: OnBytes | None) -> None:
        with torch.inference_mode(False):
            tensors = [torch.empty(slot.view.shape, dtype=slot.dtype) for slot in self._copied]
            self._storages.add(tensor for tensor in tensors if tensor.numel())
            pairs = [*zip(self._copied, tensors, strict=True)]
            self._reader.read([copy for slot, tensor in pairs for copy in self._copies(slot, tensor)], on_bytes)
            for slot, tensor in pairs:
                slot.put(tensor)
            if mapped.IS_READ_ONLY:
                self._read_what_core_keeps()

    def _read_what_core_keeps(self) -> None:
        """No view stays in a module that is in use: whoever writes into one would end the process (core bridge, trap 3)."""
        for slot in self._slots:
            if slot.is_kept:
                copy = slot.view.clone()
                self._storages.add(plain(copy))
                slot.put(copy)

    def _copies(self, slot: CoreSlot, tensor: torch.Tensor) -> list[Copy]:
        place = place_of(slot.view, self._files)
        if place is None or not slot.nbytes:
            return []
        entry, start = place
        return [Copy(entry, start, slot.view.nbytes, tensor.view(-1))]

    def _is_ours(self, patcher: Any) -> bool:
        return patcher is not None and patcher.model is self._module()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
