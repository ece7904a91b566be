"""Checkpoints with random weights: real names, recognised as what they are, the same for the same seed."""

import functools
import hashlib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from lazy_h3 import cli
from lazy_h3.commands import make_checkpoint as maker
from lazy_h3.commands.make_checkpoint import FOLDER, FOLDER_FILES, SINGLE_FILES, make_checkpoint, random_weight
from lazy_h3.commands.presets import PUBLISHED, SHRINKING, ModelPreset, num_bytes, replica, tiny
from lazy_h3.commands.tiny_tokenizer import SPECIAL_TOKENS
from lazy_h3.h3.conditioning import present, text_to_video
from lazy_h3.h3.config import AudioVAEConfig, DiTConfig, TextEncoderConfig, VideoVAEConfig
from lazy_h3.h3.formats import Layout
from lazy_h3.h3.tokenizer import find_tokenizer, load_tokenizer
from lazy_h3.memory.checkpoint import Checkpoint, open_checkpoint
from lazy_h3.nodes.catalogue import identified
from safetensors.torch import load_file
from small_models import tiny_folder_models, tiny_models, write_header

KINDS = tuple(SINGLE_FILES)
SCALE = 100
COARSE = {"vision": 0.4, "audio_vae": 0.15}  # of which the smallest step in width is large
LAYOUTS = {"single-file": "comfy", "folder": "huggingface"}
MODELS = {"single-file": tiny_models, "folder": tiny_folder_models}


def path_of(models: Path, kind: str, layout: str) -> Path:
    """What the loaders are pointed at: the file, or the component's folder."""
    return models / SINGLE_FILES[kind] if layout == "single-file" else (models / FOLDER / FOLDER_FILES[kind]).parent


def found(models: Path, kind: str, layout: str) -> tuple[Layout, Checkpoint]:
    path = path_of(models, kind, layout)
    checkpoint = open_checkpoint(path)
    return identified(path, checkpoint), checkpoint


def assert_describes(layout: Layout, config: object) -> None:
    """The recognised configuration is that of the preset, and beyond that knows special tokens and statistics."""
    extra = [field.name for field in fields(config) if field.name in SPECIAL_TOKENS or field.name.startswith("latents_")]
    same = {name: getattr(config, name) for name in extra}
    assert replace(layout.config, **same) == config


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_component_is_recognised_with_the_configuration_of_the_preset(kind, layout):
    layout_found, checkpoint = found(MODELS[layout](), kind, layout)
    assert (layout_found.kind, layout_found.layout) == (kind, LAYOUTS[layout])
    assert_describes(layout_found, getattr(tiny(), kind))
    used = {source for recipe in layout_found.recipes.values() for source in recipe.sources}
    assert used | layout_found.ignored.keys() == checkpoint.tensors.keys()
    assert layout_found.ignored == {}  # nothing is written that nobody reads


def test_the_tiny_model_has_the_dimensions_of_the_golden_one():
    golden = Path(__file__).parent / "golden" / "e2e_t2va_tiny"
    for kind, file in FOLDER_FILES.items():
        folder = (golden / file).parent
        assert_describes(identified(folder, open_checkpoint(folder)), getattr(tiny(), kind))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, layout):
    small = tiny()
    for name, seed in (("again", 0), ("other", 1)):
        make_checkpoint(tmp_path / name, small, layout, seed)
    again, other = digests(tmp_path / "again"), digests(tmp_path / "other")
    assert again == digests(MODELS[layout]())
    assert again.keys() == other.keys()
    weights = [name for name in again if name.endswith(".safetensors")]
    assert len(weights) == len(KINDS)
    assert all(again[name] != other[name] for name in weights)


