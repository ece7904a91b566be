"""A whole request through our own stack: folder loader, encoder, sampler and decoders, against the reference pipeline."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from golden_files import golden_path, read_tensors
from lazy_h3.h3.packing import unpack_audio
from lazy_h3.h3.sampling import Latents
from lazy_h3.nodes import sample as sampler_node
from small_models import folder_prompt, stage

FOLDER = "e2e_t2va_tiny"
TOLERANCE = 1e-5


def read_json(*parts: str) -> dict:
    return json.loads(golden_path(FOLDER, *parts).read_text())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def request_prompt() -> dict:
    """The request of the fixture as a graph, with the prompt's encoding kept, too."""
    meta = read_json("meta.json")
    changes = {
        "1.dtype": "fp32",
        "5.prompt": meta["prompt"],
        "6.width": meta["width"],
        "6.height": meta["height"],
        "6.duration": meta["num_frames"],
        "7.steps": meta["model_evaluations"],
        "7.noise": "official",
        "7.video_shift": read_json("scheduler", "scheduler_config.json")["shift"],
        "7.audio_shift": read_json("audio_scheduler", "scheduler_config.json")["shift"],
    }
    prompt = folder_prompt(FOLDER, changes)
    return {**prompt, "states": {"class_type": "Keep", "inputs": {"value": ["5", 0]}}}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return read_tensors(golden_path(FOLDER, "expected.safetensors"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Everything the graph made, from the exact noises of the fixture."""
    inputs = read_tensors(golden_path(FOLDER, "inputs.safetensors"))
    noise = Latents(inputs["init_video_noise"], unpack_audio(inputs["init_audio_rows"]))
    drawn: list[tuple] = []

    def recorded(video_shape, audio_shape, generator) -> Latents:
        drawn.append((video_shape, audio_shape))
        return noise

    models: Path = tmp_path_factory.mktemp("models")
    shutil.copytree(golden_path(FOLDER), models / "diffusers" / FOLDER)
    with pytest.MonkeyPatch.context() as patch, stage(tmp_path_factory.mktemp("out"), models) as running:
        patch.setitem(sampler_node.NOISES, "official", recorded)
        running.succeed(request_prompt())
        return SimpleNamespace(noise=noise, drawn=drawn, **running.kept)


def test_the_prompt_is_encoded_to_the_reference_states_and_tags(done, expected):
    ((states, options),) = done.states
    assert_close(states, expected["prompt_embeds"])
    assert options["minimax_token_tags"].tolist() == expected["text_token_tags"].tolist()


def test_the_sampler_asks_for_noise_of_the_shape_of_the_reference(done):
    assert done.drawn == [(done.noise.video.shape, done.noise.audio.shape)]


def test_both_streams_end_at_the_reference_latents(done, expected):
    video, audio = done.latent["samples"].unbind()
    assert_close(video, expected["final_latents"])
    assert_close(audio[0].transpose(0, 1), expected["final_audio_latents"])


def test_the_frames_are_those_of_the_reference(done, expected):
    frames = done.images.permute(0, 3, 1, 2)  # [F, H, W, 3] -> [F, 3, H, W]
    first, last = expected["frames_first2"][0], expected["frames_last"][0]
    assert_close(frames[: len(first)], first)
    assert_close(frames[-len(last) :], last)
    assert_close(frames.mean(dim=(1, 2, 3)), expected["frame_means"][0])


def test_the_sound_is_that_of_the_reference(done, expected):
    waveform, head = done.audio["waveform"], expected["audio_head"]
    assert done.audio["sample_rate"] == read_json("audio_vae", "config.json")["sampling_rate"]
    assert_close(waveform[..., : head.shape[-1]], head)
    assert_close(waveform.square().mean(-1).sqrt(), expected["audio_rms"])
