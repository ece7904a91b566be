"""File layouts to our names: one reader a component, all from headers alone."""

from .layout import FormatError, Layout, TensorInfo
from .recipe import Recipe, Rows

__all__ = ["FormatError", "Layout", "Recipe", "Rows", "TensorInfo"]
