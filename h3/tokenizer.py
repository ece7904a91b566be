"""Text to token ids with the Qwen tokenizer that belongs to the text encoder (text encoder spec, section 2)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

MAX_FILE_BYTES = 100_000_000  # ten times the published tokenizer
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Added tokens in the order of their ids, which follow the vocabulary: for folders whose tokenizer_config.json lists none.
ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


class TokenizerError(ValueError):
    """No usable tokenizer, or one that does not fit the text encoder. One sentence: what, where, what to do."""


class PromptTokenizer:
    """Ids of a text as it stands: nothing added, nothing cut, nothing padded."""

    def __init__(self, tokenizer: Tokenizer, source: Path) -> None:
        self._tokenizer = tokenizer
        self.source = source
        tokenizer.no_truncation()
        tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def id_of(self, token: str) -> int:
        """The id of one token by its literal. Raises TokenizerError where there is none."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerError(
                f"The tokenizer {self.source} has no token {token}: use the one that belongs to the text encoder."
            )
        return found

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)


def find_tokenizer(text_encoder: Path, extra_folders: Sequence[Path] = ()) -> Path:
    """Where the tokenizer of a text encoder lies, for ``load_tokenizer``.

    ``text_encoder`` is a single file or the folder of a Hugging Face layout. Looked for in this order: ``<stem>.tokenizer.json``
    beside the file, a folder ``tokenizer`` beside it, ``extra_folders``. Raises TokenizerError where there is none.
    """
    beside = text_encoder.with_name(f"{text_encoder.stem}.tokenizer.json")
    for candidate in (beside, text_encoder.with_name("tokenizer"), *extra_folders):
        if candidate.is_file() or (candidate.is_dir() and _files_in(candidate)):
            return candidate
    raise TokenizerError(
        f"No tokenizer for {text_encoder}: save tokenizer.json from the tokenizer folder of MiniMaxAI/MiniMax-H3 as {beside}."
    )


def load_tokenizer(path: Path) -> PromptTokenizer:
    """From a ``tokenizer.json``, or from a folder with one or with ``vocab.json`` and ``merges.txt``. Raises TokenizerError."""
    files = (path,) if path.is_file() else _files_in(path)
    if not files:
        raise TokenizerError(f"{path} holds neither tokenizer.json nor vocab.json with merges.txt: point at a tokenizer.")
    _refuse_oversized(*files, files[0].with_name("tokenizer_config.json"))
    try:
        tokenizer = Tokenizer.from_file(str(files[0])) if len(files) == 1 else _built(*files)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"The tokenizer in {path} cannot be read ({error}): download it again.") from error
    return PromptTokenizer(tokenizer, path)


def _refuse_oversized(*files: Path) -> None:
    for file in files:
        if file.is_file() and file.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerError(f"{file} is larger than {MAX_FILE_BYTES} bytes, so no tokenizer: download it again.")


def _files_in(folder: Path) -> tuple[Path, ...]:
    """The complete file, else the two that it can be built from, else nothing."""
    for names in (("tokenizer.json",), ("vocab.json", "merges.txt")):
        files = tuple(folder / name for name in names)
        if all(file.is_file() for file in files):
            return files
    return ()


def _built(vocab: Path, merges: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    for token_id, content in _added_tokens(vocab, tokenizer.get_vocab_size()):
        tokenizer.add_tokens([AddedToken(content, normalized=False)])
        if tokenizer.token_to_id(content) != token_id:
            raise TokenizerError(f"Token {content} has id {token_id} in tokenizer_config.json, which does not continue {vocab}.")
    return tokenizer


def _added_tokens(vocab: Path, num_base: int) -> list[tuple[int, str]]:
    """(id, literal) of the tokens beyond the vocabulary, in the order of their ids."""
    config = vocab.with_name("tokenizer_config.json")
    settings: dict[str, Any] = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    listed = settings.get("added_tokens_decoder") or {num_base + index: {"content": c} for index, c in enumerate(ADDED_TOKENS)}
    return sorted((int(token_id), token["content"]) for token_id, token in listed.items())
