"""``make-checkpoint``: random weights under real names, for demos, tests and benchmarks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..h3.config import AudioVAEConfig, TextEncoderConfig, VideoVAEConfig
from ..h3.formats.header import source_shapes
from ..h3.formats.recipe import Recipe
from ..h3.formats.writing import stored_tensors
from ..memory.checkpoint import open_checkpoint
from .presets import BUILDERS, ModelPreset, build
from .tiny_tokenizer import SPECIAL_TOKENS, tokenizer_json

LayoutName = Literal["single-file", "folder"]
SINGLE_FILES = {
    "text_encoder": "text_encoders/qwen3vl_32b_minimax_h3_bf16.safetensors",
    "dit": "diffusion_models/minimax_h3_fl2va_bf16.safetensors",
    "video_vae": "vae/minimax_h3_video_vae_fp16.safetensors",
    "audio_vae": "vae/minimax_h3_audio_vae_fp32.safetensors",
}
FOLDER = "diffusers/minimax_h3"
FOLDER_FILES = {
    "text_encoder": "text_encoder/model.safetensors",
    "dit": "transformer/diffusion_pytorch_model.safetensors",
    "video_vae": "vae/diffusion_pytorch_model.safetensors",
    "audio_vae": "audio_vae/diffusion_pytorch_model.safetensors",
}
MADE_BY = "lazy-h3 make-checkpoint"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def make_checkpoint(
    folder: Path, preset: ModelPreset, layout: LayoutName = "single-file", seed: int = 0, *, hollow: bool = False
) -> list[Path]:
    """Write all four components and the tokenizer; returns the files. Files that this has made before are replaced.

    Raises ValueError for a file that somebody else has made: real weights have the same names.

    ``hollow``: headers alone, with holes where the weights would be.
    """
    files = SINGLE_FILES if layout == "single-file" else {k: f"{FOLDER}/{name}" for k, name in FOLDER_FILES.items()}
    for name in files.values():
        _check_is_ours(folder / name)
    written = []
    for number, (kind, config) in enumerate(preset.components().items()):
        path = folder / files[kind]
        path.parent.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(seed * len(BUILDERS) + number)
        _write_component(path, kind, config, layout, generator, preset.dtype_of(kind), hollow)
        written.append(path)
    return [*written, *_write_tokenizer(folder, layout)]


def _check_is_ours(path: Path) -> None:
    if path.exists() and MADE_BY not in open_checkpoint(path).metadata:
        raise ValueError(f"{path}: exists and was not made by this command; choose another folder.")


def _write_component(
    path: Path, kind: str, config: Any, layout: LayoutName, generator: torch.Generator, dtype: torch.dtype, hollow: bool
) -> None:
    is_folder = layout == "folder"
    statistics = _statistics(kind, config, generator) if is_folder else {}
    with torch.device("meta"):
        module = build(kind, config)
    recipes = _recipes(kind, config, is_folder, statistics)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    dtypes = {name: module.storage_dtype(name, dtype) for name in shapes}
    tensors = {s: (dtypes[n], shape) for n in shapes for s, shape in source_shapes(recipes[n], shapes[n]).items()}
    numbers = stated_config(kind, config, statistics)
    metadata = {} if is_folder else {"config": json.dumps(numbers)}
    if is_folder:
        (path.parent / "config.json").write_text(json.dumps(_folder_config(numbers), indent=2), "utf-8")
    if hollow:
        write_hollow(path, tensors, metadata)
        return
    write_safetensors(path, tensors, metadata, _random_tensors(shapes, dtypes, recipes, generator))


def _recipes(kind: str, config: Any, is_folder: bool, statistics: Mapping[str, Any]) -> dict[str, Recipe]:
    layout = "huggingface" if is_folder else "comfy"
    recipes_of: Callable[..., dict[str, Recipe]] = import_module(f"...h3.formats.{kind}", __name__).recipes
    return recipes_of(config, layout)


def _random_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    recipes: Mapping[str, Recipe],
    generator: torch.Generator,
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        weight = random_weight(name, shape, generator).to(dtypes[name])
        for stored, tensor in stored_tensors(recipes[name], weight):
            yield stored, tensor.to(dtypes[name])


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A value that keeps activations of order one: matrices N(0, 1 / fan-in), gains near one, biases and offsets small."""
    leaf = name.rpartition(".")[2]
    if name == "rope.inv_freq":
        return 10000.0 ** (-torch.arange(shape[0]) / shape[0])
    noise = torch.randn(shape, generator=generator)
    if leaf == "latents_std":
        return 1 + 0.2 * noise.clamp(-2, 2)
    if leaf in ("scale1", "scale2") or (leaf == "weight" and len(shape) == 1):
        return 1 + 0.1 * noise
    if len(shape) < 2 or leaf in ("alpha", "beta"):
        return 0.1 * noise + (1.0 if len(shape) == 3 else 0.0)
    return noise / math.sqrt(math.prod(shape[1:]))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
    values: Iterable[tuple[str, Tensor]],
) -> None:
    """One file, a tensor at a time: a replica never stands in memory whole. ``values`` come in the order of ``tensors``."""
    with path.open("wb") as file:
        file.write(_header(tensors, metadata))
        for expected, (name, tensor) in zip(tensors, values, strict=True):
            assert name == expected
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_hollow(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> None:
    """A file with the header of a real one and a hole for its data: takes no room on disk."""
    header = _header(tensors, metadata)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors.values()))


def _header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt", MADE_BY: "random weights"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _statistics(kind: str, config: Any, generator: torch.Generator) -> dict[str, list[float]]:
    """Latent statistics, which the folder layout keeps in config.json."""
    if kind not in ("video_vae", "audio_vae"):
        return {}
    names = ("latents_mean", "latents_std")
    return {name: random_weight(name, (config.latent_channels,), generator).tolist() for name in names}


def stated_config(kind: str, config: Any, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a component under Hugging Face names: {component key: numbers}."""
    if isinstance(config, TextEncoderConfig):
        return _text_encoder_config(config)
    key = {"dit": "transformer", "video_vae": "vae", "audio_vae": "audio_vae"}[kind]
    numbers = {k: v for k, v in asdict(config).items() if v is not None}
    if isinstance(config, (VideoVAEConfig, AudioVAEConfig)):
        numbers |= statistics
    return {key: numbers}


def _folder_config(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers as a config.json has them: the text encoder's nested, with the special ids on top."""
    if "text_config" not in numbers:
        return next(iter(numbers.values()))
    text = dict(numbers["text_config"])
    ids = {name: text.pop(name) for name in SPECIAL_TOKENS}
    return {**numbers, "text_config": text, **ids}


def _text_encoder_config(config: TextEncoderConfig) -> dict[str, Any]:
    text = asdict(config)
    vision = text.pop("vision")
    rope = {"rope_theta": text.pop("rope_theta"), "mrope_section": list(text.pop("mrope_section")), "mrope_interleaved": True}
    special = {name: text.pop(name) for name in tuple(text) if name.endswith("_token_id")}
    ids = {name: given if given is not None else SPECIAL_TOKENS[name] for name, given in special.items()}
    return {"text_config": {**text, "rope_parameters": rope, **ids}, "vision_config": vision}


def _write_tokenizer(folder: Path, layout: LayoutName) -> list[Path]:
    if layout == "folder":
        path = folder / FOLDER / "tokenizer" / "tokenizer.json"
    else:
        encoder = folder / SINGLE_FILES["text_encoder"]
        path = encoder.with_name(f"{encoder.stem}.tokenizer.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tokenizer_json(), "utf-8")
    return [path]
