"""Names of model files to paths, without leaving the model folders."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath

SAFETENSORS = (".safetensors", ".sft")


def inside(folders: Iterable[Path], name: str) -> Path:
    """The file or folder ``name`` of the first folder that has it.

    Symbolic links are followed (people keep models on other disks), steps upwards are not. Raises ValueError where there is none.
    """
    folders = list(folders)
    parts = PureWindowsPath(name).parts  # takes both kinds of slashes, and knows drives
    if not parts or ".." in parts or any(PureWindowsPath(part).anchor for part in parts):
        raise ValueError(f"{name!r} leads out of the model folders; choose a name from the loader's list.")
    for folder in folders:
        path = folder.joinpath(*parts)
        if path.exists():
            return path
    places = ", ".join(map(str, folders)) or "no folder at all"
    raise ValueError(f"{name} is not in {places}; put the file there, or choose another in the loader node.")


def model_files(folders: Iterable[Path]) -> list[str]:
    """Names of all safetensors files below the folders, with forward slashes."""
    places = ((folder, place, files) for folder in folders for place, _, files in os.walk(folder, followlinks=True))
    found = {Path(place, file).relative_to(folder).as_posix() for folder, place, files in places for file in files}
    return sorted(name for name in found if name.endswith(SAFETENSORS))


def diffusers_folders(folders: Iterable[Path]) -> list[str]:
    """Names of the sub-folders that hold a model in the Hugging Face layout, up to two levels deep."""
    patterns = ("*/transformer/config.json", "*/*/transformer/config.json")
    found = ((folder, config) for folder in folders for pattern in patterns for config in folder.glob(pattern))
    return sorted({config.parent.parent.relative_to(folder).as_posix() for folder, config in found})
