"""Text to video as diffusers and transformers do it: their classes, their loading, their pipeline blocks; nothing of ours.

Two departures from the shipped pipeline, both forced. The text encoder is cut to the layers that condition the model: diffusers'
own helper insists on one layer more than it uses, which our folders do not hold. And the shortest duration, which is that of the
training, is lifted, so that a test can be short.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3 import before_denoise, decoders, denoise
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.video_processor import VideoProcessor
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLModel

NUM_LAYERS = 50
SAMPLING = (
    before_denoise.MiniMaxH3NoKeyframeAnchorsStep,
    before_denoise.MiniMaxH3PrepareLayoutStep,
    before_denoise.MiniMaxH3PrepareLatentsStep,
    before_denoise.MiniMaxH3SetTimestepsStep,
    denoise.MiniMaxH3DenoiseStep,
    decoders.MiniMaxH3AfterDenoiseStep,
)
DECODING = (decoders.MiniMaxH3VideoDecodeStep, decoders.MiniMaxH3AudioDecodeStep)
FACTS = {  # what a pipeline says of MiniMax-H3
    "vae_spatial_compression_ratio": 16,
    "vae_latent_channels": 24,
    "vae_frames_per_chunk": 17,
    "vae_latents_per_chunk": 5,
    "patch_size": (1, 2, 2),
    "canvas_multiple": 32,
    "audio_sampling_rate": 32000,
    "audio_latent_channels": 32,
    "audio_channels": 2,
    "fps": 24,
    "min_duration": 0.0,
    "max_duration": 15.0,
    "pixel_mean": (0.485, 0.456, 0.406),
    "pixel_std": (0.229, 0.224, 0.225),
    "keyframe_noise_aug": 0.999,
    "video_tag": 0,
    "audio_tag": 2,
    "_execution_device": torch.device("cpu"),
}


@dataclass(frozen=True)
class Request:
    """``steps``: evaluations of the transformer."""

    prompt: str
    width: int
    height: int
    frames: int
    steps: int
    seed: int


class Pipeline:
    """All components of a folder in the Hugging Face layout, in memory at once, as a pipeline holds them.

    ``dtype``: of the text encoder and the transformer; what the classes keep in fp32 stays so, and the VAEs are fp32.
    ``disable_mmap``: read the files into memory, instead of using their pages as weights where no conversion is needed.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, disable_mmap: bool = False) -> None:
        def loaded(cls: Any, subfolder: str, dtype: torch.dtype) -> nn.Module:
            return cls.from_pretrained(folder / subfolder, torch_dtype=dtype, disable_mmap=disable_mmap)

        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer" / "tokenizer.json"))
        self._text_encoder = _text_encoder(folder / "text_encoder", dtype, disable_mmap)
        self._components = SimpleNamespace(
            **FACTS,
            transformer=loaded(MiniMaxH3Transformer3DModel, "transformer", dtype),
            vae=loaded(AutoencoderKLMiniMaxH3, "vae", torch.float32),
            audio_vae=loaded(AutoencoderKLMiniMaxH3Audio, "audio_vae", torch.float32),
            scheduler=MiniMaxH3Scheduler(shift=12.0),
            audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
            video_processor=VideoProcessor(vae_scale_factor=16, do_normalize=False),
        )

    @property
    def weight_bytes(self) -> int:
        """Of all components."""
        modules = (self._text_encoder, *(m for m in vars(self._components).values() if isinstance(m, nn.Module)))
        return sum(weight.numel() * weight.element_size() for module in modules for weight in module.parameters())

    @torch.inference_mode()
    def encode(self, prompt: str) -> Tensor:
        """Hidden states [1, L, text_dim] after the last layer, before any norm."""
        ids = torch.tensor([self._tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        return self._text_encoder(input_ids=ids, use_cache=False).last_hidden_state

    def sample(self, states: Tensor, request: Request) -> dict[str, Tensor]:
        """Latents: ``latents`` [1, 24, T, h, w] and ``audio_latents`` [2, 32, T_a], fp32 and normalised."""
        given = {
            "prompt_embeds": states,
            "text_token_tags": torch.ones(states.shape[1], dtype=torch.long),
            "width": request.width,
            "height": request.height,
            "num_frames": request.frames,
            "num_inference_steps": request.steps + 1,  # it counts points of the schedule
            "generator": torch.Generator().manual_seed(request.seed),
        }
        return self._run(SAMPLING, given, "latents", "audio_latents")

    def decode(self, latents: dict[str, Tensor]) -> dict[str, Tensor]:
        """``videos`` [1, F, 3, H, W] in [0, 1] and ``audio`` [1, 2, samples]."""
        return self._run(DECODING, {**latents, "output_type": "pt"}, "videos", "audio")

    def _run(self, blocks: tuple[type, ...], given: dict[str, Any], *wanted: str) -> dict[str, Tensor]:
        state = PipelineState()
        for name, value in given.items():
            state.set(name, value)
        for block in blocks:
            _, state = block()(self._components, state)
        return {name: state.get(name) for name in wanted}


def _text_encoder(folder: Path, dtype: torch.dtype, disable_mmap: bool) -> nn.Module:
    """The states that condition the model come before the final norm, which a model cut to these layers would apply."""
    config = Qwen3VLConfig.from_dict(json.loads((folder / "config.json").read_text()))
    config.text_config.num_hidden_layers = NUM_LAYERS
    model = Qwen3VLModel.from_pretrained(folder, config=config, dtype=dtype, disable_mmap=disable_mmap)
    model.language_model.norm = nn.Identity()
    return model.eval()
