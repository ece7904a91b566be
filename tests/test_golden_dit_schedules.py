"""Noise schedules against the official scheduler, ComfyUI's and the few-step students'."""

import json
import re

import torch
from golden_files import golden
from lazy_h3.h3.sampling import (
    Schedule,
    audio_sigmas,
    comfy_simple_sigmas,
    euler_step,
    ladder_sigmas,
    official_sigmas,
    shifted,
    unshifted,
)

TOLERANCE = 1e-6
LADDERS = {"fasth3_v1": ((999, 749, 500, 250), 12.0, 3.0), "fasth3_v2": ((999, 874, 749, 624, 500, 375, 250, 125), 10.0, 3.0)}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_official_grids_match_the_scheduler() -> None:
    fixture = golden("dit_schedules")
    cases = json.loads(fixture.metadata["cases"])
    assert cases
    for case in cases:
        sigmas = official_sigmas(case["num_inference_steps_arg"], case["shift"])
        key = case["key"].removeprefix("official.")
        assert_close(sigmas, fixture.groups["official"][f"{key}.sigmas"])
        schedule = Schedule.official(case["evaluations"], case["shift"], case["shift"])
        assert schedule.num_steps == case["evaluations"]
        assert_close(torch.tensor([video for video, _ in schedule.times]), fixture.groups["official"][f"{key}.timesteps"])


def test_comfy_simple_matches_comfyui() -> None:
    expected = {key: value for key, value in golden("dit_schedules").groups["comfy"].items() if key.startswith("simple.")}
    assert expected
    for key, sigmas in expected.items():
        steps, shift = re.fullmatch(r"simple\.n(\d+)\.shift([\d.]+)\.sigmas", key).groups()
        assert_close(comfy_simple_sigmas(int(steps), float(shift)), sigmas)


def test_audio_levels_follow_the_video_levels() -> None:
    maps = golden("dit_schedules").groups["map"]
    expected = {key: value for key, value in maps.items() if key.startswith("sigma_audio.")}
    assert expected
    for key, sigmas in expected.items():
        video_shift, audio_shift = map(float, key.removeprefix("sigma_audio.shift").split("_"))
        assert_close(audio_sigmas(maps["sigma_video"], video_shift, audio_shift), sigmas)
        assert_close(shifted(unshifted(maps["sigma_video"], video_shift), video_shift), maps["sigma_video"])


def test_ladders_match_the_few_step_students() -> None:
    groups = golden("dit_schedules").groups
    for name, (rungs, video_shift, audio_shift) in LADDERS.items():
        assert_close(ladder_sigmas(rungs, video_shift), groups[name]["sigmas_video"])
        assert_close(ladder_sigmas(rungs, audio_shift), groups[name]["sigmas_audio"])


def test_euler_steps_match_the_official_trace() -> None:
    trace = golden("dit_schedules").groups["step"]
    velocities, samples = trace["input.velocity_dataward"], trace["output.samples"]
    schedule = Schedule.official(len(velocities))
    x = trace["input.sample"]
    for i, (velocity, expected) in enumerate(zip(velocities, samples, strict=True)):
        x = euler_step(x, velocity, schedule.times[i][0], schedule.video[i], schedule.video[i + 1])
        assert_close(x, expected)
