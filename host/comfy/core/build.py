"""Core's objects built from mapped files, without weights: the same functions of core that its own loaders call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....memory.checkpoint import open_checkpoint
from .mapped import MappedCheckpoint
from .skeleton import CannotBeLazy, CoreSlot, recording, slots_of

Views = dict[str, torch.Tensor]
Build = Callable[[list[Views], list[Any]], Any]  # (tensors, metadata) of each file -> core's object
PatcherOf = Callable[[Any], Any]
IDLE = {"offload_device": torch.device("cpu")}  # where core keeps idle models on the GPU, it would move them there at once


@dataclass(frozen=True)
class Built:
    """Core's object, whose weights are views of the files; ``slots``: where they stand."""

    made: Any
    patcher: Any
    files: list[MappedCheckpoint]
    slots: list[CoreSlot]


def built(paths: Sequence[Path], build: Build, patcher_of: PatcherOf) -> Built:
    """Raises CannotBeLazy, or what core raises."""
    import comfy.model_patcher

    files = [MappedCheckpoint(open_checkpoint(path)) for path in paths]
    with recording(files) as recorder:
        made = build([dict(file.views) for file in files], [dict(file.checkpoint.metadata) or None for file in files])
    if made is None:
        raise CannotBeLazy("core does not recognise it")
    patcher = patcher_of(made)
    if type(patcher) is not comfy.model_patcher.ModelPatcher:
        raise CannotBeLazy(f"core holds it in a {type(patcher).__name__}")
    return Built(made, patcher, files, slots_of(patcher.model, recorder, files))


def diffusion_model(options: Mapping[str, Any]) -> Build:
    """``options``: core's model options."""
    import comfy.sd

    def build(files: list[Views], metadata: list[Any]) -> Any:
        return comfy.sd.load_diffusion_model_state_dict(files[0], {**IDLE, **options}, metadata[0], disable_dynamic=True)

    return build


def text_encoder(clip_type: Any, folders: Any, options: Mapping[str, Any]) -> Build:
    """``clip_type``: of core's CLIPType; ``folders``: with embeddings; ``options``: core's model options."""
    import comfy.sd
    import comfy.utils

    lazily = {**IDLE, **options, "initial_device": torch.device("meta")}  # anywhere else, the constructor might load at once

    def build(files: list[Views], metadata: list[Any]) -> Any:
        read = [comfy.utils.convert_old_quants(views, "", metadata=own)[0] for views, own in zip(files, metadata, strict=True)]
        return comfy.sd.load_text_encoder_state_dicts(read, folders, clip_type, lazily, disable_dynamic=True)

    return build


def vae(device: Any = None) -> Build:
    """``device``: where it computes, None for core's choice."""
    import comfy.sd

    def build(files: list[Views], metadata: list[Any]) -> Any:
        chosen = {} if device is None else {"device": device}
        made = comfy.sd.VAE(sd=files[0], metadata=metadata[0], **chosen)
        made.throw_exception_if_invalid()
        return made

    return build


def itself(model: Any) -> Any:
    """The patcher of a MODEL."""
    return model


def its_patcher(holder: Any) -> Any:
    """The patcher of a CLIP or a VAE."""
    return holder.patcher
