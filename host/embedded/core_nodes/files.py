"""What the nodes that read and write files have in common."""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar

from .. import folder_paths

Shown = dict[str, str]  # {"filename", "subfolder", "type"}: how the front end asks for a file

PREFIX = (
    "STRING",
    {"default": "ComfyUI", "tooltip": "Start of the file name; may name sub-folders and contain %year%, %width% and the like."},
)
WORKFLOW: dict[str, str] = {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}


def workflow_metadata(prompt: Any, extra_pnginfo: dict[str, Any] | None) -> dict[str, Any]:
    """What is saved with a result so that it can be made again."""
    return ({"prompt": prompt} if prompt is not None else {}) | (extra_pnginfo or {})


def as_text(metadata: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in metadata.items()}


class InputFile:
    """Base of nodes with one file of the input folder: its content decides whether they run again."""

    FILE_INPUT: ClassVar[str]

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> str:
        digest = hashlib.sha256()
        with open(folder_paths.get_annotated_filepath(inputs[cls.FILE_INPUT]), "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()

    @classmethod
    def VALIDATE_INPUTS(cls, **inputs: Any) -> bool | str:
        name = inputs[cls.FILE_INPUT]
        return True if folder_paths.exists_annotated_filepath(name) else f"Invalid {cls.FILE_INPUT} file: {name}"
