"""Parameters of ours to the tensors that a layout stores: recipes read backwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .recipe import Recipe


def stored_shapes(recipe: Recipe, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in the file that one parameter of ``shape`` becomes."""
    rows: dict[str, int] = {}
    for piece in recipe.rows:
        rows[piece.source] = rows.get(piece.source, 0) + (shape[0] if shape and piece.count is None else piece.count or 0)
    shapes = {source: (count, *shape[1:]) if shape else () for source, count in rows.items()}
    norms = dict.fromkeys(recipe.extra, (shape[0], *[1] * (len(shape) - 1)) if shape else ())
    return {**shapes, **norms}


def stored_tensors(recipe: Recipe, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the file that one parameter becomes; weight norm is written as the norm and the weight itself."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    position = 0
    for piece in recipe.rows:
        count = len(parameter) if parameter.dim() and piece.count is None else piece.count or 0
        rows = parameter[position : position + count] if parameter.dim() else parameter
        pieces.setdefault(piece.source, []).append((piece.start, rows))
        position += count
    for source, parts in pieces.items():
        ordered = [rows for _, rows in sorted(parts, key=lambda part: part[0])]
        yield source, torch.cat(ordered) if len(ordered) > 1 else ordered[0]
    for norm in recipe.extra:
        yield norm, torch.linalg.vector_norm(parameter.float().flatten(1), dim=1).view(-1, *[1] * (parameter.dim() - 1))


def names_written(recipes: Mapping[str, Recipe]) -> list[str]:
    """Every tensor name that the recipes write."""
    return [source for recipe in recipes.values() for source in recipe.sources]
