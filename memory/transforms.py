"""What is done to a tensor on its way from the file: part of a component's identity, done again at every fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

StorageDtype = Callable[[str, torch.dtype], torch.dtype]


@dataclass(frozen=True)
class Cast:
    """Hold weights for computing in ``compute``; ``storage_dtype(name, compute)`` is the model's rule (its fp32 islands)."""

    compute: torch.dtype
    storage_dtype: StorageDtype

    @property
    def key(self) -> tuple[str, str]:
        """The part of the identity that this transform makes."""
        return ("cast", str(self.compute).removeprefix("torch."))

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which the parameter ``name`` is resident."""
        return self.storage_dtype(name, self.compute)
