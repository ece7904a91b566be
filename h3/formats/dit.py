"""Files of the diffusion transformer: Comfy-Org's single file and the Hugging Face folder (DiT spec, section 10)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ..config import DiTConfig
from ..dit import dit_class
from ..rotary import inverse_frequencies
from .header import CORRECT_THE_CONFIG, Header
from .layout import FormatError, Layout, Tensors, shown
from .recipe import Recipe, Rows, concatenated, constant, copied, halves_swapped
from .stated import overlaid, stated_numbers

COMPONENT = "diffusion model"
BF16_FILE = "minimax_h3_fl2va_bf16.safetensors or minimax_h3_ref2va_bf16.safetensors"
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
SIGNATURES = {  # tensors that only this model has, by layout
    "comfy": ("video_patch_proj.weight", "audio_patch_proj.weight"),
    "huggingface": ("proj_in.weight", "audio_proj_in.weight"),
}
HUGGINGFACE_STEMS = (
    ("video_patch_proj.", "proj_in."),
    ("audio_patch_proj.", "audio_proj_in."),
    ("condition_proj.", "context_embedder."),
    ("time_embedder.proj_in.", "time_embedder.linear_1."),
    ("time_embedder.proj_out.", "time_embedder.linear_2."),
    ("token_refiner.blocks.", "token_refiner.refiner_blocks."),
    ("blocks.", "transformer_blocks."),
    ("final_layer.norm.", "norm_out.norm."),
    ("final_layer.adaln_proj.linear.", "norm_out.linear."),
    ("final_layer.video_out.", "proj_out."),
    ("final_layer.audio_out.", "audio_proj_out."),
)
HUGGINGFACE_MEMBERS = (
    (".attn.q_norm.", ".attn.norm_q."),
    (".attn.k_norm.", ".attn.norm_k."),
    (".attn.out_proj.", ".attn.to_out.0."),
    (".mlp.fc2.", ".ff.net.2."),
)
GATE = "blocks.0.attn.to_gate_compress.weight"
QKV, FC1, ROPE = ".attn.qkv_proj.weight", ".mlp.fc1.weight", "rope.inv_freq"


def huggingface_name(name: str) -> str:
    """The name that the official folder has for a tensor of ours that it stores whole, or for the start of one."""
    for ours, theirs in HUGGINGFACE_STEMS:
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    for ours, theirs in HUGGINGFACE_MEMBERS:
        name = name.replace(ours, theirs)
    return name


STORED_NAME: dict[str, Callable[[str], str]] = {"comfy": str, "huggingface": huggingface_name}


def recipes(config: DiTConfig, layout: str) -> dict[str, Recipe]:
    """How every parameter and buffer of the model comes from a file of ``layout``, without prefix."""
    if layout == "comfy":
        return {name: copied(name) for name in _shapes(config)}
    return {name: _huggingface_recipe(name, config) for name in _shapes(config)}


def recognise(tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any] | None) -> Layout | None:
    """The diffusion model in a file or folder, or None where there is none. Raises FormatError for one that cannot be used."""
    found = _located(tensors)
    if found is None:
        return None
    layout, prefix = found
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    header = Header(COMPONENT, own, STORED_NAME[layout])
    stated = stated_numbers("transformer", metadata, config)
    if layout == "comfy" and config is not None:
        raise FormatError(
            "This is MiniMax's original folder, whose query, key and value rows are interleaved by head: "
            f"use the transformer folder of the Hugging Face layout, or {BF16_FILE}."
        )
    _refuse_unsupported(header, stated)
    sizes = _config(header, stated)
    needed = recipes(sizes, layout)
    header.check(_shapes(sizes), needed, {})
    return Layout(
        kind="dit",
        layout=layout,
        variant=("curve" if sizes.adaln_curve else "rank" if sizes.adaln_rank else "base") + " gated" * sizes.has_gate,
        config=sizes,
        build=partial(dit_class(sizes), sizes),
        recipes={name: _prefixed(recipe, prefix) for name, recipe in needed.items()},
        ignored={name: f"not under {prefix}, where the {COMPONENT} is" for name in tensors if not name.startswith(prefix)},
    )


def _located(tensors: Tensors) -> tuple[str, str] | None:
    """Layout and prefix of the model in the file."""
    for layout, signature in SIGNATURES.items():
        for prefix in PREFIXES:
            if all(prefix + name in tensors for name in signature):
                return layout, prefix
    return None


def _refuse_unsupported(header: Header, stated: Mapping[str, Any]) -> None:
    """One sentence for each kind of file that looks like ours and would come out wrong."""
    header.refuse_quantised(BF16_FILE)
    num_outputs, _ = header.shape("final_layer.video_out.weight", 2)
    _, num_features = header.shape("video_patch_proj.weight", 2)
    if stated.get("pdd_steps") or num_outputs > num_features:
        raise FormatError(f"The {COMPONENT} has a bank of output heads, one a step, which is not supported: use {BF16_FILE}.")


def _config(header: Header, stated: Mapping[str, Any]) -> DiTConfig:
    """The published numbers, replaced by what shapes tell, replaced by what the checkpoint states."""
    measured = _measured(header)
    config = overlaid(measured, stated)
    if config.patch_size != DiTConfig.patch_size:
        raise FormatError(
            f"The {COMPONENT} has patches of {shown(config.patch_size)} (patch_size): only {DiTConfig.patch_size} is supported."
        )
    if 6 * config.rope_freq_dim > config.attention_head_dim:
        raise FormatError(
            f"The {COMPONENT} has rope_freq_dim = {config.rope_freq_dim}, which turns more than the {config.attention_head_dim} "
            f"channels of a head: {CORRECT_THE_CONFIG}."
        )
    header.check_counts(config, {name: getattr(measured, name) for name in ("num_layers", "num_refiner_layers")})
    return config


def _measured(header: Header) -> DiTConfig:
    hidden_size, num_features = header.shape("video_patch_proj.weight", 2)
    (head_dim,) = header.shape("blocks.0.attn.q_norm.weight", 1)
    config = DiTConfig(
        has_gate=header.spelled(GATE) in header.tensors,
        hidden_size=hidden_size,
        num_layers=header.count("blocks."),
        num_refiner_layers=header.count("token_refiner.blocks."),
        num_attention_heads=header.shape("blocks.0.attn.out_proj.weight", 2)[1] // head_dim,
        attention_head_dim=head_dim,
        ffn_dim=header.shape("blocks.0.mlp.fc2.weight", 2)[1],
        in_channels=num_features // prod(DiTConfig.patch_size),
        audio_in_channels=header.shape("audio_patch_proj.weight", 2)[1],
        text_dim=header.shape("condition_proj.weight", 2)[1],
        rope_freq_dim=header.shape(ROPE, 1)[0] if header.spelled is str else DiTConfig.rope_freq_dim,
    )
    return replace(config, **_measured_time(header))


def _measured_time(header: Header) -> dict[str, Any]:
    """Sizes of whatever turns clean-times into modulations."""
    if "adaln_t_table" in header.tensors:
        return {"adaln_curve": header.shape("adaln_t_table", 2)}
    time_embed_hidden_dim, freq_dim = header.shape("time_embedder.proj_in.weight", 2)
    has_basis = "adaln_basis.weight" in header.tensors
    return {
        "freq_dim": freq_dim,
        "time_embed_hidden_dim": time_embed_hidden_dim,
        "time_embed_dim": header.shape("time_embedder.proj_out.weight", 2)[0],
        "adaln_rank": header.shape("adaln_basis.weight", 2)[0] if has_basis else None,
    }


@functools.lru_cache(maxsize=8)
def _shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in dit_class(config)(config).state_dict().items()}


def _huggingface_recipe(name: str, config: DiTConfig) -> Recipe:
    stored = huggingface_name(name)
    if name == ROPE:
        return constant(tuple(inverse_frequencies(2 * config.rope_freq_dim, config.rope_theta).tolist()))
    if name.endswith(QKV):
        attn = stored.removesuffix("qkv_proj.weight")
        return concatenated(tuple(f"{attn}to_{part}.weight" for part in "qkv"), config.inner_dim)
    if name.endswith(FC1):  # there [value; gate]
        return halves_swapped(stored.replace(FC1, ".ff.net.0.proj.weight"), 2 * config.ffn_dim)
    return copied(stored)


def _prefixed(recipe: Recipe, prefix: str) -> Recipe:
    return replace(recipe, rows=tuple(Rows(prefix + rows.source, rows.start, rows.count) for rows in recipe.rows))
