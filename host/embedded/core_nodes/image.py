"""Pictures: IMAGE is [N, H, W, 3] in 0..1, MASK [N, H, W] with 1 where the picture is transparent."""

from __future__ import annotations

import os
import random
import string
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from .. import folder_paths
from .files import PREFIX, WORKFLOW, InputFile, Shown, as_text, workflow_metadata


class LoadImage(InputFile):
    FILE_INPUT = "image"
    RETURN_TYPES = ("IMAGE", "MASK")
    FUNCTION = "load_image"
    CATEGORY = "image"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": (folder_paths.input_files(["image"]), {"image_upload": True})}}

    def load_image(self, image: str) -> tuple[Tensor, Tensor]:
        """All frames of the file that have the size of the first."""
        with Image.open(folder_paths.get_annotated_filepath(image)) as file:
            frames = [ImageOps.exif_transpose(frame) for frame in ImageSequence.Iterator(file)]
        frames = [frame for frame in frames if frame.size == frames[0].size]
        return torch.stack([_pixels(frame) for frame in frames]), torch.stack([_mask(frame) for frame in frames])


def _pixels(frame: Image.Image) -> Tensor:
    if frame.mode.startswith("I"):  # 16 bits: PIL would cut them off
        frame = frame.point(lambda value: value * (1 / 257)).convert("L")
    return torch.from_numpy(np.asarray(frame.convert("RGB"), dtype=np.float32) / 255)


def _mask(frame: Image.Image) -> Tensor:
    if "A" not in frame.getbands() and "transparency" not in frame.info:
        return torch.zeros(64, 64)
    return 1 - torch.from_numpy(np.asarray(frame.convert("RGBA").getchannel("A"), dtype=np.float32) / 255)


class SaveImage:
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("images",)
    FUNCTION = "save_images"
    OUTPUT_NODE = True
    CATEGORY = "image"
    FOLDER = "output"
    COMPRESSION = 4

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",), "filename_prefix": PREFIX}, "hidden": WORKFLOW}

    def save_images(
        self, images: Tensor, filename_prefix: str = "ComfyUI", prompt: Any = None, extra_pnginfo: Any = None
    ) -> dict[str, Any]:
        info = PngInfo()
        for name, text in as_text(workflow_metadata(prompt, extra_pnginfo)).items():
            info.add_text(name, text)
        folder = folder_paths.get_directory_by_type(self.FOLDER)
        where = folder_paths.get_save_image_path(filename_prefix, folder, images.shape[2], images.shape[1])
        shown: list[Shown] = []
        for index, image in enumerate(images):
            name = where.file("png", index)
            _as_picture(image).save(os.path.join(where.folder, name), pnginfo=info, compress_level=self.COMPRESSION)
            shown.append({"filename": name, "subfolder": where.subfolder, "type": self.FOLDER})
        return {"ui": {"images": shown}, "result": (images,)}


def _as_picture(image: Tensor) -> Image.Image:
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).to(torch.uint8).numpy()
    return Image.fromarray(pixels)


class PreviewImage(SaveImage):
    FOLDER = "temp"
    COMPRESSION = 1

    def __init__(self) -> None:
        self._prefix = "ComfyUI_temp_" + "".join(random.choices(string.ascii_lowercase, k=5))

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",)}, "hidden": WORKFLOW}

    def save_images(self, images: Tensor, prompt: Any = None, extra_pnginfo: Any = None) -> dict[str, Any]:
        return super().save_images(images, self._prefix, prompt, extra_pnginfo)
