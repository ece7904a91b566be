"""Outputs kept from node to node and from prompt to prompt, found by what went into them (host contract, sections 2 and 9).

Four caches drop entries at four different times:

- ``classic``: when a prompt without the node begins
- ``lru``: when a prompt begins and there are more than so many entries, oldest prompts first
- ``ram``: after a node completed and memory is short, entries of earlier prompts first
- ``none``: at once; consumers that are already waiting still receive their inputs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch

from .graph import DynamicPrompt
from .signatures import Keys

LARGE_OUTPUT = 512 * 2**20
AGE_FACTOR = 1.3  # an entry weighs this much more for each prompt that did not use it


class CacheEntry(NamedTuple):
    """Outputs of a node, one list per slot, and what it showed."""

    ui: dict[str, Any] | None
    outputs: list[list[Any]]


class NodeCache:
    """What is known of nodes, by key. Subclasses say when it is forgotten."""

    is_scoped = False  # children of an expansion are known inside that expansion only

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}
        self._keys: dict[str, Hashable] = {}

    async def set_prompt(self, dynprompt: DynamicPrompt, keys: Keys) -> None:
        """Another prompt begins."""
        self._dynprompt = dynprompt
        self._key_maker = keys
        self._keys = {}
        await self._add_keys(dynprompt.original_prompt)
        self._forget(())

    async def expanded(self, parent_id: str, children: Iterable[str]) -> None:
        """Node ``parent_id`` added ``children`` to the graph."""
        await self._add_keys(children)
        self._forget((*self._dynprompt.lineage(parent_id), (parent_id, self._dynprompt.get_node(parent_id)["class_type"])))

    def get(self, node_id: str) -> Any:
        """The entry of a node that is about to be used, None if there is none."""
        return self._entries.get(self._key(node_id))

    def peek(self, node_id: str) -> Any:
        """Like ``get``, without counting as use."""
        return self._entries.get(self._key(node_id))

    def set(self, node_id: str, entry: Any) -> None:
        self._entries[self._key(node_id)] = entry

    def step_done(self) -> None:
        """The executor made a step."""

    def __len__(self) -> int:
        return len(self._entries)

    def _key(self, node_id: str) -> Hashable:
        return self._keys.get(node_id, ("unknown", node_id))

    async def _add_keys(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            scope = self._dynprompt.lineage(node_id) if self.is_scoped else ()
            self._keys[node_id] = scope, await self._key_maker.key(node_id)

    def _forget(self, scope: tuple[tuple[str, str], ...]) -> None:
        """The nodes of ``scope`` are known now."""


class ClassicCache(NodeCache):
    """Keeps what the nodes of the prompt, and of the expansions of its nodes, can use again."""

    is_scoped = True

    def _forget(self, scope: tuple[tuple[str, str], ...]) -> None:
        depth = len(scope)
        members = {key for key in self._keys.values() if key[0] == scope}
        parents = {
            (node_id, self._dynprompt.get_node(node_id)["class_type"]) for node_id, key in self._keys.items() if key[0] == scope
        }

        def is_kept(key: Any) -> bool:
            if key[0][:depth] != scope:
                return True
            return key in members if len(key[0]) == depth else key[0][depth] in parents

        self._entries = {key: entry for key, entry in self._entries.items() if is_kept(key)}


class LRUCache(NodeCache):
    """Keeps up to ``size`` entries, more while all of them belong to the running prompt."""

    def __init__(self, size: int):
        super().__init__()
        self._size = size
        self._prompt_number = 0
        self._used_in: dict[Hashable, int] = {}

    async def set_prompt(self, dynprompt: DynamicPrompt, keys: Keys) -> None:
        self._prompt_number += 1
        self._used_in = {key: number for key, number in self._used_in.items() if key in self._entries}
        await super().set_prompt(dynprompt, keys)

    async def _add_keys(self, node_ids: Iterable[str]) -> None:
        node_ids = list(node_ids)
        await super()._add_keys(node_ids)
        for node_id in node_ids:
            self._used_in[self._key(node_id)] = self._prompt_number

    def get(self, node_id: str) -> Any:
        self._used_in[self._key(node_id)] = self._prompt_number
        return super().get(node_id)

    def set(self, node_id: str, entry: Any) -> None:
        self._used_in[self._key(node_id)] = self._prompt_number
        super().set(node_id, entry)

    def _forget(self, scope: tuple[tuple[str, str], ...]) -> None:
        while len(self._entries) > self._size and (oldest := min(map(self._last_use, self._entries))) < self._prompt_number:
            for key in [key for key in self._entries if self._last_use(key) == oldest]:
                self._drop(key)

    def _last_use(self, key: Hashable) -> int:
        return self._used_in[key]

    def _drop(self, key: Hashable) -> None:
        del self._entries[key]
        del self._used_in[key]


@dataclass(frozen=True)
class RamLimits:
    """Bytes of RAM that are to stay available: earlier prompts' outputs go below ``inactive``, this prompt's below ``active``."""

    active: int
    inactive: int
    available: Callable[[], int] = lambda: psutil.virtual_memory().available

    @classmethod
    def of_this_machine(cls) -> RamLimits:
        """ComfyUI's own: a tenth of the RAM (2 to 10 GiB), and everything up to 128 GiB."""
        total = psutil.virtual_memory().total
        return cls(min(10 * 2**30, max(2 * 2**30, total // 10)), min(128 * 2**30, total))


class RamPressureCache(LRUCache):
    """Keeps everything until RAM is short."""

    def __init__(self, limits: RamLimits):
        super().__init__(size=0)
        self._limits = limits

    def _forget(self, scope: tuple[tuple[str, str], ...]) -> None:
        """A new prompt alone drops nothing."""

    def step_done(self) -> None:
        self._shrink(self._limits.inactive, self._is_inactive)
        self._shrink(self._limits.active, lambda key: not self._is_held(key) and output_bytes(self._entries[key]) >= LARGE_OUTPUT)
        self._shrink(self._limits.active, lambda key: not self._is_held(key))

    def _shrink(self, target: int, may_go: Callable[[Hashable], bool]) -> None:
        """Drop entries, heaviest first, until ``target`` bytes are available."""
        if self._limits.available() >= target:
            return
        for key in sorted(filter(may_go, self._entries), key=self._weight, reverse=True):
            if self._limits.available() >= target:
                return
            self._drop(key)

    def _is_inactive(self, key: Hashable) -> bool:
        return self._last_use(key) < self._prompt_number

    def _is_held(self, key: Hashable) -> bool:
        """Outputs of this prompt that say they are cheap to keep (``is_dynamic``) stay."""
        return not self._is_inactive(key) and all(map(is_dynamic, flat(self._entries[key].outputs)))

    def _weight(self, key: Hashable) -> float:
        return AGE_FACTOR ** (self._prompt_number - self._last_use(key)) * (1 + output_bytes(self._entries[key]))


class NoCache(NodeCache):
    """Knows nothing; fingerprints are never asked."""

    async def set_prompt(self, dynprompt: DynamicPrompt, keys: Keys) -> None:
        """There is nothing to find again."""

    async def expanded(self, parent_id: str, children: Iterable[str]) -> None:
        """Likewise."""

    def set(self, node_id: str, entry: Any) -> None:
        """Dropped at once."""


def cache_maker(kind: str, lru_size: int, ram_limits: RamLimits) -> Callable[[], NodeCache]:
    """How to make a new cache of one of the four kinds."""
    makers: dict[str, Callable[[], NodeCache]] = {
        "ram": lambda: RamPressureCache(ram_limits),
        "classic": ClassicCache,
        "lru": lambda: LRUCache(lru_size),
        "none": NoCache,
    }
    if kind not in makers:
        raise ValueError(f"There is no cache '{kind}': choose one of {', '.join(makers)}.")
    return makers[kind]


def flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def is_dynamic(value: Any) -> bool:
    return hasattr(value, "is_dynamic") and bool(value.is_dynamic())


def output_bytes(entry: CacheEntry) -> int:
    """Bytes of the tensors among the outputs that are in RAM."""
    tensors = (value for value in flat(entry.outputs) if isinstance(value, torch.Tensor) and value.device.type == "cpu")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
