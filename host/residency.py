"""Our resident weights in the host's own memory management, so that /free, out-of-memory handling and pressure reach them.

Each resident resource has one patcher, an empty module in the host's list of loaded models. The patcher moves nothing: it
answers how much is loaded, and lets go when the host asks. On unified memory there is no "elsewhere" to move weights to, so
they are dropped.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..memory.resource import Identity, Resource, is_hosted
from ..memory.store import Store

log = logging.getLogger("lazy_h3")

ROOM_FACTOR = 1.1  # as the host itself asks for more than the weights
CPU = torch.device("cpu")


class ResidencyMixin:
    """The host's questions and orders about one resource. Mixed into the host's ModelPatcher."""

    resource: Resource
    store: Store
    is_leaving = False  # inside a call of the host that ends with our entry removed: do not remove it ourselves

    def model_size(self) -> int:
        return self.resource.live_bytes()

    def loaded_size(self) -> int:
        return self.resource.live_bytes()

    def current_loaded_device(self) -> torch.device:
        return self.resource.device if self.resource.resident_parts() else CPU

    def model_dtype(self) -> None:
        """No conversion is ever asked of us."""

    def partially_load(self, device: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """Weights are read by who uses them, not by the host."""
        return 0

    def partially_unload(self, device: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Everything or nothing; nothing while in use."""
        before = self.resource.live_bytes()
        if not self.store.is_pinned(self.resource):
            self._let_go("memory pressure")
        return before - self.resource.live_bytes()

    def detach(self, unpatch_all: bool = True) -> Any:
        """Let go; with ``unpatch_all=False`` the host is only about to list us again."""
        if unpatch_all and not self.is_leaving:
            self._let_go("/free or memory pressure")
        return self.model  # type: ignore[attr-defined]

    def _let_go(self, reason: str) -> None:
        self.is_leaving = True
        try:
            self.store.release(self.resource, reason, force=True)
        finally:
            self.is_leaving = False


class Residency:
    """Keeps the host's list of loaded models true to the store. ``management`` has the names of comfy.model_management."""

    def __init__(self, store: Store, management: Any, patcher_base: type) -> None:
        self._store = store
        self._management = management
        self._patcher_class = type("LazyH3Patcher", (ResidencyMixin, patcher_base), {})
        self._patchers: dict[Identity, Any] = {}  # strong: the host holds patchers weakly
        store.before_fill.append(self._make_room)
        store.on_change.append(self._follow)

    def _make_room(self, resource: Resource, nbytes: int) -> None:
        """Ask the host to unload models of others."""
        if is_hosted(resource):
            return
        management = self._management
        pinned = [entry for entry in management.current_loaded_models if self._is_pinned(entry.model)]
        wanted = ROOM_FACTOR * nbytes + management.extra_reserved_memory()
        management.free_memory(wanted, resource.device, keep_loaded=pinned)

    def _is_pinned(self, patcher: Any) -> bool:
        return isinstance(patcher, ResidencyMixin) and patcher.store is self._store and self._store.is_pinned(patcher.resource)

    def _follow(self, resource: Resource, is_resident: bool) -> None:
        """Enter a filled resource into the host's list, take a dropped one out. Errors of the host are its own, and logged."""
        if is_hosted(resource):
            return
        try:
            if is_resident:
                self._enter(resource)
            else:
                self._leave(resource)
        except Exception:
            log.exception("Lazy H3: the host's list of loaded models could not be kept up for %s.", resource.name)

    def _enter(self, resource: Resource) -> None:
        if resource.identity in self._patchers and self._entries(self._patchers[resource.identity]):
            return
        self._forget_departed()
        patcher = self._patchers.get(resource.identity) or self._made(resource)
        self._patchers[resource.identity] = patcher
        self._management.load_models_gpu([patcher])

    def _leave(self, resource: Resource) -> None:
        patcher = self._patchers.get(resource.identity)
        if patcher is None or patcher.is_leaving:
            return  # the host is walking its list by numbers: it takes the entry out itself, and the patcher must live until then
        patcher.is_leaving = True
        for entry in self._entries(patcher):
            entry.model_unload()
            self._management.current_loaded_models[:] = [e for e in self._management.current_loaded_models if e is not entry]
        patcher.is_leaving = False
        self._management.soft_empty_cache()

    def _forget_departed(self) -> None:
        """Let go of patchers without an entry. Only when the host is not at its list: a patcher's end shortens it."""
        listed = {id(entry.model) for entry in self._management.current_loaded_models}
        self._patchers = {key: patcher for key, patcher in self._patchers.items() if id(patcher) in listed}

    def _entries(self, patcher: Any) -> list[Any]:
        return [entry for entry in self._management.current_loaded_models if entry.model is patcher]

    def _made(self, resource: Resource) -> Any:
        patcher = self._patcher_class.__new__(self._patcher_class)
        patcher.resource, patcher.store = resource, self._store  # older hosts ask for the size while they construct
        patcher.__init__(torch.nn.Module(), load_device=resource.device, offload_device=CPU)
        return patcher
