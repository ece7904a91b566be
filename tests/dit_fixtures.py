"""The golden transformers as models of ours, and their inputs as requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from golden_files import Fixture, assembled, described
from lazy_h3.h3.dit import DiT, Request
from lazy_h3.h3.formats import Layout
from lazy_h3.h3.formats.dit import recognise
from lazy_h3.h3.geometry import LatentSize
from lazy_h3.h3.packing import Keyframe, PackedLayout, Reference, pack
from lazy_h3.h3.sampling import Latents, audio_sigmas
from torch import Tensor

NOT_IN_SHAPES = ("patch_size", "norm_eps", "qk_norm_eps", "final_norm_eps", "rope_theta", "rope_freq_dim")


def recognised(fixture: Fixture, weights: Mapping[str, Tensor] | None = None) -> Layout:
    """Sizes from the shapes; what they do not tell through the header's ``config`` entry, under its Hugging Face names."""
    stated = {key: fixture.config[key] for key in NOT_IN_SHAPES if key in fixture.config}
    if "rope_inv_freq_len" in fixture.config:
        stated["rope_freq_dim"] = fixture.config["rope_inv_freq_len"]
    metadata = {"config": json.dumps({"transformer": stated})}
    layout = recognise(described(fixture.weights if weights is None else weights), metadata, None)
    assert layout is not None
    return layout


def model_of(fixture: Fixture, weights: Mapping[str, Tensor] | None = None, compute: torch.dtype = torch.float32) -> DiT:
    weights = fixture.weights if weights is None else weights
    return assembled(recognised(fixture, weights), weights, compute)


def latents_of(fixture: Fixture) -> Latents:
    return Latents(fixture.input["video"], fixture.input["audio"])


def states_of(fixture: Fixture) -> Tensor:
    return fixture.input["context"]


def tags_of(fixture: Fixture) -> Tensor:
    return fixture.input.get("text_token_tags", torch.ones(states_of(fixture).shape[1], dtype=torch.long))


def layout_of(fixture: Fixture) -> PackedLayout:
    return pack(
        tags_of(fixture),
        latents_of(fixture).size.padded,
        [_keyframe(i, entry, fixture) for i, entry in enumerate(_listed(fixture, "keyframes"))],
        [reference_of(entry) for entry in _listed(fixture, "refs")],
        visual_condition_time=float(fixture.metadata.get("visual_cond_noise_aug", 0.999)),
        audio_condition_time=float(fixture.metadata.get("audio_cond_noise_aug", 1.0)),
    )


def reference_of(entry: Mapping[str, Any]) -> Reference:
    frames = 0 if entry["kind"] == "audio" else entry.get("latent_t", 1)
    size = LatentSize(frames, entry.get("latent_h", 0), entry.get("latent_w", 0), entry.get("ref_audio_t", 0))
    return Reference(size, is_image=entry["kind"] == "image")


def prepared(model: DiT, fixture: Fixture) -> Request:
    return model.prepare(states_of(fixture), layout_of(fixture))


def times_of(fixture: Fixture, case: int) -> tuple[float, float]:
    """Clean-times of video and audio in case ``s{case}``."""
    sigma = fixture.input["sigma_video"][case : case + 1]
    shifts = fixture.config.get("sigma_shift_video", 12.0), fixture.config.get("sigma_shift_audio", 3.0)
    return float(1 - sigma), float(1 - audio_sigmas(sigma, *shifts))


def num_cases(fixture: Fixture) -> int:
    return len(fixture.input["sigma_video"])


def _listed(fixture: Fixture, key: str) -> list[dict[str, Any]]:
    return json.loads(fixture.metadata.get(key, "[]"))


def _keyframe(number: int, entry: Mapping[str, Any], fixture: Fixture) -> Keyframe:
    latent, audio = (fixture.input.get(f"keyframe{number}.{name}") for name in ("latent", "audio_latent"))
    return Keyframe(
        entry["resolved_frame_index"], 0 if latent is None else latent.shape[2], 0 if audio is None else audio.shape[-1]
    )
