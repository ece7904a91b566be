"""Parameters of ours to the tensors that a layout stores: recipes read backwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .recipe import Recipe


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
