"""The same weights through diffusers' classes and through our nodes: an independent opinion on every component we run.

Needs the extra ``oracle`` (diffusers and transformers), which nothing else of the project does.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy_h3.commands.make_checkpoint import FOLDER
from lazy_h3.h3 import dit
from small_models import folder_prompt, stage, tiny_folder_models

theirs = pytest.importorskip(
    "diffusers_pipeline", reason="needs diffusers and transformers: pip install '.[oracle]'", exc_type=ImportError
)
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")  # diffusers' audio VAE still uses the old one

PROMPT = "A cat on a windowsill says <d>[en] good morning</d>; rain on the glass, für Elise."
TOLERANCE = 1e-5
BF16_ROUNDING = 2.0**-8
REQUESTS = {
    "wide, one chunk": theirs.Request(PROMPT, width=96, height=32, frames=22, steps=3, seed=11),
    "tall, two chunks": theirs.Request(PROMPT, width=32, height=64, frames=39, steps=2, seed=12),
    "two tiles": theirs.Request(PROMPT, width=288, height=32, frames=22, steps=1, seed=13),
}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return theirs.Pipeline(tiny_folder_models() / FOLDER, torch.float32)


@pytest.fixture(scope="module", params=REQUESTS)
def both(request: pytest.FixtureRequest, pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Their results and ours of one request, in our shapes."""
    wanted = REQUESTS[request.param]
    return SimpleNamespace(
        theirs=in_our_shapes(pipeline, wanted), ours=our_results(wanted, "fp32", tmp_path_factory.mktemp("out"))
    )


def in_our_shapes(pipeline: Any, wanted: Any) -> dict[str, torch.Tensor]:
    states = pipeline.encode(wanted.prompt)
    latents = pipeline.sample(states, wanted)
    decoded = pipeline.decode(latents)
    return {
        "states": states,
        "video": latents["latents"],
        "audio": latents["audio_latents"].transpose(0, 1)[None],  # [2, 32, T_a] -> [1, 32, 2, T_a]
        "frames": decoded["videos"][0].permute(0, 2, 3, 1),  # [F, 3, H, W] -> [F, H, W, 3]
        "waveform": decoded["audio"],
    }


def our_results(wanted: Any, dtype: str, out: Path) -> dict[str, torch.Tensor]:
    prompt = folder_prompt(Path(FOLDER).name, our_widgets(wanted, dtype))
    with stage(out, tiny_folder_models()) as running:
        running.succeed({**prompt, "states": {"class_type": "Keep", "inputs": {"value": ["5", 0]}}})
        kept = running.kept
    video, audio = kept["latent"]["samples"].unbind()
    waveform = kept["audio"]["waveform"]
    return {"states": kept["states"][0][0], "video": video, "audio": audio, "frames": kept["images"], "waveform": waveform}


def our_widgets(wanted: Any, dtype: str) -> dict[str, Any]:
    return {
        "1.dtype": dtype,
        "5.prompt": wanted.prompt,
        "6.width": wanted.width,
        "6.height": wanted.height,
        "6.duration": wanted.frames,
        "7.steps": wanted.steps,
        "7.seed": wanted.seed,
        "7.noise": "official",
    }


@pytest.mark.parametrize("result", ["states", "video", "audio", "frames", "waveform"])
def test_in_fp32_diffusers_and_we_agree(both: SimpleNamespace, result: str) -> None:
    torch.testing.assert_close(both.ours[result], both.theirs[result], rtol=TOLERANCE, atol=TOLERANCE)


def latent_errors(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[float]:
    """Relative, by norm, of both streams."""
    return [((ours[s] - reference[s]).norm() / reference[s].norm()).item() for s in ("video", "audio")]


def test_in_bf16_only_our_fused_multiply_adds_make_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and rotary turns multiply and add in one rounding here, and in two there; all else is cast at the same points."""
    wanted = REQUESTS["wide, one chunk"]
    reference = in_our_shapes(theirs.Pipeline(tiny_folder_models() / FOLDER, torch.bfloat16), wanted)
    fused = latent_errors(our_results(wanted, "bf16", tmp_path / "fused"), reference)
    assert max(fused) < 4 * BF16_ROUNDING
    monkeypatch.setattr(dit, "add_gated_", add_gated_in_two_roundings)
    monkeypatch.setattr(dit, "rotate_", rotate_in_two_roundings)
    unfused = latent_errors(our_results(wanted, "bf16", tmp_path / "unfused"), reference)
    assert max(unfused) < TOLERANCE < min(fused)


def add_gated_in_two_roundings(x: torch.Tensor, branch: torch.Tensor, modulation: Any, runs: Any) -> torch.Tensor:
    for rows, time, tag in runs:
        x[rows] += modulation.gate[time, tag] * branch[rows]
    return x


def rotate_in_two_roundings(x: torch.Tensor, rotary: Any) -> None:
    half = rotary.cos.shape[-1]
    first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
    x[..., :half] = first * rotary.cos - second * rotary.sin
    x[..., half : 2 * half] = second * rotary.cos + first * rotary.sin
