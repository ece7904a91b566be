"""Whether a weight is still the one that was filled: who changed a filled module by hand is found at release."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SAMPLES = 64


@dataclass(frozen=True)
class Fingerprint:
    """What an edit changes, where cheap to read. The version counter misses edits through ``.data``; the samples catch those."""

    object_id: int
    data_ptr: int
    dtype: torch.dtype
    shape: torch.Size
    version: int
    samples: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        return cls(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor._version, _samples(tensor))

    def difference(self, tensor: Tensor | None) -> str | None:
        """What has changed about the tensor that stands in this place now, in words; None if nothing."""
        if tensor is None:
            return "was deleted"
        if id(tensor) != self.object_id:
            return "was replaced"
        if tensor.dtype != self.dtype or tensor.shape != self.shape:
            return f"was converted to {tensor.dtype} {tuple(tensor.shape)}"
        if tensor.data_ptr() != self.data_ptr:
            return "points to other data"
        if tensor._version != self.version or _samples(tensor) != self.samples:
            return "was edited in place"
        return None


def _samples(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, -(-flat.numel() // NUM_SAMPLES))  # rounded up: the samples reach to the end
    return bytes(flat[::step].cpu().contiguous().view(torch.uint8).numpy())
