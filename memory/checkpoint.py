"""Safetensors headers to an index of tensors. Reads no weights and trusts nothing.

A checkpoint is one file, or the shards that a ``*.safetensors.index.json`` names. The format: eight bytes of little-endian
header length, a JSON header (name -> dtype, shape, data offsets; strings under ``__metadata__``), then the data, without holes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000  # the format's own cap
MAX_RANK = 16  # dimensions of a tensor; no model has more than a few
MAX_NAME = 255  # characters that file systems take
MAX_SHOWN = 80  # characters of a file's own words in a message
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


class CheckpointError(ValueError):
    """A file is not what it should be. One sentence that begins with the file."""


@dataclass(frozen=True)
class FileIdentity:
    """What tells one version of a file from the next: tools that copy keep the size and the time of change of the contents."""

    path: str
    size: int
    mtime_ns: int
    inode: int = 0
    ctime_ns: int = 0

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Raises CheckpointError if there is no such file."""
        try:
            status = path.stat()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise _unopened(path, error) from error
        return cls(str(path), status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor: ``nbytes`` bytes from ``offset`` of ``path``, row-major; ``dtype`` is safetensors' name for it."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along dimension 0."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


@dataclass(frozen=True)
class Checkpoint:
    """An index of tensors over one or more files, and the header metadata (of all files, joined)."""

    files: tuple[FileIdentity, ...]
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def path(self) -> str:
        """The file, or the folder of the shards: the name for messages."""
        return self.files[0].path if len(self.files) == 1 else str(Path(self.files[0].path).parent)

    def verify_unchanged(self) -> None:
        """Raises CheckpointError if a file is gone or is no longer the one whose header was read."""
        for known in self.files:
            if FileIdentity.of(Path(known.path)) != known:
                raise CheckpointError(f"{known.path}: was replaced on disk since it was opened; run the loader node again.")


def _unopened(path: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(f"{path}: cannot be opened ({reason}); check the name and the model folders.")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Index a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder that holds exactly one of either.

    Raises CheckpointError, which names the file, for anything that is not a sound checkpoint.
    """
    path = Path(os.path.abspath(path))  # a file has one identity, however it is named
    if path.is_dir():
        return open_checkpoint(_only_checkpoint_in(path))
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    return _joined([_read_file(path)])


def _only_checkpoint_in(folder: Path) -> Path:
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError as error:
        raise _unopened(folder, error) from error
    found = [n for n in names if n.endswith(".safetensors.index.json")] or [n for n in names if n.endswith(".safetensors")]
    if len(found) == 1:
        return folder / found[0]
    if not found:
        raise CheckpointError(f"{folder}: holds no .safetensors file; point the loader at the folder with the weights.")
    raise CheckpointError(f"{folder}: holds {len(found)} checkpoints ({', '.join(found[:3])}, ...); name one of them.")


@dataclass(frozen=True)
class _File:
    identity: FileIdentity
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def _joined(files: Iterable[_File]) -> Checkpoint:
    files = list(files)
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        for name, entry in file.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{entry.path}: tensor {_shown(name)} is also in {tensors[name].path.name}; remove one of the two."
                )
            tensors[name] = entry
        metadata.update(file.metadata)
    return Checkpoint(tuple(file.identity for file in files), tensors, metadata)


def _open_shards(index: Path) -> Checkpoint:
    weight_map = _weight_map(index)
    for shard in weight_map.values():
        if Path(shard).name != shard or shard in ("", "..") or not shard.isprintable() or len(shard) > MAX_NAME:
            problem = f"names the shard '{_shown(shard)}', which is outside its folder or no name of a file"
            raise CheckpointError(f"{index}: {problem}; shards lie beside their index.")
    files = [_read_file(index.parent / shard) for shard in sorted(set(weight_map.values()))]
    checkpoint = _joined(files)
    for name, shard in weight_map.items():
        entry = checkpoint.tensors.get(name)
        if entry is None or entry.path.name != shard:
            raise CheckpointError(
                f"{index}: says that tensor {_shown(name)} is in {_shown(shard)}, which does not hold it; download both again."
            )
    return checkpoint


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_table(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map from tensor names to file names; download it again.")
    return weight_map


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError for anything else: pipes, devices and endless files, too."""
    _regular(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise _unopened(path, error) from error
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: is larger than {MAX_HEADER_BYTES} bytes, which no description needs; download it again.")
    return _table(path, raw, "its text")


def _regular(path: Path) -> FileIdentity:
    """Raises CheckpointError for a folder, and for what a reader could wait for or read from forever."""
    identity = FileIdentity.of(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file; check the name and the model folders.")
    return identity


def _shown(text: str) -> str:
    """Words of a file for a message: printable, on one line, and cut where they are long."""
    text = repr(text)[1:-1]
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _read_file(path: Path) -> _File:
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: pickled checkpoints are never opened, since they can run code; use a .safetensors file.")
    identity = _regular(path)
    try:
        with path.open("rb") as file:
            raw = _header_bytes(path, file.read(8), identity.size, file)
    except OSError as error:
        raise _unopened(path, error) from error
    header = _table(path, raw, "its header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: its __metadata__ is not a table of strings; the file is damaged, download it again.")
    data_start = 8 + len(raw)
    tensors = {name: _entry(path, name, spec, data_start) for name, spec in header.items()}
    _check_extents(path, tensors.values(), data_start, identity.size)
    return _File(identity, tensors, metadata)


def _header_bytes(path: Path, prefix: bytes, size: int, file: Any) -> bytes:
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:  # only then is it something else: "PK" and "<" also begin the lengths of sound headers
        raise CheckpointError(f"{path}: {_what_begins_with(prefix)}")
    if len(prefix) < 8 or length > size - 8:
        raise CheckpointError(f"{path}: is truncated or not a safetensors file ({size} bytes); download it again.")
    raw: bytes = file.read(length)
    return raw


def _what_begins_with(prefix: bytes) -> str:
    if prefix.startswith(b"version "):
        return "is a Git LFS pointer, not the weights; fetch the file itself (git lfs pull)."
    if prefix.lstrip().startswith(b"<"):
        return "is a web page, not the weights; download the file again."
    if prefix.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "is a pickled checkpoint under another name, which is never opened; use a safetensors file."
    if prefix.isascii() and prefix.decode().replace("\n", " ").isprintable():
        return "is not a safetensors file but text; choose the file with the weights."
    return f"claims a header of {int.from_bytes(prefix, 'little')} bytes, more than the format allows; download it again."


def _table(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object that ``raw`` spells. JSON would take the last of two equal names; here both count as damage."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise CheckpointError(f"{path}: {what} has a name twice; the file is damaged, download it again.")
        return table

    try:
        table = json.loads(raw, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {what} is not valid JSON; the file is damaged, download it again.") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: {what} is not a table of names; the file is damaged, download it again.")
    return table


def _entry(path: Path, name: str, spec: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the header entry of tensor {_shown(name)} is malformed; download the file again."
        ) from error
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{path}: tensor {_shown(name)} has the unknown dtype '{_shown(str(dtype))}'; use a file in a published precision."
        )
    if len(shape) > MAX_RANK:
        raise CheckpointError(f"{path}: tensor {_shown(name)} has {len(shape)} dimensions; download the file again.")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end)):
        raise CheckpointError(
            f"{path}: tensor {_shown(name)} has a shape or offsets that are no whole numbers; download the file again."
        )
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor {_shown(name)} takes {end - begin} bytes, but its shape {list(shape)} in {dtype} needs {nbytes}; "
            "download the file again."
        )
    return TensorEntry(name, path, dtype, shape, data_start + begin, nbytes)


def _check_extents(path: Path, entries: Iterable[TensorEntry], data_start: int, size: int) -> None:
    position = data_start
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != position:
            fault = "overlaps its neighbour" if entry.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {_shown(entry.name)} {fault}; the file is damaged, download it again.")
        position += entry.nbytes
    if position != size:
        fault = "is truncated" if position > size else "has bytes behind its last tensor"
        raise CheckpointError(f"{path}: {fault} ({size} bytes, its header describes {position}); download it again.")
