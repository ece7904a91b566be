"""Hosts that page weights in by themselves (core bridge, section 6): there core's own loaders are used unchanged."""

from __future__ import annotations

from typing import Any

import torch

from .skeleton import CannotBeLazy

DEVICES = {"MODEL": "get_torch_device", "CLIP": "text_encoder_device", "VAE": "vae_device"}
REASON = "this ComfyUI reads weights as they are used by itself (dynamic VRAM)"


def refuse_where_dynamic(kind: str, device: torch.device | None = None) -> None:
    """``device``: where the model computes, None for core's choice. Raises CannotBeLazy."""
    from comfy import model_management, model_patcher

    chosen = device or getattr(model_management, DEVICES[kind])()
    plain: Any = model_patcher.ModelPatcher
    if getattr(model_patcher, "CoreModelPatcher", plain) is not plain and chosen.type != "cpu":
        raise CannotBeLazy(REASON)


def is_dynamic(patcher: Any) -> bool:
    """Whether core pages this model's weights in by itself."""
    return hasattr(patcher, "is_dynamic") and bool(patcher.is_dynamic())
