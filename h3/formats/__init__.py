"""File layouts to our names: one reader a component, all from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import audio_vae, dit, text_encoder, tiny_vae, video_vae
from .layout import FormatError, Layout, TensorInfo, Tensors
from .recipe import Recipe, Rows

READERS = (dit, text_encoder, video_vae, audio_vae, tiny_vae)


def recognise(tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any] | None = None) -> Layout:
    """What a checkpoint is. Raises FormatError if it is no component of H3, or one that cannot be used."""
    found = (reader.recognise(tensors, metadata, config) for reader in READERS)
    layout = next((layout for layout in found if layout is not None), None)
    if layout is None:
        raise FormatError("holds no component of MiniMax-H3 that is known; see the README for the files to download.")
    return layout


__all__ = ["FormatError", "Layout", "Recipe", "Rows", "TensorInfo", "recognise"]
