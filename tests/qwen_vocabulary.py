"""The real Qwen tokenizer, rebuilt from the ranked vocabulary in the ``dashscope`` wheel (text encoder spec, section 2)."""

from __future__ import annotations

import json
from base64 import b64decode
from functools import lru_cache
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from lazy_h3.h3.tokenizer import PromptTokenizer, load_tokenizer

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = {**{byte: chr(byte) for byte in PRINTABLE}, **{byte: chr(256 + index) for index, byte in enumerate(OTHERS)}}


@lru_cache(maxsize=1)
def qwen_tokenizer() -> PromptTokenizer:
    """Built from vocab.json and merges.txt, by the way our loader takes for a folder that holds no tokenizer.json."""
    with TemporaryDirectory() as folder:
        write_vocabulary(Path(folder))
        return load_tokenizer(Path(folder))


def write_vocabulary(folder: Path) -> None:
    """vocab.json and merges.txt as the model's own tokenizer folder has them."""
    ranks = ranked_tokens()
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    merges = [
        f"{spelled(left)} {spelled(right)}" for left, right in (last_pair(token, ranks) for token in ranks if len(token) > 1)
    ]
    folder.joinpath("vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), "utf-8")
    folder.joinpath("merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")


def ranked_tokens() -> dict[bytes, int]:
    """Token -> rank, in the order of ranks; the resource is read without importing its package."""
    resource = Path(str(distribution("dashscope").locate_file("dashscope/resources/qwen.tiktoken")))
    pairs = (line.split() for line in resource.read_bytes().splitlines())
    return {b64decode(token): int(rank) for token, rank in pairs}


def last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces that are left for the last join, the lowest rank first."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(pieces)]
        at = joined.index(min(joined))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces[0], pieces[1]


def spelled(token: bytes) -> str:
    """Bytes in the printable alphabet of byte-level vocabularies."""
    return "".join(LETTERS[byte] for byte in token)
