"""Would the comparisons notice a wrong weight? Each is disturbed alone, and each must be noticed: none is without effect."""

from collections.abc import Mapping

import pytest
import torch
from dit_fixtures import latents_of, model_of, num_cases, prepared, times_of
from golden_files import Fixture, golden, without_effect
from lazy_h3.h3.packing import unpack_audio, unpatchify
from lazy_h3.h3.sampling import Latents, velocity

TOLERANCE = 1e-4


def reference(fixture: Fixture, case: int) -> Latents:
    """The data-ward velocity, whichever way the fixture stores it."""
    rows = fixture.output.get(f"s{case}.video_rows_dataward"), fixture.output.get(f"s{case}.audio_rows_dataward")
    if rows[0] is None:
        return Latents(-fixture.output[f"s{case}.video"], -fixture.output[f"s{case}.audio"])
    return Latents(unpatchify(rows[0], latents_of(fixture).size), unpack_audio(rows[1]))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["dit_t2va", "dit_t2va_diffusers_keys", "dit_adaln_curve", "dit_adaln_rank"])
def test_every_weight_has_an_effect_beyond_the_tolerance(name: str) -> None:
    fixture = golden(name)
    case = num_cases(fixture) - 1  # the first is pure noise, where half of the time embedding is zero
    expected = reference(fixture, case)

    def matches(weights: Mapping[str, torch.Tensor]) -> bool:
        model = model_of(fixture, weights)
        result = velocity(model, prepared(model, fixture), latents_of(fixture), *times_of(fixture, case))
        return all(torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in zip(result, expected, strict=True))

    assert matches(fixture.weights)
    assert list(without_effect(fixture.weights, matches)) == []
