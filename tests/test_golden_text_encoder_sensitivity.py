"""The check of the parity checks: noise on any single weight must show."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from golden_files import golden, without_effect
from text_encoder_fixtures import encoder, hidden_states
from torch import Tensor

TOLERANCE = 1e-4  # of tests/test_golden_text_encoder.py


def test_noise_on_any_weight_is_noticed() -> None:
    """A request with images and a video reaches every tensor: all layers, all blocks, all taps."""
    fixture = golden("te_tiny_mixed_ref")

    def matches(weights: Mapping[str, Tensor]) -> bool:
        difference = hidden_states(fixture, encoder(fixture, weights)) - fixture.output["hidden_states"]
        return bool(difference.abs().max() <= TOLERANCE)

    assert matches(fixture.weights)
    assert set(without_effect(fixture.weights, matches)) == set()


def test_noise_on_the_language_model_is_noticed_without_pictures() -> None:
    """The vision tower alone has no effect on a text: nothing of it is read."""
    fixture = golden("te_tiny_text_only")

    def matches(weights: Mapping[str, Tensor]) -> bool:
        return torch.allclose(
            hidden_states(fixture, encoder(fixture, weights)), fixture.output["hidden_states"], atol=TOLERANCE, rtol=0
        )

    assert matches(fixture.weights)
    assert set(without_effect(fixture.weights, matches)) == {name for name in fixture.weights if name.startswith("visual.")}
