from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from golden_files import golden_path
from lazy_h3.h3.conditioning import (
    AudioReference,
    FrameSlot,
    ImageReference,
    Text,
    VideoReference,
    keyframes_to_video,
    pair_seconds,
    position_ids,
    present,
    references_to_video,
    sampled_frames,
    text_to_video,
    vision_rows,
)
from lazy_h3.h3.config import TextEncoderConfig
from lazy_h3.h3.tokenizer import TokenizerError, load_tokenizer

TOKENIZER = load_tokenizer(golden_path("e2e_t2va_tiny", "tokenizer"))  # one id a byte, then the special tokens
CONFIG = TextEncoderConfig(vocab_size=1000)
GRID = (4, 6)


def ids(*literals: str) -> list[int]:
    return [TOKENIZER.id_of(literal) for literal in literals]


def test_text_is_presented_as_it_stands() -> None:
    request = present(text_to_video("A cat."), TOKENIZER, CONFIG)
    assert bytes(request.token_ids.tolist()) == b"A cat."
    assert request.tags.tolist() == [1] * 6
    assert request.position_ids.tolist() == [list(range(6))] * 3
    assert request.vision_rows.tolist() == []
    assert request.grids == ()
    assert {t.dtype for t in (request.token_ids, request.tags, request.position_ids, request.vision_rows)} == {torch.int64}


def test_empty_prompt_is_the_end_of_text() -> None:
    request = present(text_to_video(""), TOKENIZER, CONFIG)
    assert request.token_ids.tolist() == ids("<|endoftext|>")
    assert request.tags.tolist() == [1]
    assert request.position_ids.tolist() == [[0]] * 3


def test_empty_prompt_adds_nothing_to_a_keyframe() -> None:
    with_text, without = (present(keyframes_to_video(prompt, [GRID]), TOKENIZER, CONFIG) for prompt in ("!", ""))
    assert with_text.token_ids.tolist() == [*without.token_ids.tolist(), ord("!")]


def test_keyframes_are_numbered_pictures_before_the_prompt() -> None:
    assert keyframes_to_video("Go.", [GRID, (2, 2)]) == [
        Text("<Picture 1>: "), FrameSlot(GRID), Text("<Picture 2>: "), FrameSlot((2, 2)), Text("Go."),
    ]  # fmt: skip


def test_references_are_numbered_by_kind_and_a_soundtrack_comes_just_before_its_video() -> None:
    video = VideoReference(GRID, num_samples=3, has_soundtrack=True)
    assert references_to_video("Go.", [AudioReference(), video, ImageReference(GRID), AudioReference()]) == [
        Text("<Audio 1>: "), Text("<Audio 2>: "), Text("<Video 1>: "),
        Text("<0.2 seconds>"), FrameSlot(GRID, is_video=True), Text("<1.0 seconds>"), FrameSlot(GRID, is_video=True),
        Text("<Picture 1>: "), FrameSlot(GRID), Text("<Audio 3>: "), Text("Go."),
    ]  # fmt: skip


def test_two_frames_a_second_are_sampled() -> None:
    assert list(sampled_frames(49)) == [0, 12, 24, 36, 48]
    assert list(sampled_frames(48)) == [0, 12, 24, 36]


@pytest.mark.parametrize(
    ("num_samples", "seconds"), [(1, [0.0]), (2, [0.25]), (4, [0.25, 1.25]), (5, [0.25, 1.25, 2.0]), (6, [0.25, 1.25, 2.25])]
)
def test_pair_stands_at_the_mean_of_its_samples(num_samples: int, seconds: list[float]) -> None:
    assert pair_seconds(num_samples) == seconds


def test_block_is_start_pads_end_and_all_of_it_is_tagged_video() -> None:
    request = present([Text("a"), FrameSlot(GRID), FrameSlot((2, 2), is_video=True)], TOKENIZER, CONFIG)
    start, end, image, video = ids("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    assert request.token_ids.tolist() == [97, start, *[image] * 6, end, start, video, end]
    assert request.tags.tolist() == [1, *[0] * 8, *[0] * 3]
    assert request.vision_rows.tolist() == [2, 3, 4, 5, 6, 7, 10]
    assert request.grids == (GRID, (2, 2))


def test_positions_go_on_by_the_longer_side_after_a_block() -> None:
    t, h, w = position_ids([1, (2, 3), 2]).tolist()
    assert t == [0, 1, 1, 1, 1, 1, 1, 4, 5]
    assert h == [0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert w == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert vision_rows([1, (2, 3), 2]).tolist() == [1, 2, 3, 4, 5, 6]


def test_special_literals_in_a_prompt_are_text() -> None:
    request = present(text_to_video("<|vision_start|><|image_pad|>"), TOKENIZER, CONFIG)
    assert request.token_ids.tolist() == ids("<|vision_start|>", "<|image_pad|>")
    assert request.tags.tolist() == [1, 1]
    assert request.vision_rows.tolist() == []


def test_special_ids_of_the_config_go_before_those_of_the_tokenizer() -> None:
    config = replace(CONFIG, vision_start_token_id=901, vision_end_token_id=902, image_token_id=903, video_token_id=904)
    request = present([FrameSlot((2, 2)), FrameSlot((2, 2), is_video=True)], TOKENIZER, config)
    assert request.token_ids.tolist() == [901, 903, 902, 901, 904, 902]


def test_token_beyond_the_embedding_is_named() -> None:
    config = replace(CONFIG, vocab_size=ids("<|im_end|>")[0])
    with pytest.raises(
        TokenizerError, match=rf"'<\|im_end\|>' .* has id {config.vocab_size}, but .* knows {config.vocab_size} tokens"
    ):
        present(text_to_video("fine <|im_end|>"), TOKENIZER, config)


def test_picture_for_an_encoder_without_tower_is_refused() -> None:
    with pytest.raises(ValueError, match="no vision tower"):
        present(keyframes_to_video("Go.", [GRID]), TOKENIZER, replace(CONFIG, vision=None))


def test_long_prompt_is_presented_whole_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        present(text_to_video("a" * 1024), TOKENIZER, CONFIG)
        assert caplog.messages == []
        assert len(present(text_to_video("a" * 1025), TOKENIZER, CONFIG).token_ids) == 1025
    assert caplog.messages == ["The prompt has 1025 text tokens; the model was trained with at most 1024."]
