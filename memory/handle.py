"""The light object on the wires: names a resource, holds no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .component import Component
from .resource import Hints
from .store import Store


class Handle:
    """What loader nodes return. Copies are the handle itself; printing it loads nothing."""

    __slots__ = ("__weakref__", "_component", "_store")

    def __init__(self, component: Component, store: Store) -> None:
        known = store.add(component)
        assert isinstance(known, Component)
        self._component = known
        self._store = store

    @property
    def component(self) -> Component:
        return self._component

    @property
    def kind(self) -> str:
        return self._component.kind

    @property
    def config(self) -> Any:
        """The model's numbers; loads nothing."""
        return self._component.module.config

    @contextmanager
    def use(
        self,
        *parts: str,
        node: tuple[str, str] | None = None,
        num_passes: int | None = None,
        points: tuple[float, ...] = (),
    ) -> Iterator[Any]:
        """Pin the component with the named parts resident (default: all) and give its module. No await inside the block.

        ``node``: (prompt id, node id) of the user; ``num_passes`` and ``points``: see ``Hints``. Raises MemoryRefused or
        CheckpointError if it cannot be filled.
        """
        owner = None if node is None else ("node", *node)
        wanted = frozenset(parts) or self._component.parts
        with self._store.use(self._component, wanted, owner, Hints(num_passes, points)):
            yield self._component.module

    def release(self, reason: str) -> None:
        """Drop the weights now, or when the last user is done."""
        self._store.release(self._component, reason)

    def is_dynamic(self) -> bool:
        """Tells ComfyUI's RAM-pressure cache that evicting this output frees nothing."""
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self

    def __copy__(self) -> Handle:
        return self

    def __repr__(self) -> str:
        return f"<{self._component.name} of {self._component.checkpoint.path}>"
