"""Names of model files to paths, without leaving the model folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
    if not folders:
        raise ValueError(f"{name} is not there, for want of a folder with models; name it with --models.")
    places = ", ".join(map(str, folders))
    raise ValueError(f"{name} is not in {places}; put the file there, or choose another in the loader node.")


def model_files(folders: Iterable[Path]) -> list[str]:
    """Names of all safetensors files below the folders, with forward slashes."""
    found = {name for folder in folders for name in files_below(folder)}
    return sorted(name for name in found if name.endswith(SAFETENSORS))


def files_below(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, with forward slashes.

    Links to folders are followed, after all that lies here in truth; a folder is entered once, so circles end.
    """
    entered: set[tuple[int, int]] = set()
    tops = [str(folder)]
    for top in tops:  # grows by the links that are met
        for place, subfolders, files in os.walk(top):
            status = os.stat(place)
            if (status.st_dev, status.st_ino) in entered:
                subfolders.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            tops += [path for path in (os.path.join(place, name) for name in sorted(subfolders)) if os.path.islink(path)]
            yield from (Path(place, file).relative_to(folder).as_posix() for file in files)


def diffusers_folders(folders: Iterable[Path]) -> list[str]:
    """Names of the sub-folders that hold a model in the Hugging Face layout, up to two levels deep."""
    patterns = ("*/transformer/config.json", "*/*/transformer/config.json")
    found = ((folder, config) for folder in folders for pattern in patterns for config in folder.glob(pattern))
    return sorted({config.parent.parent.relative_to(folder).as_posix() for folder, config in found})
