"""Residency mode "streamed": alike blocks pass through a ring of two, block k + 1 read while block k computes.

The blocks' weights are never all in memory. Each block of a module list gets hooks: before it runs, its weights are put in place
(waiting for the read that was begun one block earlier) and the read of the next block begins; after it ran, its places are empty
again and its ring slot is free. The first blocks may be held for good, if there is room; reading then wraps around past them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .gather import GatheredEmbedding
from .resource import Cost
from .skeleton import Slot
from .source import WeightSource
from .storages import LivingStorages

RING_SLOTS = 2


class RingSlot:
    """Room for one block's weights, used for one block after the other."""

    def __init__(self, like: Sequence[Slot], device: torch.device) -> None:
        blank = [torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in like]
        self.tensors = [
            nn.Parameter(tensor, requires_grad=False) if slot.is_parameter else tensor
            for slot, tensor in zip(like, blank, strict=True)
        ]
        self.free: Any = None  # CUDA event after which the last block no longer needs its weights


@dataclass(frozen=True)
class BlockList:
    """A module list and the slots of each of its blocks, alike in shapes and order."""

    blocks: Sequence[nn.Module]
    slots: Sequence[Sequence[Slot]]

    @property
    def block_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots[0])

    @property
    def ring_bytes(self) -> int:
        return min(RING_SLOTS, len(self.blocks)) * self.block_bytes


class BlockStream:
    """The blocks of one module list, streamed.

    The first ``num_held`` blocks stay.
    ``num_passes``: how often the list will be run through; None for unknown, then reading always goes on around.
    ``prefetch=False`` reads each block only when it is needed.
    """

    def __init__(
        self,
        found: BlockList,
        source: WeightSource,
        storages: LivingStorages,
        *,
        num_held: int = 0,
        num_passes: int | None = None,
        prefetch: bool = True,
    ) -> None:
        self._blocks = found.blocks
        self._slots = found.slots
        self._source = source
        self._storages = storages
        self.num_held = num_held
        self._passes_left = num_passes
        self._prefetches = prefetch
        self._ring: list[RingSlot] = []
        self._coming: dict[int, tuple[RingSlot, Future[None]]] = {}
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="lazy-h3-stream")
        self._hooks: list[RemovableHandle] = []
        self._turn = threading.RLock()  # a block's weights are in place for one caller at a time
        self._copy_stream: Any = torch.cuda.Stream(source.device) if source.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.bytes_read = 0

    def open(self) -> None:
        """Make the ring, hook the blocks, and begin to read the first one."""
        streamed = range(self.num_held, len(self._blocks))
        with torch.inference_mode(False):
            self._ring = [RingSlot(self._slots[0], self._source.device) for _ in streamed[:RING_SLOTS]]
        self._storages.add(tensor for slot in self._ring for tensor in slot.tensors)
        for index in streamed:
            self._hooks += [
                self._blocks[index].register_forward_pre_hook(lambda *_, index=index: self._enter(index)),
                self._blocks[index].register_forward_hook(lambda *_, index=index: self._leave(index), always_call=True),
            ]
        if streamed and self._prefetches:
            self._begin(streamed[0])

    def close(self) -> None:
        """Unhook, wait for a read that is under way, and let the ring go."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()
        for slots in self._slots[self.num_held :]:
            for slot in slots:
                slot.clear()
        self._ring.clear()

    def _enter(self, index: int) -> None:
        self._turn.acquire()
        try:
            ring_slot = self._arrived(index)
            for slot, tensor in zip(self._slots[index], ring_slot.tensors, strict=True):
                slot.put(tensor)
            following = self._following(index)
            if following is not None and self._prefetches:
                self._begin(following)
        except BaseException:
            self._turn.release()
            raise

    def _leave(self, index: int) -> None:
        if not self._slots[index][0].is_filled:
            return  # _enter failed: there is nothing to take back
        ring_slot, _ = self._coming.pop(index)
        for slot in self._slots[index]:
            slot.clear()
        if self._copy_stream is not None:
            ring_slot.free = torch.cuda.current_stream(self._source.device).record_event()
        self._ring.append(ring_slot)
        self._turn.release()

    def _arrived(self, index: int) -> RingSlot:
        """The ring slot with the block's weights; waits for its read, or reads it now."""
        if index not in self._coming:
            for unwanted in list(self._coming):  # somebody runs the blocks in another order
                slot, read = self._coming.pop(unwanted)
                read.exception()
                self._ring.append(slot)
            self._begin(index)
        ring_slot, read = self._coming[index]
        try:
            read.result()
        except BaseException:
            self._ring.append(self._coming.pop(index)[0])
            raise
        return ring_slot

    def _begin(self, index: int) -> None:
        if index in self._coming or not self._ring:
            return
        ring_slot = self._ring.pop()
        self._coming[index] = ring_slot, self._reading.submit(self._read, index, ring_slot)

    def _read(self, index: int, ring_slot: RingSlot) -> None:
        if ring_slot.free is not None:
            self._copy_stream.wait_event(ring_slot.free)
        tensors: dict[str, Tensor] = {s.name: t for s, t in zip(self._slots[index], ring_slot.tensors, strict=True)}
        self._source.read(tensors, stream=self._copy_stream)
        self.bytes_read += sum(tensor.nbytes for tensor in tensors.values())

    def _following(self, index: int) -> int | None:
        """The block to read next; None after the last block of the last pass."""
        if index + 1 < len(self._blocks):
            return index + 1
        if self._passes_left is not None:
            self._passes_left -= 1
            if self._passes_left <= 0:
                return None
        return self.num_held


