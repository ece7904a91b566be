"""A model that core's own loader has read becomes idle as views of its file, where it stands (core bridge, section 7)."""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ....memory import device as devices
from ....memory.checkpoint import FileIdentity
from ....memory.graph import Key
from ....memory.resource import Identity
from .build import Build, Built, PatcherOf, built, diffusion_model, its_patcher, itself, text_encoder, vae
from .loaders import CoreLoaders
from .model import CoreModel
from .skeleton import CannotBeLazy, CoreSlot, plain

NUM_SAMPLES = 8  # elements of a weight that are compared with the file
SUFFIXES = (".safetensors", ".sft")

_numbers = itertools.count(1)


class Adopted(CoreModel):
    """``origins``: keys of the loaders that it may be from."""

    goes_after_use = True

    def __init__(self, origins: tuple[Key, ...], *args: Any) -> None:
        self.origins = origins
        super().__init__(*args)


@dataclass(frozen=True)
class _Recipe:
    """How core made a model: the kind of its object, files, and what to call with their tensors."""

    kind: str
    paths: Sequence[Path]
    build: Build
    patcher_of: PatcherOf


def adopt(patcher: Any, origins: tuple[Key, ...], loaders: CoreLoaders, management: Any) -> Adopted:
    """Make views of the weights of a patcher's module, and lazy patchers of it and all its clones.

    Of the file, only the header is read for that. Raises CannotBeLazy, or what core raises; then it is unloaded, and as it was.
    """
    clones = _patchers_of(patcher)
    recipe = _recipe(patcher)
    twin = built(recipe.paths, recipe.build, recipe.patcher_of)
    unload(patcher.model, management)
    slots = _moved(twin, patcher.model)
    identity = Identity(f"core {recipe.kind}", tuple(map(FileIdentity.of, recipe.paths)), ("adopted", next(_numbers)))
    for slot in slots:
        slot.put(slot.view)
    for clone in clones:
        loaders.take(clone)
    name = f"{identity.kind} ({', '.join(path.stem for path in recipe.paths)})"
    adopted = Adopted(origins, identity, name, patcher.load_device, patcher.model, twin.files, slots, management)
    devices.trim()
    return adopted


def unload(module: nn.Module, management: Any) -> None:
    """Have core unload all patchers of a module, with its own call where there is one."""
    entries = loaded_entries(module, management)
    unload_clones = getattr(management, "unload_model_and_clones", None)
    if entries and unload_clones is not None:
        wanted = {"unload_additional_models": False, "all_devices": True}
        known = inspect.signature(unload_clones).parameters
        unload_clones(entries[0].model, **{name: value for name, value in wanted.items() if name in known})
    for entry in loaded_entries(module, management):  # on devices that core's call leaves out
        entry.model_unload()
        management.current_loaded_models[:] = [other for other in management.current_loaded_models if other is not entry]
    if entries:
        management.soft_empty_cache()


def loaded_entries(module: nn.Module, management: Any) -> list[Any]:
    """What core's list of loaded models has of a module."""
    entries = list(management.current_loaded_models)
    return [entry for entry in entries if (patcher := entry.model) is not None and patcher.model is module]


def _patchers_of(patcher: Any) -> list[Any]:
    """The patcher and all its clones that are alive. Raises CannotBeLazy if one is not just core's own."""
    import comfy.model_patcher

    base = comfy.model_patcher.ModelPatcher
    found = [each for each in gc.get_objects() if issubclass(type(each), base) and getattr(each, "model", None) is patcher.model]
    other = next((type(each) for each in [patcher, *found] if type(each) is not base), None)
    if other is not None:
        raise CannotBeLazy(f"its patcher is a {other.__name__}")
    return found


def _recipe(patcher: Any) -> _Recipe:
    """Raises CannotBeLazy for a model that no loader of core's made from safetensors files alone."""
    import comfy.sd

    init = patcher.cached_patcher_init or ()
    name = getattr(init[0], "__name__", "") if len(init) == 2 else ""
    if name not in _RECIPES or getattr(comfy.sd, name, None) is not init[0]:
        raise CannotBeLazy("its loader does not say how it was made")
    call = inspect.signature(init[0]).bind(*init[1])
    call.apply_defaults()
    recipe = _RECIPES[name](call.arguments)
    odd = next((path.name for path in recipe.paths if path.suffix not in SUFFIXES), None)
    if odd is not None:
        raise CannotBeLazy(f"{odd} is no safetensors file")
    return recipe


def _of_diffusion_model(call: Mapping[str, Any]) -> _Recipe:
    return _Recipe("MODEL", [Path(call["unet_path"])], diffusion_model(call["model_options"]), itself)


def _of_text_encoder(call: Mapping[str, Any]) -> _Recipe:
    build = text_encoder(call["clip_type"], call["embedding_directory"], call["model_options"])
    return _Recipe("CLIP", [*map(Path, call["ckpt_paths"])], build, its_patcher)


def _of_vae(call: Mapping[str, Any]) -> _Recipe:
    return _Recipe("VAE", [Path(call["vae_path"])], vae(call["device"]), its_patcher)


_RECIPES: dict[str, Callable[[Mapping[str, Any]], _Recipe]] = {
    "load_diffusion_model": _of_diffusion_model,
    "load_clip_model_patcher": _of_text_encoder,
    "load_vae_patcher": _of_vae,
}


def _moved(twin: Built, module: nn.Module) -> list[CoreSlot]:
    """The twin's slots with the module's places. Raises CannotBeLazy where the two differ."""
    theirs, ours = _names(twin.patcher.model), _names(module)
    if theirs != ours:
        raise CannotBeLazy(f"its weight {min(theirs ^ ours)} is not as in its file")
    prefixes = {id(part): prefix for prefix, part in twin.patcher.model.named_modules()}
    return [_moved_slot(slot, module, prefixes) for slot in twin.slots]


def _moved_slot(slot: CoreSlot, module: nn.Module, prefixes: Mapping[int, str]) -> CoreSlot:
    places = [(module.get_submodule(prefixes[id(part)]), name) for part, name in slot.places]
    for (part, name), (twin, _) in zip(places, slot.places, strict=True):
        if not _is_same(getattr(part, name), slot):
            weight = f"{prefixes[id(twin)]}.{name}".lstrip(".")
            raise CannotBeLazy(f"its weight {weight} is not as in its file")
    return replace(slot, where=tuple((weakref.ref(part), name) for part, name in places))


def _is_same(weight: Tensor, slot: CoreSlot) -> bool:
    """Whether a weight is what the file gives: its shape, its dtype, and a few of its elements."""
    if weight.shape != slot.tensor.shape or weight.dtype != slot.dtype:
        return False
    ours, stored = plain(weight.data), plain(slot.view)
    return len(ours) == len(stored) and all(map(_agree, ours, stored))


def _agree(ours: Tensor, stored: Tensor) -> bool:
    step = max(1, ours.numel() // NUM_SAMPLES)
    few = stored.reshape(-1)[::step].to(ours.dtype)
    return bool((ours.reshape(-1)[::step].cpu().float() == few.float()).all())


def _names(module: nn.Module) -> set[str]:
    """Of all weights, also of those that stand in several places."""
    weights = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name for names in weights for name, _ in names}
