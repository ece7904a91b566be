"""Loaders: files to handles. No weights are read here, whatever the order of the nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..memory.component import Component
from ..memory.handle import Handle
from ..memory.resource import Identity
from .catalogue import AS_STORED, DTYPES, LOADERS, files_of
from .runtime import runtime

CATEGORY = "Lazy H3"
DTYPE_INPUT = (
    [AS_STORED, *DTYPES],
    {
        "default": AS_STORED,
        "tooltip": "Precision to hold the weights in. What must stay fp32 (norms, heads, time embedding) does in any case.",
    },
)
ERRORS = (OSError, ValueError)  # CheckpointError, FormatError and the host's path errors are ValueErrors


class LazyH3Loader:
    """A node that opens headers and gives handles. Sub-classes say which files to which slots."""

    CATEGORY = CATEGORY
    FUNCTION = "load"
    OUTPUT_TOOLTIPS: ClassVar[tuple[str, ...]]

    @classmethod
    def paths(cls, **inputs: Any) -> dict[int, tuple[str, Path]]:
        """Slot -> (kind, file or folder). Raises ValueError for a name that is not there."""
        raise NotImplementedError

    @classmethod
    def components(cls, *, dtype: str = AS_STORED, **inputs: Any) -> dict[int, Component]:
        """Slot -> component, from headers alone."""
        shared = runtime()
        paths = cls.paths(**inputs)
        return {slot: shared.catalogue.component(path, kind, dtype, shared.device()) for slot, (kind, path) in paths.items()}

    @classmethod
    def lazy_h3_resources(cls, **inputs: Any) -> Mapping[int, Identity]:
        """Slot -> what the widgets load, for the analysis of the graph; nothing for files that cannot be loaded.

        The name is ours alone: node classes of the host have attributes of every plainer name.
        """
        try:
            return {slot: component.identity for slot, component in cls.components(**inputs).items()}
        except ERRORS:
            return {}

    @classmethod
    def IS_CHANGED(cls, *, dtype: str = AS_STORED, **inputs: Any) -> str:
        """Changes with the files on disk; names no folder, since it is saved with the results.

        Never raises: a missing file shows when the node runs, and a linked name then, too.
        """
        runtime().attachment.touch()
        if None in inputs.values():
            return dtype
        try:
            files = [file for _, path in cls.paths(**inputs).values() for file in files_of(path)]
        except ERRORS as error:
            return json.dumps([str(error), dtype])
        return json.dumps([*([Path(file.path).name, file.size, file.mtime_ns] for file in files), dtype])

    def load(self, **inputs: Any) -> tuple[Handle, ...]:
        """Handles for all slots. Raises CheckpointError or FormatError, which name the file."""
        shared = runtime()
        shared.attachment.touch()
        components = self.components(**inputs)
        return tuple(shared.handle(components[slot]) for slot in sorted(components))


class _FileLoader(LazyH3Loader):
    FOLDER: ClassVar[str]
    KIND: ClassVar[str]
    FILE_TOOLTIP: ClassVar[str]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"file": (runtime().host.model_files(cls.FOLDER), {"tooltip": cls.FILE_TOOLTIP})},
            "optional": {"dtype": DTYPE_INPUT},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, file: str | None = None) -> bool | str:
        """In place of the host's own check, which lists the other files but does not say what to do."""
        return file is None or _found(cls.paths, file=file)

    @classmethod
    def paths(cls, *, file: str) -> dict[int, tuple[str, Path]]:
        return {0: (cls.KIND, _model_path(cls.FOLDER, file))}


class LazyH3TextEncoderLoader(_FileLoader):
    """The Qwen3-VL text encoder from one file."""

    DESCRIPTION = "Opens a MiniMax-H3 text encoder. Its weights are read by the first node that encodes, and gone after the last."
    FOLDER = "text_encoders"
    KIND = "text_encoder"
    FILE_TOOLTIP = "A file of models/text_encoders, for example qwen3vl_32b_minimax_h3_bf16.safetensors."
    RETURN_TYPES = ("LAZYH3_TEXT_ENCODER",)
    RETURN_NAMES = ("text_encoder",)
    OUTPUT_TOOLTIPS = ("A handle: the name of the model, not its weights.",)


