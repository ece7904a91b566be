"""Latents to pictures and sound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..h3.audio_vae import normalise_loudness
from ..h3.config import AudioVAEConfig
from ..h3.windows import decode_plan
from ..memory.component import Component
from ..memory.handle import Handle
from .demand import Demand, GraphSizes
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
        """The decoder runs once a tile of each window. Activations: one such call, the canvas of a window, all frames."""
        config, size = component.module.config, sizes.latent(inputs.get("latent"))
        pixels = size.height * size.width * config.spatial_ratio**2
        plan = decode_plan(size.frames, config)
        tile = min(config.tile_size // config.spatial_ratio, size.height) * min(
            config.tile_size // config.spatial_ratio, size.width
        )
        tokens = config.window_length * tile
        call = tokens * config.decoder_width * (6 + 4 * config.decoder_ffn_mult)
        canvas = 2 * config.window_length * config.temporal_ratio * 3 * pixels
        frames = plan.num_frames * 3 * pixels
        return Demand(frozenset({"decoder"}), plan.num_windows, (), 4 * (call + canvas + frames), may_stream=False)

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
            frames = _joined(chunks, decode_plan(video.shape[2], model.config).num_frames)
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
        """One pass. Activations as reserved for this decoder elsewhere (VAE spec, section 2.3)."""
        samples = sizes.latent(inputs.get("latent")).audio * component.module.config.hop_length
        width = component.module.config.decoder_dim / AudioVAEConfig.decoder_dim
        return Demand(frozenset({"decoder"}), activation_bytes=round(4 * 220 * samples * width), may_stream=False)

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


def _joined(chunks: Iterator[torch.Tensor], num_frames: int) -> torch.Tensor:
    """The chunks in one tensor on the CPU, never held twice."""
    first = next(chunks)
    frames = torch.empty(num_frames, *first.shape[1:])
    done = 0
    for chunk in itertools.chain([first], chunks):
        frames[done : done + len(chunk)] = chunk
        done += len(chunk)
    return frames


def _stream(latent: dict[str, Any], index: int) -> torch.Tensor:
    samples = latent["samples"]
    return samples.unbind()[index] if getattr(samples, "is_nested", False) else samples
