"""The video VAE's encoder: a causal 3D CNN of six levels (VAE spec, section 1.3)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from .config import VideoVAEConfig


class CausalConv3d(nn.Conv3d):
    """3x3x3 convolution over reflected sides (left, right, top, bottom) and two zero frames before the first, none behind."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: tuple[int, int, int] = (1, 1, 1),
        reflected: tuple[int, int, int, int] = (1, 1, 1, 1),
    ):
        super().__init__(in_channels, out_channels, 3, stride)
        self.reflected = reflected

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (*self.reflected, 0, 0), mode="reflect")
        if x.shape[2] == 1:  # the taps before the last would meet the zero frames only
            return F.conv3d(x, self.weight[:, :, -1:], self.bias, self.stride)
        return super().forward(F.pad(x, (0, 0, 0, 0, 2, 0)))


class FrameGroupNorm(nn.GroupNorm):
    """GroupNorm with the statistics of each frame alone."""

    def forward(self, x: Tensor) -> Tensor:
        frames = x.transpose(1, 2).flatten(0, 1)  # [B T, C, H, W]
        return super().forward(frames).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


class ResidualBlock(nn.Module):
    """Two normalised convolutions beside a shortcut, which is a convolution where the channels change."""

    def __init__(self, in_channels: int, out_channels: int, config: VideoVAEConfig):
        super().__init__()
        self.norm1 = FrameGroupNorm(config.norm_num_groups, in_channels, config.norm_eps)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = FrameGroupNorm(config.norm_num_groups, out_channels, config.norm_eps)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.nin_shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.nin_shortcut(x) + h


class Downsample(nn.Module):
    """Strided convolution; a frame that it halves is reflected at the right and the bottom only."""

    def __init__(self, channels: int, temporal_factor: int, spatial_factor: int):
        super().__init__()
        reflected = (0, 1, 0, 1) if spatial_factor == 2 else (0, 0, 0, 0)
        self.conv = CausalConv3d(channels, channels, (temporal_factor, spatial_factor, spatial_factor), reflected)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Level(nn.Module):
    """Residual blocks, of which the first changes the channels, then a Downsample where a factor is above 1."""

    def __init__(self, in_channels: int, out_channels: int, temporal_factor: int, spatial_factor: int, config: VideoVAEConfig):
        super().__init__()
        widths = [in_channels] + [out_channels] * config.layers_per_block
        self.block = nn.ModuleList(ResidualBlock(*pair, config) for pair in pairwise(widths))
        is_strided = temporal_factor > 1 or spatial_factor > 1
        self.downsample = Downsample(out_channels, temporal_factor, spatial_factor) if is_strided else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return self.downsample(x)


class VideoEncoder(nn.Module):
    """Normalised pixels [B, 3, T, H, W] to [B, 2 C, ceil(T / 4), H / 16, W / 16]: mean and log variance before ``quant_conv``."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        channels = config.block_out_channels
        self.conv_in = CausalConv3d(config.in_channels, channels[0])
        self.down = nn.ModuleList(
            Level(*sizes, config)
            for sizes in zip(
                (channels[0], *channels[:-1]),
                channels,
                config.temporal_downsample_factors,
                config.spatial_downsample_factors,
                strict=True,
            )
        )
        self.norm_out = FrameGroupNorm(config.norm_num_groups, channels[-1], config.norm_eps)
        self.conv_out = CausalConv3d(channels[-1], 2 * config.latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))
