"""What the tests of the VAEs share: filled models, layouts of pixels, and the check of the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

from golden_files import Fixture, assembled, cooked, described, disturbed, golden
from lazy_h3.h3.formats import Layout
from torch import Tensor, nn


def loaded(name: str, reader: ModuleType, group: str = "weights") -> tuple[Fixture, Layout, nn.Module]:
    """A fixture, how its weights were recognised, and the model filled with them."""
    fixture = golden(name)
    weights = fixture.groups[group]
    layout = reader.recognise(described(weights), {}, fixture.config)
    return fixture, layout, assembled(layout, weights)


def case_names(tensors: Mapping[str, Tensor], kind: str) -> list[str]:
    """Prefixes, with their dot, of the tensors called ``kind``."""
    return [name.removesuffix(kind) for name in tensors if name == kind or name.endswith("." + kind)]


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return (found - expected).abs().max().item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value."""
    return error(found, expected) / expected.abs().max().item()


def as_frames(pixels: Tensor) -> Tensor:
    """[B, 3, T, H, W] in [-1, 1] to [B, T, H, W, 3] in [0, 1]."""
    return ((pixels + 1) / 2).movedim(1, -1)


def as_pixels(frames: Tensor) -> Tensor:
    """[T, H, W, 3] to [1, 3, T, H, W]."""
    return frames.movedim(-1, 0)[None]


def outputs_of(modules: Mapping[str, nn.Module]) -> dict[str, list[Tensor]]:
    """Lists that fill with the outputs of the modules, call by call."""
    seen: dict[str, list[Tensor]] = {name: [] for name in modules}

    def remember(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen[name].append(output.clone())

    for name, module in modules.items():
        module.register_forward_hook(remember(name))
    return seen


def unnoticed(
    model: nn.Module, part: str, layout: Layout, tensors: Mapping[str, Tensor], matches: Callable[[], bool]
) -> list[str]:
    """Stored tensors behind the parameters of ``part`` that can be disturbed, one at a time, while ``matches()`` still holds."""
    assert matches()
    quiet = []
    for name, parameter in model.state_dict().items():
        recipe = layout.recipes[name]
        for source in recipe.sources if name.startswith(model.PARTS[part]) else ():
            kept = parameter.clone()
            parameter.copy_(cooked(recipe, disturbed(tensors, source), kept.shape, kept.dtype))
            quiet += [source] if matches() else []
            parameter.copy_(kept)
    return quiet
