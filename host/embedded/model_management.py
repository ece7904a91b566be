"""Models on devices: who is loaded, and who goes when room is needed (host contract, section 6).

One ModelManagement per host. The functions of this module are those of the current host's, as ComfyUI's are the process's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from .context import current_host, throw_exception_if_processing_interrupted
from .errors import InterruptProcessingException

__all__ = [
    "InterruptProcessingException",
    "LoadedModel",
    "ModelManagement",
    "ModelPatcher",
    "throw_exception_if_processing_interrupted",
]

CPU = torch.device("cpu")
INFERENCE_BYTES = int(0.8 * 2**30)
EVERYTHING = 1 << 100


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(current_host().model_management, name)


def is_out_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))


class ModelPatcher:
    """What the manager asks of a model. A base to override: it moves nothing, and is loaded entirely or not at all."""

    def __init__(self, model: torch.nn.Module, load_device: torch.device, offload_device: torch.device = CPU, size: int = 0):
        self.model = model
        self.load_device = load_device
        self.offload_device = offload_device
        self.size = size
        self._is_loaded = False

    def is_dynamic(self) -> bool:
        return False

    def is_clone(self, other: ModelPatcher) -> bool:
        """Whether both stand for the same module."""
        return other.model is self.model

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return self.size if self._is_loaded else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self._is_loaded else self.offload_device

    def partially_load(self, device: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> float:
        """Load within ``extra_memory`` more bytes; returns the bytes loaded."""
        self._is_loaded = True
        return self.size

    def partially_unload(self, device: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False) -> float:
        """Give up some weights; returns the bytes freed."""
        return 0

    def detach(self, unpatch_all: bool = True) -> None:
        """The manager lets the model go. With ``unpatch_all=False`` it comes back at once: keep the weights."""
        self._is_loaded = self._is_loaded and not unpatch_all


class LoadedModel:
    """An entry of ``current_loaded_models``: holds the patcher weakly, and leaves the list when the module dies."""

    def __init__(self, patcher: ModelPatcher, forget: Callable[[LoadedModel], None]):
        self._patcher = weakref.ref(patcher)
        self._forget = forget
        self._finalizer: weakref.finalize | None = None
        self.device = patcher.load_device
        self.currently_used = True

    @property
    def model(self) -> ModelPatcher | None:
        return self._patcher()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadedModel) and self.model is other.model

    __hash__ = None  # type: ignore[assignment]  # equality may change when a patcher dies

    def model_memory(self) -> int:
        return self._alive().model_size()

    def model_loaded_memory(self) -> int:
        return self._alive().loaded_size()

    def model_offloaded_memory(self) -> int:
        return self.model_memory() - self.model_loaded_memory()

    def model_memory_required(self, device: torch.device) -> int:
        return self.model_offloaded_memory() if device == self._alive().current_loaded_device() else self.model_memory()

    def is_dead(self) -> bool:
        return self.model is None

    def model_load(self, extra_memory: float, force_patch_weights: bool = False) -> None:
        patcher = self._alive()
        patcher.partially_load(self.device, extra_memory, force_patch_weights=force_patch_weights)
        self._finalizer = weakref.finalize(patcher.model, self._forget, self)
        self._finalizer.atexit = False

    def model_unload(self, memory_to_free: float | None = None, unpatch_weights: bool = True) -> bool:
        """Give up ``memory_to_free`` bytes, everything if that is not enough; returns whether everything went."""
        patcher = self._alive()
        if memory_to_free is not None and memory_to_free < patcher.loaded_size():
            freed = patcher.partially_unload(patcher.offload_device, memory_to_free)
            if freed >= memory_to_free:
                return False
        self.let_go(unpatch_weights)
        return True

    def let_go(self, unpatch_all: bool) -> None:
        self._alive().detach(unpatch_all=unpatch_all)
        if self._finalizer is not None:
            self._finalizer.detach()

    def _alive(self) -> ModelPatcher:
        patcher = self.model
        if patcher is None:
            raise ReferenceError("This model's patcher is gone: its owner has to keep a reference to it.")
        return patcher


class ModelManagement:
    """The models on the devices of one host. ``set_free_memory`` makes believe that a device has so much room."""

    def __init__(self, device: torch.device | None = None):
        self.current_loaded_models: list[LoadedModel] = []
        self.disable_smart_memory = False
        self.reserved_bytes = 0
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._free: dict[torch.device, Callable[[], int]] = {}

    def get_torch_device(self) -> torch.device:
        return self._device

    def intermediate_device(self) -> torch.device:
        return CPU

    unet_offload_device = vae_offload_device = text_encoder_offload_device = intermediate_device

    def cpu_mode(self) -> bool:
        return self._device.type == "cpu"

    def set_free_memory(self, device: torch.device, free: int | Callable[[], int] | None) -> None:
        """Bytes, or a function that returns them; None asks the device again."""
        if free is None:
            self._free.pop(device, None)
        else:
            self._free[device] = free if callable(free) else lambda: free

    def get_free_memory(self, device: torch.device | None = None) -> int:
        device = device or self._device
        if device in self._free:
            return self._free[device]()
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available

    def get_total_memory(self, device: torch.device | None = None) -> int:
        device = device or self._device
        return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total

    def extra_reserved_memory(self) -> int:
        return self.reserved_bytes

    def minimum_inference_memory(self) -> int:
        return INFERENCE_BYTES + self.reserved_bytes

    def soft_empty_cache(self, force: bool = False) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def free_memory(
        self, memory_required: float, device: torch.device, keep_loaded: Sequence[LoadedModel] = ()
    ) -> list[LoadedModel]:
        """Unload until ``memory_required`` bytes of ``device`` are free; returns the models that left entirely.

        Those that are offloaded most go first, then the small ones, then the newest.
        """
        unloaded = []
        for loaded in sorted(
            self._candidates(device, keep_loaded), key=lambda each: (-each.model_offloaded_memory(), each.model_memory())
        ):
            loaded.currently_used = False
            short = EVERYTHING if self.disable_smart_memory else memory_required - self.get_free_memory(device)
            if short > 0 and loaded.model_unload(short):
                unloaded.append(loaded)
        self._remove(unloaded)
        if unloaded:
            self.soft_empty_cache()
        return unloaded

    def _candidates(self, device: torch.device, keep_loaded: Sequence[LoadedModel]) -> list[LoadedModel]:
        on_device = (each for each in self.current_loaded_models if each.device == device)
        return [each for each in on_device if each not in keep_loaded and not each.is_dead()]

    def load_models_gpu(
        self,
        models: Sequence[ModelPatcher],
        memory_required: float = 0,
        force_patch_weights: bool = False,
        force_full_load: bool = False,
    ) -> None:
        """Make room for the models and load them, the first of them last."""
        to_load = [self._entry(patcher) for patcher in reversed(list(dict.fromkeys(models)))]
        for loaded in to_load:
            self._detach_clones(loaded)
        extra = max(self.minimum_inference_memory(), memory_required + self.reserved_bytes)
        for device in {loaded.device for loaded in to_load} - {CPU}:
            needed = sum(loaded.model_memory_required(device) for loaded in to_load if loaded.device == device)
            self.free_memory(1.1 * needed + extra, device)
            if self.get_free_memory(device) < extra:
                self.free_memory(extra, device)
        for loaded in to_load:
            loaded.model_load(self._room(loaded, extra, force_full_load), force_patch_weights)
            self.current_loaded_models.insert(0, loaded)

    def _entry(self, patcher: ModelPatcher) -> LoadedModel:
        for loaded in self.current_loaded_models:
            if loaded.model is patcher:
                loaded.currently_used = True
                return loaded
        return LoadedModel(patcher, self._forget)

    def _detach_clones(self, wanted: LoadedModel) -> None:
        """Entries of the same module leave the list for a moment and keep their weights."""
        patcher = wanted._alive()
        clones = [each for each in self.current_loaded_models if each.model is not None and patcher.is_clone(each.model)]
        for clone in clones:
            clone.let_go(unpatch_all=False)
        self._remove(clones)

    def _room(self, loaded: LoadedModel, extra: float, force_full_load: bool) -> float:
        """Bytes by which a model may grow: without limit on the CPU."""
        if loaded.device == CPU or force_full_load:
            return EVERYTHING
        return max(0, self.get_free_memory(loaded.device) - extra) or 0.1

    def unload_all_models(self) -> None:
        for device in {loaded.device for loaded in self.current_loaded_models}:
            self.free_memory(EVERYTHING, device)

    def _forget(self, loaded: LoadedModel) -> None:
        self._remove([loaded])

    def _remove(self, leaving: Sequence[LoadedModel]) -> None:
        self.current_loaded_models[:] = [each for each in self.current_loaded_models if not any(each is one for one in leaving)]
