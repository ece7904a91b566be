"""Files of TAEH3, whole or with one half (VAE spec, section 4). Of the models that share the name, this is the TAEHV one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..config import TinyVAEConfig
from ..tiny_vae import TinyVAE
from .header import Header
from .layout import Layout, Tensors
from .recipe import Recipe, copied

NUM_PIXEL_CHANNELS = 12  # 2 x 2 pixels of three colours
LATENT_CHANNELS = TinyVAEConfig.latent_channels


def recognise(tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any] | None) -> Layout | None:
    """A TAEH3, or its encoder or decoder alone; None for another model. Raises FormatError for one that cannot be used."""
    parts = _parts(tensors)
    if not parts:
        return None
    header = Header("tiny VAE", tensors)
    header.refuse_quantised("taeh3.safetensors")
    sizes = _config(header, parts)
    shapes = _shapes(sizes, parts)
    found = {name: recipe for name, recipe in recipes(sizes, "comfy").items() if name in shapes}
    header.check(shapes, found, {})
    variant = "full" if len(parts) == len(TinyVAE.PARTS) else f"{parts[0]} only"
    return Layout("tiny_vae", "comfy", variant, sizes, partial(TinyVAE, sizes, parts), found, {})


def recipes(config: TinyVAEConfig, layout: str) -> dict[str, Recipe]:
    """Every parameter stands in the file under its own name; there is one layout."""
    return {name: copied(name) for name in _shapes(config)}


@functools.lru_cache(maxsize=8)
def _shapes(config: TinyVAEConfig, parts: tuple[str, ...] = tuple(TinyVAE.PARTS)) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in TinyVAE(config, parts).state_dict().items()}


def _parts(tensors: Tensors) -> tuple[str, ...]:
    """The halves whose first or last convolution has the channels of H3."""

    def has(name: str, axis: int, size: int) -> bool:
        return name in tensors and len(tensors[name].shape) > axis and tensors[name].shape[axis] == size

    is_there = {
        "encoder": has("encoder.17.bias", 0, LATENT_CHANNELS) and has("encoder.0.weight", 1, NUM_PIXEL_CHANNELS),
        "decoder": has("decoder.22.bias", 0, NUM_PIXEL_CHANNELS) and has("decoder.1.weight", 1, LATENT_CHANNELS),
    }
    return tuple(part for part in TinyVAE.PARTS if is_there[part])


def _config(header: Header, parts: tuple[str, ...]) -> TinyVAEConfig:
    sizes: dict[str, Any] = {}
    if "encoder" in parts:
        sizes["encoder_width"] = header.shape("encoder.0.weight", 4)[0]
    if "decoder" in parts:
        sizes["decoder_widths"] = tuple(header.shape(f"decoder.{layer}.weight", 4)[0] for layer in (1, 8, 14, 20))
    return TinyVAEConfig(**sizes)
