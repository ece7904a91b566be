from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_files import golden_path
from lazy_h3.h3.tokenizer import ADDED_TOKENS, TokenizerError, find_tokenizer, load_tokenizer
from qwen_vocabulary import LETTERS

TINY = golden_path("e2e_t2va_tiny", "tokenizer", "tokenizer.json")


def write_bytes_vocabulary(folder: Path, added: dict[int, str] | None = None) -> Path:
    """vocab.json and merges.txt of a tokenizer that knows the 256 bytes and one merge."""
    folder.mkdir(exist_ok=True)
    letters = [LETTERS[byte] for byte in range(256)]
    vocabulary = {letter: index for index, letter in enumerate([*letters, "ab"])}
    folder.joinpath("vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    folder.joinpath("merges.txt").write_text("#version: 0.2\na b\n", "utf-8")
    if added is not None:
        listed = {str(token_id): {"content": content, "special": True} for token_id, content in added.items()}
        folder.joinpath("tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}), "utf-8")
    return folder


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_file_and_its_folder_load_the_same_tokenizer() -> None:
    text = "A cat says <d>[en] hello</d>"
    from_file, from_folder = load_tokenizer(TINY), load_tokenizer(TINY.parent)
    assert from_file.encode(text) == from_folder.encode(text)
    assert bytes(from_file.encode(text)).decode() == text


def test_literals_of_added_tokens_become_their_ids() -> None:
    tokenizer = load_tokenizer(TINY)
    start, end = tokenizer.id_of("<|vision_start|>"), tokenizer.id_of("<|vision_end|>")
    assert tokenizer.encode("a<|vision_start|> <|vision_end|>") == [97, start, 32, end]


def test_nothing_is_added_cut_or_padded(tmp_path: Path) -> None:
    settings = json.loads(TINY.read_text("utf-8"))
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings), "utf-8")
    assert load_tokenizer(path).encode("abcdef") == list(b"abcdef")
    assert load_tokenizer(path).encode("a") == [97]


def test_vocabulary_and_merges_are_built_with_the_added_tokens_of_the_config(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bytes_vocabulary(tmp_path, {257: "<|endoftext|>", 258: "<d>"}))
    assert tokenizer.encode("ab<d>b") == [256, 258, 98]
    assert tokenizer.id_of("<|endoftext|>") == 257


def test_vocabulary_without_a_config_gets_the_published_added_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bytes_vocabulary(tmp_path))
    assert [tokenizer.id_of(token) for token in ADDED_TOKENS] == list(range(257, 257 + 26))
    assert tokenizer.token(257 + 25) == "</think>"


def test_added_tokens_that_do_not_continue_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="<d> has id 300"):
        load_tokenizer(write_bytes_vocabulary(tmp_path, {300: "<d>"}))


def test_unknown_token_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"no token <\|nothing\|>"):
        load_tokenizer(TINY).id_of("<|nothing|>")


def test_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("<html>", "utf-8")
    with pytest.raises(TokenizerError, match="cannot be read") as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    touch(tmp_path / "vocab.json")
    with pytest.raises(TokenizerError, match="neither"):
        load_tokenizer(tmp_path)


def test_places_are_searched_in_order(tmp_path: Path) -> None:
    """Beside the file under its own name, then the folder "tokenizer", then the caller's folders."""
    weights = touch(tmp_path / "text_encoders" / "encoder.v2.safetensors")
    host = touch(tmp_path / "host" / "tokenizer.json").parent
    assert find_tokenizer(weights, [tmp_path / "absent", host]) == host
    folder = touch(weights.parent / "tokenizer" / "tokenizer.json").parent
    assert find_tokenizer(weights, [host]) == folder
    own = touch(weights.parent / "encoder.v2.tokenizer.json")
    assert find_tokenizer(weights, [host]) == own


def test_hugging_face_folder_has_its_tokenizer_beside_it(tmp_path: Path) -> None:
    assert find_tokenizer(TINY.parent.parent / "text_encoder") == TINY.parent


def test_missing_tokenizer_says_where_to_get_it_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"MiniMaxAI/MiniMax-H3 as .*encoder\.tokenizer\.json"):
        find_tokenizer(tmp_path / "encoder.safetensors", [tmp_path])
