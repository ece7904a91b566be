"""Which weights are alive, whoever holds them: told by the storages themselves."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class LivingStorages:
    """Weak references to storages of weights. A storage counts for as long as any tensor, view or alias of it exists."""

    def __init__(self) -> None:
        self._known: list[tuple[StorageWeakRef, int]] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Storages that are known already count once."""
        known = dict(self._living())
        for storage in (tensor.untyped_storage() for tensor in tensors):
            known.setdefault(StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self._known = [*known.items()]

    def __len__(self) -> int:
        return len(self._living())

    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._living())

    def _living(self) -> list[tuple[StorageWeakRef, int]]:
        return [(storage, n) for storage, n in self._known if not storage.expired()]  # type: ignore[no-untyped-call]
