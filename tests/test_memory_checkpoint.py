from __future__ import annotations

import io
import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lazy_h3.memory.checkpoint import CheckpointError, FileIdentity, open_checkpoint
from memory_models import written, written_raw
from safetensors.torch import load_file

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.arange(6, dtype=torch.float32).view(2, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
    }


def sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None) -> Path:
    for name, tensors in shards.items():
        written(folder / name, tensors)
    index = folder / "model.safetensors.index.json"
    if weight_map is None:
        weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


def test_an_index_says_where_the_bytes_of_every_tensor_are(tmp_path, tensors):
    path = written(tmp_path / "model.safetensors", tensors, {"format": "pt", "config": "{}"})
    checkpoint = open_checkpoint(path)
    raw = path.read_bytes()
    assert checkpoint.metadata == {"format": "pt", "config": "{}"}
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in load_file(path).items():
        entry = checkpoint.tensors[name]
        assert entry.shape == tuple(tensor.shape)
        stored = raw[entry.offset : entry.offset + entry.nbytes]
        assert stored == bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())
    assert checkpoint.path == str(path)


def test_opening_reads_the_header_and_nothing_else(tmp_path, tensors, monkeypatch):
    path = written(tmp_path / "model.safetensors", tensors)
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    sizes = []

    class Counted(io.FileIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    monkeypatch.setattr(Path, "open", lambda self, mode: Counted(self, mode))
    open_checkpoint(path)
    assert sizes == [8, header_bytes]


def test_shards_are_one_checkpoint(tmp_path):
    shards = {"a.safetensors": {"one": torch.ones(2)}, "b.safetensors": {"two": torch.ones(3), "three": torch.ones(1)}}
    checkpoint = open_checkpoint(sharded(tmp_path, shards))
    assert {name: entry.path.name for name, entry in checkpoint.tensors.items()} == {
        "one": "a.safetensors",
        "two": "b.safetensors",
        "three": "b.safetensors",
    }
    assert checkpoint.path == str(tmp_path)
    assert len(checkpoint.files) == 2


def test_a_folder_stands_for_its_only_checkpoint(tmp_path):
    (tmp_path / "single").mkdir()
    single = written(tmp_path / "single" / "model.safetensors", {"x": torch.ones(2)})
    assert open_checkpoint(tmp_path / "single").path == str(single)
    (tmp_path / "sharded").mkdir()
    sharded(tmp_path / "sharded", {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(2)}})
    assert open_checkpoint(tmp_path / "sharded").tensors.keys() == {"x", "y"}


def test_two_names_of_one_file_are_one_identity(tmp_path, monkeypatch):
    path = written(tmp_path / "model.safetensors", {"x": torch.ones(2)})
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("model.safetensors").files == open_checkpoint(path).files
    assert open_checkpoint(tmp_path / "sub" / ".." / "model.safetensors").files == open_checkpoint(path).files


