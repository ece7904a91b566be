"""The embedded host, as the pack sees it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..events import Send
from ..files import diffusers_folders, inside, model_files
from ..interface import Progress
from ..nested import NestedLatent
from . import progress
from .context import get_executing_context
from .host import EmbeddedHost
from .model_management import ModelManagement, ModelPatcher


class EmbeddedPort:
    """Answers ``host.interface.Host`` for one EmbeddedHost. ``send`` gets what front ends should hear, on any thread."""

    progress_module: Any = progress
    patcher_base: type = ModelPatcher

    def __init__(self, host: EmbeddedHost, device: torch.device | None = None, send: Send = lambda *_: None) -> None:
        self._host = host
        self._device = device or _best_device()
        self._send = send

    @property
    def management(self) -> ModelManagement:
        return self._host.model_management

    def device(self) -> torch.device:
        return self._device

    def model_files(self, folder: str) -> list[str]:
        return model_files(self._folders(folder))

    def model_folders(self, folder: str) -> list[str]:
        return diffusers_folders(self._folders(folder))

    def model_path(self, folder: str, name: str) -> Path:
        return inside(self._folders(folder), name)

    def tokenizer_folders(self) -> Iterable[Path]:
        return ()

    def executing(self) -> tuple[str, str] | None:
        context = get_executing_context()
        return None if context is None else (context.prompt_id, context.node_id)

    def node_class(self, class_type: str) -> type | None:
        return self._host.node_classes.get(class_type)

    def outputs_to_execute(self) -> Iterable[str] | None:
        running = self._host.running
        return running[4] if running else None

    def progress(self, total: int) -> Progress:
        bar = progress.ProgressBar(total)

        def report(done: int, total: int) -> None:
            self.raise_if_interrupted()
            bar.update_absolute(done, total)

        return report

    def send(self, name: str, data: dict[str, Any]) -> None:
        self._send(name, data)

    def raise_if_interrupted(self) -> None:
        self._host.throw_if_interrupted()

    def nested_latent(self, video: torch.Tensor, audio: torch.Tensor) -> NestedLatent:
        return NestedLatent((video, audio))

    def _folders(self, kind: str) -> list[Path]:
        return [Path(folder) for folder in self._host.folders.get_folder_paths(kind)]


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
