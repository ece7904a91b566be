"""A checkpoint as tensors that lie in its mapped files: all of its weights to look at, none of them in memory."""

from __future__ import annotations

import mmap
import sys
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ....memory.checkpoint import Checkpoint, TensorEntry
from ....memory.reader import STORED_DTYPES

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # older Pythons do not name it
IS_READ_ONLY = sys.platform == "win32"  # copies on write would be charged for the whole file there
MORE_DTYPES = {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "F8_E8M0": torch.float8_e8m0fnu}


class MappedCheckpoint:
    """Views of all tensors, private: what is written into them never reaches the file (core bridge, trap 3).

    Raises KeyError for a dtype that torch does not have.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        paths = dict.fromkeys(entry.path for entry in checkpoint.tensors.values() if entry.nbytes)
        self._maps = {path: _map_of(path) for path in paths}
        self.views: Mapping[str, Tensor] = {name: self._view(entry) for name, entry in checkpoint.tensors.items()}
        entries = (entry for entry in checkpoint.tensors.values() if entry.nbytes)
        self._places = sorted(((self.views[e.name].data_ptr(), e) for e in entries), key=lambda place: place[0])

    def place_of(self, tensor: Tensor) -> tuple[TensorEntry, int] | None:
        """The stored tensor that a view lies in, and its first byte there; None for one that is not contiguous or not ours."""
        position = bisect_right(self._places, tensor.data_ptr(), key=lambda place: place[0]) - 1
        if position < 0 or not tensor.is_contiguous():
            return None
        address, entry = self._places[position]
        start = tensor.data_ptr() - address
        return (entry, start) if start + tensor.nbytes <= entry.nbytes else None

    def forget_pages(self) -> None:
        """Give back the memory of pages that were looked at, and undo what was written into them."""
        for mapped in self._maps.values():
            if hasattr(mapped, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def _view(self, entry: TensorEntry) -> Tensor:
        dtype = STORED_DTYPES.get(entry.dtype) or MORE_DTYPES[entry.dtype]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a buffer that cannot be written to
            flat = torch.frombuffer(
                self._maps[entry.path], dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.offset
            )
        return flat.view(entry.shape)


def _map_of(path: Path) -> mmap.mmap:
    """The file, copy on write where that costs nothing.

    Without a reservation: a writable map of a file that is larger than the machine's memory would be refused otherwise.
    """
    with path.open("rb") as file:
        if IS_READ_ONLY:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def place_of(tensor: Tensor, files: Sequence[MappedCheckpoint]) -> tuple[TensorEntry, int] | None:
    """The stored tensor that a view lies in, and its first byte there; None if it lies in none of the files."""
    return next((place for file in files if (place := file.place_of(tensor)) is not None), None)
