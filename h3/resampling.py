"""Twofold resampling with one Kaiser-windowed sinc, so that an activation in between does not alias (VAE spec, section 2.2).

Checkpoints carry copies of the filter; it is computed instead.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_TAPS = 12
CUTOFF = 0.25  # cycles a sample
TRANSITION_HALF_WIDTH = 0.3


@lru_cache(maxsize=1)
def lowpass_taps() -> Tensor:
    """The symmetric filter, fp32 [12] on the CPU, summing to 1."""
    attenuation = 2.285 * (NUM_TAPS // 2 - 1) * pi * 4 * TRANSITION_HALF_WIDTH + 7.95  # Kaiser's estimate, in decibels
    beta = 0.1102 * (attenuation - 8.7)
    window = torch.kaiser_window(NUM_TAPS, periodic=False, beta=beta, dtype=torch.float64, device="cpu")
    offsets = torch.arange(NUM_TAPS, dtype=torch.float64, device="cpu") - (NUM_TAPS - 1) / 2
    taps = 2 * CUTOFF * window * torch.sinc(2 * CUTOFF * offsets)
    return (taps / taps.sum()).float()


def upsampled(x: Tensor, taps: Tensor) -> Tensor:
    """[B, C, L] to [B, C, 2 L]; beyond the ends the first and last samples go on."""
    x = F.pad(x, (3, 3), mode="replicate")
    return F.conv_transpose1d(x, _per_channel(2 * taps, x), stride=2, padding=11, groups=x.shape[1])


def downsampled(x: Tensor, taps: Tensor) -> Tensor:
    """[B, C, 2 L] to [B, C, L]; beyond the ends the first and last samples go on."""
    x = F.pad(x, (5, 5), mode="replicate")
    return F.conv1d(x, _per_channel(taps, x), stride=2, groups=x.shape[1])


def _per_channel(taps: Tensor, x: Tensor) -> Tensor:
    return taps.expand(x.shape[1], 1, -1)
