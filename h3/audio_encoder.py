"""The audio VAE's encoder: a strided 1D CNN and a head of one causal attention (VAE spec, section 2.1)."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import attention
from .config import AudioVAEConfig

DILATIONS = (1, 3, 9)
EPS = 1e-9


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha per channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha * x).sin().square() / (self.alpha + EPS)


class ResidualUnit(nn.Module):
    """A dilated and a pointwise convolution, each after a Snake, beside the identity."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels),
            nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation),
            Snake(channels),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class EncoderBlock(nn.Module):
    """Three residual units, then a strided convolution to twice the channels."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.block = nn.Sequential(
            *(ResidualUnit(channels, dilation) for dilation in DILATIONS),
            Snake(channels),
            nn.Conv1d(channels, 2 * channels, 2 * stride, stride, padding=ceil(stride / 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class AudioEncoder(nn.Module):
    """Mono samples [B, 1, hop T] to features [B, latent_dim, T]."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        widths = [config.encoder_dim * 2**level for level in range(len(config.encoder_rates) + 1)]
        self.block = nn.Sequential(
            nn.Conv1d(1, widths[0], 7, padding=3),
            *map(EncoderBlock, widths, config.encoder_rates),
            Snake(widths[-1]),
            nn.Conv1d(widths[-1], config.latent_dim, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class CausalAttention(nn.Module):
    """Each step sees itself and those before it. Heads are averaged, not joined, then pooled to the latent's channels."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        width, channels = config.latent_dim, config.latent_channels
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x) + torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        mean = attention(q, k, v, is_causal=True).mean(dim=1)
        return self.proj(F.adaptive_avg_pool1d(mean, self.proj.in_features))


class GatedMLP(nn.Module):
    """A second norm, then w2(gelu(w0 x) w1 x)."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.w0 = nn.Linear(channels, 2 * channels)
        self.w1 = nn.Linear(channels, 2 * channels)
        self.w2 = nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(F.gelu(self.w0(x), approximate="tanh") * self.w1(x))


class ProjectionHead(nn.Module):
    """Features [B, T, latent_dim] to [B, T, latent_channels]."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        width, channels = config.latent_dim, config.latent_channels
        self.norm1 = nn.LayerNorm(width)
        self.attn = CausalAttention(config)
        self.norm3 = nn.LayerNorm(width)
        self.proj = nn.Linear(width, channels)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = GatedMLP(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.norm3(x)) + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))
