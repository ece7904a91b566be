"""Whole sampling runs against the official two-scheduler Euler, ComfyUI's Euler and the few-step ladders."""

import pytest
import torch
from dit_fixtures import model_of, states_of, tags_of
from golden_files import Fixture, golden
from lazy_h3.h3.sampling import Latents, Schedule, sample

TOLERANCE = 1e-4


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def noise_of(fixture: Fixture) -> Latents:
    return Latents(fixture.input["noise_video"], fixture.input["noise_audio"])


def shifts_of(fixture: Fixture) -> tuple[float, float]:
    stream_shifts = (fixture.metadata.get(f"shift_{s}", fixture.config[f"sigma_shift_{s}"]) for s in ("video", "audio"))
    video, audio = map(float, stream_shifts)
    return video, audio


@torch.inference_mode()
def test_every_official_step_matches_the_reference() -> None:
    fixture = golden("dit_sample_euler4")
    schedule = Schedule.of(fixture.input["official_sigmas_video"], fixture.input["official_sigmas_audio"])
    assert schedule == Schedule.official(schedule.num_steps, *shifts_of(fixture))
    steps = []
    result = sample(
        model_of(fixture),
        states_of(fixture),
        tags_of(fixture),
        noise_of(fixture),
        schedule,
        on_step=lambda done, total, latents: steps.append((done, total, latents)),
    )
    assert [(done, total) for done, total, _ in steps] == [(i + 1, schedule.num_steps) for i in range(schedule.num_steps)]
    for i, (_, _, latents) in enumerate(steps):
        assert_close(latents.video, fixture.output[f"official.step{i}.video"])
        assert_close(latents.audio, fixture.output[f"official.step{i}.audio"])
    assert torch.equal(result.video, steps[-1][2].video)


@torch.inference_mode()
def test_the_comfy_schedule_reaches_comfyuis_result() -> None:
    fixture = golden("dit_sample_euler4")
    shifts = shifts_of(fixture)
    schedule = Schedule.of_video(fixture.input["sigmas"], *shifts)
    torch.testing.assert_close(
        torch.tensor(Schedule.comfy_simple(schedule.num_steps, *shifts).video), fixture.input["sigmas"], rtol=0, atol=1e-6
    )
    result = sample(model_of(fixture), states_of(fixture), tags_of(fixture), noise_of(fixture), schedule)
    assert_close(result.video, fixture.output["video"])
    assert_close(result.audio, fixture.output["audio"])


@torch.inference_mode()
@pytest.mark.parametrize("release", ["v1_4step", "v2_8step"])
def test_few_step_ladders_start_from_unit_noise(release: str) -> None:
    fixture = golden("dit_sample_fasth3")
    expected = {key.removeprefix(f"{release}."): value for key, value in fixture.output.items() if key.startswith(release)}
    schedule = Schedule.of(expected["sigmas_video"], expected["sigmas_audio"])
    result = sample(model_of(fixture), states_of(fixture), tags_of(fixture), noise_of(fixture), schedule)
    assert_close(result.video, expected["video"])
    assert_close(result.audio, expected["audio"])


@torch.inference_mode()
def test_a_partial_schedule_starts_from_a_noised_latent() -> None:
    fixture = golden("dit_sample_img2img_shift7_5")
    start = Latents(fixture.input["latent_video"], fixture.input["latent_audio"])
    schedule = Schedule.of_video(fixture.input["sigmas"], *shifts_of(fixture))
    result = sample(model_of(fixture), states_of(fixture), tags_of(fixture), noise_of(fixture), schedule, start=start)
    assert_close(result.video, fixture.output["video"])
    assert_close(result.audio, fixture.output["audio"])