class StreamedFill:
    """A set of slots of one module, filled in streamed mode: lists of blocks through rings, embedding tables from the file.

    Everything else stays in memory like in whole mode, and is for the caller to read (``staying``).
    """

    def __init__(self, module: nn.Module, slots: Sequence[Slot], source: WeightSource, storages: LivingStorages) -> None:
        self._slots = slots
        self._source = source
        self._storages = storages
        self._lists = sorted(_streamable_lists(module, slots), key=lambda found: -len(found.blocks) * found.block_bytes)
        self._tables = dict(_gatherable_tables(module, slots, source)) if self._lists else {}
        self._num_held = 0  # blocks of the first list, which is the largest
        self._streams: list[BlockStream] = []

    @property
    def is_possible(self) -> bool:
        return bool(self._lists)

    @property
    def passing(self) -> set[str]:
        """Names of slots that are filled only while they are needed."""
        held = {slot.name for slots in self._lists[0].slots[: self._num_held] for slot in slots} if self._lists else set()
        blocks = {slot.name for found in self._lists for slots in found.slots for slot in slots}
        return (blocks - held) | self._tables.keys()

    @property
    def least_bytes(self) -> int:
        """Resident bytes with no block held."""
        passing = self.passing
        rest = sum(slot.nbytes for slot in self._slots if slot.name not in passing)
        return rest + sum(found.ring_bytes for found in self._lists)

    def cost(self, transient: int) -> Cost:
        """The least that can be resident, and what holding blocks of the largest list adds and saves."""
        main = self._lists[0]
        reread = sum(len(found.blocks) * found.block_bytes for found in self._lists)
        return Cost(self.least_bytes, transient, reread, main.block_bytes, len(main.blocks))

    def staying(self, grant: int | None) -> list[Slot]:
        """Slots that are read now and stay; within ``grant`` bytes as many blocks of the largest list as fit."""
        main = self._lists[0]
        spare = 0 if grant is None else max(0, grant - self.least_bytes)
        self._num_held = min(spare // main.block_bytes, len(main.blocks))
        passing = self.passing
        return [slot for slot in self._slots if slot.name not in passing]

    def open(self, num_passes: int | None, prefetch: bool) -> None:
        """Begin to stream."""
        for gathered in self._tables.values():
            gathered.open()
        for found in self._lists:
            held = self._num_held if found is self._lists[0] else 0
            stream = BlockStream(found, self._source, self._storages, num_held=held, num_passes=num_passes, prefetch=prefetch)
            self._streams.append(stream)
            stream.open()

    def close(self) -> None:
        """Stop streaming; nothing that passed is held afterwards."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        for gathered in self._tables.values():
            gathered.close()


def _streamable_lists(module: nn.Module, slots: Sequence[Slot]) -> Iterator[BlockList]:
    """Lists longer than their ring whose blocks are alike, with all of their slots among ``slots``."""
    for name in module.REPEATED:  # type: ignore[union-attr]
        if not any(slot.name.startswith(f"{name}.") for slot in slots):
            continue  # not among the parts that are asked for, or not in this model at all
        blocks = list(module.get_submodule(name).children())
        by_block = [[slot for slot in slots if slot.name.startswith(f"{name}.{number}.")] for number in range(len(blocks))]
        shapes = {tuple((slot.shape, slot.dtype) for slot in members) for members in by_block}
        if len(blocks) > RING_SLOTS and len(shapes) == 1 and by_block[0]:
            yield BlockList(blocks, by_block)


def _gatherable_tables(module: nn.Module, slots: Sequence[Slot], source: WeightSource) -> Iterator[tuple[str, GatheredEmbedding]]:
    """Embedding tables that stand in the file as they are."""
    for slot in slots:
        entry = source.only_entry(slot.name)
        if isinstance(slot.owner, nn.Embedding) and entry is not None:
            yield slot.name, GatheredEmbedding(slot.owner, slot, entry, source)