def test_single_files_have_the_published_names():
    assert set(digests(tiny_models())) == {
        "text_encoders/qwen3vl_32b_minimax_h3_bf16.safetensors",
        "text_encoders/qwen3vl_32b_minimax_h3_bf16.tokenizer.json",
        "diffusion_models/minimax_h3_fl2va_bf16.safetensors",
        "vae/minimax_h3_video_vae_fp16.safetensors",
        "vae/minimax_h3_audio_vae_fp32.safetensors",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_readers_of_safetensors_understand_the_files_and_the_weights_are_sane(kind, layout):
    folder = MODELS[layout]()
    file = folder / (SINGLE_FILES[kind] if layout == "single-file" else f"{FOLDER}/{FOLDER_FILES[kind]}")
    for name, tensor in load_file(file).items():
        assert tensor.isfinite().all(), name
        assert tensor.numel() < 100 or tensor.float().std() > 0.01, name


def test_random_weights_keep_activations_of_order_one():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 400, generator=generator)
    y = x @ random_weight("linear.weight", (300, 400), generator).T
    assert 0.9 < y.std() < 1.1
    assert 0.5 < random_weight("norm.weight", (400,), generator).mean() < 1.5
    assert random_weight("linear.bias", (400,), generator).abs().mean() < 0.2
    assert random_weight("latents_std", (400,), generator).min() > 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tokenizer_reads_back_what_it_is_given(layout):
    checkpoint = open_checkpoint(path_of(MODELS[layout](), "text_encoder", layout))
    beside = Path(checkpoint.path).parent.with_name("tokenizer")
    tokenizer = load_tokenizer(find_tokenizer(Path(checkpoint.path), (beside,)))
    text = "Grüße, 世界 🙂\n\t<d>[en] hi</d>  two  blanks "
    ids = tokenizer.encode(text)
    assert bytes_of(tokenizer, ids).decode() == text
    assert max(ids) < tiny().text_encoder.vocab_size
    assert tokenizer.id_of("<|vision_start|>") == SPECIAL_TOKENS["vision_start_token_id"]
    assert tokenizer.encode("a<|image_pad|>b")[1] == SPECIAL_TOKENS["image_token_id"]
    assert max(SPECIAL_TOKENS.values()) < tiny().text_encoder.vocab_size
    request = present(text_to_video(text), tokenizer, found(MODELS[layout](), "text_encoder", layout)[0].config)
    assert len(request.token_ids) == len(request.tags) >= len(ids)


def bytes_of(tokenizer, ids: list[int]) -> bytes:
    """One token is one byte, spelled as byte-level BPE spells it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return bytes(byte_of[tokenizer.token(token_id)] for token_id in ids)


@functools.cache
def small_replica(name: str = "minimax-h3") -> ModelPreset:
    return replica(SCALE, name)


def sizes(preset: ModelPreset) -> dict[str, int]:
    return {kind: num_bytes(kind, config) for kind, config in preset.components().items()}


@pytest.mark.parametrize("name", ["minimax-h3", "minimax-h3-r16"])
def test_a_replica_keeps_the_proportions_of_the_published_model(name):
    small, real = small_replica(name), PUBLISHED[name]
    for kind, part, _ in SHRINKING:
        size, published = (num_bytes(kind, getattr(preset, kind), part) for preset in (small, real))
        assert size == pytest.approx(published / SCALE, rel=COARSE.get(part or kind, 0.05))
    assert sum(sizes(small).values()) == pytest.approx(sum(sizes(real).values()) / SCALE, rel=0.02)


def test_a_thirteenth_of_the_rank_form_does_not_hold_the_decoder_of_the_video_vae_and_an_eighth_does():
    for scale in (32, SCALE):
        small = replica(scale, "minimax-h3-r16")
        decoder, total = num_bytes("video_vae", small.video_vae, "decoder"), sum(sizes(small).values())
        assert total / 13 < decoder < total / 8


def test_a_replica_has_all_layers():
    small = small_replica()
    assert small.text_encoder.num_hidden_layers == TextEncoderConfig().num_hidden_layers == 50
    assert small.text_encoder.vision.depth == TextEncoderConfig().vision.depth
    assert (
        (small.dit.num_layers, small.dit.num_refiner_layers)
        == (DiTConfig().num_layers, DiTConfig().num_refiner_layers)
        == (50, 2)
    )
    assert small.video_vae.decoder_num_layers == VideoVAEConfig().decoder_num_layers == 36
    assert small.audio_vae.decoder_rates == AudioVAEConfig().decoder_rates
    assert small.dit.text_dim == small.text_encoder.hidden_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replica_is_recognised_with_the_configuration_of_the_preset(tmp_path, monkeypatch, layout):
    """Only headers are written: the weights would take a gigabyte."""
    monkeypatch.setattr(maker, "write_safetensors", lambda path, tensors, metadata, _: write_header(path, tensors, metadata))
    small = small_replica()
    make_checkpoint(tmp_path, small, layout)
    for kind, config in small.components().items():
        layout_found, checkpoint = found(tmp_path, kind, layout)
        assert layout_found.kind == kind
        assert_describes(layout_found, config)
        if layout == "single-file":
            assert checkpoint.nbytes == num_bytes(kind, config)


def test_a_scale_that_no_width_reaches_is_refused_with_numbers():
    with pytest.raises(
        ValueError, match=r"--scale 100000 asks for a text_encoder \(language\) of 0\.5 MiB, less than its layers take"
    ):
        replica(100_000)


def test_an_unknown_model_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="--model h4: is not a published model; choose one of minimax-h3, minimax-h3-r16"):
        replica(SCALE, "h4")


def test_the_command_lists_what_it_wrote(tmp_path, capsys):
    assert cli.main(["make-checkpoint", str(tmp_path / "made"), "--preset", "tiny", "--seed", "0"]) == 0
    listed = dict(line.split("  ") for line in capsys.readouterr().out.splitlines())
    files = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    assert listed == {str(path): f"{path.stat().st_size} bytes" for path in files}
    assert digests(tmp_path / "made") == digests(tiny_models())
