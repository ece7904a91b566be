"""Counts the bytes of all tensors that are alive while code runs, but for those that were there before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Inside the block every storage that an operation makes is counted until nobody holds it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._known = {key: (storage, n) for key, (storage, n) in self._known.items() if not storage.expired()}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        return sum(n for storage, n in self._known.values() if not storage.expired())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]
