"""Core's nested audio-video latent, for hosts that have none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class NestedLatent:
    """Two streams as one ``samples`` value: core's ``is_nested`` and ``unbind()``, and what nodes commonly ask of a latent."""

    is_nested = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def unbind(self) -> tuple[Tensor, ...]:
        return self.tensors

    def to(self, *args: object, **kwargs: object) -> NestedLatent:
        return NestedLatent([tensor.to(*args, **kwargs) for tensor in self.tensors])  # type: ignore[call-overload]

    @property
    def shape(self) -> torch.Size:
        """Of the video stream."""
        return self.tensors[0].shape

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype
