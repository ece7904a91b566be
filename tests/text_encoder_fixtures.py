"""The te_tiny_* fixtures as requests: settings, segments, frame blocks, and the encoder that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch
from golden_files import Fixture, assembled, described
from lazy_h3.h3.conditioning import FrameSlot, Presentation, Segment, Text, present
from lazy_h3.h3.formats.text_encoder import recognise
from lazy_h3.h3.patches import COMFY, FrameBlock, PixelPolicy, image_block, video_blocks
from lazy_h3.h3.text_encoder import TextEncoder
from lazy_h3.h3.vision import VisionFeatures
from torch import Tensor


class NumberTokenizer:
    """Reads "12 7" as the ids 12, 7: the fixtures hold ids, not texts."""

    source = Path("numbers")

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def token(self, token_id: int) -> str:
        return str(token_id)


def settings(fixture: Fixture) -> dict[str, Any]:
    """What config.json of such a model would say."""
    config = fixture.config
    return {"text_config": config["text"], "vision_config": config["vision"], **config["special_tokens"]}


def encoder(fixture: Fixture, weights: Mapping[str, Tensor] | None = None) -> TextEncoder:
    tensors = fixture.weights if weights is None else weights
    layout = recognise(described(tensors), {}, settings(fixture))
    assert layout is not None
    module = assembled(layout, tensors)
    assert isinstance(module, TextEncoder)
    return module


def segments(fixture: Fixture) -> list[Segment]:
    """Texts and frame slots, told apart by the start and end tokens of the fixture's own vocabulary."""
    special = fixture.config["special_tokens"]
    grids = iter(fixture.output.get("vision_block_grids", torch.empty(0, 3)).tolist())
    ids = iter(fixture.input["token_ids"].tolist())
    found: list[Segment] = []
    while text := list(takewhile(lambda token: token != special["vision_start_token_id"], ids)):
        found.append(Text(" ".join(map(str, text))))
        pads = list(takewhile(lambda token: token != special["vision_end_token_id"], ids))
        if pads:
            _, rows, columns = next(grids)
            found.append(FrameSlot((rows, columns), is_video=pads[0] == special["video_token_id"]))
    return found


def presentation(fixture: Fixture, model: TextEncoder) -> Presentation:
    return present(segments(fixture), NumberTokenizer(), model.config)  # type: ignore[arg-type]


def policy(fixture: Fixture) -> PixelPolicy:
    limits = (fixture.config["preprocessing"]["min_pixels"], fixture.config["preprocessing"]["max_pixels"])
    return replace(COMFY, image_limits=limits, video_limits=limits)


def frame_blocks(fixture: Fixture, model: TextEncoder) -> dict[str, list[FrameBlock]]:
    """Blocks of each picture, in the order of the sequence: "image_0", "video_0", ..."""
    assert model.config.vision is not None
    counts = {"image": 0, "video": 0}
    blocks = {}
    for kind, *_ in fixture.config["sequence"]:
        if kind in counts:
            name = f"{kind}_{counts[kind]}"
            counts[kind] += 1
            pixels = fixture.input[name]
            rules = (model.config.vision, policy(fixture))
            blocks[name] = [image_block(pixels, *rules)] if kind == "image" else video_blocks(pixels, *rules)
    return blocks


def features(fixture: Fixture, model: TextEncoder) -> VisionFeatures | None:
    """The tower's output for the pictures of the fixture, None for a fixture without any."""
    if not any(name.startswith(("image_", "video_")) for name in fixture.input):
        return None
    blocks = list(chain.from_iterable(frame_blocks(fixture, model).values()))
    return model.encode_vision(torch.cat([block.patches for block in blocks]), [block.grid for block in blocks])


def hidden_states(fixture: Fixture, model: TextEncoder) -> Tensor:
    request = presentation(fixture, model)
    return model(request.token_ids, request.position_ids, request.vision_rows, features(fixture, model))
