"""Video VAE files: ComfyUI single files and Hugging Face folders, whole or with one half (VAE spec, sections 3.1 and 3.2)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..config import VideoVAEConfig
from ..video_vae import VideoVAE
from .header import CORRECT_THE_CONFIG, Header
from .layout import FormatError, Layout, Tensors, shown
from .recipe import Recipe, constant, copied, halves_swapped, interleaved
from .stated import overlaid, stated_numbers

STATISTICS = ("latents_mean", "latents_std")
COUNTS = ("block_out_channels", "layers_per_block", "decoder_num_layers")  # of modules
ENCODER_MARK = "encoder.down.0.block.0.conv1.weight"
DECODER_MARK = "decoder.transformer_blocks.0.scale1"
IGNORED = {"decoder.mask_token": "only training masks tokens"}
HUGGINGFACE_NAMES = (
    (r"^encoder\.down\.", "encoder.down_blocks."),
    (r"^(encoder\.down_blocks\.\d+)\.block\.", r"\1.resnets."),
    (r"^(encoder\.down_blocks\.\d+)\.downsample\.", r"\1.downsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"^decoder\.x_embedder\.", "decoder.proj_in."),
    (r"\.attn\.to_out\.", ".attn.to_out.0."),
    (r"\.ff\.w1\.", ".ff.net.0.proj."),
    (r"\.ff\.w2\.", ".ff.net.2."),
)


def huggingface_name(name: str) -> str:
    """The name that the official folder has for a tensor of ours, or for the start of one."""
    for ours, theirs in HUGGINGFACE_NAMES:
        name = re.sub(ours, theirs, name)
    return name


STORED_NAME: dict[str, Callable[[str], str]] = {"comfy": str, "huggingface": huggingface_name}


def recognise(tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any] | None) -> Layout | None:
    """A video VAE, or its encoder or decoder alone; None for another model. Raises FormatError for one that cannot be used."""
    layout = _layout(tensors)
    parts = _parts(tensors, layout)
    if not parts:
        return None
    header = Header("video VAE", tensors, STORED_NAME[layout])
    header.refuse_quantised("minimax_h3_video_vae_fp16.safetensors")
    sizes = _config(header, parts, stated_numbers("vae", metadata, config))
    shapes = _shapes(sizes, parts)
    found = recipes(sizes, layout, parts) | {name: constant(getattr(sizes, name)) for name in STATISTICS if name not in tensors}
    ignored = {name: reason for name, reason in IGNORED.items() if name in tensors}
    header.check(shapes, found, ignored)
    variant = "full" if len(parts) == len(VideoVAE.PARTS) else f"{parts[0]} only"
    return Layout("video_vae", layout, variant, sizes, partial(VideoVAE, sizes, parts), found, ignored)


def recipes(config: VideoVAEConfig, layout: str, parts: tuple[str, ...] = tuple(VideoVAE.PARTS)) -> dict[str, Recipe]:
    """Where each parameter of the halves stands in a file of ``layout``; Hugging Face keeps the statistics in config.json."""
    shapes = _shapes(config, parts)
    if layout == "comfy":
        return {name: copied(name) for name in shapes}
    statistics = {name: constant(getattr(config, name)) for name in STATISTICS}
    return {name: _huggingface_recipe(name, shape[0], config) for name, shape in shapes.items()} | statistics


def _huggingface_recipe(name: str, num_rows: int, config: VideoVAEConfig) -> Recipe:
    if ".to_qkv." in name:
        sources = tuple(name.replace("to_qkv", projection) for projection in ("to_q", "to_k", "to_v"))
        return interleaved(sources, config.decoder_attention_head_dim, config.decoder_num_attention_heads)
    if ".ff.w1." in name:
        return halves_swapped(huggingface_name(name), num_rows)
    return copied(huggingface_name(name))


@functools.lru_cache(maxsize=8)
def _shapes(config: VideoVAEConfig, parts: tuple[str, ...] = tuple(VideoVAE.PARTS)) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in VideoVAE(config, parts).state_dict().items()}


def _layout(tensors: Tensors) -> str:
    is_huggingface = any(name in tensors for name in ("decoder.proj_in.weight", huggingface_name(ENCODER_MARK)))
    return "huggingface" if is_huggingface else "comfy"


def _parts(tensors: Tensors, layout: str) -> tuple[str, ...]:
    """The halves that are there. Other VAEs' encoders begin with the same name, but have 2D kernels or middle blocks."""
    mark = tensors.get(STORED_NAME[layout](ENCODER_MARK))
    has_middle = any(name.startswith("encoder.mid") for name in tensors)
    is_there = {"encoder": mark is not None and len(mark.shape) == 5 and not has_middle, "decoder": DECODER_MARK in tensors}
    return tuple(part for part in VideoVAE.PARTS if is_there[part])


