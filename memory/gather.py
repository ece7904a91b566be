"""Rows of an embedding table straight from the file, in place of the table: a prompt needs a few hundred of its many rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from .checkpoint import TensorEntry
from .reader import STORED_DTYPES, Copy
from .skeleton import Slot
from .source import WeightSource


class GatheredEmbedding:
    """Answers for an ``nn.Embedding`` whose table stays in the file, from ``open`` to ``close``."""

    def __init__(self, module: nn.Embedding, slot: Slot, entry: TensorEntry, source: WeightSource) -> None:
        self._module = module
        self._slot = slot
        self._entry = entry
        self._source = source

    def open(self) -> None:
        self._module.__dict__["forward"] = self._gather

    def close(self) -> None:
        self._module.__dict__.pop("forward", None)

    def _gather(self, ids: Tensor) -> Tensor:
        """Rows of the table for ``ids`` of any shape: the same bits as the table would give."""
        unique, positions = torch.unique(ids, return_inverse=True)
        return embedding(positions, self._rows(unique.tolist()))

    def _rows(self, ids: list[int]) -> Tensor:
        entry, slot = self._entry, self._slot
        with torch.inference_mode(False):  # reader threads may not write to inference tensors
            rows = torch.empty(len(ids), *slot.shape[1:], dtype=slot.dtype, device=self._source.device)
        item = STORED_DTYPES[entry.dtype].itemsize
        width = entry.row_bytes // item
        flat = rows.view(-1)
        copies = [
            Copy(entry, number * entry.row_bytes, entry.row_bytes, flat[place * width : (place + 1) * width])
            for place, number in enumerate(ids)
        ]
        self._source.reader.read(copies)
        return rows
