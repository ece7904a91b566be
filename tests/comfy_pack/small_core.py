"""Core's H3 models in small: what core cannot tell from a file is changed in this process alone (core bridge, section 9)."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QUANTISED = {"float8_e4m3fn": (torch.float8_e4m3fn, 448), "int8_tensorwise": (torch.int8, 127)}  # format -> dtype, its largest
LAYERS = ("qkv_proj.weight", "o_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight")
LORA_RANK = 4
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SCALES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "language": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
        "vision": {"hidden_size": 128, "intermediate_size": 32},
        "video": {"ch": 32},
        "video_decoder": {"heads": 2, "num_layers": 2},
        "audio": {"encoder_dim": 4, "latent_dim": 128, "decoder_dim": 128},
        "dit": {"hidden_size": 64, "num_layers": 3, "ffn_hidden_size": 96, "num_attention_heads": 2, "time_embed_dim": 32},
    },
    "medium": {
        "language": {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2},
        "vision": {"hidden_size": 128, "intermediate_size": 256},
        "video": {"ch": 32},
        "video_decoder": {"heads": 8, "num_layers": 12},
        "audio": {"encoder_dim": 16, "latent_dim": 512, "decoder_dim": 256},
        "dit": {"hidden_size": 768, "num_layers": 10, "ffn_hidden_size": 2048, "num_attention_heads": 6, "time_embed_dim": 384},
    },
}


def shrink_core(scale: str) -> None:
    """Change the numbers that core has as constants, in this process."""
    import comfy.ldm.minimax.audio_vae as audio
    import comfy.ldm.minimax.vae as video
    from comfy.text_encoders import qwen3vl

    sizes = SCALES[scale]
    config = qwen3vl.QWEN3VL_CONFIGS["qwen3vl_32b"]
    fields = [(name, type(value), dataclasses.field(default=value)) for name, value in sizes["language"].items()]
    qwen3vl.QWEN3VL_CONFIGS["qwen3vl_32b"] = dataclasses.make_dataclass("SmallQwen3VL", fields, bases=(config,))
    qwen3vl.QWEN3VL_VISION["qwen3vl_32b"].update(sizes["vision"])
    video.ViT3DDecoder = functools.partial(video.ViT3DDecoder, **sizes["video_decoder"])
    video.MiniMaxH3VideoVAE = functools.partial(video.MiniMaxH3VideoVAE, **sizes["video"])
    audio.MiniMaxH3AudioVAE = functools.partial(audio.MiniMaxH3AudioVAE, **sizes["audio"])


def write_files(folder: Path, scale: str) -> None:
    """Checkpoints with random weights for the shrunk core, in ComfyUI's folders. Call ``shrink_core`` first."""
    for number, (name, weights) in enumerate(_weights(SCALES[scale]["dit"]).items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(number)
        save_file({key: _random(key, t, generator).to(t.dtype).contiguous() for key, t in weights.items()}, path)
    _write_derived(folder)


def write_hollow_files(folder: Path) -> None:
    """Checkpoints of core's own sizes: headers, and holes in the place of data, which take no room on disk."""
    for name, weights in _weights({}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        header: dict[str, Any] = {}
        position = 0
        for key, tensor in weights.items():
            end = position + tensor.nbytes
            header[key] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [position, end]}
            position = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + position)


def _weights(transformer_sizes: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """File -> its tensors on meta, as the modules of core have them in this process."""
    import comfy.ldm.minimax.audio_vae as audio
    import comfy.ldm.minimax.model as dit
    import comfy.ldm.minimax.vae as video
    import comfy.ops
    from comfy.text_encoders import minimax, qwen3vl

    ops = comfy.ops.disable_weight_init
    width = qwen3vl.QWEN3VL_CONFIGS["qwen3vl_32b"]().hidden_size
    with torch.device("meta"):
        encoder = minimax.MiniMaxQwen3VL({}, torch.bfloat16, "meta", ops)
        transformer = dit.MiniMaxH3Model(**transformer_sizes, text_dim=width, dtype=torch.bfloat16, device="meta", operations=ops)
        parts = {
            "text_encoders/small_te.safetensors": (encoder, torch.bfloat16),
            "diffusion_models/small_dit.safetensors": (transformer, None),
            "vae/small_video_vae.safetensors": (video.MiniMaxH3VideoVAE(operations=ops), torch.float16),
            "vae/small_audio_vae.safetensors": (audio.MiniMaxH3AudioVAE(), torch.float32),
        }
    return {name: {k: t.to(dtype or t.dtype) for k, t in part.state_dict().items()} for name, (part, dtype) in parts.items()}


def _write_derived(folder: Path) -> None:
    """What is made from the transformer: a LoRA, and the same weights quantised."""
    weights = load_file(folder / "diffusion_models/small_dit.safetensors")
    (folder / "loras").mkdir(exist_ok=True)
    save_file(_lora(weights), folder / "loras/small_lora.safetensors")
    for name in QUANTISED:
        save_file(_quantised(weights, name), folder / f"diffusion_models/small_dit_{name}.safetensors")


def _lora(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the matrices of all blocks."""
    generator = torch.Generator().manual_seed(5)
    lora = {}
    for name, weight in weights.items():
        if name.startswith("blocks.") and weight.dim() == 2 and "adaln" not in name:
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            lora[f"{layer}.lora_A.weight"] = 0.1 * torch.randn(LORA_RANK, weight.shape[1], generator=generator).bfloat16()
            lora[f"{layer}.lora_B.weight"] = 0.1 * torch.randn(weight.shape[0], LORA_RANK, generator=generator).bfloat16()
    return lora


def _quantised(weights: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Attention and feed-forward matrices with one scale each, as core's ``comfy_quant`` files have it."""
    dtype, largest = QUANTISED[form]
    stored = dict(weights)
    for name, weight in weights.items():
        if name.startswith("blocks.") and weight.dim() == 2 and name.endswith(LAYERS):
            scale = weight.abs().max().float() / largest
            layer = name.removesuffix(".weight")
            scaled = weight.float() / scale
            stored[name] = scaled.to(dtype) if dtype.is_floating_point else scaled.round().to(dtype)
            stored[f"{layer}.weight_scale"] = scale
            stored[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps({"format": form}).encode()), dtype=torch.uint8)
    return stored


def _random(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Matrices keep the size of what goes through them; scales are about one; frequencies are those of a rotary embedding."""
    if name.endswith("inv_freq"):
        return 1 / 10000 ** (torch.arange(like.numel()) / like.numel())
    values = torch.randn(like.shape, generator=generator)
    if like.dim() > 1:
        return values / math.sqrt(like[0].numel())
    if name.endswith("bias"):
        return 0.02 * values
    return 1 + 0.05 * values
