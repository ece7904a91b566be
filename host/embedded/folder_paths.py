"""Where files are: outputs, inputs, temporary files, models. No name that comes from a workflow leads out of these folders.

One Folders per host. The functions of this module are those of the current host's, as ComfyUI's are the process's.
"""

from __future__ import annotations

import mimetypes
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..files import files_below
from .context import current_host
from .errors import PathError

MODEL_SUFFIXES = frozenset({".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl", ".gguf"})
ALIASES = {"diffusion_models": ("diffusion_models", "unet"), "text_encoders": ("text_encoders", "clip")}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(current_host().folders, name)


class SavePath(NamedTuple):
    """Where the next file of a prefix goes, in the order of ComfyUI's function: ``<folder>/<filename>_<counter>_.<suffix>``."""

    folder: str
    filename: str
    counter: int
    subfolder: str
    filename_prefix: str

    def file(self, suffix: str, offset: int = 0) -> str:
        """Name of the file, ``offset`` files after the next."""
        return f"{self.filename.replace('%batch_num%', str(offset))}_{self.counter + offset:05}_.{suffix}"


def inside(folder: Path, name: str) -> Path:
    """``folder / name``, links of the file system not followed.

    Raises:
        PathError: the name leads out of the folder, or no file can have it.
    """
    if not _is_file_name(name):
        raise PathError(f"{name!r} holds a character that no file name can have: take it out.")
    root = folder.absolute()
    path = Path(os.path.normpath(root / name.replace("\\", "/")))
    if not path.is_relative_to(root):
        raise PathError(f"'{name}' leads out of the folder {folder}: use a name inside it.")
    return path


def _is_file_name(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False


class Folders:
    """The folders of one host. Model kinds ("vae", "text_encoders") are sub-folders of every model folder."""

    def __init__(self, output: Path, inputs: Path, temp: Path | None, models: Sequence[Path]):
        self._output = Path(output)
        self._input = Path(inputs)
        self._temp = temp and Path(temp)
        self._models = [Path(folder) for folder in models]
        self._remove_temp: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Remove the temporary folder, if it was made here; that also happens when nobody needs it any more."""
        self._remove_temp()

    def get_output_directory(self) -> str:
        return str(self._output)

    def get_input_directory(self) -> str:
        return str(self._input)

    def get_temp_directory(self) -> str:
        if self._temp is None:
            self._temp = Path(tempfile.mkdtemp(prefix="lazy-h3-"))
            self._remove_temp = weakref.finalize(self, shutil.rmtree, self._temp, ignore_errors=True)
        return str(self._temp)

    def get_directory_by_type(self, kind: str) -> str:
        """Folder of "output", "input" or "temp"."""
        folders = {"output": self.get_output_directory, "input": self.get_input_directory, "temp": self.get_temp_directory}
        if kind not in folders:
            raise PathError(f"There is no folder '{kind}': use one of {', '.join(folders)}.")
        return folders[kind]()

    def get_folder_paths(self, kind: str) -> list[str]:
        """Folders with models of a kind, whether they exist or not."""
        return [str(folder / name) for folder in self._models for name in ALIASES.get(kind, (kind,))]

    def get_filename_list(self, kind: str) -> list[str]:
        """Names of the model files of a kind, relative to their folder, with slashes, sorted."""
        names = {name for folder in self.get_folder_paths(kind) for name in files_below(Path(folder))}
        return sorted(name for name in names if Path(name).suffix.lower() in MODEL_SUFFIXES)

    def get_full_path(self, kind: str, name: str) -> str | None:
        """Path of a model file, None if there is no such file."""
        paths = [inside(Path(folder), name) for folder in self.get_folder_paths(kind)]
        return next((str(path) for path in paths if path.is_file()), None)

    def get_full_path_or_raise(self, kind: str, name: str) -> str:
        path = self.get_full_path(kind, name)
        if path is None:
            raise FileNotFoundError(
                f"There is no model '{name}' in {' or '.join(self.get_folder_paths(kind)) or kind}: put the file there."
            )
        return path

    def get_annotated_filepath(self, name: str) -> str:
        """Path of ``name`` in the input folder; "name [output]" and "name [temp]" mean those folders."""
        match = re.fullmatch(r"(.*?) ?\[(output|input|temp)\]", name)
        name, kind = match.groups() if match else (name, "input")
        return str(inside(Path(self.get_directory_by_type(kind)), name))

    def exists_annotated_filepath(self, name: str) -> bool:
        try:
            return Path(self.get_annotated_filepath(name)).is_file()
        except PathError:
            return False

    def input_files(self, content_types: Iterable[str]) -> list[str]:
        """Names in the input folder whose type is one of "image", "audio", "video"."""
        wanted = tuple(content_types)
        files = (file.name for file in self._input.glob("*") if file.is_file())
        return sorted(name for name in files if (mimetypes.guess_type(name)[0] or "").split("/")[0] in wanted)

    def get_save_image_path(self, filename_prefix: str, output_dir: str, width: int = 0, height: int = 0) -> SavePath:
        """Where to save next. The prefix may name sub-folders, which are made, and contain %width%, %year% and the like.

        Raises:
            PathError: the prefix leads out of ``output_dir``.
        """
        prefix = _filled(filename_prefix, width, height)
        root = Path(output_dir).absolute()
        target = inside(root, prefix)
        if target == root:
            raise PathError(f"The file name prefix '{filename_prefix}' names no file: add a name.")
        target.parent.mkdir(parents=True, exist_ok=True)
        subfolder = target.parent.relative_to(root).as_posix()
        return SavePath(str(target.parent), target.name, _next_counter(target), "" if subfolder == "." else subfolder, prefix)


def _filled(prefix: str, width: int, height: int) -> str:
    now = time.localtime()
    values = {"width": width, "height": height, "year": now.tm_year, "month": f"{now.tm_mon:02}", "day": f"{now.tm_mday:02}"}
    values |= {"hour": f"{now.tm_hour:02}", "minute": f"{now.tm_min:02}", "second": f"{now.tm_sec:02}"}
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", str(value))
    return prefix


def _next_counter(target: Path) -> int:
    """One more than the highest number of a file ``<name>_<number>...`` beside the target."""
    pattern = re.compile(rf"{re.escape(target.name)}_(\d+)\D.*", re.IGNORECASE)
    numbers = [int(match[1]) for file in target.parent.iterdir() if (match := pattern.fullmatch(file.name))]
    return max(numbers, default=0) + 1