@pytest.mark.parametrize("length", [0x280, 0x480, 0x3C, 0x4B50, 0x3C20, 0x3C0A])
def test_a_header_may_have_any_length_even_one_that_spells_another_format(tmp_path, length):
    """The length is the first thing in a file: 640 begins like a pickle, 19280 like a zip, 15392 like a web page."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = written_raw(tmp_path / "model.safetensors", header.ljust(length), bytes(4))
    assert open_checkpoint(path).tensors["x"].offset == 8 + length


def test_a_changed_or_deleted_file_is_noticed(tmp_path, tensors):
    path = written(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(path)
    checkpoint.verify_unchanged()
    os.utime(path, ns=(0, checkpoint.files[0].mtime_ns + 1))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: was replaced on disk"):
        checkpoint.verify_unchanged()
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: cannot be opened \(No such file"):
        checkpoint.verify_unchanged()


def deep(depth: int) -> bytes:
    return b'{"x":' + b"[" * depth + b"]" * depth + b"}"


def header_of(**entry: object) -> dict[str, object]:
    return {"x": {**F32, **entry}}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 132735373312\n"
PICKLE = b"\x80\x02}q\x00X\x01\x00\x00\x00xq\x01K\x01s."
ZIP = b"PK\x03\x04\x00\x00\x08\x08\x00\x00" + bytes(64)
RAW_FILES = {
    "an empty file": (b"", "truncated or not a safetensors file"),
    "three bytes": (b"abc", "truncated or not a safetensors file"),
    "a cut header": ((100).to_bytes(8, "little") + b"{}", "truncated or not a safetensors file"),
    "a text": (b"MIT License\n\nCopyright", "is not a safetensors file but text; choose the file with the weights."),
    "an absurd header length": ((1 << 62).to_bytes(8, "little") + b"{}", "claims a header of 4611686018427387904 bytes"),
    "a Git LFS pointer": (LFS, "Git LFS pointer"),
    "a web page": (b"<!DOCTYPE html>\n<html><body>404</body></html>", "web page"),
    "an indented web page": (b"\n\n  <html><body>404</body></html>", "web page"),
    "a pickle": (PICKLE, "pickled checkpoint under another name"),
    "a newer pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}", "pickled checkpoint under another name"),
    "a zip": (ZIP, "pickled checkpoint under another name"),
}
HEADERS = {
    "no JSON": (b"{not json}", b"", "not valid JSON"),
    "no UTF-8": (b'{"\xff\xfe":1}', b"", "not valid JSON"),
    "an empty header": (b"", b"", "not valid JSON"),
    "deeply nested JSON": (deep(100_000), b"", "not valid JSON"),
    "a list": ([1, 2], b"", "not a table"),
    "a duplicate key": (b'{"x":%s,"x":%s}' % ((json.dumps(F32).encode(),) * 2), bytes(8), "has a name twice"),
    "a duplicate field": (b'{"x":{"dtype":"F32","dtype":"F32"}}', bytes(8), "has a name twice"),
    "metadata that are no strings": ({"__metadata__": {"a": 1}, "x": F32}, bytes(8), "not a table of strings"),
    "metadata that are no table": ({"__metadata__": "text", "x": F32}, bytes(8), "not a table of strings"),
    "an entry that is no table": ({"x": 5}, bytes(8), "entry of tensor x is malformed"),
    "an entry without a shape": ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "entry of tensor x is malformed"),
    "three offsets": (header_of(data_offsets=[0, 8, 9]), bytes(8), "entry of tensor x is malformed"),
    "a shape that is no list": (header_of(shape=2), bytes(8), "entry of tensor x is malformed"),
    "an unknown dtype": (header_of(dtype="F13"), bytes(8), "unknown dtype 'F13'"),
    "a dtype that is no name": (header_of(dtype=["F32"]), bytes(8), "unknown dtype"),
    "a dtype that is null": (header_of(dtype=None), bytes(8), "unknown dtype"),
    "a negative dimension": (header_of(shape=[-2]), bytes(8), "no whole numbers"),
    "two negative dimensions": (header_of(shape=[-2, -1]), bytes(8), "no whole numbers"),
    "a huge dimension": (header_of(shape=[1 << 63, 0], data_offsets=[0, 0]), b"", "no whole numbers"),
    "a dimension beyond the file": (header_of(shape=[1 << 61]), bytes(8), "takes 8 bytes, but its shape"),
    "a fractional dimension": (header_of(shape=[2.0]), bytes(8), "no whole numbers"),
    "a boolean dimension": (header_of(shape=[2, True]), bytes(8), "no whole numbers"),
    "a dimension in words": (header_of(shape=["2"]), bytes(8), "no whole numbers"),
    "negative offsets": (header_of(data_offsets=[-8, 0]), bytes(8), "no whole numbers"),
    "infinite offsets": (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}', bytes(8), "no whole numbers"),
    "reversed offsets": (header_of(data_offsets=[8, 0]), bytes(8), "takes -8 bytes"),
    "a size unlike shape and dtype": (header_of(shape=[3]), bytes(8), r"takes 8 bytes, but its shape \[3\] in F32 needs 12"),
    "offsets beyond the file": (header_of(), bytes(7), "truncated"),
    "bytes behind the last tensor": (header_of(), bytes(9), "bytes behind its last tensor"),
    "a hole": ({"x": F32, "y": {**F32, "data_offsets": [12, 20]}}, bytes(20), "tensor y leaves a hole"),
    "a hole at the start": (header_of(data_offsets=[4, 12]), bytes(12), "tensor x leaves a hole"),
    "an overlap": ({"x": F32, "y": {**F32, "data_offsets": [4, 12]}}, bytes(12), "tensor y overlaps"),
    "the same bytes twice": ({"x": F32, "y": F32}, bytes(8), "overlaps"),
}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def assert_refused(path: Path, problem: str) -> None:
    """One sentence that begins with the file's name; no file stays open."""
    before = open_files()
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert message.endswith(".")
    assert open_files() == before


@pytest.mark.parametrize("case", RAW_FILES)
def test_something_else_instead_of_the_file_is_named_for_what_it_is(tmp_path, case):
    content, problem = RAW_FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert_refused(path, problem)


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_is_refused(tmp_path, case):
    header, data, problem = HEADERS[case]
    assert_refused(written_raw(tmp_path / "model.safetensors", header, data), problem)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl", "MODEL.PT"])
