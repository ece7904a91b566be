"""What the pack asks of whatever runs its nodes. ComfyUI and the embedded host both answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

Progress = Callable[[int, int], None]  # (done, total); raises the host's interrupt


class Host(Protocol):
    """A graph executor with ComfyUI's semantics, and its folders."""

    @property
    def progress_module(self) -> Any:
        """``get_progress_state``, ``ProgressHandler``: ComfyUI's names."""

    @property
    def management(self) -> Any:
        """ComfyUI's model_management, or an object with its names."""

    @property
    def patcher_base(self) -> type:
        """The class of the host's list of loaded models."""

    def device(self) -> torch.device:
        """Where models compute."""

    def model_files(self, folder: str) -> list[str]:
        """Names of the safetensors files of a model folder (``text_encoders``, ``diffusion_models``, ``vae``)."""

    def model_folders(self, folder: str) -> list[str]:
        """Names of the sub-folders of a model folder that hold a Hugging Face pipeline."""

    def model_path(self, folder: str, name: str) -> Path:
        """The path of a name from the two lists. Raises ValueError, in one sentence, if it is not there or escapes the folder."""

    def tokenizer_folders(self) -> Iterable[Path]:
        """Folders in which the host itself ships the Qwen tokenizer."""

    def executing(self) -> tuple[str, str] | None:
        """(prompt id, node id) of the node whose code is running here, also after an await."""

    def node_class(self, class_type: str) -> type | None:
        """The registered class of a node type."""

    def outputs_to_execute(self) -> Iterable[str] | None:
        """The output nodes that the running prompt was queued for, if the host tells."""

    def progress(self, total: int) -> Progress:
        """Reports progress of the executing node."""

    def send(self, name: str, data: dict[str, Any]) -> None:
        """Sends a message to all front ends that are connected; on any thread."""

    def raise_if_interrupted(self) -> None:
        """Raises the host's own interrupt exception if the user asked to stop."""

    def nested_latent(self, video: torch.Tensor, audio: torch.Tensor) -> Any:
        """The two streams as one ``samples`` value, in core's format (``is_nested``, ``unbind()``)."""
