"""Files that state nonsense about themselves: refused in one short sentence, at once, before anything is built."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_h3.commands.make_checkpoint import FOLDER, SINGLE_FILES
from lazy_h3.h3 import tokenizer
from lazy_h3.h3.formats import FormatError
from lazy_h3.h3.tokenizer import TokenizerError, load_tokenizer
from lazy_h3.memory import checkpoint
from lazy_h3.memory.checkpoint import CheckpointError, open_checkpoint
from lazy_h3.nodes import catalogue
from lazy_h3.nodes.catalogue import AS_STORED, Catalogue, identified
from memory_models import written, written_raw
from safetensors.torch import load_file, save_file
from small_models import CPU, tiny_folder_models, tiny_models

HUGE = 1 << 63
STATED: list[tuple[str, str, Any]] = [  # (component's folder, field, value)
    *(("vae", "decoder_num_layers", value) for value in (HUGE, 1 << 20, -1, 0, True, 2.0)),
    ("vae", "layers_per_block", HUGE),
    ("vae", "layers_per_block", 1 << 20),
    ("vae", "decoder_num_attention_heads", 1 << 23),
    ("vae", "block_out_channels", [8] * 10_000),
    ("vae", "spatial_downsample_factors", [2, -2, 2, 2, 1, 1]),
    ("vae", "latents_std", [float("inf")] * 24),
    ("vae", "latents_std", [1e308] * 24),
    ("vae", "latents_mean", ["x"] * 24),
    ("vae", "pixel_std", [float("nan")] * 3),
    ("vae", "pixel_std", [10**400] * 3),
    ("vae", "pixel_mean", []),
    ("vae", "norm_eps", -1e-6),
    ("vae", "norm_num_groups", 3),
    ("vae", "spatial_padding_mode", "\n" * 5000),
    ("audio_vae", "decoder_rates", [20] * 10_000),
    ("audio_vae", "resblock_dilation_sizes", [[1] * 10_000]),
    ("audio_vae", "encoder_rates", [2] * 60),
    ("audio_vae", "num_attention_heads", 5),
    ("transformer", "num_layers", HUGE),
    ("transformer", "num_refiner_layers", 1 << 20),
    ("transformer", "audio_in_channels", 10**29),
    ("transformer", "audio_in_channels", True),
    ("transformer", "rope_theta", 0),
    ("transformer", "patch_size", [1] * 5000),
    ("transformer", "has_gate", 1),
    ("text_encoder", "text_config", 5),
    ("text_encoder", "text_config", {"rope_parameters": -1}),
    ("text_encoder", "text_config", {"rope_parameters": {"rope_theta": 0.0}}),
    ("text_encoder", "text_config", {"mrope_section": [1] * 5000}),
    ("text_encoder", "vision_config", [[1]]),
    ("text_encoder", "vision_config", {"num_heads": 0}),
    ("text_encoder", "image_token_id", -1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(tiny_folder_models() / FOLDER, folder)
    return folder


def refusal(part: Path) -> str:
    with pytest.raises((FormatError, CheckpointError)) as caught:
        identified(part, open_checkpoint(part))
    message = str(caught.value)
    assert message.startswith(str(part))
    assert message.endswith(".")
    assert message.isprintable()
    assert len(message) < len(str(part)) + 400
    return message


@pytest.mark.parametrize(("part", "field", "value"), STATED, ids=[f"{p}-{f}-{v!r:.20}" for p, f, v in STATED])
def test_a_stated_number_that_no_file_can_back_is_refused(model, part: str, field: str, value: Any):
    config = model / part / "config.json"
    sound = config.read_text()
    assert identified(model / part, open_checkpoint(model / part))
    config.write_text(json.dumps(json.loads(sound) | {field: value}))
    try:
        message = refusal(model / part)
    finally:
        config.write_text(sound)
    while isinstance(value, dict):
        ((field, value),) = value.items()
    assert field in message or f"{part}: is not described in a way that can be built (" in message


@pytest.mark.parametrize("text", ["[]", "5", "null", '"x"', "NaN", "[" * 50_000, '{"a":' * 50_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(model, text: str):
    config = model / "vae" / "config.json"
    sound = config.read_text()
    config.write_text(text, "latin1")
    try:
        assert str(config) in refusal(model / "vae")
    finally:
        config.write_text(sound)


@pytest.mark.parametrize(
    "entry",
    ["[" * 100_000, "5", '{"transformer": []}', '{"transformer": {"rope_theta": 1e999}}', '{"transformer": {"hidden_size": 0}}'],
)
def test_a_header_entry_that_is_no_configuration_is_refused(tmp_path, entry: str):
    path = tmp_path / "dit.safetensors"
    save_file(load_file(tiny_models() / SINGLE_FILES["dit"]), path, {"config": entry})
    refusal(path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("text_encoder", "model.layers.0.self_attn.q_norm.weight"),
        ("dit", "blocks.0.attn.q_norm.weight"),
        ("video_vae", "decoder.transformer_blocks.0.ff.w2.weight"),
    ],
)
def test_a_tensor_of_no_width_is_refused(tmp_path, kind: str, name: str):
    tensors = load_file(tiny_models() / SINGLE_FILES[kind])
    tensors[name] = tensors[name][..., :0].contiguous()
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    assert f"{name} of the" in refusal(path)


def test_what_no_check_foresees_is_refused_with_the_file(monkeypatch, model):
    def recognise(*_: object) -> None:
        raise RecursionError("too deep\nby far")

    monkeypatch.setattr(catalogue, "recognise", recognise)
    assert "vae: is not described in a way that can be built (too deep); download" in refusal(model / "vae")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool, torch.float64])
def test_tensors_that_are_never_read_do_not_decide_the_precision(tmp_path, dtype: torch.dtype):
    tensors = load_file(tiny_models() / SINGLE_FILES["dit"])
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    other = torch.zeros(2 * sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.int8).to(dtype)
    path = tmp_path / "whole model.safetensors"
    save_file({**prefixed, "other.weight": other}, path)
    assert Catalogue().component(path, "dit", AS_STORED, CPU).compute == torch.bfloat16


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@needs_pipes
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pipe_beside_the_weights_is_refused_rather_than_waited_for(tmp_path, name: str):
    shutil.copy(tiny_models() / SINGLE_FILES["video_vae"], tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / name)
    assert f"{tmp_path / name}: is not a file" in refusal(tmp_path)


@needs_pipes
def test_a_pipe_is_no_tokenizer(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(TokenizerError, match="holds neither"):
            load_tokenizer(path)


def test_descriptions_beyond_any_size_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_HEADER_BYTES", 100)
    monkeypatch.setattr(tokenizer, "MAX_FILE_BYTES", 100)
    for name in ("model.safetensors.index.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}" + " " * 99)
    with pytest.raises(CheckpointError, match="larger than 100 bytes"):
        open_checkpoint(tmp_path)
    with pytest.raises(TokenizerError, match="larger than 100 bytes"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("x", {"shape": [1 << 62] * 200_000}),
        ("x", {"shape": [1] * 17}),
        ("x", {"dtype": "F" * 5000}),
        ("x", {"dtype": ["F32"] * 5000}),
        ("x\n" * 5000, {"shape": [3]}),
        ("x\n" * 5000, {"shape": [-1]}),
        ("x\n" * 5000, {"shape": 5}),
    ],
)
def test_a_header_of_any_length_is_refused_in_a_short_sentence(tmp_path, name: str, spec: dict[str, Any]):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | spec
    refusal(written_raw(tmp_path / "model.safetensors", {name: entry}, bytes(8)))


@pytest.mark.parametrize("shard", ["x" * 3000, "x\ny", "x\0y", "\ud800"])
def test_a_shard_that_is_no_name_is_refused(tmp_path, shard: str):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": shard}}))
    assert "no name of a file" in refusal(index)


def test_unknown_tensors_with_long_names_are_named_in_short(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = load_file(tiny_models() / SINGLE_FILES["dit"])
    written(path, tensors | {f"{index}\n" * 4000: torch.ones(1) for index in range(2)})
    assert "which we do not know" in refusal(path)
