from itertools import pairwise

import pytest
import torch
from lazy_h3.h3.packing import pack_audio
from lazy_h3.h3.sampling import Latents, Schedule, comfy_noise, denoise, euler_step, official_noise, sample

SHAPES = (1, 24, 2, 4, 6), (1, 32, 2, 8)


class TowardsOnes:
    """A network whose data is all ones: from any point of the straight path the velocity leads there."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[float, float]] = []

    def prepare(self, states: torch.Tensor, layout: object) -> "TowardsOnes":
        self.text = states
        return self

    def __call__(self, video, audio, request, video_time, audio_time):
        self.evaluations.append((video_time, audio_time))
        return (1 - video) / (1 - video_time), (1 - audio) / (1 - audio_time)


def noise() -> Latents:
    return comfy_noise(*SHAPES, torch.Generator().manual_seed(0))


def run(schedule: Schedule, **options) -> tuple[Latents, TowardsOnes]:
    network = TowardsOnes()
    return sample(network, torch.zeros(1, 3, 4), None, noise(), schedule, **options), network


@pytest.mark.parametrize("schedule", [Schedule.official(6), Schedule.comfy_simple(7, 9.0, 2.0), Schedule.ladder([999, 500])])
def test_sampling_lands_on_the_data_after_as_many_evaluations_as_steps(schedule: Schedule) -> None:
    result, network = run(schedule)
    torch.testing.assert_close(result.video, torch.ones(SHAPES[0]))
    torch.testing.assert_close(result.audio, torch.ones(SHAPES[1]))
    assert network.evaluations == list(schedule.times)
    assert len(network.evaluations) == schedule.num_steps


def test_a_start_at_the_data_stays_there() -> None:
    start = Latents(torch.ones(SHAPES[0]), torch.ones(SHAPES[1]))
    seen = []
    run(Schedule.official(8, last=3), start=start, on_step=lambda *step: seen.append(step))
    schedule = Schedule.official(8, last=3)
    assert schedule.num_steps == len(seen) == 3
    first = seen[0][2].video
    expected = schedule.video[1] * noise().video + (1 - schedule.video[1])
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("last", [2, 20, 1000])
@pytest.mark.parametrize("shifts", [(12.0, 3.0), (100.0, 0.1), (0.1, 100.0), (100.0, 100.0)])
@pytest.mark.parametrize("made", [Schedule.official, Schedule.comfy_simple])
def test_levels_that_fp32_or_the_table_cannot_tell_apart_are_one(made, shifts, last) -> None:
    """Of a hundred times as many steps, as at the lowest denoise."""
    schedule = made(100 * last, *shifts, last=last)
    assert 1 <= schedule.num_steps <= last
    assert all(after < before for levels in (schedule.video, schedule.audio) for before, after in pairwise(levels))
    first = 0.01 if made is Schedule.official else max(0.01, 1 / 1000)
    expected = [shift * first / (1 + (shift - 1) * first) for shift in shifts]
    assert [schedule.video[0], schedule.audio[0]] == pytest.approx(expected, rel=1e-3)


def test_a_callback_that_raises_ends_the_run_there() -> None:
    network = TowardsOnes()

    def interrupt(done: int, total: int, latents: Latents) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        denoise(network, network, noise(), Schedule.official(5), interrupt)
    assert len(network.evaluations) == 2


def test_the_last_euler_step_is_the_predicted_clean_latent() -> None:
    x, v = torch.randn(2, 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(euler_step(x, v, 0.75, 0.25, 0.0), x + 0.25 * v)


def test_the_two_noise_conventions_share_the_video_and_order_the_audio_differently() -> None:
    comfy, official = (draw(*SHAPES, torch.Generator().manual_seed(5)) for draw in (comfy_noise, official_noise))
    assert [x.shape for x in comfy] == [x.shape for x in official] == [torch.Size(shape) for shape in SHAPES]
    assert torch.equal(comfy.video, official.video)
    assert not torch.equal(comfy.audio, official.audio)
    generator = torch.Generator().manual_seed(5)
    torch.randn(SHAPES[0], generator=generator)
    assert torch.equal(pack_audio(official.audio), torch.randn(16, 32, generator=generator))


@pytest.mark.parametrize(
    ("video", "audio", "message"),
    [
        ((1.0, 0.5, 0.0), (1.0, 0.0), "3 video but 2 audio"),
        ((1.0, 0.5), (1.0, 0.0), "video schedule"),
        ((0.0,), (0.0,), "video schedule"),
        ((1.0, 0.0), (1.0, 0.5), "audio schedule"),
        ((1.0, 0.5, 0.5, 0.0), (1.0, 0.5, 0.25, 0.0), "video noise level goes from 0.5 to 0.5"),
    ],
)
def test_a_schedule_that_does_not_fall_to_zero_is_refused(video, audio, message) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(video, audio)


def test_an_official_schedule_has_one_evaluation_fewer_than_points_and_shared_ends() -> None:
    schedule = Schedule.official(4)
    assert schedule.video[0] == schedule.audio[0] == 1
    assert schedule.video[-1] == schedule.audio[-1] == 0
    assert schedule.num_steps == 4
