"""Stored tensors to device memory: in parallel, with bounded staging, without mapping the file.

Mapping would cost twice the weights on unified memory (the mapped pages and the copy). So bytes are read by ``preadv`` straight
into the final storage where dtype and device allow it, and through a small staging buffer per thread where they do not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import CheckpointError, TensorEntry

CHUNK_BYTES = 8 << 20
NUM_THREADS = 4
POLL_SECONDS = 0.1
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

OnBytes = Callable[[int, int], None]  # (done, total); may raise to interrupt


@dataclass(frozen=True)
class Copy:
    """Read ``nbytes`` bytes of ``entry``, from byte ``start`` on, into ``target``: a flat contiguous tensor, any dtype."""

    entry: TensorEntry
    start: int
    nbytes: int
    target: Tensor


@dataclass(frozen=True)
class Reader:
    """How to read. ``keep_cache=False`` gives page cache back on the way; ``before_chunk(bytes)`` precedes each read."""

    num_threads: int = NUM_THREADS
    chunk_bytes: int = CHUNK_BYTES
    keep_cache: bool = True
    before_chunk: Callable[[int], None] | None = None

    @property
    def staging_bytes(self) -> int:
        """The most that staging buffers take beside the weights."""
        return self.num_threads * self.chunk_bytes

    def read(self, copies: Iterable[Copy], on_bytes: OnBytes | None = None, stream: Any = None) -> None:
        """Perform all copies; joins its threads before it returns or raises.

        ``on_bytes`` is called on the calling thread, at least every POLL_SECONDS. Raises CheckpointError if a file ends early or
        cannot be read, and whatever ``on_bytes`` raises. ``stream``: the CUDA stream to copy on, None for the current one.
        """
        copies = list(copies)
        total = sum(copy.nbytes for copy in copies)
        work = _Work(self._batches(copies))
        with ThreadPoolExecutor(self.num_threads, thread_name_prefix="lazy-h3-read") as threads:
            running = [threads.submit(self._drain, work, stream) for _ in range(self.num_threads)]
            try:
                _follow(running, work, total, on_bytes)
            finally:
                work.stop()

    def _batches(self, copies: list[Copy]) -> Iterator[list[Copy]]:
        """Pieces of at most ``chunk_bytes``; small neighbours share a batch, so that a batch is worth a thread's turn."""
        batch: list[Copy] = []
        size = 0
        for copy in copies:
            for piece in _pieces(copy, self.chunk_bytes):
                if size + piece.nbytes > self.chunk_bytes and batch:
                    yield batch
                    batch, size = [], 0
                batch.append(piece)
                size += piece.nbytes
        if batch:
            yield batch

    def _drain(self, work: _Work, stream: Any) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream), _Files(self.keep_cache) as files:
            staging: _Staging | None = None
            for batch in work:
                for copy in batch:
                    if self.before_chunk is not None:
                        self.before_chunk(copy.nbytes)
                    if _is_direct(copy):
                        files.read_into(copy.entry, copy.start, _bytes_of(copy.target))
                    else:
                        staging = staging or _Staging(self.chunk_bytes, copy.target.device)
                        staging.transfer(files, copy)
                    work.add_done(copy.nbytes)


def _pieces(copy: Copy, chunk_bytes: int) -> Iterator[Copy]:
    item = STORED_DTYPES[copy.entry.dtype].itemsize
    step = chunk_bytes // item * item
    for start in range(0, copy.nbytes, step):
        nbytes = min(step, copy.nbytes - start)
        yield Copy(copy.entry, copy.start + start, nbytes, copy.target[start // item : (start + nbytes) // item])


def _is_direct(copy: Copy) -> bool:
    return copy.target.device.type == "cpu" and copy.target.dtype == STORED_DTYPES[copy.entry.dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _follow(running: list[Future[None]], work: _Work, total: int, on_bytes: OnBytes | None) -> None:
    """Report progress until every thread is done; raises the first failure."""
    pending = set(running)
    while pending:
        done, pending = wait_for(pending, timeout=POLL_SECONDS)
        for future in done:
            future.result()
        if on_bytes is not None:
            on_bytes(work.done_bytes, total)


class _Work:
    """Batches handed to threads one at a time, and the bytes they have done."""

    def __init__(self, batches: Iterator[list[Copy]]) -> None:
        self.done_bytes = 0
        self._batches = batches
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> Iterator[list[Copy]]:
        return self

    def __next__(self) -> list[Copy]:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._batches)

    def add_done(self, nbytes: int) -> None:
        with self._lock:
            self.done_bytes += nbytes

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


class _Files:
    """One thread's open files."""

    def __init__(self, keep_cache: bool) -> None:
        self._keep_cache = keep_cache
        self._open: dict[Path, int] = {}
        self._closing = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def read_into(self, entry: TensorEntry, start: int, buffer: memoryview) -> None:
        descriptor = self._descriptor(entry.path)
        position = entry.offset + start
        filled = 0
        while filled < len(buffer):
            try:
                count = _read_at(descriptor, buffer[filled:], position + filled)
            except OSError as error:
                raise CheckpointError(f"{entry.path}: cannot be read ({error.strerror}); check the disk.") from error
            if count == 0:
                raise CheckpointError(
                    f"{entry.path}: ends inside tensor {entry.name}; the file was cut short, download it again."
                )
            filled += count
        if not self._keep_cache:
            _give_cache_back(descriptor, position, len(buffer))

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            try:
                self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be opened ({error.strerror}); check that the file is still there."
                ) from error
            self._closing.callback(self._close, path)
        return self._open[path]

    def _close(self, path: Path) -> None:
        descriptor = self._open.pop(path)
        if not self._keep_cache:
            _give_cache_back(descriptor, 0, 0)
        os.close(descriptor)


def _read_at(descriptor: int, buffer: memoryview, position: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], position)
    os.lseek(descriptor, position, os.SEEK_SET)  # Windows: descriptors are per thread, so the position is ours
    data = os.read(descriptor, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def _give_cache_back(descriptor: int, position: int, nbytes: int) -> None:
    """Drop the pages of this range from the page cache; a length of 0 means to the end of the file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, position, nbytes, os.POSIX_FADV_DONTNEED)


class _Staging:
    """A thread's way through a buffer: two slots, so that on CUDA one is read into while the other is copied from."""

    def __init__(self, chunk_bytes: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._slots = [torch.empty(chunk_bytes // 2, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
        self._events: list[Any] = [None, None]
        self._turn = 0

    def transfer(self, files: _Files, copy: Copy) -> None:
        """Read ``copy`` through the slots; casts on the target's device."""
        dtype = STORED_DTYPES[copy.entry.dtype]
        for piece in _pieces(copy, len(self._slots[0])):
            slot = self._next_slot()[: piece.nbytes]
            files.read_into(piece.entry, piece.start, _bytes_of(slot))
            piece.target.copy_(slot.view(dtype), non_blocking=self._is_cuda)
            self._mark_busy(piece.target.device)
        self._wait_until_free()

    def _next_slot(self) -> Tensor:
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._slots[self._turn]

    def _mark_busy(self, device: torch.device) -> None:
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events[self._turn] = event

    def _wait_until_free(self) -> None:
        for event in self._events:
            if event is not None:
                event.synchronize()
