"""The small checkpoints in the formats of the files that the official templates name: rotated int8, and 4 bits in blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .small_core import LAYERS

TRANSFORMER = "diffusion_models/small_dit_int8_convrot.safetensors"
ENCODER = "text_encoders/small_te_nvfp4_awq.safetensors"
ENCODER_LAYERS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
)
ROTATED = (256, 64, 16)  # sizes of a rotation, powers of four, by which the width of a matrix may be divided


def write_template_files(folder: Path) -> None:
    """Quantise the transformer and the text encoder that ``small_core.write_files`` wrote, by core's own layouts."""
    weights = load_file(folder / "diffusion_models/small_dit.safetensors")
    save_file(_quantised(weights, "blocks.", LAYERS, _rotated_int8), folder / TRANSFORMER)
    weights = load_file(folder / "text_encoders/small_te.safetensors")
    save_file(_quantised(weights, "model.layers.", ENCODER_LAYERS, _nvfp4_awq), folder / ENCODER)


def _quantised(weights: dict[str, torch.Tensor], prefix: str, layers: tuple[str, ...], quantise: Any) -> dict[str, torch.Tensor]:
    stored = {}
    for name, weight in weights.items():
        if name.startswith(prefix) and name.endswith(layers):
            conf, parts = quantise(weight)
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            stored[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)
        else:
            stored[name] = weight
    return stored


def _rotated_int8(weight: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One scale per row."""
    from comfy.quant_ops import TensorWiseINT8Layout

    group = next(size for size in ROTATED if weight.shape[1] % size == 0)
    data, params = TensorWiseINT8Layout.quantize(weight, per_channel=True, convrot=True, convrot_groupsize=group)
    conf = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    return conf, {"weight": data, "weight_scale": params.scale}


def _nvfp4_awq(weight: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Blocks of 16 with a scale each; what enters the layer is scaled, and the weight the other way round."""
    from comfy.quant_ops import TensorCoreNVFP4Layout

    entering = torch.linspace(0.5, 2.0, weight.shape[1])
    data, params = TensorCoreNVFP4Layout.quantize(weight / entering.to(weight.dtype))
    scales = {"weight_scale": params.block_scale, "weight_scale_2": params.scale, "pre_quant_scale": entering.to(weight.dtype)}
    return {"format": "nvfp4"}, {"weight": data, **scales}
