"""Reference tensors: read, sort, and pour into a skeleton by its recipes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lazy_h3.h3.formats import Layout, Recipe, Rows
from safetensors import safe_open
from torch import Tensor, nn

FOLDER = Path(os.environ.get("LAZY_H3_GOLDEN") or Path(__file__).parent / "golden")
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass
class Fixture:
    """One file: ``weights.x`` is ``weights["x"]``, likewise input, output, intermediate; the rest is in ``groups``."""

    config: dict[str, Any]
    metadata: dict[str, str]
    groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.groups["weights"]

    @property
    def input(self) -> dict[str, Tensor]:
        return self.groups["input"]

    @property
    def output(self) -> dict[str, Tensor]:
        return self.groups["output"]

    @property
    def intermediate(self) -> dict[str, Tensor]:
        return self.groups.get("intermediate", {})


@dataclass(frozen=True)
class Info:
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def golden_path(*parts: str) -> Path:
    return FOLDER.joinpath(*parts)


def read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)


def golden(name: str) -> Fixture:
    """The fixture ``<name>.safetensors``."""
    path = golden_path(f"{name}.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    fixture = Fixture(json.loads(metadata.get("config", "{}")), metadata)
    for key, tensor in read_tensors(path).items():
        group, _, rest = key.partition(".")
        fixture.groups.setdefault(group, {})[rest] = tensor
    return fixture


def described(tensors: Mapping[str, Tensor]) -> dict[str, Info]:
    """The header view of tensors in memory."""
    return {name: Info(tuple(t.shape), DTYPE_NAMES.get(t.dtype, str(t.dtype))) for name, t in tensors.items()}


def rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    if rows.count is None:
        return tensor[rows.start :] if tensor.dim() else tensor
    return tensor[rows.start : rows.start + rows.count]


def cooked(recipe: Recipe, tensors: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A recipe in plain torch, independent of the reader."""
    if recipe.values is not None:
        return torch.tensor(recipe.values, dtype=dtype).reshape(shape)
    pieces = [rows_of(tensors[r.source], r) for r in recipe.rows]
    result = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).reshape(shape).to(dtype).clone()
    if recipe.finish is not None:
        recipe.finish(result, {name: tensors[name] for name in recipe.extra})
    return result


def assembled(layout: Layout, tensors: Mapping[str, Tensor], compute: torch.dtype = torch.float32) -> nn.Module:
    """The skeleton of ``layout`` filled from tensors in memory, computing in ``compute``."""
    with torch.device("meta"):
        module = layout.build()
    state = module.state_dict()
    assert set(state) == set(layout.recipes), set(state) ^ set(layout.recipes)
    filled = {n: cooked(layout.recipes[n], tensors, t.shape, module.storage_dtype(n, compute)) for n, t in state.items()}
    module.load_state_dict(filled, assign=True)
    return module.requires_grad_(False).eval()


def disturbed(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The same tensors, with noise of a tenth of the standard deviation on one of them (plus 0.1 where it is constant)."""
    tensor = tensors[name].float()
    spread = tensor.std() if tensor.numel() > 1 else tensor.new_zeros(())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tensor.shape, generator=generator) * 0.1 * spread if spread > 0 else torch.full_like(tensor, 0.1)
    return {**tensors, name: (tensor + noise).to(tensors[name].dtype)}


def without_effect(tensors: Mapping[str, Tensor], matches: Callable[[Mapping[str, Tensor]], bool]) -> Iterator[str]:
    """Names of tensors that can be disturbed without the comparison ``matches`` noticing."""
    return (name for name in tensors if matches(disturbed(tensors, name)))
