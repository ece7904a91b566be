from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lazy_h3.h3.formats.recipe import Recipe, Rows, copied
from lazy_h3.memory.checkpoint import CheckpointError
from lazy_h3.memory.component import Component
from memory_models import BytesRead, component_of, random_weights, written
from safetensors.torch import load_file, save_file
from streamed_models import BLOCK_BYTES, WIDTH, Tower, streamed, tiny_text_encoder, tower, whole
from torch import Tensor, nn

NUM_ROWS = 16
ROW_BYTES = WIDTH * 4
IDS = {
    "a row": torch.tensor([3, 1, 4, 1, 5]),
    "duplicates alone": torch.tensor([7, 7, 7]),
    "the ends": torch.tensor([0, NUM_ROWS - 1]),
    "every row": torch.arange(NUM_ROWS).flip(0),
    "a batch": torch.tensor([[2, 0], [1, 2], [15, 3]]),
    "int32": torch.tensor([[9, 3, 9]], dtype=torch.int32),
    "one number": torch.tensor(6),
    "none": torch.empty(0, dtype=torch.int64),
    "no columns": torch.empty(2, 0, dtype=torch.int64),
}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "tower.safetensors"


def table_of(component: Component) -> Tensor:
    table = whole(component).module.embed.weight.detach().clone()
    component.drop()
    return table


@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize("case", IDS)
def test_gathered_rows_are_those_of_the_table(path, case, is_inference):
    component = tower(path)
    expected = torch.nn.functional.embedding(IDS[case], table_of(component))
    with torch.inference_mode(is_inference):
        found = streamed(component).module.embed(IDS[case])
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    component.drop()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_rows_are_cast_as_the_table_is(path, stored, compute):
    """In inference mode, too: the threads that cast know nothing of it."""
    component = tower(path, stored=stored, compute=compute)
    expected = table_of(component)[IDS["a batch"]]
    found = streamed(component).module.embed(IDS["a batch"])
    assert found.dtype == compute
    assert torch.equal(found, expected)
    component.drop()


def test_only_the_rows_that_are_asked_for_are_read_and_each_once(path):
    count = BytesRead()
    component = streamed(tower(path, reader=count.reader), prefetch=False)
    for ids, num_rows in (([3, 1, 4, 1, 5], 4), ([7] * 50, 1), ([], 0)):
        before = count.total
        component.module.embed(torch.tensor(ids, dtype=torch.int64))
        assert count.total - before == num_rows * ROW_BYTES
    component.drop()


@pytest.mark.parametrize("ids", [[NUM_ROWS], [-1], [0, 5, -3], [2, 1 << 40], [-(1 << 40)]])
def test_a_row_that_the_table_lacks_is_an_error_and_never_a_neighbour_in_the_file(path, ids):
    component = streamed(tower(path))
    culprit = next(i for i in ids if not 0 <= i < NUM_ROWS)
    with pytest.raises(IndexError, match=f"Row {culprit} of embed.weight was asked for, which has 16 rows"):
        component.module.embed(torch.tensor(ids))
    component.drop()
    with pytest.raises(IndexError):  # as the table itself would
        whole(component).module.embed(torch.tensor(ids))
    component.drop()


def test_the_table_is_not_among_what_is_alive(path):
    component = streamed(tower(path))
    cost = component.costs(component.parts)
    assert cost["whole"].resident - cost["streamed"].resident == NUM_ROWS * ROW_BYTES + 4 * BLOCK_BYTES
    component.module.embed(torch.arange(NUM_ROWS))
    assert component.live_bytes() == cost["streamed"].resident
    component.drop()