def test_pickle_formats_are_never_opened(tmp_path, name, monkeypatch):
    path = tmp_path / name
    path.write_bytes(PICKLE)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("was opened"))
    assert_refused(path, "pickled checkpoints are never opened")


def test_a_pickle_among_the_shards_is_never_opened(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(PICKLE)
    index = sharded(tmp_path, {}, {"x": "a.bin"})
    opened = []
    original = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **kwargs: (opened.append(self.name), original(self, *args, **kwargs))[1]
    )
    with pytest.raises(CheckpointError, match=r"a\.bin: pickled checkpoints are never opened"):
        open_checkpoint(index)
    assert opened == [index.name]


def test_a_truncated_file_is_refused(tmp_path, tensors):
    path = written(tmp_path / "model.safetensors", tensors)
    os.truncate(path, path.stat().st_size - 1)
    assert_refused(path, "is truncated")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert_refused(tmp_path / "model.safetensors", "No such file")


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(f"{tmp_path}/model\0.safetensors")


def test_a_folder_without_one_checkpoint_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(PICKLE)
    assert_refused(tmp_path, r"holds no \.safetensors file")
    written(tmp_path / "a.safetensors", {"x": torch.ones(1)})
    written(tmp_path / "b.safetensors", {"x": torch.ones(1)})
    assert_refused(tmp_path, "holds 2 checkpoints")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    assert_refused(path, "is not a file")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"x": 1}}', "[" * 100_000],
    ids=["empty", "list", "no map", "empty map", "list as map", "number as shard", "deeply nested"],
)
def test_a_damaged_shard_index_is_refused(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    assert_refused(index, "not valid JSON|not a table|has no weight_map")


def test_a_shard_index_that_names_a_tensor_twice_is_refused(tmp_path):
    index = sharded(tmp_path, {"a.safetensors": {"x": torch.ones(1)}})
    index.write_text('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}')
    assert_refused(index, "has a name twice")


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..", ""])
def test_a_shard_outside_the_folder_is_refused(tmp_path, shard):
    (tmp_path / "models").mkdir()
    written(tmp_path / "a.safetensors", {"x": torch.ones(1)})
    assert_refused(sharded(tmp_path / "models", {}, {"x": shard}), "outside its folder")


def test_a_missing_shard_is_refused(tmp_path):
    index = sharded(tmp_path, {"a.safetensors": {"x": torch.ones(1)}}, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"b\.safetensors: cannot be opened"):
        open_checkpoint(index)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path):
    index = sharded(tmp_path, {"a.safetensors": {"x": torch.ones(1)}}, {"x": "a.safetensors", "y": "a.safetensors"})
    assert_refused(index, r"tensor y is in a\.safetensors, which does not hold it")


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path):
    shards = {"a.safetensors": {"x": torch.ones(1)}, "b.safetensors": {"y": torch.ones(1)}}
    index = sharded(tmp_path, shards, {"x": "b.safetensors", "y": "a.safetensors"})
    assert_refused(index, "which does not hold it")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = {"a.safetensors": {"x": torch.ones(1)}, "b.safetensors": {"x": torch.ones(1), "y": torch.ones(1)}}
    index = sharded(tmp_path, shards, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor x is also in a\.safetensors"):
        open_checkpoint(index)


def test_a_damaged_file_of_any_kind_is_opened_or_refused_but_never_crashes(tmp_path, tensors):
    """Random bytes overwritten, cut and repeated: what comes back is an index or a CheckpointError."""
    sound = written(tmp_path / "sound.safetensors", tensors, {"format": "pt"}).read_bytes()
    path = tmp_path / "model.safetensors"
    rng = random.Random(0)
    outcomes = {"opened": 0, "refused": 0}
    for _ in range(400):
        path.write_bytes(damaged(sound, rng))
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ")  # noqa: PT017  (either outcome is fine)
            outcomes["refused"] += 1
        else:
            outcomes["opened"] += 1
    assert min(outcomes.values()) > 0


def damaged(sound: bytes, rng: random.Random) -> bytes:
    raw = bytearray(sound)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw))
        edits: list[Callable[[], object]] = [
            lambda at=at: raw.__setitem__(at, rng.randrange(256)),
            lambda at=at: raw.__setitem__(at, rng.choice(b'0123456789[]{}",:-')),
            lambda at=at: raw.__delitem__(slice(at, at + rng.randint(1, 8))),
            lambda at=at: raw.__setitem__(slice(at, at), raw[at : at + rng.randint(1, 8)]),
        ]
        rng.choice(edits)()
    return bytes(raw)


def test_file_identity_names_the_file_that_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "x.safetensors"))):
        FileIdentity.of(tmp_path / "x.safetensors")
