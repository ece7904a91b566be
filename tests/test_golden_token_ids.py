"""Token ids, tags and block grids of the real tokenizer against the reference (golden te_token_ids)."""

from __future__ import annotations

import json
from itertools import chain, repeat
from typing import Any

import pytest
from golden_files import golden_path
from lazy_h3.h3.conditioning import (
    AudioReference,
    ImageReference,
    Reference,
    Segment,
    VideoReference,
    keyframes_to_video,
    present,
    references_to_video,
    text_to_video,
)
from lazy_h3.h3.config import TextEncoderConfig, VisionConfig
from lazy_h3.h3.patches import COMFY, image_size
from lazy_h3.h3.vision import Grid
from qwen_vocabulary import qwen_tokenizer

CASES = json.loads(golden_path("te_token_ids.json").read_text("utf-8"))
PUBLISHED = TextEncoderConfig()


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in cases]


def expanded(run_lengths: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(repeat(value, count) for value, count in run_lengths))


def grid_of(height: int, width: int) -> Grid:
    vision = PUBLISHED.vision or VisionConfig()
    size = image_size((height, width), vision.patch_size * vision.spatial_merge_size, COMFY.image_limits)
    return size[0] // vision.patch_size, size[1] // vision.patch_size


def reference(kind: str, *numbers: int) -> Reference:
    if kind == "image":
        return ImageReference(grid_of(*numbers))
    return VideoReference(grid_of(*numbers[1:]), num_samples=numbers[0]) if kind == "video" else AudioReference()


def segments(case: dict[str, Any]) -> list[Segment]:
    if case["images_hw"] is not None:
        return keyframes_to_video(case["prompt"], [grid_of(*size) for size in case["images_hw"]])
    if case["refs"] is not None:
        return references_to_video(case["prompt"], [reference(*ref) for ref in case["refs"]])
    return text_to_video(case["prompt"])


@pytest.mark.parametrize("case", named(CASES["prompts"]))
def test_prompt_has_the_ids_of_the_reference(case: dict[str, Any]) -> None:
    assert qwen_tokenizer().encode(case["text"]) == case["ids"]


def test_added_tokens_have_the_ids_of_the_reference() -> None:
    tokenizer = qwen_tokenizer()
    added = CASES["tokenizer"]["added_tokens"]
    assert {str(tokenizer.id_of(literal)): literal for literal in added.values()} == added


@pytest.mark.parametrize("case", named(CASES["presentations"]))
def test_request_has_the_ids_tags_and_blocks_of_the_reference(case: dict[str, Any]) -> None:
    presentation = present(segments(case), qwen_tokenizer(), PUBLISHED)
    assert presentation.token_ids.tolist() == expanded(case["ids_run_length"])
    assert presentation.tags.tolist() == expanded(case["tags_run_length"])
    assert [[1, *grid] for grid in presentation.grids] == case["vision_block_grids_thw"]
    assert presentation.position_ids.shape == (3, case["n"])
