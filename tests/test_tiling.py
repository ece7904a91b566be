"""Tile plans and the two ways to make one picture of tiles."""

from __future__ import annotations

from math import prod

import pytest
import torch
from lazy_h3.h3.tiling import AxisTiles, Grid, fade_in_, tile_axis, tiled
from torch import Tensor

RULES = ("raw", "composited")
TWO_DEEP = Grid(tile_axis(44, 16, 4, 2), tile_axis(28, 16, 4, 2))


def picture(grid: Grid) -> Tensor:
    return torch.rand(2, grid.rows.extent, grid.columns.extent, generator=torch.Generator().manual_seed(3))


def shifted_by_call():
    """A network whose tiles disagree: each call adds another number."""
    calls = iter(range(1000))
    return lambda crop: crop + next(calls)


@pytest.mark.parametrize("length", range(16, 700, 28))
@pytest.mark.parametrize(("size", "overlap", "multiple"), [(64, 16, 4), (64, 60, 4), (32, 0, 4), (256, 64, 4)])
def test_tiles_cover_the_axis_and_overlap_enough(length: int, size: int, overlap: int, multiple: int):
    tiles = tile_axis(length, size, overlap, multiple)
    assert tiles.extent == length
    assert tiles.length == min(size, length)
    assert len(tiles.overlaps) == len(tiles.starts) - 1
    assert all(gap >= overlap and gap % multiple == 0 for gap in tiles.overlaps)
    ends = [start + tiles.length for start in tiles.starts]
    assert [end - gap for end, gap in zip(ends, tiles.overlaps, strict=False)] == list(tiles.starts[1:])


@pytest.mark.parametrize("overlap", [64, 65, 1000])
def test_an_overlap_of_a_whole_tile_is_refused(overlap: int):
    with pytest.raises(ValueError, match=f"overlap of {overlap} leaves tiles of 64"):
        tile_axis(100, 64, overlap, 4)


def test_a_coarser_axis_has_the_same_tiles():
    assert AxisTiles((0, 48), 64, (16,)) // 16 == AxisTiles((0, 3), 4, (1,))


def test_a_fade_begins_with_the_neighbour_alone_and_never_reaches_the_end():
    tensor, neighbour = torch.zeros(1, 6), torch.ones(1, 4)
    fade_in_(tensor, neighbour, dim=1)
    assert tensor.tolist() == [[1.0, 0.75, 0.5, 0.25, 0.0, 0.0]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grid", [TWO_DEEP, Grid(tile_axis(16, 16, 4, 4), tile_axis(40, 16, 8, 4))])
def test_tiles_that_agree_give_back_the_picture(rule: str, grid: Grid):
    x = picture(grid)
    torch.testing.assert_close(tiled(lambda crop: crop.clone(), x, grid, grid, rule), x)


@pytest.mark.parametrize("rule", RULES)
def test_tiles_are_asked_for_row_by_row_and_may_be_of_another_size(rule: str):
    grid = Grid(tile_axis(6, 4, 2, 2), tile_axis(8, 4, 0, 4))
    calls = []

    def enlarged(crop: Tensor) -> Tensor:
        calls.append(crop.clone())
        return crop.repeat_interleave(3, -2).repeat_interleave(3, -1)

    x = picture(grid)
    outputs = Grid(tile_axis(18, 12, 6, 6), tile_axis(24, 12, 0, 12))
    torch.testing.assert_close(tiled(enlarged, x, grid, outputs, rule), x.repeat_interleave(3, -2).repeat_interleave(3, -1))
    assert len(calls) == grid.num_tiles
    assert torch.equal(calls[1], x[:, :4, 4:])


def test_composited_tiles_are_a_normalised_overlap_add_where_at_most_two_overlap():
    grid, x = TWO_DEEP, picture(TWO_DEEP)
    expected, network = torch.zeros_like(x), shifted_by_call()
    for row in range(len(grid.rows.starts)):
        for column in range(len(grid.columns.starts)):
            window = ramp(grid.rows, row)[:, None] * ramp(grid.columns, column)
            grid.crop(expected, row, column).add_(network(grid.crop(x, row, column)) * window)
    torch.testing.assert_close(tiled(shifted_by_call(), x, grid, grid, "composited"), expected)


def ramp(axis: AxisTiles, tile: int) -> Tensor:
    """A tile's weights along its axis; those of two neighbours add up to one."""
    weights = torch.ones(axis.length)
    if tile > 0:
        gap = axis.overlaps[tile - 1]
        weights[:gap] *= torch.arange(gap) / gap
    if tile < len(axis.overlaps):
        gap = axis.overlaps[tile]
        weights[axis.length - gap :] *= 1 - torch.arange(gap) / gap
    return weights


def test_the_rules_differ_only_where_two_overlaps_cross():
    grid, x = TWO_DEEP, picture(TWO_DEEP)
    raw, composited = (tiled(shifted_by_call(), x, grid, grid, rule) for rule in RULES)
    crossings = prod((crossed(grid.rows)[:, None], crossed(grid.columns)))
    differs = ((raw - composited).abs() > 1e-4).any(dim=0)
    assert differs.any()
    assert not differs[~crossings].any()


def crossed(axis: AxisTiles) -> Tensor:
    """Which places two tiles cover."""
    covered = torch.zeros(axis.extent)
    for start in axis.starts:
        covered[start : start + axis.length] += 1
    return covered > 1
