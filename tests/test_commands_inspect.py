"""``inspect``: what a file or folder is, from its header alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lazy_h3 import cli
from lazy_h3.commands.make_checkpoint import FOLDER, FOLDER_FILES, SINGLE_FILES
from lazy_h3.memory import reader
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import copied_models, folder_prompt, stage, tiny_folder_models, tiny_models

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def inspect(capsys):
    """(exit code, document, stderr) of ``inspect PATH --json``."""

    def run(path: Path) -> tuple[int, dict, str]:
        code = cli.main(["inspect", str(path), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out), captured.err

    return run


def the_only(document: dict) -> dict:
    (entry,) = document["checkpoints"]
    return entry


def split_into_shards(folder: Path) -> None:
    """The text encoder of a folder, as two files and their index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, members in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in zip(SHARDS, halves, strict=True) for name in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole.unlink()


@pytest.mark.parametrize("kind", SINGLE_FILES)
def test_a_single_file_is_described(inspect, kind):
    path = tiny_models() / SINGLE_FILES[kind]
    code, document, stderr = inspect(path)
    assert (code, stderr) == (0, "")
    entry = the_only(document)
    tensors = load_file(path)
    by_dtype: dict[str, int] = {}
    for tensor in tensors.values():
        name = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        by_dtype[name] = by_dtype.get(name, 0) + tensor.numel() * tensor.element_size()
    assert (entry["component"], entry["layout"]) == (kind, "comfy")
    assert entry["variant"] in ("base", "full")
    assert (entry["tensors"], entry["files"]) == (len(tensors), 1)
    assert (entry["precision"], entry["bytes"]) == (by_dtype, sum(by_dtype.values()))
    assert entry["refused"] is None
    assert entry["ignored_tensors"] == entry["ignored_bytes"] == 0


def test_a_model_folder_is_described_by_its_four_components(inspect):
    code, document, _ = inspect(tiny_folder_models() / FOLDER)
    assert code == 0
    assert [entry["component"] for entry in document["checkpoints"]] == ["text_encoder", "dit", "video_vae", "audio_vae"]
    assert {entry["layout"] for entry in document["checkpoints"]} == {"huggingface"}


def test_a_component_folder_is_described_alone(inspect):
    code, document, _ = inspect((tiny_folder_models() / FOLDER / FOLDER_FILES["dit"]).parent)
    assert code == 0
    assert the_only(document)["component"] == "dit"


def test_shards_are_one_checkpoint_and_load_like_the_whole(inspect, tmp_path):
    models = copied_models(tmp_path / "models", tiny_folder_models())
    folder = models / FOLDER / "text_encoder"
    whole = the_only(inspect(folder)[1])
    split_into_shards(folder)
    code, document, _ = inspect(folder)
    assert code == 0
    assert the_only(document) == {**whole, "files": 2}
    assert states_of(models, tmp_path) == states_of(tiny_folder_models(), tmp_path)


def states_of(models: Path, tmp_path: Path) -> bytes:
    prompt = {node: spec for node, spec in folder_prompt("minimax_h3").items() if node in ("1", "5")}
    with stage(tmp_path / "out", models) as running:
        running.succeed({**prompt, "states": {"class_type": "Keep", "inputs": {"value": ["5", 0]}}})
        return running.kept["states"][0][0].view(torch.uint8).numpy().tobytes()


def test_a_missing_shard_is_named(inspect, tmp_path):
    models = copied_models(tmp_path / "models", tiny_folder_models())
    folder = models / FOLDER / "text_encoder"
    split_into_shards(folder)
    (folder / SHARDS[1]).unlink()
    code, document, stderr = inspect(folder)
    assert code == 2
    assert SHARDS[1] in the_only(document)["refused"]
    assert SHARDS[1] in stderr


