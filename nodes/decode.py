"""Latents to pictures and sound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..h3 import activations
from ..h3.audio_vae import normalise_loudness
from ..h3.config import STEREO, VideoVAEConfig
from ..h3.windows import decode_plan
from ..memory.component import Component
from ..memory.handle import Handle
from .demand import FP32, Demand, GraphSizes
from .load import CATEGORY, of_kind
from .runtime import runtime

RULES = ["raw", "composited"]
SINGLE_FRAMES = ["padded", "comfy"]


class LazyH3DecodeVideo:
    """Video latents to IMAGE, window by window."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Decodes the video. Only the VAE's decoder is read; it is freed after the last decode."
    USES = "video_vae"
    TAKES_TURNS = True
    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("images",)
    OUTPUT_TOOLTIPS = ("All frames, 24 a second.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "video_vae": ("LAZYH3_VIDEO_VAE", {"tooltip": "From a video VAE loader."}),
                "latent": ("LATENT", {"tooltip": "An audio-video latent, or a video latent alone."}),
            },
            "optional": {
                "tile_blending": (RULES, {"tooltip": "raw: as the official decoder. composited: smoother where tiles cross."}),
                "single_frame": (
                    SINGLE_FRAMES,
                    {"tooltip": "For a lone latent frame. padded: with context. comfy: as core decodes it."},
                ),
            },
        }

    @classmethod
    def demand(cls, inputs: Mapping[str, Any], sizes: GraphSizes, component: Component) -> Demand:
        """The decoder runs once a tile of each window; all frames stay."""
        config, size = component.module.config, sizes.latent(inputs.get("latent"))
        plan = decode_plan(size.frames, config)
        frame = size.height * size.width * config.spatial_ratio**2 * config.in_channels
        return Demand(
            frozenset({"decoder"}),
            plan.num_windows,
            activation_bytes=activations.video_decoding(config, size, component.compute.itemsize),
            output_bytes=FP32 * plan.num_frames * frame,
            may_stream=False,
        )

    async def decode(
        self, video_vae: Handle, latent: dict[str, Any], tile_blending: str = "raw", single_frame: str = "padded"
    ) -> tuple[torch.Tensor]:
        """Frames [F, H, W, 3] in [0, 1], fp32 on the CPU."""
        shared = runtime()
        of_kind(video_vae, "video_vae")
        await shared.attachment.turn()
        video = _stream(latent, 0)
        report = shared.progress(1)
        with video_vae.use("decoder", node=shared.host.executing()) as model, torch.inference_mode():
            chunks = model.decode_stream(video, rule=tile_blending, single_frame=single_frame, on_window=report)
            frames = torch.empty(_frames_shape(video, model.config))
            _fill(frames, chunks)
        return (frames,)


class LazyH3DecodeAudio:
    """Audio latents to AUDIO."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Decodes the sound. Only the VAE's decoder is read; it is freed after the last decode."
    USES = "audio_vae"
    TAKES_TURNS = True
    FUNCTION = "decode"
    RETURN_TYPES = ("AUDIO",)
    RETURN_NAMES = ("audio",)
    OUTPUT_TOOLTIPS = ("Stereo, 32 kHz.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "audio_vae": ("LAZYH3_AUDIO_VAE", {"tooltip": "From an audio VAE loader."}),
                "latent": ("LATENT", {"tooltip": "An audio-video latent, or an audio latent alone."}),
            },
            "optional": {
                "limit_loudness": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "Quieten loud clips as core's audio decode node does."},
                ),
            },
        }

    @classmethod
    def demand(cls, inputs: Mapping[str, Any], sizes: GraphSizes, component: Component) -> Demand:
        """One pass; the sound stays."""
        config, num_latents = component.module.config, sizes.latent(inputs.get("latent")).audio
        return Demand(
            frozenset({"decoder"}),
            activation_bytes=activations.audio_decoding(config, num_latents),
            output_bytes=FP32 * STEREO * num_latents * config.hop_length,
            may_stream=False,
        )

    async def decode(self, audio_vae: Handle, latent: dict[str, Any], limit_loudness: bool = False) -> tuple[dict[str, Any]]:
        """{"waveform": [1, 2, samples] fp32 on the CPU, "sample_rate": Hz}."""
        shared = runtime()
        of_kind(audio_vae, "audio_vae")
        await shared.attachment.turn()
        audio = _stream(latent, -1)
        report = shared.progress(1)
        with audio_vae.use("decoder", node=shared.host.executing()) as model, torch.inference_mode():
            waveform = model.decode(audio, on_stage=report).cpu()
        if limit_loudness:
            waveform = normalise_loudness(waveform)
        return ({"waveform": waveform, "sample_rate": audio_vae.config.sampling_rate},)


def _frames_shape(latent: torch.Tensor, config: VideoVAEConfig) -> tuple[int, ...]:
    height, width = (side * config.spatial_ratio for side in latent.shape[3:])
    return decode_plan(latent.shape[2], config).num_frames, height, width, config.in_channels


def _fill(frames: torch.Tensor, chunks: Iterator[torch.Tensor]) -> None:
    """Copy the chunks into the frames, one after the other."""
    done = 0
    for chunk in chunks:
        frames[done : done + len(chunk)] = chunk
        done += len(chunk)
        del chunk  # or it would outlive the decoding of the next one


def _stream(latent: dict[str, Any], index: int) -> torch.Tensor:
    samples = latent["samples"]
    return samples.unbind()[index] if getattr(samples, "is_nested", False) else samples
