from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from lazy_h3.memory import reader as reader_module
from lazy_h3.memory.checkpoint import CheckpointError, TensorEntry, open_checkpoint
from lazy_h3.memory.reader import STORED_DTYPES, Copy, Reader
from memory_models import written
from torch import Tensor

NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def numbers(dtype: torch.dtype, count: int = 1000) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 20
    return values.to(dtype) if dtype.is_floating_point else values.round().abs().to(dtype)


def entry_of(path: Path, name: str = "x") -> TensorEntry:
    return open_checkpoint(path).tensors[name]


def read_whole(path: Path, dtype: torch.dtype, reader: Reader, on_bytes=None, name: str = "x") -> Tensor:
    entry = entry_of(path, name)
    target = torch.full((torch.Size(entry.shape).numel(),), 77).to(dtype)
    reader.read([Copy(entry, 0, entry.nbytes, target)], on_bytes)
    return target


def reading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("lazy-h3-read")]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy())


@pytest.mark.parametrize("name", STORED_DTYPES)
def test_every_stored_dtype_is_read_bit_for_bit(tmp_path, name):
    stored = numbers(STORED_DTYPES[name])
    path = written(tmp_path / "x.safetensors", {"x": stored})
    assert bits(read_whole(path, stored.dtype, Reader(num_threads=2, chunk_bytes=256))) == bits(stored)


@pytest.mark.parametrize("compute", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_a_cast_is_torchs_own_cast(tmp_path, name, compute):
    stored = numbers(STORED_DTYPES[name])
    path = written(tmp_path / "x.safetensors", {"x": stored})
    read = read_whole(path, compute, Reader(num_threads=2, chunk_bytes=176))
    assert bits(read) == bits(stored.to(compute))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("chunk_bytes", [16, 24, 100, 4096, 1 << 20])
def test_chunks_of_any_size_on_any_number_of_threads_meet_without_a_seam(tmp_path, num_threads, chunk_bytes):
    tensors = {f"t{size}": numbers(torch.float32, size) for size in (0, 1, 3, 7, 64, 333)}
    path = written(tmp_path / "x.safetensors", tensors)
    entries = open_checkpoint(path).tensors
    for dtype in (torch.float32, torch.bfloat16):
        targets = {name: torch.zeros(tensor.numel(), dtype=dtype) for name, tensor in tensors.items()}
        copies = [Copy(entries[name], 0, entries[name].nbytes, target) for name, target in targets.items()]
        Reader(num_threads, chunk_bytes).read(copies)
        assert all(torch.equal(targets[name], tensor.to(dtype)) for name, tensor in tensors.items())


def test_a_copy_reads_only_its_range(tmp_path):
    stored = numbers(torch.float32, 100)
    path = written(tmp_path / "x.safetensors", {"x": stored})
    read = []
    target = torch.zeros(30)
    Reader(chunk_bytes=32, before_chunk=read.append).read([Copy(entry_of(path), 40 * 4, 30 * 4, target)])
    assert torch.equal(target, stored[40:70])
    assert sum(read) == 30 * 4
    assert max(read) <= 32


def test_progress_is_told_on_the_callers_thread_and_ends_with_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "POLL_SECONDS", 0.005)
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32, 64)})
    gates = threading.Semaphore(0)
    calls = []

    def on_bytes(done: int, total: int) -> None:
        calls.append((threading.get_ident(), done, total))
        gates.release()

    read_whole(path, torch.float32, Reader(1, 32, before_chunk=lambda _: gates.acquire()), on_bytes)
    assert {ident for ident, _, _ in calls} == {threading.get_ident()}
    assert {total for _, _, total in calls} == {256}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == 256
    assert len(set(done)) > 2


def test_progress_is_told_even_while_the_disk_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "POLL_SECONDS", 0.005)
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32)})
    answers = threading.Event()
    calls = []

    def on_bytes(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:
            answers.set()

    read_whole(path, torch.float32, Reader(1, before_chunk=lambda _: answers.wait(10)), on_bytes)
    assert calls[:3] == [0, 0, 0]


class Interrupted(BaseException):
    pass


def test_an_interrupt_joins_the_threads_and_closes_the_files(tmp_path):
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32)})
    num_chunks = []
    before = open_files()

    def interrupt(done: int, total: int) -> None:
        raise Interrupted

    reader = Reader(2, 64, before_chunk=lambda _: (num_chunks.append(1), threading.Event().wait(0.02)))
    with pytest.raises(Interrupted):
        read_whole(path, torch.float32, reader, interrupt)
    assert not reading_threads()
    assert open_files() == before
    assert 0 < len(num_chunks) < 4000 // 64


