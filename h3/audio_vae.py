"""The audio VAE: waveforms to normalised latents and back, each channel on its own (VAE spec, section 2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .audio_decoder import AudioDecoder, OnStage
from .audio_encoder import AudioEncoder, ProjectionHead
from .config import AudioVAEConfig


class AudioVAE(nn.Module):
    """Latents are normalised, fp32 [B, C, 2, T] with 40 latent frames a second; waveforms are fp32 [B, 2, samples] in [-1, 1]."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "encoder": ("encoder.", "pre_block.", "mean_proj.", "latents_"),
        "decoder": ("decoder.", "dec_in_proj.", "latents_"),
    }
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {"decode": ("decoder",), "encode": ("encoder",)}
    REPEATED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.encoder = AudioEncoder(config)
        self.pre_block = ProjectionHead(config)
        self.mean_proj = nn.Conv1d(channels, channels, 1)
        self.dec_in_proj = nn.Conv1d(channels, config.latent_dim, 1)
        self.decoder = AudioDecoder(config)
        self.register_buffer("latents_mean", torch.zeros(channels))
        self.register_buffer("latents_std", torch.ones(channels))

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        """Always fp32: decoded in bf16 the sound is some 20 dB quieter."""
        return torch.float32

    def decode(self, latents: Tensor, *, on_stage: OnStage | None = None) -> Tensor:
        """Latents [B, C, 2, T] to a waveform [B, 2, hop T]. ``on_stage`` is called after each upsampling stage.

        Raises ValueError for another number of channels.
        """
        channels = self.config.latent_channels
        if latents.dim() != 4 or latents.shape[1] != channels or not latents.numel():
            raise ValueError(f"The audio VAE decodes latents [B, {channels}, 2, T], not {list(latents.shape)}.")
        mono = latents.to(self.latents_mean).transpose(1, 2).flatten(0, 1)  # [B 2, C, T]
        features = self.dec_in_proj(mono * self.latents_std[:, None] + self.latents_mean[:, None])
        return self.decoder(features, on_stage).unflatten(0, (len(latents), -1)).squeeze(2)

    def encode(self, waveform: Tensor) -> Tensor:
        """A waveform [B, 2, samples], filled up with zeros to whole latent frames, to the posterior's mean [B, C, 2, T].

        Raises ValueError where there is no sample.
        """
        if waveform.dim() != 3 or not waveform.numel():
            raise ValueError(f"The audio VAE encodes waveforms [B, 2, samples], not {list(waveform.shape)}.")
        mono = waveform.to(self.latents_mean).flatten(0, 1)[:, None]  # [B 2, 1, samples]
        mono = F.pad(mono, (0, -mono.shape[-1] % self.config.hop_length))
        features = self.pre_block(self.encoder(mono).mT).mT
        latents = (self.mean_proj(features) - self.latents_mean[:, None]) / self.latents_std[:, None]
        return latents.unflatten(0, waveform.shape[:2]).transpose(1, 2)


def normalise_loudness(waveform: Tensor) -> Tensor:
    """Each item of [B, channels, samples] over max(1, 5 standard deviations), as ComfyUI's decode node does (section 2.3)."""
    return waveform / (5 * waveform.std(dim=(1, 2), keepdim=True)).clamp(min=1)
