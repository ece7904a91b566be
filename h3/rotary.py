"""Rotary position embedding in its half-split form: the first half of the channels pairs with the second."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """theta^(-2j/dim) for j = 0 .. dim/2 - 1, fp32 on the CPU: powers on other devices differ in the last bits.

    The reciprocal of a power, not a negative power: the last bits grow to 3e-5 over 50 layers.
    """
    return 1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is [..., L, D], cos and sin are [L, D/2]; the result has the wider of the two dtypes."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
