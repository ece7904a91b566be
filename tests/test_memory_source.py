from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from lazy_h3.h3.formats.recipe import Recipe, Rows, constant, copied, halves_swapped, weight_norm_folded
from lazy_h3.memory.checkpoint import CheckpointError, open_checkpoint
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.skeleton import Slot, emptied
from lazy_h3.memory.source import WeightSource
from memory_models import CPU, BytesRead, written
from torch import Tensor, nn

MATRIX = torch.arange(24.0).view(6, 4)
VECTOR = torch.arange(5.0)


class Some(nn.Module):
    """Places of every kind."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"matrix": (6, 4), "part": (2, 4), "swapped": (6, 4), "vector": (5,), "fixed": (2,)}.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
        self.normed = nn.Parameter(torch.empty(6, 4))
        self.register_buffer("scalar", torch.empty(()))


RECIPES = {
    "matrix": copied("m"),
    "part": Recipe((Rows("m", 3, 2),)),
    "swapped": halves_swapped("m", 6),
    "vector": copied("v"),
    "fixed": constant((1.5, -2.0)),
    "normed": weight_norm_folded("m", "g"),
    "scalar": copied("s"),
}
GAINS = torch.ones(6, 1)


@pytest.fixture
def path(tmp_path) -> Path:
    return written(tmp_path / "x.safetensors", {"m": MATRIX, "v": VECTOR, "g": GAINS, "s": torch.tensor(7.0)})


def slots_of(dtype: torch.dtype = torch.float32) -> dict[str, Slot]:
    with torch.device("meta"):
        return emptied(Some(), lambda _: dtype)


def source_of(path: Path, slots: dict[str, Slot], reader: Reader | None = None) -> WeightSource:
    return WeightSource(open_checkpoint(path), RECIPES, reader or Reader(), CPU, slots)


def read(source: WeightSource, slots: dict[str, Slot], *names: str) -> dict[str, Tensor]:
    tensors = {name: source.blank(slots[name].shape, slots[name].dtype) for name in names}
    source.read(tensors)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_slots_are_read_as_their_recipes_say(path, dtype):
    slots = slots_of(dtype)
    found = read(source_of(path, slots), slots, *slots)
    expected = {
        "matrix": MATRIX,
        "part": MATRIX[3:5],
        "swapped": MATRIX.roll(3, 0),
        "vector": VECTOR,
        "fixed": torch.tensor([1.5, -2.0]),
        "scalar": torch.tensor(7.0),
    }
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(dtype)), name
    torch.testing.assert_close(found["normed"], torch.nn.functional.normalize(MATRIX, dim=1).to(dtype), rtol=0.01, atol=0)


def test_only_the_slots_that_are_asked_for_are_read(path):
    count, slots = BytesRead(), slots_of()
    source = source_of(path, slots, count.reader)
    assert count.total == 0
    read(source, slots, "part", "fixed", "scalar")
    assert count.total == (2 * 4 + 1) * 4


def test_a_slot_is_read_into_memory_that_is_there_already(path):
    """As ring slots are, again and again; what stood in it before does not shine through."""
    slots = slots_of()
    source = source_of(path, slots)
    target = torch.full((6, 4), torch.nan)
    pointer = target.data_ptr()
    for name in ("matrix", "swapped", "normed", "matrix"):
        source.read({name: target.fill_(torch.nan)})
        assert target.data_ptr() == pointer
        assert target.isfinite().all()
    assert torch.equal(target, MATRIX)


def test_which_slots_can_be_gathered_row_by_row(path):
    slots = slots_of()
    source = source_of(path, slots)
    assert {name for name, slot in slots.items() if source.can_gather(slot)} == {"matrix", "part", "vector"}


@pytest.mark.parametrize("name", ["matrix", "part", "vector"])
def test_gathered_rows_come_in_the_order_of_their_numbers(path, name):
    slots = slots_of(torch.bfloat16)
    source = source_of(path, slots)
    table = read(source, slots, name)[name]
    for numbers in ([1, 0], [0], [], list(range(len(table)))):
        found = source.gathered(slots[name], numbers)
        assert found.shape == (len(numbers), *table.shape[1:])
        assert torch.equal(found, table[numbers])


def test_room_is_never_an_inference_tensor(path):
    slots = slots_of()
    with torch.inference_mode():
        source = source_of(path, slots)
        assert not source.blank((2,), torch.float32).is_inference()
        assert not source.gathered(slots["matrix"], [1]).is_inference()


def test_what_reading_takes_on_top(path):
    slots = slots_of()
    reader = Reader(num_threads=3, chunk_bytes=100)
    source = source_of(path, slots, reader)
    assert source.transient_bytes([]) == 0
    assert source.transient_bytes([slots["matrix"], slots["swapped"], slots["fixed"], slots["scalar"]]) == 0
    assert source.transient_bytes([slots["matrix"], slots["normed"]]) == GAINS.nbytes
    halves = slots_of(torch.bfloat16)
    assert source_of(path, halves, reader).transient_bytes([halves["matrix"]]) == 300
    assert source_of(path, halves, reader).transient_bytes([halves["normed"]]) == 300 + GAINS.nbytes


@pytest.mark.parametrize("way", ["read", "gathered"])
def test_a_file_that_changes_under_way_is_refused(path, way):
    slots = slots_of()
    source = source_of(path, slots)
    written(path.with_name("y"), {"m": MATRIX + 1, "v": VECTOR, "g": GAINS, "s": torch.tensor(7.0)}).replace(path)
    os.utime(path, (1, 1))  # clocks of file systems are too coarse for two files of one moment
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}: was replaced on disk"):
        read(source, slots, "matrix") if way == "read" else source.gathered(slots["matrix"], [0])


def test_a_source_that_cannot_fill_its_slots_is_not_made(path):
    slots = slots_of()
    with pytest.raises(CheckpointError, match="nothing says how to fill vector"):
        WeightSource(open_checkpoint(path), {n: r for n, r in RECIPES.items() if n != "vector"}, Reader(), CPU, slots)


def test_an_interrupt_ends_the_read(path):
    slots = slots_of()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source_of(path, slots).read({"matrix": torch.empty(6, 4)}, interrupt)
