"""Rows of an embedding table straight from the file, in place of the table: a prompt needs a few hundred of its many rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from .skeleton import Slot
from .source import WeightSource


class GatheredEmbedding:
    """Answers for an ``nn.Embedding`` whose table stays in the file, from ``open`` to ``close``.

    A model that asks for the table itself (``weight``) gets it, read for this one use.
    """

    def __init__(self, module: nn.Embedding, slot: Slot, source: WeightSource) -> None:
        self._module = module
        self._slot = slot
        self._source = source

    def open(self) -> None:
        members: dict[str, Any] = {
            "forward": lambda _, ids: self._looked_up(ids),
            "weight": property(lambda _: self._table()),
        }
        self._module.__class__ = type("GatheredEmbedding", (nn.Embedding,), members)

    def close(self) -> None:
        self._module.__class__ = nn.Embedding

    def _looked_up(self, ids: Tensor) -> Tensor:
        """Rows of the table for ``ids`` of any shape: the same bits as the table would give. Raises IndexError as it would."""
        unique, positions = torch.unique(ids, return_inverse=True)
        numbers = unique.tolist()
        for number in (*numbers[:1], *numbers[-1:]):
            if not 0 <= number < self._slot.shape[0]:
                raise IndexError(f"Row {number} of {self._slot.name} was asked for, which has {self._slot.shape[0]} rows.")
        return embedding(positions, self._source.gathered(self._slot, numbers))

    def _table(self) -> Tensor:
        table = torch.empty(self._slot.shape, dtype=self._slot.dtype, device=self._source.device)
        self._source.read({self._slot.name: table})
        return table
