"""Core's loaders, with models that are idle as views of their files."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....memory.checkpoint import FileIdentity, open_checkpoint
from ....memory.resource import Identity
from ....memory.store import Store
from .build import Build, PatcherOf, built, diffusion_model, its_patcher, itself, text_encoder, vae
from .dynamic import REASON, is_dynamic, refuse_where_dynamic
from .mapped import MappedCheckpoint
from .model import CoreModel
from .patcher import Owner, lazy_class
from .skeleton import CannotBeLazy

_copies = itertools.count(1)


class CoreLoaders:
    """Loads each (file, options) once, as long as somebody has it. Raises CannotBeLazy where core must load by itself."""

    def __init__(self, store: Store, executing: Owner) -> None:
        self._store = store
        self._executing = executing
        self._made: weakref.WeakValueDictionary[Identity, Any] = weakref.WeakValueDictionary()

    def identity(self, kind: str, paths: Sequence[Path], options: Mapping[str, Any]) -> Identity:
        """Of what a loader with these files and options gives. Raises CheckpointError for a file that is not there."""
        files = tuple(map(FileIdentity.of, paths))
        return Identity(f"core {kind}", files, tuple(sorted((name, str(value)) for name, value in options.items())))

    def model(self, path: Path, options: Mapping[str, Any]) -> Any:
        """A MODEL. ``options``: core's model options."""
        refuse_where_dynamic("MODEL")
        return self._known_or_made("MODEL", [path], options, diffusion_model(options), itself)

    def clip(self, paths: Sequence[Path], options: Mapping[str, Any]) -> Any:
        """A CLIP. ``options``: the loader's ``type`` and ``device``."""
        import comfy.sd
        import folder_paths

        clip_type = getattr(comfy.sd.CLIPType, options["type"].upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)
        on_cpu = dict.fromkeys(("load_device", "offload_device"), torch.device("cpu")) if options["device"] == "cpu" else {}
        refuse_where_dynamic("CLIP", on_cpu.get("load_device"))
        build = text_encoder(clip_type, folder_paths.get_folder_paths("embeddings"), on_cpu)
        return self._known_or_made("CLIP", paths, options, build, its_patcher)

    def vae(self, path: Path) -> Any:
        """A VAE."""
        refuse_where_dynamic("VAE")
        return self._known_or_made("VAE", [path], {}, vae(), its_patcher)

    def with_lora(self, model: Any, path: Path, strength: float) -> Any:
        """A clone of a MODEL with the patches of a LoRA, whose pages are given back when the model is unloaded."""
        if is_dynamic(model):
            raise CannotBeLazy(REASON)
        import comfy.patcher_extension
        import comfy.sd

        file = MappedCheckpoint(open_checkpoint(path))
        metadata = dict(file.checkpoint.metadata)
        patched, _ = comfy.sd.load_lora_for_models(model, None, dict(file.views), strength, 0, lora_metadata=metadata or None)

        def unloaded(patcher: Any, unpatch_all: bool) -> None:
            if unpatch_all:
                file.forget_pages()

        patched.add_callback_with_key(comfy.patcher_extension.CallbacksMP.ON_DETACH, f"lazy_h3 {path}", unloaded)
        return patched

    def take(self, patcher: Any) -> None:
        """From here on it fills before core loads, and lets go of everything when core unloads it."""
        patcher.__class__ = lazy_class(type(patcher), self._store, self._executing)
        patcher.offload_device = torch.device("cpu")

    def _known_or_made(
        self, kind: str, paths: Sequence[Path], options: Mapping[str, Any], build: Build, patcher_of: PatcherOf
    ) -> Any:
        identity = self.identity(kind, paths, options)
        known = self._made.get(identity)
        if known is None:
            taken = self._store.find(identity) is not None  # by a clone of an object that is gone: it has its own weights
            known = self._built(
                replace(identity, options=(*identity.options, next(_copies))) if taken else identity, paths, build, patcher_of
            )
            self._made[identity] = known
        return known

    def _built(self, identity: Identity, paths: Sequence[Path], build: Build, patcher_of: PatcherOf) -> Any:
        import comfy.model_management

        lazy = built(paths, build, patcher_of)
        patcher = lazy.patcher
        self.take(patcher)
        patcher.cached_patcher_init = partial(self._copied, identity, paths, build, patcher_of), ()
        name = f"{identity.kind} ({', '.join(path.stem for path in paths)})"
        core = CoreModel(identity, name, patcher.load_device, patcher.model, lazy.files, lazy.slots, comfy.model_management)
        self._store.add(core)
        return lazy.made

    def _copied(
        self, identity: Identity, paths: Sequence[Path], build: Build, patcher_of: PatcherOf, disable_dynamic: bool = False
    ) -> Any:
        """Another patcher with weights of its own, for core's deep clones."""
        own = replace(identity, options=(*identity.options, next(_copies)))
        return patcher_of(self._built(own, paths, build, patcher_of))
