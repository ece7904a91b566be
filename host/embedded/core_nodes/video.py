"""Video: frames and sound joined, and written to a file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import folder_paths
from ..audio import Audio
from ..video import CODECS, CONTAINERS, VideoComponents, VideoFromComponents
from .files import PREFIX, WORKFLOW, workflow_metadata

SUFFIXES = {"auto": "mp4"}


class CreateVideo:
    RETURN_TYPES = ("VIDEO",)
    FUNCTION = "create"
    CATEGORY = "video"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"images": ("IMAGE",), "fps": ("FLOAT", {"default": 24.0, "min": 1.0, "max": 120.0, "step": 1.0})},
            "optional": {"audio": ("AUDIO",), "bit_depth": ("INT", {"default": 8, "min": 8, "max": 10, "step": 2})},
        }

    def create(self, images: Tensor, fps: float, audio: Audio | None = None, bit_depth: int = 8) -> tuple[VideoFromComponents]:
        return (VideoFromComponents(VideoComponents(images, Fraction(fps), audio), bit_depth),)


class SaveVideo:
    RETURN_TYPES = ("VIDEO",)
    RETURN_NAMES = ("video",)
    FUNCTION = "save"
    OUTPUT_NODE = True
    CATEGORY = "video"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "video": ("VIDEO",),
                "filename_prefix": (PREFIX[0], PREFIX[1] | {"default": "video/ComfyUI"}),
                "format": (list(CONTAINERS), {"default": "auto"}),
            },
            "optional": {"codec": (list(CODECS), {"default": "auto"})},
            "hidden": WORKFLOW,
        }

    def save(
        self,
        video: VideoFromComponents,
        filename_prefix: str,
        format: str,
        codec: str = "auto",
        *,
        prompt: Any = None,
        extra_pnginfo: Any = None,
    ) -> dict[str, Any]:
        where = folder_paths.get_save_image_path(filename_prefix, folder_paths.get_output_directory(), *video.get_dimensions())
        name = where.file(SUFFIXES.get(format, format))
        video.save_to(Path(where.folder, name), format, codec, workflow_metadata(prompt, extra_pnginfo))
        shown = [{"filename": name, "subfolder": where.subfolder, "type": "output"}]
        return {"ui": {"images": shown, "animated": [True]}, "result": (video,)}
