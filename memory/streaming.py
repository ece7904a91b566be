"""Residency mode "streamed": alike blocks pass through a ring of two, block k + 1 read while block k computes.

The blocks' weights are never all in memory. Each block of a module list runs inside a frame of ours: its weights are put in place
(waiting for the read that was begun one block earlier), the read of the next block begins, and when it is done, however it ends,
its places are empty again and its ring slot is free. Hooks would not do: torch skips them when a block is interrupted. The first
blocks may be held for good, if there is room; reading then wraps around past them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .gather import GatheredEmbedding
from .resource import Cost
from .skeleton import Slot
from .source import WeightSource
from .storages import LivingStorages

RING_SLOTS = 2


class RingSlot:
    """Room for one block's weights, used for one block after the other."""

    def __init__(self, like: Sequence[Slot], source: WeightSource) -> None:
        blank = [source.blank(slot.shape, slot.dtype) for slot in like]
        with torch.inference_mode(False):
            self.tensors = [
                nn.Parameter(tensor, requires_grad=False) if slot.is_parameter else tensor
                for slot, tensor in zip(like, blank, strict=True)
            ]
        self.free: Any = None  # CUDA event after which nothing that was begun before needs this memory


@dataclass(frozen=True)
class BlockList:
    """A module list and the slots of each of its blocks, alike in shapes and order."""

    blocks: Sequence[nn.Module]
    slots: Sequence[Sequence[Slot]]

    @property
    def block_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots[0])


class BlockStream:
    """The blocks of one module list, streamed. The first ``num_held`` stay.

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
        self._coming: dict[int, tuple[RingSlot, Future[None]]] = {}  # also the block that runs; other ring slots are free
        self._running: int | None = None
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="lazy-h3-stream")  # one: reads end in the order they began
        self._unframe: list[Callable[[], object]] = []
        self._turn = threading.RLock()  # a block's weights are in place for one caller at a time
        self._copy_stream: Any = torch.cuda.Stream(source.device) if source.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.bytes_read = 0

    def open(self) -> None:
        """Make the ring, frame the blocks, and begin to read the first one."""
        streamed = range(self.num_held, len(self._blocks))
        self._ring = [RingSlot(self._slots[0], self._source) for _ in streamed[:RING_SLOTS]]
        self._storages.add(tensor for slot in self._ring for tensor in slot.tensors)
        for ring_slot in self._ring:
            self._mark_free(ring_slot)
        for index in streamed:
            self._frame(index)
        if streamed and self._prefetches:
            self._begin(streamed[0])

    def close(self) -> None:
        """Give the blocks back, wait for a read that is under way, and let the ring go."""
        while self._unframe:
            self._unframe.pop()()
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()
        for slots in self._slots[self.num_held :]:
            for slot in slots:
                slot.clear()
        self._ring.clear()

    def _frame(self, index: int) -> None:
        """Have the block run with its weights in place."""
        own, forward = self._blocks[index].__dict__, self._blocks[index].forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in_place(index):
                return forward(*args, **kwargs)

        before = own.get("forward")  # a compiled module has one, and so has a block that is framed twice
        self._unframe.append(lambda: own.pop("forward") if before is None else own.update(forward=before))
        own["forward"] = run

    @contextmanager
    def _in_place(self, index: int) -> Iterator[None]:
        """Inside, the block has its weights, and the next block is read."""
        with self._turn:
            if self._running is not None:
                raise RuntimeError(f"Block {index} was called inside block {self._running}; streamed blocks run one by one.")
            try:
                self._running = index
                for slot, tensor in zip(self._slots[index], self._arrived(index).tensors, strict=True):
                    slot.put(tensor)
                following = self._following(index)
                if following is not None and self._prefetches:
                    self._begin(following)
                yield
            finally:
                self._running = None
                for slot in self._slots[index]:
                    slot.clear()
                if index in self._coming:
                    self._mark_free(self._coming.pop(index)[0])

    def _mark_free(self, ring_slot: RingSlot) -> None:
        """What computes now may still use the memory; what is read into it comes after."""
        if self._copy_stream is not None:
            ring_slot.free = torch.cuda.current_stream(self._source.device).record_event()

    def _arrived(self, index: int) -> RingSlot:
        """The ring slot with the block's weights; waits for its read, or reads it now, again if that failed before."""
        if not self._is_coming(index):
            self._coming.clear()  # whatever else comes: somebody runs the blocks in another order
            self._begin(index)
        self._coming[index][1].result()
        return self._coming[index][0]

    def _is_coming(self, index: int) -> bool:
        """Whether the block is being read, or was read without an error."""
        _, read = self._coming.get(index, (None, None))
        return read is not None and not (read.done() and read.exception())

    def _begin(self, index: int) -> None:
        """Begin to read the block, unless it is coming already or no ring slot is free."""
        taken = [ring_slot for ring_slot, _ in self._coming.values()]
        free = next((ring_slot for ring_slot in self._ring if ring_slot not in taken), None)
        if index not in self._coming and free is not None:
            self._coming[index] = free, self._reading.submit(self._read, index, free)

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
            self._passes_left -= 1  # below zero it just runs on: the number was that of an earlier user
        return None if self._passes_left == 0 else self.num_held


class StreamedFill:
    """A set of slots of one module, filled in streamed mode: lists of blocks through rings, embedding tables from the file.

    Everything else stays in memory like in whole mode, and is for the caller to read (``staying``).
    """

    def __init__(self, module: nn.Module, slots: Sequence[Slot], source: WeightSource, storages: LivingStorages) -> None:
        self._slots = slots
        self._source = source
        self._storages = storages
        self._lists = sorted(_streamable_lists(module, slots), key=lambda found: -len(found.blocks) * found.block_bytes)
        tables = [slot for slot in slots if GatheredEmbedding.is_possible(slot, source)] if self._lists else []
        self._tables = {slot.name: GatheredEmbedding(slot, source) for slot in tables}
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

    def cost(self) -> Cost:
        """The least that can be resident, and what holding blocks of the largest list adds and saves."""
        passing = self.passing
        rest = sum(slot.nbytes for slot in self._slots if slot.name not in passing)
        rings = sum(RING_SLOTS * found.block_bytes for found in self._lists)
        reread = sum(len(found.blocks) * found.block_bytes for found in self._lists)
        main = self._lists[0]
        return Cost(
            rest + rings,
            reread_per_pass=reread,
            block_bytes=main.block_bytes,
            num_blocks=len(main.blocks),
            ring_blocks=RING_SLOTS,
            read=rest,
        )

    def staying(self, grant: int | None) -> list[Slot]:
        """Slots that are read now and stay; within ``grant`` bytes as many blocks of the largest list as fit."""
        least = self.cost()
        self._num_held = 0 if grant is None else least.num_held(grant - least.resident)
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
        while self._streams:
            self._streams.pop().close()
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
