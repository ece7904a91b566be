"""Objects of other loaders as resources, to be released after their last use (core bridge, section 7)."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....memory.graph import Key
from ....memory.handle import Handle
from ....memory.resource import Cost, FillRequest, Identity, Mode, Parts
from ....memory.store import Store
from ...interface import Host
from .adopt import Adopted, adopt, loaded_entries, unload
from .dynamic import is_dynamic
from .loaders import CoreLoaders
from .model import WEIGHTS

log = logging.getLogger("lazy_h3")

_numbers = itertools.count(1)


class Unloadable:
    """A model of which no more is known than that core can unload it. ``origins``: keys of the loaders that it may be from."""

    is_hosted = True
    is_pinned_by_users = False
    goes_after_use = True

    def __init__(self, patcher: Any, origins: tuple[Key, ...], management: Any) -> None:
        module = patcher.model
        self.name = f"{type(patcher).__name__} of {type(module).__name__}"
        self.identity = Identity("core object", (), (self.name, next(_numbers)))
        self.origins = origins
        self.device: torch.device = patcher.load_device
        self._module: weakref.ref[nn.Module] = weakref.ref(module)
        self._size = management.module_size(module)
        self._management = management

    @property
    def parts(self) -> Parts:
        return WEIGHTS

    def nbytes(self, parts: Parts | None = None) -> int:
        return self._size

    def costs(self, parts: Parts, points: tuple[float, ...] = ()) -> Mapping[Mode, Cost]:
        return {"whole": Cost(self._size)}

    def resident_parts(self) -> Parts:
        return WEIGHTS if self._entries() else frozenset()

    def fill(self, request: FillRequest) -> None:
        raise RuntimeError(f"{self.name}: only ComfyUI itself can load it; it does when a node asks for it.")

    def drop(self) -> None:
        """Have core unload it: its weights move to the host's memory, or are freed there, too, as its loader has it."""
        module = self._module()
        if module is not None:
            unload(module, self._management)

    def shrink(self, nbytes: int) -> int:
        return 0

    def live_bytes(self) -> int:
        """What core says that it has loaded."""
        return sum(entry.model_loaded_memory() for entry in self._entries())

    def dirty(self) -> None:
        """Core patches it as it likes, and restores it itself."""

    def _entries(self) -> list[Any]:
        module = self._module()
        return [] if module is None else loaded_entries(module, self._management)


class Releases:
    """Makes resources of objects of other loaders: idle as views where that can be, else unloaded by core."""

    def __init__(self, store: Store, loaders: CoreLoaders, host: Host) -> None:
        self._store = store
        self._loaders = loaders
        self._host = host
        self._unloadables: weakref.WeakKeyDictionary[nn.Module, Unloadable] = weakref.WeakKeyDictionary()
        self._adopted: weakref.WeakSet[Adopted] = weakref.WeakSet()
        self._told: set[str] = set()
        store.on_settle.append(self._look)

    def after_last_use(self, value: Any, origins: tuple[Key, ...]) -> None:
        """Release what is in a MODEL, CLIP, VAE or the like when no node can use it any more that gets it from ``origins``.

        Does nothing for an object that is lazy by itself.
        """
        patchers = patchers_of(value)
        if not patchers and not isinstance(value, Handle):
            self._tell(f"A {type(value).__name__} has no weights that ComfyUI could unload; it is passed on unchanged.")
        for patcher in patchers:
            self._follow(patcher, origins)

    def evict_after_last_use(self, value: Any, origins: tuple[Key, ...]) -> None:
        """The same for a model of a loader of ours that core pages in by itself; does nothing for others."""
        for patcher in filter(is_dynamic, patchers_of(value)):
            self._follow(patcher, origins)

    def followed(self) -> set[Key]:
        """Keys of the loaders that these objects may be from."""
        return {key for resource in [*self._adopted, *self._unloadables.values()] for key in resource.origins}

    def _follow(self, patcher: Any, origins: tuple[Key, ...]) -> None:
        module = patcher.model
        known = self._unloadables.get(module) or getattr(module, "lazy_h3", None)
        if known is None:
            self._store.add(self._made(patcher, origins))
        elif isinstance(known, (Adopted, Unloadable)):
            known.origins = origins

    def _made(self, patcher: Any, origins: tuple[Key, ...]) -> Adopted | Unloadable:
        """Of one that core pages in by itself, nothing is left when core has unloaded it."""
        if not is_dynamic(patcher):
            try:
                adopted = adopt(patcher, origins, self._loaders, self._host.management)
            except Exception as reason:
                name, why = type(patcher.model).__name__, str(reason).rstrip(".")
                self._tell(f"{name}: unloaded after its last use, but its weights stay in RAM, since {why}.")
            else:
                self._adopted.add(adopted)
                return adopted
        unloadable = Unloadable(patcher, origins, self._host.management)
        self._unloadables[patcher.model] = unloadable
        return unloadable

    def _look(self) -> None:
        """At what core has loaded and unloaded by itself."""
        for resource in list(self._unloadables.values()):
            if resource.resident_parts():
                self._store.filled(resource, "ComfyUI loaded it")
            else:
                self._store.dropped(resource, "ComfyUI unloaded it")

    def _tell(self, message: str) -> None:
        """Once."""
        if message not in self._told:
            self._told.add(message)
            log.info("%s", message)


def patchers_of(value: Any) -> list[Any]:
    """Core's patchers in an object of core's: a MODEL is one, a CLIP or a VAE has one, a CONTROL_NET names several."""
    try:
        from comfy.model_patcher import ModelPatcher
    except ImportError:  # not in ComfyUI
        return []
    models = getattr(value, "get_models", None)
    found = [value, getattr(value, "patcher", None), *(models() if callable(models) else ())]
    return [each for each in found if isinstance(each, ModelPatcher)]
