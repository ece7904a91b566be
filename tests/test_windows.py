"""Windows of the video VAE in time: what they join to and how long they live."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lazy_h3.h3.config import VideoVAEConfig
from lazy_h3.h3.windows import decode_plan, frames_of_latent, joined, num_encoded_latents
from torch import Tensor

CONFIG = VideoVAEConfig()
RAW_FRAMES = CONFIG.window_length * CONFIG.temporal_ratio


def window(values: Tensor) -> Tensor:
    """[1, 1, 28, 1, 1]"""
    return values.float().view(1, 1, -1, 1, 1).clone()


@pytest.mark.parametrize("num_latents", range(1, 120))
def test_a_plan_covers_its_latents_with_whole_windows(num_latents: int):
    plan = decode_plan(num_latents, CONFIG)
    assert num_latents + plan.num_repeats == 5 * plan.num_windows + 2
    assert plan.num_frames == sum(frames_of_latent(index, CONFIG) for index in range(num_latents))


@pytest.mark.parametrize(("frames", "latents"), [(5, 2), (22, 7), (39, 12), (124, 37), (141, 42), (243, 72), (362, 107)])
def test_a_clip_of_the_grid_keeps_its_length(frames: int, latents: int):
    assert num_encoded_latents(frames, CONFIG) == latents
    assert decode_plan(latents, CONFIG).num_frames == frames


def test_the_frames_between_body_and_tail_are_left_out():
    (body, tail) = joined([window(torch.arange(RAW_FRAMES))], 22, CONFIG)
    assert body.flatten().tolist() == list(range(3, 20))
    assert tail.flatten().tolist() == list(range(23, 28))


def test_a_window_fades_in_from_the_tail_of_the_one_before():
    runs = list(joined([window(torch.ones(RAW_FRAMES)), window(torch.zeros(RAW_FRAMES))], 39, CONFIG))
    assert [run.shape[2] for run in runs] == [17, 17, 5]
    torch.testing.assert_close(runs[1].flatten()[:6], torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0]))


@pytest.mark.parametrize(("num_frames", "lengths"), [(1, [1]), (17, [17]), (18, [17, 1]), (22, [17, 5])])
def test_frames_beyond_the_plan_are_cut_off(num_frames: int, lengths: list[int]):
    runs = joined([window(torch.arange(RAW_FRAMES))], num_frames, CONFIG)
    assert [run.shape[2] for run in runs] == lengths


def test_a_window_is_gone_before_the_next_is_made():
    alive: list[weakref.ref] = []

    def windows() -> Iterator[Tensor]:
        for _ in range(3):
            assert all(reference() is None for reference in alive)
            memory = np.zeros((1, 1, RAW_FRAMES, 1, 1), np.float32)
            alive.append(weakref.ref(memory))
            yield torch.from_numpy(memory)
            del memory

    assert sum(len(run.flatten()) for run in map(torch.clone, joined(windows(), 56, CONFIG))) == 56
    assert len(alive) == 3
