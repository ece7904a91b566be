"""The transformer inside a whole request: a Hugging Face folder, text states in, latents out."""

import json

import pytest
import torch
from golden_files import assembled, described, golden_path, read_tensors
from lazy_h3.h3.dit import DiT
from lazy_h3.h3.formats.dit import recognise
from lazy_h3.h3.geometry import LatentSize
from lazy_h3.h3.packing import pack, unpack_audio
from lazy_h3.h3.sampling import Latents, Schedule, official_noise, sample

FOLDER = "e2e_t2va_tiny"
TOLERANCE = 1e-5


def read_json(*parts: str) -> dict:
    return json.loads(golden_path(FOLDER, *parts).read_text())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def request_numbers() -> dict:
    return read_json("meta.json")


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return read_tensors(golden_path(FOLDER, "expected.safetensors"))


@pytest.fixture(scope="module")
def noise() -> Latents:
    inputs = read_tensors(golden_path(FOLDER, "inputs.safetensors"))
    return Latents(inputs["init_video_noise"], unpack_audio(inputs["init_audio_rows"]))


@pytest.fixture(scope="module")
def model() -> DiT:
    weights = read_tensors(golden_path(FOLDER, "transformer", "diffusion_pytorch_model.safetensors"))
    return assembled(recognise(described(weights), {}, read_json("transformer", "config.json")), weights)


def official_schedule(request_numbers: dict) -> Schedule:
    shifts = (read_json(folder, "scheduler_config.json")["shift"] for folder in ("scheduler", "audio_scheduler"))
    return Schedule.official(request_numbers["model_evaluations"], *shifts)


@torch.inference_mode()
def test_every_evaluation_and_the_final_latents_match(model, noise, expected, request_numbers) -> None:
    velocities = []
    model.register_forward_hook(lambda _, __, rows: velocities.append(rows))
    result = sample(model, expected["prompt_embeds"], expected["text_token_tags"], noise, official_schedule(request_numbers))
    assert len(velocities) == request_numbers["model_evaluations"]
    for i, (video, audio) in enumerate(velocities):
        assert_close(video, expected[f"v_{i}"])
        assert_close(audio, expected[f"va_{i}"])
    assert_close(result.video, expected["final_latents"])
    assert_close(result.audio[0].transpose(0, 1), expected["final_audio_latents"])


def test_the_layout_and_the_row_timesteps_match(noise, expected, request_numbers) -> None:
    schedule = official_schedule(request_numbers)
    layout = pack(expected["text_token_tags"], noise.size)
    torch.testing.assert_close(layout.position_ids, expected["position_ids"], rtol=0, atol=1e-12)
    assert layout.tags.tolist() == expected["token_tags"].tolist()
    for i, times in enumerate(schedule.times):
        distinct, time_of = layout.row_times(*times)
        assert_close(distinct, expected[f"row_t_{i}"])
        rows = [time_of[run.kind] for run in layout.runs for _ in range(run.rows.start, run.rows.stop)]
        assert rows == expected[f"row_i_{i}"].tolist()


def test_the_geometry_of_the_request_has_the_shapes_of_its_noise(noise, request_numbers) -> None:
    size = LatentSize.of_clip(request_numbers["num_frames"], request_numbers["height"], request_numbers["width"])
    assert size == noise.size


def test_the_official_noise_comes_from_the_request_seed(noise, request_numbers) -> None:
    generator = torch.Generator().manual_seed(request_numbers["generator_seed"])
    drawn = official_noise(noise.video.shape, noise.audio.shape, generator)
    assert_close(drawn.video, noise.video)
    assert_close(drawn.audio, noise.audio)
