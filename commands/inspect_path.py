"""``inspect``: what a file or folder is, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..h3.formats import FormatError
from ..host.files import diffusers_folders, model_files
from ..memory.checkpoint import CheckpointError, open_checkpoint
from ..memory.units import shown_bytes
from ..nodes.catalogue import identified
from ..nodes.load import LazyH3FolderLoader

MAX_LISTED = 20
FILE_FOLDERS = ("text_encoders", "clip", "diffusion_models", "unet", "vae")  # of a folder with models; "diffusers" beside them


def inspect_path(path: Path) -> dict[str, Any]:
    """{"path", "checkpoints": [...]}, an entry for each component. A refused one has "refused" with the reason."""
    return {"path": str(path), "checkpoints": [_described(part) for part in _parts(path)]}


def _parts(path: Path) -> Iterator[Path]:
    """The components of a Hugging Face model, else what lies in a folder with models, else several files, else the path."""
    yield from [*_components(path)] or [*_models_below(path)] or [*_files_in(path)] or [path]


def _components(model: Path) -> Iterator[Path]:
    """The component folders of a Hugging Face model."""
    folders = (model / name for _, name in LazyH3FolderLoader.SUBFOLDERS)
    return (folder for folder in folders if (folder / "config.json").is_file())


def _models_below(root: Path) -> Iterator[Path]:
    for name in diffusers_folders([root / "diffusers"]):
        yield from _components(root / "diffusers" / name)
    for folder in FILE_FOLDERS:
        yield from (root / folder / name for name in model_files([root / folder]))


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder that holds several, and no index that makes them one checkpoint."""
    files = sorted(folder.glob("*.safetensors"))
    return files if len(files) > 1 and not any(folder.glob("*.safetensors.index.json")) else []


def _described(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": str(path), "component": None, "refused": None}
    try:
        checkpoint = open_checkpoint(path)
        precisions: Counter[str] = Counter()
        for tensor in checkpoint.tensors.values():
            precisions[tensor.dtype] += tensor.nbytes
        entry |= {
            "tensors": len(checkpoint.tensors),
            "bytes": checkpoint.nbytes,
            "files": len(checkpoint.files),
            "precision": dict(precisions.most_common()),
        }
        layout = identified(path, checkpoint)
    except (CheckpointError, FormatError) as error:
        return entry | {"refused": str(error)}
    ignored = sorted(layout.ignored.items())
    return entry | {
        "component": layout.kind,
        "layout": layout.layout,
        "variant": layout.variant,
        "ignored_tensors": len(ignored),
        "ignored_bytes": sum(checkpoint.tensors[name].nbytes for name, _ in ignored),
        "ignored": dict(ignored[:MAX_LISTED]),
    }


def shown(found: dict[str, Any]) -> Iterator[str]:
    """The findings as lines for people; why the only refused one is refused is an error, with a line of its own."""
    num_refused = sum(entry["refused"] is not None for entry in found["checkpoints"])
    for entry in found["checkpoints"]:
        yield entry["path"]
        if entry["component"]:
            yield f"  {entry['component']}, {entry['layout']} layout, variant {entry['variant']}"
        if "bytes" in entry:
            precisions = ", ".join(f"{name} {shown_bytes(nbytes)}" for name, nbytes in entry["precision"].items())
            yield f"  {entry['tensors']} tensors in {entry['files']} file(s): {precisions}"
        if entry.get("ignored_tensors"):
            reasons = "; ".join(sorted(set(entry["ignored"].values())))
            yield f"  {entry['ignored_tensors']} tensors are never read ({reasons})"
        if entry["refused"]:
            yield f"  refused: {entry['refused']}" if num_refused > 1 else "  refused"
