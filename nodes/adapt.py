"""Core's loaders, memory-lazy: the same widgets and outputs, and weights that are there only while they are used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..host.comfy.core.loaders import CoreLoaders
from ..host.comfy.core.skeleton import CannotBeLazy
from ..memory.checkpoint import FileIdentity
from ..memory.resource import Identity
from .load import ERRORS
from .runtime import runtime

CATEGORY = "Lazy H3/stock graphs"
SUFFIXES = (".safetensors", ".sft")
WEIGHT_DTYPES = {
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}

log = logging.getLogger("lazy_h3")


class StandIn:
    """A node in the place of core's node CORE, whose widgets it has. ``WIDGETS``: those that it understands."""

    CATEGORY = CATEGORY
    FUNCTION = "load"
    CORE: ClassVar[str]
    WIDGETS: ClassVar[frozenset[str]]

    @classmethod
    def core_class(cls) -> Any:
        """Raises ValueError outside ComfyUI."""
        found = runtime().host.node_class(cls.CORE)
        if found is None:
            raise ValueError(
                f"{cls.__name__} stands in for ComfyUI's {cls.CORE}, which this host does not have; run it in ComfyUI."
            )
        return found

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        core: Any = runtime().host.node_class(cls.CORE)
        return {"required": {}} if core is None else core.INPUT_TYPES()

    @classmethod
    def files(cls, **inputs: Any) -> list[Path]:
        """The files that the widgets name. Raises ValueError for a name that is not there, CannotBeLazy for other formats."""
        raise NotImplementedError

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> str:
        """Runs again if a file was replaced: unlike core's, it is still to be read. The prompt is followed from here on."""
        runtime().attachment.touch()
        try:
            return " ".join(str(FileIdentity.of(path)) for path in cls.files(**inputs))
        except (CannotBeLazy, *ERRORS):
            return ""

    @classmethod
    def lazily(cls, loaders: CoreLoaders, **inputs: Any) -> Any:
        """Core's object without weights. Raises CannotBeLazy, or what core raises."""
        raise NotImplementedError

    def load(self, **inputs: Any) -> tuple[Any, ...]:
        """Core's object without weights; as core's own node loads it where it cannot be had without."""
        shared = runtime()
        shared.attachment.touch()
        core = self.core_class()
        try:
            self._check(inputs)
            return (self.lazily(shared.core_loaders, **inputs),)
        except Exception as reason:
            names = ", ".join(value for value in inputs.values() if isinstance(value, str))
            log.info("%s: loaded by ComfyUI's own %s, and not lazy: %s.", names, self.CORE, str(reason).rstrip("."))
        made: tuple[Any, ...] = getattr(core(), core.FUNCTION)(**inputs)
        self._follow(made[0], inputs)
        return made

    def _follow(self, made: Any, inputs: Mapping[str, Any]) -> None:
        """What core has loaded by itself is core's own to release."""

    def _check(self, inputs: Mapping[str, Any]) -> None:
        unknown = inputs.keys() - self.WIDGETS
        if unknown:
            raise CannotBeLazy(f"its input {min(unknown)} is new")


class CoreLoader(StandIn):
    """A node that makes a model from files. Sub-classes say from which, and with what options."""

    KIND: ClassVar[str]

    @classmethod
    def options(cls, **inputs: Any) -> dict[str, Any]:
        """What else decides how the model is made."""
        return {}

    @classmethod
    def lazy_h3_resources(cls, **inputs: Any) -> Mapping[int, Identity]:
        """Slot -> what the widgets load, for the analysis of the graph; nothing for what core loads by itself."""
        try:
            return {0: runtime().core_loaders.identity(cls.KIND, cls.files(**inputs), cls.options(**inputs))}
        except (CannotBeLazy, *ERRORS):
            return {}

    def _follow(self, made: Any, inputs: Mapping[str, Any]) -> None:
        """But where it pages weights in by itself, they can be evicted after their last use."""
        shared = runtime()
        if shared.settings.is_on("evict_dynamic"):
            shared.releases.evict_after_last_use(made, tuple(self.lazy_h3_resources(**inputs).values()))


