"""ComfyUI, as the pack sees it. Imported only inside ComfyUI; every name is looked up when it is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..files import diffusers_folders, inside
from ..interface import Progress
from ..nested import NestedLatent


def is_comfy_running() -> bool:
    """Whether this process is a ComfyUI server (or something that loaded its core)."""
    return "folder_paths" in sys.modules and "comfy" in sys.modules


class ComfyHost:
    """Answers ``host.interface.Host`` from ComfyUI's modules."""

    @property
    def progress_module(self) -> Any:
        from comfy_execution import progress

        return progress

    @property
    def management(self) -> Any:
        from comfy import model_management

        return model_management

    @property
    def patcher_base(self) -> type:
        from comfy.model_patcher import ModelPatcher

        return ModelPatcher

    def device(self) -> torch.device:
        import comfy.model_management

        return comfy.model_management.get_torch_device()

    def model_files(self, folder: str) -> list[str]:
        import folder_paths

        return [name for name in folder_paths.get_filename_list(folder) if name.endswith((".safetensors", ".sft"))]

    def model_folders(self, folder: str) -> list[str]:
        import folder_paths

        return diffusers_folders(map(Path, folder_paths.get_folder_paths(folder)))

    def model_path(self, folder: str, name: str) -> Path:
        import folder_paths

        return inside(map(Path, folder_paths.get_folder_paths(folder)), name)

    def tokenizer_folders(self) -> Iterable[Path]:
        import comfy

        return [Path(root) / "text_encoders" / "qwen25_tokenizer" for root in comfy.__path__]

    def executing(self) -> tuple[str, str] | None:
        from comfy_execution.utils import get_executing_context

        context = get_executing_context()
        return None if context is None else (context.prompt_id, context.node_id)

    def node_class(self, class_type: str) -> type | None:
        import nodes

        return nodes.NODE_CLASS_MAPPINGS.get(class_type)

    def outputs_to_execute(self) -> Iterable[str] | None:
        import server

        instance = getattr(server.PromptServer, "instance", None)
        if instance is None:
            return None
        running, _ = instance.prompt_queue.get_current_queue_volatile()
        return running[0][4] if running else None

    def progress(self, total: int) -> Progress:
        import comfy.utils

        bar = comfy.utils.ProgressBar(total)

        def report(done: int, total: int) -> None:
            self.raise_if_interrupted()
            bar.update_absolute(done, total)

        return report

    def send(self, name: str, data: dict[str, Any]) -> None:
        import server

        instance = getattr(server.PromptServer, "instance", None)
        if instance is not None:
            instance.send_sync(name, data, None)

    def raise_if_interrupted(self) -> None:
        import comfy.model_management

        comfy.model_management.throw_exception_if_processing_interrupted()

    def nested_latent(self, video: torch.Tensor, audio: torch.Tensor) -> Any:
        try:
            from comfy.nested_tensor import NestedTensor
        except ImportError:  # older than 0.30
            return NestedLatent((video, audio))
        return NestedTensor((video, audio))