class LazyH3DiTLoader(_FileLoader):
    """The diffusion transformer from one file."""

    DESCRIPTION = (
        "Opens a MiniMax-H3 diffusion transformer. Its weights are read when sampling starts, and gone after the last sampler."
    )
    FOLDER = "diffusion_models"
    KIND = "dit"
    FILE_TOOLTIP = "A file of models/diffusion_models, for example minimax_h3_fl2va_bf16.safetensors."
    RETURN_TYPES = ("LAZYH3_DIT",)
    RETURN_NAMES = ("dit",)
    OUTPUT_TOOLTIPS = ("A handle: the name of the model, not its weights.",)


class LazyH3VideoVAELoader(_FileLoader):
    """The video VAE from one file."""

    DESCRIPTION = "Opens the MiniMax-H3 video VAE. Decoding reads only its decoder."
    FOLDER = "vae"
    KIND = "video_vae"
    FILE_TOOLTIP = "A file of models/vae, for example minimax_h3_video_vae_fp16.safetensors."
    RETURN_TYPES = ("LAZYH3_VIDEO_VAE",)
    RETURN_NAMES = ("video_vae",)
    OUTPUT_TOOLTIPS = ("A handle: the name of the model, not its weights.",)


class LazyH3AudioVAELoader(_FileLoader):
    """The audio VAE from one file."""

    DESCRIPTION = "Opens the MiniMax-H3 audio VAE, which always computes in fp32."
    FOLDER = "vae"
    KIND = "audio_vae"
    FILE_TOOLTIP = "A file of models/vae, for example minimax_h3_audio_vae_fp32.safetensors."
    RETURN_TYPES = ("LAZYH3_AUDIO_VAE",)
    RETURN_NAMES = ("audio_vae",)
    OUTPUT_TOOLTIPS = ("A handle: the name of the model, not its weights.",)


class LazyH3FolderLoader(LazyH3Loader):
    """All four components from a folder in the Hugging Face layout."""

    DESCRIPTION = "Opens a MiniMax-H3 folder in the Hugging Face layout (transformer, text_encoder, vae, audio_vae, tokenizer)."
    SUBFOLDERS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("text_encoder", "text_encoder"),
        ("dit", "transformer"),
        ("video_vae", "vae"),
        ("audio_vae", "audio_vae"),
    )
    RETURN_TYPES = ("LAZYH3_TEXT_ENCODER", "LAZYH3_DIT", "LAZYH3_VIDEO_VAE", "LAZYH3_AUDIO_VAE")
    RETURN_NAMES = ("text_encoder", "dit", "video_vae", "audio_vae")
    OUTPUT_TOOLTIPS = ("The text encoder.", "The diffusion transformer.", "The video VAE.", "The audio VAE.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        folders = runtime().host.model_folders("diffusers")
        return {
            "required": {"folder": (folders, {"tooltip": "A folder of models/diffusers that holds transformer/config.json."})},
            "optional": {"dtype": DTYPE_INPUT},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, folder: str | None = None) -> bool | str:
        return folder is None or _found(cls.paths, folder=folder)

    @classmethod
    def paths(cls, *, folder: str) -> dict[int, tuple[str, Path]]:
        root = _model_path("diffusers", folder)
        return {slot: (kind, root / subfolder) for slot, (kind, subfolder) in enumerate(cls.SUBFOLDERS)}


def of_kind(value: Any, kind: str) -> Handle:
    """The value, if it is the handle of a component of this kind. Raises ValueError, which says what to wire in."""
    if isinstance(value, Handle) and value.kind == kind:
        return value
    wanted, loader = LOADERS[kind]
    found = f"the handle of the {LOADERS[value.kind][0]}" if isinstance(value, Handle) else f"{value!r:.40}, which is no handle"
    raise ValueError(f"This node needs the {wanted} and was given {found}; wire in the node {loader}.")


def _model_path(folder: str, name: Any) -> Path:
    """The path of a name in a loader's list. Raises ValueError if there is none, or if it is no name at all."""
    if not isinstance(name, str):
        raise ValueError(f"The loader was given {name!r:.40} in place of a name; choose one from its list.")
    return runtime().host.model_path(folder, name)


def _found(paths: Callable[..., Any], **inputs: str) -> bool | str:
    """True, or why there is no such file."""
    try:
        paths(**inputs)
    except ERRORS as error:
        return str(error)
    return True
