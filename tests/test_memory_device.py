from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from lazy_h3.memory import device as devices
from lazy_h3.memory.device import GIB, PoolStatus, pool_status
from memory_models import CPU

GPU = torch.device("cuda:0")
MACHINE = SimpleNamespace(total=64 * GIB, available=48 * GIB)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """64 GiB, 48 of them available, in no container; gives the root of its cgroup tree."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    monkeypatch.setattr(devices, "_cgroup_path", lambda: "")
    return tmp_path


def cgroup(folder: Path, limit: str, used: int = 0, inactive_file: int | None = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    counts = "anon 5\n" if inactive_file is None else f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n"
    (folder / "memory.stat").write_text(counts)


def test_on_a_cpu_the_pool_is_the_machines_ram(machine):
    assert pool_status(CPU) == PoolStatus(64 * GIB, 48 * GIB, unified=True)
    assert pool_status(torch.device("mps")) == pool_status(CPU)


def test_this_machine_answers():
    status = pool_status(CPU)
    assert 0 < status.available < status.free <= status.total
    assert devices.process_bytes() > 10 << 20


def test_the_floor_is_for_the_rest_of_the_machine():
    assert PoolStatus(128 * GIB, 0, unified=True).floor == 128 * GIB * 12 // 100
    assert PoolStatus(8 * GIB, 0, unified=True).floor == 2 * GIB
    assert PoolStatus(24 * GIB, 0, unified=False).floor == GIB
    assert PoolStatus(24 * GIB, 10 * GIB, unified=False).available == 9 * GIB
    assert PoolStatus(24 * GIB, GIB // 2, unified=False).available == 0


def test_a_containers_limit_is_the_pool(machine):
    cgroup(machine, str(16 * GIB), used=6 * GIB, inactive_file=GIB)
    assert pool_status(CPU) == PoolStatus(16 * GIB, 11 * GIB, unified=True)


def test_a_limit_above_the_machine_changes_nothing(machine):
    cgroup(machine, str(512 * GIB), used=GIB)
    assert pool_status(CPU) == PoolStatus(64 * GIB, 48 * GIB, unified=True)


def test_a_container_without_a_limit_is_the_machine(machine):
    cgroup(machine, "max", used=6 * GIB)
    assert pool_status(CPU) == PoolStatus(64 * GIB, 48 * GIB, unified=True)


def test_a_full_container_has_nothing_free(machine):
    cgroup(machine, str(4 * GIB), used=5 * GIB)
    assert pool_status(CPU) == PoolStatus(4 * GIB, 0, unified=True)
    assert pool_status(CPU).available == 0


def test_the_cgroup_of_the_process_counts(machine, monkeypatch):
    monkeypatch.setattr(devices, "_cgroup_path", lambda: "user.slice/app.scope")
    cgroup(machine / "user.slice" / "app.scope", str(8 * GIB), used=GIB)
    cgroup(machine / "other.slice", str(GIB), used=GIB)
    assert pool_status(CPU) == PoolStatus(8 * GIB, 7 * GIB, unified=True)


def test_a_limit_of_a_cgroup_around_it_counts_as_well(machine, monkeypatch):
    """A slice with 8 GiB, of which its other services hold 3, in a pod with 20."""
    monkeypatch.setattr(devices, "_cgroup_path", lambda: "pod/slice/app.scope")
    cgroup(machine / "pod", str(20 * GIB), used=4 * GIB)
    cgroup(machine / "pod" / "slice", str(8 * GIB), used=4 * GIB)
    cgroup(machine / "pod" / "slice" / "app.scope", "max", used=GIB)
    assert pool_status(CPU) == PoolStatus(8 * GIB, 4 * GIB, unified=True)
    cgroup(machine / "pod", str(20 * GIB), used=18 * GIB)
    assert pool_status(CPU) == PoolStatus(8 * GIB, 2 * GIB, unified=True)


def test_a_path_that_is_not_mounted_falls_back_to_the_mount(machine, monkeypatch):
    """Containers without a cgroup namespace name a folder that they cannot see."""
    monkeypatch.setattr(devices, "_cgroup_path", lambda: "docker/4f1f0c")
    cgroup(machine, str(8 * GIB), used=GIB)
    assert pool_status(CPU) == PoolStatus(8 * GIB, 7 * GIB, unified=True)


@pytest.mark.parametrize("damage", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("content", [None, "", "lots\n", "one two three\n"])
def test_a_cgroup_that_cannot_be_read_is_no_limit(machine, damage, content):
    cgroup(machine, str(8 * GIB), used=GIB)
    if content is None:
        (machine / damage).unlink()
    else:
        (machine / damage).write_text(content)
    status = pool_status(CPU)
    if damage == "memory.stat" and content == "":
        assert status == PoolStatus(8 * GIB, 7 * GIB, unified=True)
    else:
        assert status == PoolStatus(64 * GIB, 48 * GIB, unified=True)


def test_a_kernel_that_counts_no_file_pages_is_understood(machine):
    cgroup(machine, str(8 * GIB), used=GIB, inactive_file=None)
    assert pool_status(CPU) == PoolStatus(8 * GIB, 7 * GIB, unified=True)


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ("0::/user.slice/app.scope\n", "user.slice/app.scope"),
        ("0::/\n", ""),
        ("12:memory:/docker/1\n1:name=systemd:/docker/1\n0::/docker/2\n", "docker/2"),
        ("12:memory:/docker/1\n", ""),
        ("", ""),
    ],
    ids=["version 2", "root", "both versions", "version 1", "empty"],
)
def test_the_cgroup_is_found_in_proc(monkeypatch, content, path):
    monkeypatch.setattr(Path, "read_text", lambda self: content)
    assert devices._cgroup_path() == path


def test_without_proc_there_is_no_cgroup(monkeypatch, tmp_path):
    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    monkeypatch.setattr(Path, "read_text", missing)
    assert devices._cgroup_path() == ""
    assert pool_status(CPU) == PoolStatus(64 * GIB, 48 * GIB, unified=True)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_trimmed_without_their_c_library(monkeypatch, platform):
    def missing(*_: object) -> None:
        pytest.fail("asked the C library")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    devices.trim()
    devices.collect_and_trim()


def test_a_c_library_without_malloc_trim_is_no_problem(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    devices.trim()


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps its heap")
def test_trim_gives_small_blocks_back_to_the_system():
    blocks = [torch.ones(16 << 10) for _ in range(2000)]  # 64 KiB each: from the heap, not mapped
    keep = torch.ones(16 << 10)
    before = devices.process_bytes()
    del blocks
    devices.trim()
    assert before - devices.process_bytes() > 100 << 20
    assert keep.sum() == 16 << 10


def test_collecting_frees_what_only_a_cycle_holds():
    class Node:
        pass

    node = Node()
    node.self = node
    gc.disable()
    try:
        freed = []
        node.last = type("Last", (), {"__del__": lambda _: freed.append(1)})()
        del node
        assert freed == []
        devices.collect_and_trim()
        assert freed == [1]
    finally:
        gc.enable()


def test_a_pretended_pool_holds_only_this_process(monkeypatch):
    monkeypatch.setattr(devices, "process_bytes", lambda: 3 * GIB)
    assert pool_status(CPU, 128 * GIB) == PoolStatus(128 * GIB, 125 * GIB, unified=True)
    assert pool_status(CPU, GIB) == PoolStatus(GIB, 0, unified=True)


def test_a_pretended_gpu_needs_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert pool_status(GPU, 24 * GIB) == PoolStatus(24 * GIB, 24 * GIB, unified=False)


class FakeCuda:
    """A GPU with 24 GiB: 10 free, 8 held by torch, 5 of those in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
        answers = {
            "is_available": lambda: True,
            "mem_get_info": lambda device: (10 * GIB, 24 * GIB),
            "memory_reserved": lambda device: 8 * GIB,
            "memory_allocated": lambda device: 5 * GIB,
            "get_device_properties": lambda device: SimpleNamespace(**properties),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


def test_what_torch_keeps_for_itself_on_a_gpu_is_free_for_weights(monkeypatch, machine):
    FakeCuda(monkeypatch, is_integrated=0)
    assert pool_status(GPU) == PoolStatus(24 * GIB, 13 * GIB, unified=False)


def test_an_integrated_gpu_shares_the_machines_ram(monkeypatch, machine):
    """The driver counts page cache as used there, so its answer is not asked for."""
    FakeCuda(monkeypatch, is_integrated=1)
    assert pool_status(GPU) == PoolStatus(24 * GIB, 51 * GIB, unified=True)
    assert devices.is_unified(GPU)


def test_an_old_torch_that_cannot_tell_has_a_discrete_gpu(monkeypatch, machine):
    FakeCuda(monkeypatch)
    assert not devices.is_unified(GPU)
    assert devices.is_unified(CPU)


def test_the_process_measures_itself():
    block = torch.ones(64 << 20, dtype=torch.uint8)
    held = devices.process_bytes()
    del block
    devices.trim()
    assert held - devices.process_bytes() > 50 << 20
