"""How a parameter of ours is put together from the tensors of a file.

Every published layout of H3 differs from ours only in names, in the order of row blocks (split or interleaved q, k, v; swapped
feed-forward halves) and in weight norm, so a recipe is a list of row ranges, read one after the other into the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Finish = Callable[[Tensor, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Rows:
    """Rows ``start : start + count`` along dimension 0 of the stored tensor ``source``; ``count=None`` is all from ``start``."""

    source: str
    start: int = 0
    count: int | None = None


@dataclass(frozen=True)
class Recipe:
    """One parameter: row ranges concatenated along dimension 0, then ``finish`` with the tensors named in ``extra``.

    ``values`` stands for a constant instead (statistics that live in a config file). ``finish(parameter, extra)`` works in place.
    """

    rows: tuple[Rows, ...] = ()
    extra: tuple[str, ...] = ()
    finish: Finish | None = None
    values: tuple[float, ...] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the file's tensors that the recipe reads."""
        return tuple(dict.fromkeys([*(piece.source for piece in self.rows), *self.extra]))


def copied(source: str) -> Recipe:
    """The whole stored tensor, unchanged."""
    return Recipe((Rows(source),))


def concatenated(sources: tuple[str, ...], num_rows: int) -> Recipe:
    """Several stored tensors of ``num_rows`` rows each, one below the other (split q, k, v to one matrix)."""
    return Recipe(tuple(Rows(source, 0, num_rows) for source in sources))


def halves_swapped(source: str, num_rows: int) -> Recipe:
    """Second half of the rows first ([value; gate] to [gate; value])."""
    half = num_rows // 2
    return Recipe((Rows(source, half, half), Rows(source, 0, half)))


def interleaved(sources: tuple[str, ...], group_rows: int, num_groups: int) -> Recipe:
    """Row groups of each source in turn (split q, k, v to one matrix that is interleaved per head)."""
    return Recipe(tuple(Rows(s, group * group_rows, group_rows) for group in range(num_groups) for s in sources))


def constant(values: tuple[float, ...]) -> Recipe:
    """Numbers that stand in a configuration, not in the file."""
    return Recipe(values=values)


def weight_norm_folded(weight_v: str, weight_g: str) -> Recipe:
    """``g * v / ||v||``, the norm over all dimensions but the first (VAE spec, section 3.3)."""

    def fold(parameter: Tensor, extra: Mapping[str, Tensor]) -> None:
        norm = torch.linalg.vector_norm(parameter.flatten(1), dim=1).view(-1, *[1] * (parameter.dim() - 1))
        parameter.mul_(extra[weight_g].to(parameter) / norm)

    return Recipe((Rows(weight_v),), extra=(weight_g,), finish=fold)
