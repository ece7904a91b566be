"""Tiny text encoders against the reference: goldens te_tiny_*, te_preproc and the encoder of e2e_*."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from golden_files import assembled, described, golden, golden_path, read_tensors
from lazy_h3.h3.conditioning import keyframes_to_video, present, text_to_video
from lazy_h3.h3.config import VisionConfig
from lazy_h3.h3.formats.text_encoder import recognise
from lazy_h3.h3.patches import COMFY, OFFICIAL, image_block, image_size, video_blocks, video_size
from lazy_h3.h3.text_encoder import TextEncoder
from lazy_h3.h3.tokenizer import find_tokenizer, load_tokenizer
from PIL import Image
from text_encoder_fixtures import encoder, features, frame_blocks, hidden_states, presentation
from torch import Tensor

ENCODER_FOLDER = golden_path("e2e_t2va_tiny", "text_encoder")
PIPELINE_TOLERANCE = 1e-4  # bit-equal on AVX-512; kernels of other CPUs round values up to 24 differently, 3e-5 after 50 layers
TEXT = ["te_tiny_text_only"]
PICTURES = ["te_tiny_one_image", "te_tiny_two_images", "te_tiny_video", "te_tiny_odd_image", "te_tiny_mixed_ref"]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0, check_dtype=False)


@pytest.mark.parametrize("name", TEXT + PICTURES)
def test_hidden_states_are_those_of_the_reference(name: str) -> None:
    fixture = golden(name)
    assert_near(hidden_states(fixture, encoder(fixture)), fixture.output["hidden_states"])


@pytest.mark.parametrize("name", TEXT + PICTURES)
def test_every_layer_reads_what_the_reference_layer_reads(name: str) -> None:
    fixture = golden(name)
    model = encoder(fixture)
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hidden_states(fixture, model)
    assert_near(seen[0], fixture.output["inputs_embeds"])
    assert_near(torch.stack(seen), fixture.output["layer_inputs"])


@pytest.mark.parametrize("name", TEXT + PICTURES)
def test_request_has_the_ids_tags_and_positions_of_the_reference(name: str) -> None:
    fixture = golden(name)
    request = presentation(fixture, encoder(fixture))
    assert torch.equal(request.token_ids, fixture.input["token_ids"])
    assert torch.equal(request.tags, fixture.output["token_tags"])
    assert torch.equal(request.position_ids, fixture.output["position_ids"])


@pytest.mark.parametrize("name", PICTURES)
def test_vision_features_are_those_of_the_reference(name: str) -> None:
    fixture = golden(name)
    vision = features(fixture, encoder(fixture))
    assert vision is not None
    assert_near(vision.embeds, fixture.output["visual_embeds"])
    assert len(vision.deepstack) == len(fixture.config["vision"]["deepstack_visual_indexes"])
    for index, rows in enumerate(vision.deepstack):
        assert_near(rows, fixture.output[f"deepstack_{index}"])


@pytest.mark.parametrize("name", PICTURES)
def test_position_table_is_resampled_as_in_the_reference(name: str) -> None:
    fixture = golden(name)
    model = encoder(fixture)
    assert model.visual is not None
    grids = [tuple(grid) for _, *grid in fixture.output["vision_block_grids"].tolist()]
    assert_near(model.visual.positions(grids), fixture.output["vision_pos_embed"], 1e-5)


@pytest.mark.parametrize("name", PICTURES)
def test_patches_of_a_request_are_those_of_the_reference(name: str) -> None:
    fixture = golden(name)
    blocks = frame_blocks(fixture, encoder(fixture))
    for kind, values in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        patches = [block.patches for picture in blocks if picture.startswith(kind) for block in blocks[picture]]
        if patches:
            assert_near(torch.cat(patches), fixture.input[values], 1e-6)
        else:
            assert values not in fixture.input


PREPROCESSING = golden("te_preproc")
NUM_IMAGES = len(PREPROCESSING.config["images"])


@pytest.mark.parametrize("index", range(NUM_IMAGES))
@pytest.mark.parametrize(("filter_name", "rules"), [("bilinear", COMFY), ("bicubic", OFFICIAL)])
def test_image_becomes_the_patches_of_the_reference(index: int, filter_name: str, rules: Any) -> None:
    limits = COMFY.image_limits  # both were made with these
    block = image_block(PREPROCESSING.input[f"image_{index}"], VisionConfig(), replace(rules, image_limits=limits))
    assert [[1, *block.grid]] == PREPROCESSING.output[f"grid_{index}"].tolist()
    assert_near(block.patches, PREPROCESSING.output[f"patches_{filter_name}_{index}"], 1e-6)


def test_video_becomes_the_patches_of_the_reference() -> None:
    blocks = video_blocks(PREPROCESSING.input["video_0"], VisionConfig(), COMFY)
    assert [[len(blocks), *blocks[0].grid]] == PREPROCESSING.output["video_grid_0"].tolist()
    assert_near(torch.cat([block.patches for block in blocks]), PREPROCESSING.output["video_patches_0"], 1e-6)


@pytest.mark.parametrize("row", PREPROCESSING.config["resize_table"], ids=lambda row: "x".join(map(str, row["hw"])))
def test_size_before_the_tower_is_that_of_the_reference(row: dict[str, Any]) -> None:
    size = tuple(row["hw"])
    assert [*image_size(size, 32, COMFY.image_limits)] == row["comfy"]
    assert [*image_size(size, 32, OFFICIAL.image_limits)] == row["hf_image"]
    videos = {frames: [*video_size(int(frames), size, 32, OFFICIAL.video_limits)] for frames in row["hf_video"]}
    assert videos == row["hf_video"]


@pytest.fixture(scope="module")
def pipeline_encoder() -> TextEncoder:
    """From the Hugging Face folder, which has a layer, a norm and a head too many."""
    tensors = read_tensors(ENCODER_FOLDER / "model.safetensors")
    layout = recognise(described(tensors), {}, json.loads(ENCODER_FOLDER.joinpath("config.json").read_text("utf-8")))
    assert layout is not None
    return assembled(layout, tensors)


def requested(workflow: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """meta.json, inputs and expected results of an end-to-end fixture."""
    folder = golden_path(workflow)
    meta = json.loads(folder.joinpath("meta.json").read_text("utf-8"))
    return meta, read_tensors(folder / "inputs.safetensors"), read_tensors(folder / "expected.safetensors")


def test_prompt_embeds_are_those_of_the_pipeline(pipeline_encoder: TextEncoder) -> None:
    meta, _, expected = requested("e2e_t2va_tiny")
    request = present(text_to_video(meta["prompt"]), load_tokenizer(find_tokenizer(ENCODER_FOLDER)), pipeline_encoder.config)
    hidden = pipeline_encoder(request.token_ids, request.position_ids)
    assert_near(hidden[None], expected["prompt_embeds"], PIPELINE_TOLERANCE)
    assert request.tags.tolist() == expected["text_token_tags"].tolist()


def test_first_keyframe_gives_the_first_rows_of_the_pipeline(pipeline_encoder: TextEncoder) -> None:
    meta, inputs, expected = requested("e2e_fl2va_tiny")
    canvas = Image.fromarray(inputs["image"].numpy()).resize((meta["width"], meta["height"]), Image.Resampling.LANCZOS)
    processor = meta["image_processor"]
    rules = replace(OFFICIAL, image_limits=(processor["shortest_edge"], processor["longest_edge"]))
    block = image_block(torch.from_numpy(np.array(canvas)), pipeline_encoder.config.vision, rules)
    tokenizer = load_tokenizer(find_tokenizer(ENCODER_FOLDER))
    request = present(keyframes_to_video("", [block.grid]), tokenizer, pipeline_encoder.config)
    vision = pipeline_encoder.encode_vision(block.patches, [block.grid])
    hidden = pipeline_encoder(request.token_ids, request.position_ids, request.vision_rows, vision)
    assert_near(hidden, expected["prompt_embeds"][0, : len(hidden)], PIPELINE_TOLERANCE)
    assert request.tags.tolist() == expected["text_token_tags"][: len(hidden)].tolist()