def test_a_failing_thread_stops_the_others(tmp_path):
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32)})
    turns = []

    def before_chunk(nbytes: int) -> None:
        turns.append(nbytes)
        threading.Event().wait(0.01)
        if len(turns) >= 3:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        read_whole(path, torch.float32, Reader(2, 64, before_chunk=before_chunk))
    assert not reading_threads()
    assert len(turns) < 4000 // 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["direct", "staged"])
def test_a_file_that_ends_early_is_named_with_the_tensor(tmp_path, dtype):
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32)})
    entry = entry_of(path)
    os.truncate(path, entry.offset + 1234)
    before = open_files()
    problem = rf"^{re.escape(str(path))}: ends inside tensor x; the file was cut short"
    with pytest.raises(CheckpointError, match=problem):
        Reader(chunk_bytes=512).read([Copy(entry, 0, entry.nbytes, torch.zeros(1000, dtype=dtype))])
    assert open_files() == before


def test_a_file_that_is_gone_is_named(tmp_path):
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32)})
    entry = entry_of(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: cannot be opened"):
        Reader().read([Copy(entry, 0, entry.nbytes, torch.zeros(1000))])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32)})
    entry = entry_of(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: cannot be (read|opened)"):
        Reader().read([Copy(entry, 0, entry.nbytes, torch.zeros(1000))])


def test_files_are_closed_after_reading(tmp_path):
    paths = [written(tmp_path / f"{n}.safetensors", {"x": numbers(torch.float32)}) for n in range(3)]
    before = open_files()
    copies = [Copy(entry, 0, entry.nbytes, torch.zeros(1000)) for entry in map(entry_of, paths)]
    Reader(chunk_bytes=256).read(copies)
    assert open_files() == before
    assert all(torch.equal(copy.target, numbers(torch.float32)) for copy in copies)


def test_systems_without_positioned_reads_seek_instead(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "preadv", raising=False)
    stored = numbers(torch.float32)
    path = written(tmp_path / "x.safetensors", {"x": stored})
    assert torch.equal(read_whole(path, torch.float32, Reader(3, 128)), stored)
    assert torch.equal(read_whole(path, torch.bfloat16, Reader(3, 128)), stored.bfloat16())


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """The system may give less than was asked for."""
    original = reader_module._read_at
    monkeypatch.setattr(reader_module, "_read_at", lambda fd, buffer, position: original(fd, buffer[:7], position))
    stored = numbers(torch.float32)
    path = written(tmp_path / "x.safetensors", {"x": stored})
    assert torch.equal(read_whole(path, torch.float32, Reader(2, 128)), stored)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no advice for its page cache")
@pytest.mark.parametrize("keep_cache", [True, False])
def test_page_cache_is_given_back_on_request(tmp_path, monkeypatch, keep_cache):
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: advised.append((offset, length, advice)))
    stored = numbers(torch.float32)
    path = written(tmp_path / "x.safetensors", {"x": stored})
    assert torch.equal(read_whole(path, torch.float32, Reader(1, 1000, keep_cache=keep_cache)), stored)
    start = entry_of(path).offset
    ranges = [(start + n * 1000, 1000, os.POSIX_FADV_DONTNEED) for n in range(4)]
    assert advised == ([] if keep_cache else [*ranges, (0, 0, os.POSIX_FADV_DONTNEED)])


def test_staging_is_bounded_and_only_for_casts(tmp_path, monkeypatch):
    """Beside the weights, each thread has two halves of a chunk, and none where bytes go straight to their place."""
    path = written(tmp_path / "x.safetensors", {"x": numbers(torch.float32)})
    made = []
    original = reader_module._Staging

    def counted(chunk_bytes: int, device: torch.device):
        staging = original(chunk_bytes, device)
        made.append(sum(slot.nbytes for slot in staging._slots))
        return staging

    monkeypatch.setattr(reader_module, "_Staging", counted)
    reader = Reader(3, 256)
    read_whole(path, torch.float32, reader)
    assert made == []
    read_whole(path, torch.bfloat16, reader)
    assert 0 < sum(made) <= reader.staging_bytes == 3 * 256


def test_reading_nothing_is_fine():
    calls = []
    Reader().read([], lambda done, total: calls.append((done, total)))
    assert calls[-1] == (0, 0)
