"""One component's stored tensors as the file's header describes them, and how they must fit the model: exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .layout import FormatError, Tensors, shown, shown_name
from .recipe import Recipe

Shapes = Mapping[str, tuple[int, ...]]
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_NAMED = 3
CORRECT_THE_CONFIG = "put the right numbers into config.json or into the 'config' entry of the file's header"


class Header:
    """The tensors of ``component``. ``spelled`` turns our name of a tensor, or the start of one, into the file's."""

    def __init__(self, component: str, tensors: Tensors, spelled: Callable[[str], str] = str) -> None:
        self.component = component
        self.tensors = tensors
        self.spelled = spelled

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Raises FormatError where the tensor is missing, empty or of another rank."""
        stored = self.spelled(name)
        if stored not in self.tensors:
            raise FormatError(f"The {self.component} lacks the tensor {stored}: download the file again.")
        shape = tuple(self.tensors[stored].shape)
        if len(shape) != num_dims:
            raise FormatError(f"Tensor {stored} of the {self.component} has shape {list(shape)}, not {num_dims} dimensions.")
        if 0 in shape:
            raise FormatError(f"Tensor {stored} of the {self.component} is empty (shape {list(shape)}): download the file again.")
        return shape

    def count(self, prefix: str) -> int:
        """Members of the list of modules that ``prefix`` names; a gap in it shows as a missing tensor later."""
        stored = self.spelled(prefix)
        return len({name[len(stored) :].partition(".")[0] for name in self.tensors if name.startswith(stored)})

    def check_counts(self, config: Any, present: Mapping[str, Any]) -> None:
        """Raises FormatError where ``config`` has more or fewer modules than the file: none is built on its word alone.

        ``present``: field of ``config`` -> what the file has, a number of modules or a tuple with an entry for each.
        """
        for name, found in present.items():
            value = getattr(config, name)
            if _num_modules(value) != _num_modules(found):
                raise FormatError(
                    f"The {self.component} should have {name} = {shown(value)} and the file has {shown(found)}: "
                    f"download the file again, or {CORRECT_THE_CONFIG}."
                )

    def refuse_quantised(self, instead: str) -> None:
        """Raises FormatError for quantised tensors or their scales; ``instead`` names the file to use."""
        for name, tensor in self.tensors.items():
            if tensor.dtype not in PLAIN_DTYPES or name.endswith((".weight_scale", ".comfy_quant")):
                problem = f"The {self.component} is quantised (tensor {shown_name(name)} is {tensor.dtype})"
                raise FormatError(f"{problem}, which cannot be read yet: use {instead}.")

    def check(self, shapes: Shapes, recipes: Mapping[str, Recipe], ignored: Mapping[str, str]) -> None:
        """Raises FormatError unless each source of ``recipes`` is there as its parameter needs it, and the rest is ``ignored``.

        ``shapes`` has the same keys as ``recipes``: the names of the parameters.
        """
        used = {source for recipe in recipes.values() for source in recipe.sources}
        if used - self.tensors.keys():
            raise FormatError(f"The {self.component} lacks {_named(used - self.tensors.keys())}: download the file again.")
        unknown = self.tensors.keys() - used - ignored.keys()
        if unknown:
            raise FormatError(f"The {self.component} has {_named(unknown)}, which we do not know: this variant is not supported.")
        for name, recipe in recipes.items():
            if recipe.values is not None and shapes[name] != (len(recipe.values),):
                raise FormatError(
                    f"The {self.component} needs {list(shapes[name])} numbers for {name} and was given {len(recipe.values)}: "
                    f"{CORRECT_THE_CONFIG}."
                )
            self._check_shapes(source_shapes(recipe, shapes[name]))

    def _check_shapes(self, expected: Shapes) -> None:
        for source, shape in expected.items():
            found = tuple(self.tensors[source].shape)
            if found != shape:
                raise FormatError(
                    f"Tensor {source} of the {self.component} has shape {list(found)} and its configuration asks for "
                    f"{list(shape)}: {CORRECT_THE_CONFIG}."
                )


def source_shapes(recipe: Recipe, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shape of each stored tensor behind a parameter of ``shape``; those in ``extra`` hold one number a row."""
    num_rows = {
        source: sum(shape[0] if piece.count is None else piece.count for piece in recipe.rows if piece.source == source)
        for source in recipe.sources
        if source not in recipe.extra
    }
    one_a_row = (shape[0], *[1] * (len(shape) - 1)) if recipe.extra else ()
    return {source: (rows, *shape[1:]) for source, rows in num_rows.items()} | dict.fromkeys(recipe.extra, one_a_row)


def _num_modules(value: Any) -> Any:
    """Of each list, where there are several."""
    if not isinstance(value, tuple):
        return value
    return [len(item) for item in value] if value and isinstance(value[0], tuple) else len(value)


def _named(names: set[str]) -> str:
    """A few of the names and how many there are besides."""
    few = ", ".join(shown_name(name) for name in sorted(names)[:MAX_NAMED])
    return f"{few} and {len(names) - MAX_NAMED} more tensors" if len(names) > MAX_NAMED else few
