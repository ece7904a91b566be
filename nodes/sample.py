"""The empty audio-video latent and the sampler."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..h3 import activations, geometry, sampling
from ..h3.config import FPS, STEREO, DiTConfig
from ..memory.component import Component
from ..memory.device import pool_status
from ..memory.graph import link_of
from ..memory.handle import Handle
from ..memory.units import shown_bytes
from .demand import FP32, Demand, GraphSizes
from .load import CATEGORY, of_kind
from .runtime import runtime

CANVAS_MULTIPLE = 32
TRAINED_SECONDS = (5.0, 15.1)
NOISES = {"comfy": sampling.comfy_noise, "official": sampling.official_noise}
SCHEDULES = {"official": sampling.Schedule.official, "simple": sampling.Schedule.comfy_simple}
SCHEDULE_INPUTS = ("steps", "video_shift", "audio_shift", "schedule", "denoise")
STEPS = 49  # of the official pipeline
MAX_SEED = 0xFFFFFFFFFFFFFFFF

log = logging.getLogger("lazy_h3")


class LazyH3EmptyLatent:
    """Width, height and duration to a latent of zeros on the model's grids."""

    CATEGORY = CATEGORY
    DESCRIPTION = (
        "An empty latent for video and sound. Durations snap up to the model's frame grid; the info output says to what."
    )
    FUNCTION = "make"
    RETURN_TYPES = ("LATENT", "INT", "STRING")
    RETURN_NAMES = ("latent", "frames", "info")
    OUTPUT_TOOLTIPS = ("Core's nested audio-video latent.", "Number of video frames.", "What was asked for and what it becomes.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"min": 32, "max": 16384, "step": CANVAS_MULTIPLE}
        return {
            "required": {
                "width": ("INT", {"default": 1344, **side, "tooltip": "Pixels, rounded down to a multiple of 32."}),
                "height": ("INT", {"default": 768, **side, "tooltip": "Pixels, rounded down to a multiple of 32."}),
                "duration": (
                    "FLOAT",
                    {
                        "default": 5.0,
                        "min": 0.1,
                        "max": 3600.0,
                        "step": 0.1,
                        "tooltip": "In the unit below. Trained: 5 to 15 seconds.",
                    },
                ),
                "unit": (["seconds", "frames"], {"default": "seconds", "tooltip": "24 frames are one second."}),
            }
        }

    @classmethod
    def latent_size(cls, width: int, height: int, duration: float, unit: str = "seconds") -> geometry.LatentSize:
        """What these widget values deliver."""
        frames = geometry.frames_of_duration(duration) if unit == "seconds" else geometry.aligned_frames(round(duration))
        return geometry.LatentSize.of_clip(frames, _snapped(height), _snapped(width))

    def make(self, width: int, height: int, duration: float, unit: str) -> tuple[dict[str, Any], int, str]:
        """Zeros: video [1, 24, T, H/16, W/16] and audio [1, 32, 2, T_a]. Raises ValueError for more than the machine has."""
        runtime().attachment.touch()
        size = self.latent_size(width, height, duration, unit)
        frames = geometry.pixel_frames(size.frames)
        model = DiTConfig()
        shape = (1, model.in_channels, size.frames, size.height, size.width)
        _check_fits(shape, f"{width} x {height} and {duration:g} {unit}")
        video, audio = torch.zeros(shape), torch.zeros(1, model.audio_in_channels, STEREO, size.audio)
        info = _delivery(f"{width} x {height}, {duration:g} {unit}", _snapped(width), _snapped(height), frames)
        return {"samples": runtime().host.nested_latent(video, audio)}, frames, info


class LazyH3Sampler:
    """Both streams from noise to clean latents, with the official Euler steps."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Samples video and sound together. The diffusion transformer is read now and freed after the last sampler."
    USES = "dit"
    TAKES_TURNS = True
    FUNCTION = "sample"
    RETURN_TYPES = ("LATENT",)
    RETURN_NAMES = ("latent",)
    OUTPUT_TOOLTIPS = ("The clean audio-video latent.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        shift = {"min": 0.1, "max": 100.0, "step": 0.1}
        return {
            "required": {
                "dit": ("LAZYH3_DIT", {"tooltip": "From a DiT loader."}),
                "positive": ("CONDITIONING", {"tooltip": "The encoded prompt. H3 is guidance-distilled: there is no negative."}),
                "latent": ("LATENT", {"tooltip": "An audio-video latent; its shape is the size of the result."}),
                "seed": (
                    "INT",
                    {"default": 0, "min": 0, "max": MAX_SEED, "control_after_generate": True, "tooltip": "Seed of the noise."},
                ),
                "steps": (
                    "INT",
                    {"default": STEPS, "min": 1, "max": 1000, "tooltip": "Evaluations of the model. The official default is 49."},
                ),
            },
            "optional": {
                "video_shift": (
                    "FLOAT",
                    {"default": sampling.VIDEO_SHIFT, **shift, "tooltip": "Bends the video's noise schedule."},
                ),
                "audio_shift": (
                    "FLOAT",
                    {"default": sampling.AUDIO_SHIFT, **shift, "tooltip": "Bends the sound's noise schedule."},
                ),
                "schedule": (
                    list(SCHEDULES),
                    {"tooltip": "official: MiniMax's grid. simple: ComfyUI's table of 1000 noise levels."},
                ),
                "noise": (list(NOISES), {"tooltip": "Whose order of drawing noise: decides which pictures a seed means."}),
                "denoise": (
                    "FLOAT",
                    {
                        "default": 1.0,
                        "min": 0.01,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "Below 1: start from the latent's contents.",
                    },
                ),
            },
        }

    @classmethod
    def demand(cls, inputs: Mapping[str, Any], sizes: GraphSizes, component: Component) -> Demand:
        """As many passes as steps, at the clean-times of the schedule."""
        config, size = component.module.config, sizes.latent(inputs.get("latent"))
        num_steps, points = _expected(inputs, sizes)
        return Demand(
            component.parts,
            num_steps,
            points,
            activations.sampling(config, sizes.tokens(inputs.get("positive")), size, component.compute.itemsize),
            _latent_bytes(config, size),
        )

    async def sample(
        self,
        dit: Handle,
        positive: list[Any],
        latent: dict[str, Any],
        seed: int,
        steps: int,
        video_shift: float = sampling.VIDEO_SHIFT,
        audio_shift: float = sampling.AUDIO_SHIFT,
        schedule: str = "official",
        noise: str = "comfy",
        denoise: float = 1.0,
    ) -> tuple[dict[str, Any]]:
        """The latent with both streams sampled, fp32 on the CPU. Raises ValueError for inputs that are not H3's."""
        shared = runtime()
        of_kind(dit, "dit")
        await shared.attachment.turn()
        states, options = _only_condition(positive, dit.config)
        start = _streams(latent, dit.config)
        plan = _schedule(steps, video_shift, audio_shift, schedule, denoise)
        report = shared.progress(plan.num_steps)
        hints = {"num_passes": plan.num_steps, "points": plan.clean_times}
        with dit.use(node=shared.host.executing(), **hints) as model, torch.inference_mode():
            draw = NOISES[noise](start.video.shape, start.audio.shape, torch.Generator().manual_seed(seed))
            result = sampling.sample(
                model,
                states,
                options.get("minimax_token_tags"),
                draw,
                plan,
                start=start if denoise < 1 else None,
                on_step=lambda done, total, _: report(done, total),
            )
        _warn_unless_finite(result, dit)
        return ({**latent, "samples": shared.host.nested_latent(result.video, result.audio)},)


def _schedule(
    steps: int,
    video_shift: float = sampling.VIDEO_SHIFT,
    audio_shift: float = sampling.AUDIO_SHIFT,
    schedule: str = "official",
    denoise: float = 1.0,
) -> sampling.Schedule:
    """The last ``steps`` of as many more as ``denoise`` leaves out."""
    return SCHEDULES[schedule](max(steps, round(steps / denoise)), video_shift, audio_shift, last=steps)


def _expected(inputs: Mapping[str, Any], sizes: GraphSizes) -> tuple[int, tuple[float, ...] | None]:
    """Steps and clean-times, as far as they are known before the run."""
    values = {name: inputs[name] for name in SCHEDULE_INPUTS if name in inputs}
    if any(link_of(value) is not None for value in values.values()):
        sizes.guesses.append(f"a schedule of computed values is taken for {STEPS} steps, and nothing is folded for it")
        return STEPS, None
    plan = _schedule(**values)
    return plan.num_steps, plan.clean_times


def _latent_bytes(config: DiTConfig, size: geometry.LatentSize) -> int:
    """Both streams."""
    video = config.in_channels * size.frames * size.height * size.width
    return FP32 * (video + config.audio_in_channels * STEREO * size.audio)


def _warn_unless_finite(result: sampling.Latents, dit: Handle) -> None:
    if not all(stream.isfinite().all() for stream in result):
        compute = str(dit.component.compute).removeprefix("torch.")
        log.warning(
            "Lazy H3: the latent holds NaN or infinite values: %s overflows in %s or its file is damaged; "
            "choose fp32 in its loader, or download it again.",
            dit.component.name,
            compute,
        )


def _check_fits(shape: tuple[int, ...], asked: str) -> None:
    """Raises ValueError for a latent larger than the machine's memory."""
    nbytes, total = FP32 * math.prod(shape), pool_status(torch.device("cpu")).total
    if nbytes > total:
        raise ValueError(
            f"A latent for {asked} takes {shown_bytes(nbytes)}, more than the memory of this machine ({shown_bytes(total)}); "
            "choose a smaller picture or a shorter clip."
        )


def _snapped(side: int) -> int:
    return max(CANVAS_MULTIPLE, side // CANVAS_MULTIPLE * CANVAS_MULTIPLE)


def _delivery(asked: str, width: int, height: int, frames: int) -> str:
    seconds = frames / FPS
    low, high = TRAINED_SECONDS
    note = "" if low <= seconds <= high else " The model was trained on 5 to 15 seconds."
    return f"Asked for {asked}; makes {width} x {height}, {frames} frames ({seconds:.2f} s).{note}"


def _only_condition(positive: list[Any], config: DiTConfig) -> tuple[torch.Tensor, dict[str, Any]]:
    if len(positive) != 1:
        raise ValueError(f"The sampler takes one condition, and {len(positive)} are combined; H3 has no way to mix them.")
    states, options = positive[0]
    unsupported = [name for name in ("minimax_keyframes", "minimax_refs") if options.get(name)]
    if unsupported:
        raise ValueError(f"The condition holds {unsupported[0]}, which this sampler does not take yet; use a text prompt alone.")
    if states.shape[-1] != config.text_dim:
        raise ValueError(
            f"The condition has {states.shape[-1]} numbers a token, but this diffusion model takes {config.text_dim}; "
            "encode the prompt with the text encoder that belongs to it."
        )
    return states, options


def _streams(latent: dict[str, Any], config: DiTConfig) -> sampling.Latents:
    samples = latent["samples"]
    if not getattr(samples, "is_nested", False):
        raise ValueError("The latent holds no sound; use the node Empty audio-video latent (Lazy H3) or core's for MiniMax-H3.")
    if latent.get("noise_mask") is not None:
        raise ValueError("The latent has a noise mask, which this sampler does not take yet; remove the mask.")
    video, audio = samples.unbind()[:2]
    if len(video) != 1:
        raise ValueError(f"The latent is a batch of {len(video)}; H3 makes one clip at a time.")
    _check_shape("video", video, 1, config.in_channels, "T", "h", "w")
    _check_shape("sound", audio, 1, config.audio_in_channels, STEREO, "T")
    return sampling.Latents(video.float().cpu(), audio.float().cpu())


def _check_shape(stream: str, latent: torch.Tensor, *expected: int | str) -> None:
    """Sizes that are names in ``expected`` may be anything."""
    pairs = zip(latent.shape, expected, strict=False)
    if latent.dim() != len(expected) or any(size != wanted for size, wanted in pairs if isinstance(wanted, int)):
        raise ValueError(
            f"The latent's {stream} has the shape {list(latent.shape)}, but this diffusion model makes "
            f"[{', '.join(map(str, expected))}]; use the node Empty audio-video latent (Lazy H3)."
        )
