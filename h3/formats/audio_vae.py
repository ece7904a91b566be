"""Audio VAE files: ComfyUI's single file, and the official ones with un-folded weight norm (VAE spec, section 3.3)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..audio_vae import AudioVAE
from ..config import AudioVAEConfig
from .header import CORRECT_THE_CONFIG, Header
from .layout import FormatError, Layout, Tensors
from .recipe import Recipe, constant, copied, weight_norm_folded
from .stated import overlaid, stated_numbers

MARK = "pre_block.attn.qkv.weight"
STATISTICS = ("latents_mean", "latents_std")
NORMED = re.compile(r"(encoder|decoder)\..*\.weight")  # the convolutions with weight norm
IGNORED = {
    r".*\.filter": "every copy is the one resampling filter, which is computed",
    r"logs_proj\.(weight|bias)": "the posterior's spread, of which only the mean is used",
    r"pre_block\.attn\.zero_k_bias": "all zeros: keys have no bias",
}


def weight_v_name(name: str) -> str:
    """Where the official files have the direction of a convolution's weight; other tensors keep their name."""
    return f"{name}_v" if NORMED.fullmatch(name) else name


STORED_NAME: dict[str, Callable[[str], str]] = {"comfy": str, "huggingface": weight_v_name}


def recognise(tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any] | None) -> Layout | None:
    """An audio VAE, or None for another model. Raises FormatError for one that cannot be used."""
    if MARK not in tensors:
        return None
    layout = "huggingface" if any(name.endswith(".weight_g") for name in tensors) else "comfy"
    header = Header("audio VAE", tensors, STORED_NAME[layout])
    header.refuse_quantised("minimax_h3_audio_vae_fp32.safetensors")
    sizes = _config(header, stated_numbers("audio_vae", metadata, config))
    found = recipes(sizes, layout) | {name: constant(getattr(sizes, name)) for name in STATISTICS if name not in tensors}
    ignored = {name: reason for name in tensors for pattern, reason in IGNORED.items() if re.fullmatch(pattern, name)}
    header.check(_shapes(sizes), found, ignored)
    return Layout("audio_vae", layout, "full", sizes, partial(AudioVAE, sizes), found, ignored)


def recipes(config: AudioVAEConfig, layout: str) -> dict[str, Recipe]:
    """Where each parameter stands in a file of ``layout``; the official ones keep the statistics in config.json."""
    if layout == "comfy":
        return {name: copied(name) for name in _shapes(config)}
    statistics = {name: constant(getattr(config, name)) for name in STATISTICS}
    return {name: _huggingface_recipe(name) for name in _shapes(config)} | statistics


def _huggingface_recipe(name: str) -> Recipe:
    return weight_norm_folded(f"{name}_v", f"{name}_g") if NORMED.fullmatch(name) else copied(name)


@functools.lru_cache(maxsize=8)
def _shapes(config: AudioVAEConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in AudioVAE(config).state_dict().items()}


def _config(header: Header, stated: Mapping[str, Any]) -> AudioVAEConfig:
    """The published numbers, replaced by what shapes tell, replaced by what the checkpoint states."""
    measured = _encoder_sizes(header) | _decoder_sizes(header)
    config = overlaid(AudioVAEConfig(), measured | stated)
    for rates, others in (("decoder_rates", "decoder_kernel_sizes"), ("resblock_kernel_sizes", "resblock_dilation_sizes")):
        if len(getattr(config, rates)) != len(getattr(config, others)):
            raise FormatError(f"The audio VAE's {rates} and {others} differ in number: {CORRECT_THE_CONFIG}.")
    header.check_counts(config, {name: sizes for name, sizes in measured.items() if isinstance(sizes, tuple)})
    if config.latent_dim % config.num_attention_heads:
        raise FormatError(
            f"The audio VAE's width {config.latent_dim} does not split into {config.num_attention_heads} heads "
            f"(num_attention_heads): {CORRECT_THE_CONFIG}."
        )
    return config


def _encoder_sizes(header: Header) -> dict[str, Any]:
    last = header.count("encoder.block.") - 1  # between the first and the last convolution: blocks, then one Snake
    kernels = [header.shape(f"encoder.block.{block}.block.4.weight", 3)[2] for block in range(1, last - 1)]
    return {
        "encoder_dim": header.shape("encoder.block.0.weight", 3)[0],
        "encoder_rates": tuple(kernel // 2 for kernel in kernels),
        "latent_dim": header.shape(f"encoder.block.{last}.weight", 3)[0],
        "latent_channels": header.shape("mean_proj.weight", 3)[0],
    }


def _decoder_sizes(header: Header) -> dict[str, Any]:
    num_stages = header.count("decoder.ups.")
    kernels = tuple(header.shape(f"decoder.ups.{stage}.0.weight", 3)[2] for stage in range(num_stages))
    blocks = [f"decoder.resblocks.{block}.convs1." for block in range(header.count("decoder.resblocks.") // max(1, num_stages))]
    dilations = AudioVAEConfig.resblock_dilation_sizes[0]
    return {
        "decoder_dim": header.shape("decoder.conv_pre.weight", 3)[0],
        "decoder_rates": tuple((kernel + 1) // 2 for kernel in kernels),
        "decoder_kernel_sizes": kernels,
        "resblock_kernel_sizes": tuple(header.shape(f"{convs}0.weight", 3)[2] for convs in blocks),
        "resblock_dilation_sizes": tuple(dilations[: header.count(convs)] for convs in blocks),
    }