def _config(header: Header, parts: tuple[str, ...], stated: Mapping[str, Any]) -> VideoVAEConfig:
    """The published numbers, replaced by what shapes tell, replaced by what the checkpoint states."""
    padding = stated.get("spatial_padding_mode", "reflect")
    if padding != "reflect":
        raise FormatError(
            f"The video VAE's encoder pads with {shown(padding)} (spatial_padding_mode): only 'reflect' is supported."
        )
    numbers = {"tile_overlap": stated.get("tile_overlap_min"), **stated}
    measured = _encoder_sizes(header) if "encoder" in parts else {}
    measured |= _decoder_sizes(header) if "decoder" in parts else {}
    config = overlaid(VideoVAEConfig(), measured | numbers)
    header.check_counts(config, {name: measured[name] for name in COUNTS if name in measured})
    if "decoder" in parts:
        _check_heads(config, header.shape("decoder.x_embedder.weight", 2)[0])
    num_levels = len(config.block_out_channels)
    for factors in (config.spatial_downsample_factors, config.temporal_downsample_factors):
        if len(factors) != num_levels:
            problem = f"The video VAE's encoder has {num_levels} levels and downsample factors for {len(factors)}"
            raise FormatError(f"{problem}: {CORRECT_THE_CONFIG}.")
    if not len(config.pixel_mean) == len(config.pixel_std) == config.in_channels:
        problem = f"The video VAE has {config.in_channels} colours and pixel_mean or pixel_std for another number"
        raise FormatError(f"{problem}: {CORRECT_THE_CONFIG}.")
    return config


def _check_heads(config: VideoVAEConfig, width: int) -> None:
    heads, head_dim = config.decoder_num_attention_heads, config.decoder_attention_head_dim
    if heads * head_dim != width:
        raise FormatError(
            f"A video VAE's decoder of width {width} does not split into {heads} heads of {head_dim} channels "
            f"(decoder_num_attention_heads, decoder_attention_head_dim): {CORRECT_THE_CONFIG}."
        )


def _encoder_sizes(header: Header) -> dict[str, Any]:
    levels = range(header.count("encoder.down."))
    return {
        "in_channels": header.shape("encoder.conv_in.weight", 5)[1],
        "latent_channels": header.shape("quant_conv.weight", 5)[0] // 2,
        "block_out_channels": tuple(header.shape(f"encoder.down.{level}.block.0.conv1.weight", 5)[0] for level in levels),
        "layers_per_block": header.count("encoder.down.0.block."),
    }


def _decoder_sizes(header: Header) -> dict[str, Any]:
    width, hidden = header.shape("decoder.transformer_blocks.0.ff.w2.weight", 2)
    return {
        "latent_channels": header.shape("decoder.x_embedder.weight", 2)[1],
        "decoder_num_layers": header.count("decoder.transformer_blocks."),
        "decoder_num_register_tokens": header.shape("decoder.register_tokens", 3)[1],
        "decoder_ffn_mult": hidden // width,
    }
