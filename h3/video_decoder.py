"""The video VAE's decoder: a full-attention transformer over one window of latent voxels (VAE spec, section 1.5)."""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import attention
from .config import VideoVAEConfig
from .rotary import inverse_frequencies, rotated

Rotary = tuple[Tensor, Tensor]  # cosines and sines [N, R / 2], for the first R channels of a head


def window_positions(frames: int, height: int, width: int, num_suffix: int) -> Tensor:
    """Coordinates (t, h, w) of each token, fp32 [N, 3]: centres of equal cells of [-1, 1] on each axis, then 0 for the suffix."""
    axes = [(torch.arange(size, dtype=torch.float32, device="cpu") + 0.5) * 2 / size - 1 for size in (frames, height, width)]
    patches = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
    return F.pad(patches, (0, 0, 0, num_suffix))


@lru_cache(maxsize=16)
def rotary_angles(config: VideoVAEConfig, frames: int, height: int, width: int) -> Tensor:
    """Angles [N, 3 n] of a window in fp32: for n frequencies those of t, then of h, then of w."""
    positions = window_positions(frames, height, width, config.decoder_num_register_tokens + 1)
    num_frequencies = int(config.decoder_attention_head_dim * config.decoder_rope_dim_ratio) // 6
    frequencies = inverse_frequencies(2 * num_frequencies, config.decoder_rope_theta)
    return (2 * pi * positions[:, :, None] * frequencies).flatten(1)


class RMSNorm(nn.Module):
    """Root mean square norm in the dtype of its weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Full attention; q and k have norms without weights, taken in fp32 before the rotation."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        width = config.decoder_width
        self.num_heads = config.decoder_num_attention_heads
        self.eps = config.decoder_norm_eps
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x.to(self.to_qkv.weight.dtype)
        qkv = self.to_qkv(x).unflatten(-1, (self.num_heads, 3, -1))  # rows of the weight: per head q, k, v
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [B, H, N, D]
        q, k = (self._turned(u, rotary).to(v.dtype) for u in (q, k))
        return self.to_out(attention(q, k, v).transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Normalised in fp32; the first R channels of each head then rotate, the rest does not."""
        cos, sin = rotary
        x = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        num_rotary = 2 * cos.shape[-1]
        return torch.cat([rotated(x[..., :num_rotary], cos, sin), x[..., num_rotary:]], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU; ``w1`` holds the gate, then the value."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(width, 2 * hidden)
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w1(x.to(self.w1.weight.dtype)).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and scaled per channel after."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        width = config.decoder_width
        self.norm1 = RMSNorm(width, config.decoder_norm_eps)
        self.attn = Attention(config)
        self.scale1 = nn.Parameter(torch.ones(width))
        self.norm2 = RMSNorm(width, config.decoder_norm_eps)
        self.ff = FeedForward(width, width * config.decoder_ffn_mult)
        self.scale2 = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.scale1 * self.attn(self.norm1(x), rotary)
        return x + self.scale2 * self.ff(self.norm2(x))


class VideoDecoder(nn.Module):
    """Latents [B, C, T, H, W] of one window to raw pixels [B, 3, 4 T, 16 H, 16 W], which are still ImageNet-normalised."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        width = config.decoder_width
        self.config = config
        self.x_embedder = nn.Linear(config.latent_channels, width)
        self.register_tokens = nn.Parameter(torch.zeros(1, config.decoder_num_register_tokens, width))
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config.decoder_num_layers))
        self.norm_out = nn.LayerNorm(width, eps=config.decoder_norm_eps)
        self.proj_out = nn.Linear(width, config.in_channels * config.temporal_ratio * config.spatial_ratio**2)

    def forward(self, latents: Tensor) -> Tensor:
        window = latents.shape[2:]
        x = self._with_suffix(self.x_embedder(latents.flatten(2).mT))  # [B, N, width]
        x = x.to(self.norm_out.weight.dtype)  # the residual stream has the dtype of the norms
        rotary = self._rotary(window, x.device)
        for block in self.transformer_blocks:
            x = block(x, rotary)
        x = self.norm_out(x)[:, : window.numel()]
        return self._unpatchified(self.proj_out(x.to(self.proj_out.weight.dtype)), window)

    def _with_suffix(self, patches: Tensor) -> Tensor:
        """Appends the register tokens and one zero token."""
        registers = self.register_tokens.expand(len(patches), -1, -1)
        return torch.cat([patches, registers, torch.zeros_like(registers[:, :1])], dim=1)

    def _rotary(self, window: torch.Size, device: torch.device) -> Rotary:
        angles = rotary_angles(self.config, *window).to(device)
        return angles.cos(), angles.sin()

    def _unpatchified(self, patches: Tensor, window: torch.Size) -> Tensor:
        """[B, t h w, c pt ph pw] to [B, c, t pt, h ph, w pw]."""
        config = self.config
        patch = (config.in_channels, config.temporal_ratio, config.spatial_ratio, config.spatial_ratio)
        x = patches.unflatten(2, patch).unflatten(1, window)  # [B, t, h, w, c, pt, ph, pw]
        return x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)