class LazyH3UNETLoader(CoreLoader):
    """A MODEL whose weights are read when sampling starts."""

    DESCRIPTION = "ComfyUI's Load Diffusion Model; the weights are read when sampling starts, and gone after the last sampler."
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("Core's model, without weights until somebody samples.",)
    CORE = "UNETLoader"
    KIND = "MODEL"
    WIDGETS = frozenset({"unet_name", "weight_dtype"})

    @classmethod
    def files(cls, *, unet_name: str, **inputs: Any) -> list[Path]:
        return [_file("diffusion_models", unet_name)]

    @classmethod
    def options(cls, *, weight_dtype: str = "default", **inputs: Any) -> dict[str, Any]:
        return dict(WEIGHT_DTYPES.get(weight_dtype, {}))

    @classmethod
    def lazily(cls, loaders: CoreLoaders, **inputs: Any) -> Any:
        return loaders.model(cls.files(**inputs)[0], cls.options(**inputs))


class LazyH3CLIPLoader(CoreLoader):
    """A CLIP whose weights are read when a prompt is encoded."""

    DESCRIPTION = "ComfyUI's Load CLIP; the weights are read when a prompt is encoded, and gone after the last node that encodes."
    RETURN_TYPES = ("CLIP",)
    RETURN_NAMES = ("CLIP",)
    OUTPUT_TOOLTIPS = ("Core's text encoder, without weights until somebody encodes.",)
    CORE = "CLIPLoader"
    KIND = "CLIP"
    WIDGETS = frozenset({"clip_name", "type", "device"})

    @classmethod
    def files(cls, *, clip_name: str, **inputs: Any) -> list[Path]:
        return [_file("text_encoders", clip_name)]

    @classmethod
    def options(cls, *, type: str = "stable_diffusion", device: str = "default", **inputs: Any) -> dict[str, Any]:
        return {"type": type, "device": device}

    @classmethod
    def lazily(cls, loaders: CoreLoaders, **inputs: Any) -> Any:
        return loaders.clip(cls.files(**inputs), cls.options(**inputs))


class LazyH3DualCLIPLoader(LazyH3CLIPLoader):
    """A CLIP of two files."""

    DESCRIPTION = (
        "ComfyUI's DualCLIPLoader; the weights are read when a prompt is encoded, and gone after the last node that encodes."
    )
    CORE = "DualCLIPLoader"
    WIDGETS = frozenset({"clip_name1", "clip_name2", "type", "device"})

    @classmethod
    def files(cls, *, clip_name1: str, clip_name2: str, **inputs: Any) -> list[Path]:
        return [_file("text_encoders", name) for name in (clip_name1, clip_name2)]


class LazyH3VAELoader(CoreLoader):
    """A VAE whose weights are read when it encodes or decodes."""

    DESCRIPTION = "ComfyUI's Load VAE; the weights are read when it encodes or decodes, and gone after the last node that does."
    RETURN_TYPES = ("VAE",)
    RETURN_NAMES = ("VAE",)
    OUTPUT_TOOLTIPS = ("Core's VAE, without weights until somebody encodes or decodes.",)
    CORE = "VAELoader"
    KIND = "VAE"
    WIDGETS = frozenset({"vae_name"})

    @classmethod
    def files(cls, *, vae_name: str, **inputs: Any) -> list[Path]:
        tiny = getattr(cls.core_class(), "video_taes", ())
        return [_file("vae_approx" if Path(vae_name).stem in tiny else "vae", vae_name)]

    @classmethod
    def lazily(cls, loaders: CoreLoaders, **inputs: Any) -> Any:
        return loaders.vae(cls.files(**inputs)[0])


class LazyH3LoraLoaderModelOnly(StandIn):
    """A LoRA on a MODEL, mapped from its file."""

    DESCRIPTION = "ComfyUI's Load LoRA (Model); its file is read when the model's weights are, and let go with them."
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with the LoRA's patches.",)
    CORE = "LoraLoaderModelOnly"
    WIDGETS = frozenset({"model", "lora_name", "strength_model"})

    @classmethod
    def files(cls, *, lora_name: str, **inputs: Any) -> list[Path]:
        return [_file("loras", lora_name)]

    @classmethod
    def lazily(cls, loaders: CoreLoaders, *, model: Any, strength_model: float, **inputs: Any) -> Any:
        return loaders.with_lora(model, cls.files(**inputs)[0], strength_model) if strength_model else model


def _file(folder: str, name: str) -> Path:
    """Raises CannotBeLazy for what is no safetensors file, ValueError for a name that is not there."""
    if not isinstance(name, str) or not name.endswith(SUFFIXES):
        raise CannotBeLazy(f"{name} is no safetensors file")
    return runtime().host.model_path(folder, name)
