"""Core's patcher of a model that is idle as views: it fills before core loads, and puts views back where core keeps copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....memory.store import Store
from .model import CoreModel

Owner = Callable[[], tuple[str, str] | None]


class LazyPatcherMixin:
    """Mixed into core's ModelPatcher; clones keep the class, the module and its ``lazy_h3`` (core bridge, section 4)."""

    model: Any
    store: Store
    executing: Owner  # (prompt, node) that runs here

    @property
    def _core(self) -> CoreModel | None:
        return getattr(self.model, "lazy_h3", None)

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        core = self._core
        return super().model_size() if core is None else core.model_size  # type: ignore[misc]

    def partially_load(self, *args: Any, **kwargs: Any) -> Any:
        self._ensure_filled()
        return super().partially_load(*args, **kwargs)  # type: ignore[misc]

    def patch_model(self, device_to: Any = None, lowvram_model_memory: int = 0, load_weights: bool = True, **kwargs: Any) -> Any:
        if load_weights:  # before object patches are applied: a patched tensor would be overwritten
            self._ensure_filled()
        return super().patch_model(device_to, lowvram_model_memory, load_weights, **kwargs)  # type: ignore[misc]

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self._ensure_filled()
        result = super().load(*args, **kwargs)  # type: ignore[misc]
        if self._core is not None:
            self._core.note_placed_weights()
        return result

    def patch_weight_to_device(self, *args: Any, **kwargs: Any) -> Any:
        if self._core is not None and not self._core.resident_parts():  # core asks for every weight, mostly while it loads
            self._ensure_filled()
        return super().patch_weight_to_device(*args, **kwargs)  # type: ignore[misc]

    def model_state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        self._ensure_filled()
        return super().model_state_dict_for_saving(*args, **kwargs)  # type: ignore[misc]

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """With views in place of weights: who merges with them would keep a whole model in memory (core bridge, trap 10).

        Also of idle ones: core moves the data of a weight to the GPU, for whoever holds it. Copies where the values differ, which
        live on with whoever took them.
        """
        if self._core is not None and not self._core.is_exact:
            self._ensure_filled()
        patches = super().get_key_patches(filter_prefix)  # type: ignore[misc]
        views = {} if self._core is None else self._core.exact_views()
        for key, ((weight, convert), *more) in patches.items():
            patches[key] = [(views.get(id(weight), weight), convert), *more]
        return patches

    def detach(self, unpatch_all: bool = True) -> Any:
        """Back to views; with ``unpatch_all=False`` core is only about to list the model again."""
        core = self._core
        if core is None or not unpatch_all or not core.resident_parts():
            return super().detach(unpatch_all)  # type: ignore[misc]
        self.eject_model()
        self.model_patches_to(self.offload_device)
        self.unpatch_model(None, True)  # without a device: with one, core would copy the whole model there first
        self.cached_hook_patches.clear()
        self.current_hooks = None
        core.put_views()
        super().detach(True)  # type: ignore[misc]
        self.store.dropped(core, "core unloaded it")
        return self.model

    def _ensure_filled(self) -> None:
        core = self._core
        if core is None:
            return
        executing = self.executing()
        if executing is not None:
            self.store.hold(core, ("node", *executing))
        elif not core.resident_parts():
            with self.store.use(core):
                pass
        core.note_loader(self)


@functools.lru_cache(maxsize=8)
def lazy_class(base: type, store: Store, executing: Owner) -> type:
    """A sub-class of core's patcher whose models belong to ``store``."""
    return type("LazyModelPatcher", (LazyPatcherMixin, base), {"store": store, "executing": staticmethod(executing)})
