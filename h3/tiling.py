"""Overlapping tiles over height and width: where they lie and how their results become one picture (VAE spec, section 1.7).

The tile size is part of the video VAE's function, since positions and statistics are local to a tile; it bounds memory as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor

CompositionRule = Literal["raw", "composited"]
ROWS, COLUMNS = -2, -1


@dataclass(frozen=True)
class AxisTiles:
    """Tiles of one ``length`` along an axis; ``overlaps[j]`` lies between the tiles j and j + 1."""

    starts: tuple[int, ...]
    length: int
    overlaps: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Length of the axis."""
        return self.starts[-1] + self.length

    def __floordiv__(self, ratio: int) -> AxisTiles:
        """The same tiles on an axis that is ``ratio`` times coarser."""
        starts = tuple(start // ratio for start in self.starts)
        return AxisTiles(starts, self.length // ratio, tuple(overlap // ratio for overlap in self.overlaps))


@dataclass(frozen=True)
class Grid:
    """Tiles over both axes of a picture [..., rows.extent, columns.extent]."""

    rows: AxisTiles
    columns: AxisTiles

    @property
    def num_tiles(self) -> int:
        return len(self.rows.starts) * len(self.columns.starts)

    def crop(self, picture: Tensor, row: int, column: int) -> Tensor:
        """The picture under a tile, as a view."""
        part = picture.narrow(ROWS, self.rows.starts[row], self.rows.length)
        return part.narrow(COLUMNS, self.columns.starts[column], self.columns.length)

    def __floordiv__(self, ratio: int) -> Grid:
        return Grid(self.rows // ratio, self.columns // ratio)


def tile_axis(length: int, tile_size: int, min_overlap: int, multiple: int) -> AxisTiles:
    """The fewest tiles that cover ``length``; what they have too much widens the overlaps by ``multiple`` each, first to last.

    Raises ValueError if the tiles would not advance.
    """
    if min_overlap >= tile_size:
        raise ValueError(f"A tile overlap of {min_overlap} leaves tiles of {tile_size} nothing of their own: make it smaller.")
    if length <= tile_size:
        return AxisTiles((0,), length, ())
    num_gaps = ceil((length - min_overlap) / (tile_size - min_overlap)) - 1
    slack = tile_size + num_gaps * (tile_size - min_overlap) - length
    rounds, rest = divmod(slack // multiple, num_gaps)
    overlaps = tuple(min_overlap + multiple * (rounds + (gap < rest)) for gap in range(num_gaps))
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + tile_size - overlap)
    return AxisTiles(tuple(starts), tile_size, overlaps)


def tiled(network: Callable[[Tensor], Tensor], x: Tensor, inputs: Grid, outputs: Grid, rule: CompositionRule) -> Tensor:
    """``network`` on each crop of x, row by row; its results, which are changed in place, become one picture.

    A result fades in from the one above and then from the one to its left. Under ``raw`` these are the neighbours as the network
    gave them; under ``composited`` they are the picture so far, which keeps the diagonal neighbour where two overlaps cross.
    """
    picture = None
    above: list[Tensor] = []
    for row, overlap_below in enumerate((*outputs.rows.overlaps, 0)):
        below, left = [], None
        for column, overlap_right in enumerate((*outputs.columns.overlaps, 0)):
            tile = network(inputs.crop(x, row, column))
            bottom, right = _last(tile, overlap_below, ROWS), _last(tile, overlap_right, COLUMNS)
            if above:
                fade_in_(tile, above[column], ROWS)
            if left is not None:
                fade_in_(tile, left, COLUMNS)
            if picture is None:
                picture = tile.new_empty(*tile.shape[:-2], outputs.rows.extent, outputs.columns.extent)
            outputs.crop(picture, row, column).copy_(tile)
            below.append(bottom)
            left = right if rule == "raw" else _last(tile, overlap_right, COLUMNS)
            del tile  # or it would outlive the computation of the next one
        if rule == "composited":
            below = [_last(outputs.crop(picture, row, column), overlap_below, ROWS) for column in range(len(below))]
        above = below
    return picture


def fade_in_(tensor: Tensor, neighbour: Tensor, dim: int) -> None:
    """Cross-fades from ``neighbour`` into the start of ``tensor``, in place: its shares are 0, 1/e, 2/e ... for a length of e."""
    extent = neighbour.shape[dim]
    share = torch.arange(extent, dtype=torch.float32, device=tensor.device).div(extent).to(tensor.dtype)
    share = share.view([extent if axis == dim % tensor.dim() else 1 for axis in range(tensor.dim())])
    start = tensor.narrow(dim, 0, extent)
    start.copy_(neighbour * (1 - share) + start * share)


def _last(tile: Tensor, count: int, dim: int) -> Tensor:
    """A copy of the last ``count`` rows or columns: the tile itself will change."""
    return tile.narrow(dim, tile.shape[dim] - count, count).clone()