def test_tensors_that_are_never_read_are_counted_with_their_reason(inspect, tmp_path):
    path = tmp_path / "with head.safetensors"
    source = tiny_models() / SINGLE_FILES["text_encoder"]
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    save_file({**load_file(source), "lm_head.weight": torch.zeros(264, 16, dtype=torch.bfloat16)}, path, metadata)
    code, document, _ = inspect(path)
    entry = the_only(document)
    assert code == 0
    assert (entry["ignored_tensors"], entry["ignored_bytes"]) == (1, 264 * 16 * 2)
    assert set(entry["ignored"]) == {"lm_head.weight"}
    assert entry["ignored"]["lm_head.weight"]


REFUSED = {
    "foreign": "holds no component of MiniMax-H3",
    "quantised": "is quantised (tensor blocks.0.mlp.fc1.weight is F8_E4M3)",
    "extra": "blocks.0.surprise",
    "fewer": "blocks.1.norm1.weight",
    "pointer": "Git LFS pointer",
    "missing": "cannot be opened",
}


def refused_file(folder: Path, case: str) -> Path:
    """A file with one fault; "missing" is not even there."""
    path = folder / f"{case}.safetensors"
    dit = load_file(tiny_models() / SINGLE_FILES["dit"])
    if case == "foreign":
        save_file({"transformer.h.0.attn.weight": torch.zeros(4, 4)}, path)
    elif case == "quantised":
        save_file({**dit, "blocks.0.mlp.fc1.weight": dit["blocks.0.mlp.fc1.weight"].to(torch.float8_e4m3fn)}, path)
    elif case == "extra":
        save_file({**dit, "blocks.0.surprise": torch.zeros(1)}, path)
    elif case == "fewer":
        save_file({name: tensor for name, tensor in dit.items() if name != "blocks.1.norm1.weight"}, path)
    elif case == "pointer":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_with_the_file_and_the_reason(inspect, tmp_path, case):
    path = refused_file(tmp_path, case)
    code, document, stderr = inspect(path)
    entry = the_only(document)
    assert code == 2
    assert entry["component"] is None
    assert entry["refused"].startswith(str(path))
    assert REFUSED[case] in entry["refused"]
    assert stderr == f"lazy-h3: {entry['refused']}\n"


def test_a_foreign_file_is_still_measured(inspect, tmp_path):
    entry = the_only(inspect(refused_file(tmp_path, "foreign"))[1])
    assert (entry["tensors"], entry["bytes"], entry["precision"]) == (1, 64, {"F32": 64})


def test_a_broken_config_is_named(inspect, tmp_path):
    models = copied_models(tmp_path / "models", tiny_folder_models())
    config = models / FOLDER / "transformer" / "config.json"
    config.write_text("{oops")
    code, _, stderr = inspect(config.parent)
    assert code == 2
    assert f"{config}: its text is not valid JSON" in stderr


def test_people_get_lines_with_the_same_facts(capsys):
    assert cli.main(["inspect", str(tiny_models() / SINGLE_FILES["dit"])]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == str(tiny_models() / SINGLE_FILES["dit"])
    assert "dit, comfy layout, variant base" in text
    assert "BF16" in text


def test_a_folder_with_several_files_is_described_file_by_file(inspect, tmp_path):
    kinds = ["audio_vae", "video_vae"]
    for kind in kinds:
        shutil.copy(tiny_models() / SINGLE_FILES[kind], tmp_path / f"{kind}.safetensors")
    code, document, _ = inspect(tmp_path)
    assert (code, [entry["component"] for entry in document["checkpoints"]]) == (0, kinds)


@pytest.mark.parametrize("num_bad", [1, 2])
def test_people_read_each_reason_once(capsys, tmp_path, num_bad):
    shutil.copy(tiny_models() / SINGLE_FILES["dit"], tmp_path / "good.safetensors")
    for number in range(num_bad):
        (tmp_path / f"{number}.safetensors").write_text("No weights here.")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("is not a safetensors file but text") == num_bad
    assert captured.err.startswith(f"lazy-h3: {tmp_path}")
    assert len(captured.err.splitlines()) == 1


def test_no_weights_are_read(inspect, monkeypatch):
    def refuse(*_: object) -> int:
        raise AssertionError("weights were read")

    monkeypatch.setattr(reader, "_read_at", refuse)
    assert inspect(tiny_folder_models() / FOLDER)[0] == 0
