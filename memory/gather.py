"""Rows of an embedding table straight from the file, in place of the table: a prompt needs a few hundred of its many rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from .skeleton import Slot
from .source import WeightSource


class FileEmbedding(nn.Embedding):
    """What an ``nn.Embedding`` is while its table stays in the file."""

    gathered: GatheredEmbedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.gathered.looked_up(ids)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The table itself, read for this one use."""
        return self.gathered.table()


class GatheredEmbedding:
    """Answers for an ``nn.Embedding`` from the file, from ``open`` to ``close``."""

    def __init__(self, slot: Slot, source: WeightSource) -> None:
        self._slot = slot
        self._source = source

    @staticmethod
    def is_possible(slot: Slot, source: WeightSource) -> bool:
        """Whether the slot is the table of a module that does nothing but look its rows up."""
        module = slot.owner
        return type(module) in (nn.Embedding, FileEmbedding) and module.max_norm is None and source.can_gather(slot)

    def open(self) -> None:
        self._slot.owner.__dict__["gathered"] = self
        self._slot.owner.__class__ = FileEmbedding

    def close(self) -> None:
        self._slot.owner.__class__ = nn.Embedding
        self._slot.owner.__dict__.pop("gathered", None)

    def looked_up(self, ids: Tensor) -> Tensor:
        """Rows of the table for ``ids`` of any shape: the same bits as the table would give. Raises IndexError as it would."""
        unique, positions = torch.unique(ids, return_inverse=True)
        numbers = unique.tolist()
        for number in (*numbers[:1], *numbers[-1:]):
            if not 0 <= number < self._slot.shape[0]:
                raise IndexError(f"Row {number} of {self._slot.name} was asked for, which has {self._slot.shape[0]} rows.")
        return embedding(positions, self._source.gathered(self._slot, numbers))

    def table(self) -> Tensor:
        table = self._source.blank(self._slot.shape, self._slot.dtype)
        self._source.read({self._slot.name: table})
        return table