def test_a_table_may_be_a_row_range_of_another(path):
    weights = random_weights(lambda: Tower(4))
    written(path, {**weights, "wide": torch.arange(30.0 * WIDTH).view(30, WIDTH)})
    recipes = {name: copied(name) for name in weights} | {"embed.weight": Recipe((Rows("wide", 9, NUM_ROWS),))}
    component = streamed(tower(path, num_blocks=4, recipes=recipes))
    assert torch.equal(component.module.embed(torch.tensor([0, 15]))[:, 0], torch.tensor([9.0, 24.0]) * WIDTH)
    with pytest.raises(IndexError):
        component.module.embed(torch.tensor([16]))
    component.drop()


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe((Rows("embed.weight", 8, 8), Rows("embed.weight", 0, 8))),
        Recipe((Rows("embed.weight"),), (), lambda p, _: p.neg_()),
    ],
    ids=["two ranges", "finished"],
)
def test_a_table_that_is_put_together_stays_in_memory(path, recipe):
    component = tower(path)
    recipes = {name: copied(name) for name in component.module.state_dict(keep_vars=True)} | {"embed.weight": recipe}
    component = streamed(tower(path, recipes=recipes))
    table = load_file(path)["embed.weight"]
    expected = table.roll(8, 0) if recipe.finish is None else -table
    assert torch.equal(component.module.embed.weight, expected)
    assert torch.equal(component.module.embed(IDS["a batch"]), expected[IDS["a batch"]])
    component.drop()


def test_the_module_is_an_embedding_before_during_and_after(path):
    component = tower(path)
    embed = component.module.embed
    for _ in range(2):
        streamed(component)
        assert isinstance(embed, nn.Embedding)
        assert component.module.embed is embed
        assert (embed.num_embeddings, embed.embedding_dim) == (NUM_ROWS, WIDTH)
        assert component.dirty() is None
        component.drop()
        assert type(embed) is nn.Embedding
        assert embed.weight.is_meta


def test_the_table_itself_is_read_for_who_asks_for_it_and_not_kept(path):
    count = BytesRead()
    component = tower(path, reader=count.reader)
    expected = table_of(component)
    streamed(component, prefetch=False)
    before, alive = count.total, component.live_bytes()
    assert torch.equal(component.module.embed.weight, expected)
    assert count.total - before == NUM_ROWS * ROW_BYTES
    assert component.live_bytes() == alive
    component.drop()


class Renormed(Tower):
    """Its look-up changes the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_ROWS, WIDTH, max_norm=1.0)


class Doubled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class Special(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Doubled(NUM_ROWS, WIDTH)


@pytest.mark.parametrize("build", [Renormed, Special])
def test_an_embedding_that_does_more_than_look_up_keeps_its_table(path, build):
    written(path, random_weights(build))
    component = component_of(path, build)
    expected = whole(component).module.embed(IDS["a row"])
    component.drop()
    streamed(component)
    assert component.resident_parts() == component.parts
    assert torch.equal(component.module.embed(IDS["a row"]), expected)
    component.drop()


class Scalar(Tower):
    """Has a parameter without rows."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"all": ("",)}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))


def test_parameters_without_rows_are_no_tables(path):
    written(path, random_weights(Scalar))
    component = component_of(path, Scalar)
    assert set(component.costs(component.parts)) == {"whole", "streamed"}
    assert streamed(component).module.scale.shape == ()
    component.drop()


def test_rows_of_a_file_that_was_replaced_are_refused(path):
    component = streamed(tower(path), prefetch=False)
    other = path.with_name("other")
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, other)
    other.replace(path)
    os.utime(path, (1, 1))  # clocks of file systems are too coarse for two files of one moment
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}: was replaced on disk"):
        component.module.embed(IDS["a row"])
    component.drop()


def test_the_text_encoders_token_table_stays_in_the_file(tmp_path):
    count = BytesRead()
    component = tiny_text_encoder(tmp_path / "encoder.safetensors", has_vision=False, reader=count.reader)
    table = component.module.model.embed_tokens.weight
    streamed(component, prefetch=False)
    before = count.total
    component.module.model.embed(torch.tensor([5, 5, 9]))
    assert count.total - before == 2 * table.nbytes // table.shape[0]
    component.drop()
