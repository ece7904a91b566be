"""Tensors that lie in mapped files."""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path

import pytest
import torch
from lazy_h3.host.comfy.core.mapped import MappedCheckpoint, place_of
from lazy_h3.memory.checkpoint import open_checkpoint
from safetensors.torch import load_file, save_file

TENSORS = {
    "a": torch.arange(7, dtype=torch.float32),
    "b.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "d": torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
    "scale": torch.tensor(0.5),
    "wide": torch.arange(4, dtype=torch.int64),
}
can_forget = pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system gives no pages back on request")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


@pytest.fixture
def mapped(path: Path) -> MappedCheckpoint:
    return MappedCheckpoint(open_checkpoint(path))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Shape, dtype and bits."""
    return one.shape == other.shape and one.dtype == other.dtype and one.tolist() == other.tolist()


def test_views_have_what_the_file_has(mapped: MappedCheckpoint) -> None:
    assert mapped.views.keys() == TENSORS.keys()
    assert all(same(mapped.views[name], tensor) for name, tensor in TENSORS.items())


def test_what_is_written_into_a_view_never_reaches_the_file(mapped: MappedCheckpoint, path: Path) -> None:
    mapped.views["a"].fill_(-1.0)
    assert mapped.views["a"].eq(-1).all()
    assert all(same(tensor, TENSORS[name]) for name, tensor in load_file(path).items())
    assert same(MappedCheckpoint(open_checkpoint(path)).views["a"], TENSORS["a"])


@can_forget
def test_pages_that_are_forgotten_take_writes_with_them(mapped: MappedCheckpoint) -> None:
    mapped.views["a"].fill_(-1.0)
    mapped.forget_pages()
    assert same(mapped.views["a"], TENSORS["a"])


@can_forget
def test_pages_that_are_forgotten_are_not_in_memory(tmp_path: Path) -> None:
    save_file({"large": torch.ones(8 << 20)}, tmp_path / "large.safetensors")
    mapped = MappedCheckpoint(open_checkpoint(tmp_path / "large.safetensors"))
    before = mapped_pages()
    assert mapped.views["large"].sum() == 8 << 20
    assert mapped_pages() - before > 24 << 20
    mapped.forget_pages()
    assert mapped_pages() - before < 8 << 20


def mapped_pages() -> int:
    """Bytes of files in this process's memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("this system does not tell")
    return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("RssFile"))


def test_a_view_is_found_in_its_tensor(mapped: MappedCheckpoint) -> None:
    for name in TENSORS.keys() - {"empty"}:
        place = mapped.place_of(mapped.views[name])
        assert place is not None
        assert (place[0].name, place[1]) == (name, 0)


def test_a_slice_is_found_at_its_first_byte(mapped: MappedCheckpoint) -> None:
    weight = mapped.views["b.weight"]
    for rows in (weight[1:], weight[2:3], weight.view(-1)[5:]):
        place = mapped.place_of(rows)
        assert place is not None
        assert (place[0].name, place[1]) == ("b.weight", rows.storage_offset() * 2 - weight.storage_offset() * 2)


def test_what_is_not_contiguous_or_not_in_the_file_has_no_place(mapped: MappedCheckpoint) -> None:
    assert mapped.place_of(mapped.views["b.weight"].T) is None
    assert mapped.place_of(mapped.views["b.weight"][:, 1:3]) is None
    assert mapped.place_of(mapped.views["b.weight"].clone()) is None
    assert mapped.place_of(torch.ones(3)) is None


def test_tensors_at_odd_offsets_are_read_right(tmp_path: Path) -> None:
    """Other writers than safetensors' own do not sort by size."""
    values = torch.arange(3, dtype=torch.float32)
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"\x05" + values.numpy().tobytes()
    (tmp_path / "odd.safetensors").write_bytes(content)
    mapped = MappedCheckpoint(open_checkpoint(tmp_path / "odd.safetensors"))
    assert same(mapped.views["x"], values)
    place = mapped.place_of(mapped.views["x"][1:])
    assert place is not None
    assert (place[0].name, place[1]) == ("x", 4)


def test_the_first_of_several_files_that_has_a_view_tells_its_place(path: Path, tmp_path: Path) -> None:
    save_file({"other": torch.ones(3)}, tmp_path / "other.safetensors")
    files = [MappedCheckpoint(open_checkpoint(p)) for p in (path, tmp_path / "other.safetensors")]
    place = place_of(files[1].views["other"], files)
    assert place is not None
    assert place[0].path.name == "other.safetensors"
    assert place_of(torch.ones(3), files) is None


def test_a_dtype_that_torch_does_not_have_is_a_key_error(tmp_path: Path) -> None:
    save_file({"six": torch.zeros(6, dtype=torch.uint8)}, tmp_path / "six.safetensors")
    content = (tmp_path / "six.safetensors").read_bytes()
    (tmp_path / "six.safetensors").write_bytes(content.replace(b'"U8"', b'"Z8"'))
    with pytest.raises((KeyError, ValueError), match="Z8"):
        MappedCheckpoint(open_checkpoint(tmp_path / "six.safetensors"))


@pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole takes its whole size there")
def test_a_file_that_is_larger_than_the_memory_of_the_machine_is_mapped(tmp_path: Path) -> None:
    nbytes = 4 << 40
    text = json.dumps({"huge": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + nbytes)
    mapped = MappedCheckpoint(open_checkpoint(tmp_path / "huge.safetensors"))
    assert mapped.views["huge"][-1] == 0
