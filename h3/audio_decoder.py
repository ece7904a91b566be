"""The audio VAE's decoder: BigVGAN, transposed convolutions with alias-free periodic activations (VAE spec, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import AudioVAEConfig
from .resampling import downsampled, lowpass_taps, upsampled

OnStage = Callable[[int, int], None]  # (stages done, total); may raise to interrupt
EPS = 1e-9


class SnakeBeta(nn.Module):
    """x + sin(a x)^2 / b per channel, for a = exp(alpha) and b = exp(beta)."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + (a * x).sin().square() / (b + EPS)


class AliasFreeActivation(nn.Module):
    """SnakeBeta at twice the rate, so that the harmonics it makes can be filtered out on the way back."""

    def __init__(self, channels: int):
        super().__init__()
        self.act = SnakeBeta(channels)

    def forward(self, x: Tensor, taps: Tensor) -> Tensor:
        return downsampled(self.act(upsampled(x, taps)), taps)


class ResidualBlock(nn.Module):
    """One pair of convolutions for each dilation, the second undilated, each after its activation."""

    def __init__(self, channels: int, kernel_size: int, dilations: tuple[int, ...]):
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel_size, dilation=dilation, padding=dilation * (kernel_size - 1) // 2)
            for dilation in dilations
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel_size, padding=(kernel_size - 1) // 2) for _ in dilations)
        self.activations = nn.ModuleList(AliasFreeActivation(channels) for _ in range(2 * len(dilations)))

    def forward(self, x: Tensor, taps: Tensor) -> Tensor:
        pairs = zip(self.activations[::2], self.convs1, self.activations[1::2], self.convs2, strict=True)
        for act1, conv1, act2, conv2 in pairs:
            x = x + conv2(act2(conv1(act1(x, taps)), taps))
        return x


class AudioDecoder(nn.Module):
    """Features [B, latent_dim, T] to mono samples [B, 1, hop T] in [-1, 1]."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        widths = [config.decoder_dim // 2**stage for stage in range(len(config.decoder_rates) + 1)]
        self.conv_pre = nn.Conv1d(config.latent_dim, widths[0], 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ModuleList([nn.ConvTranspose1d(width, width // 2, kernel, rate, padding=(kernel - rate) // 2)])
            for width, kernel, rate in zip(widths, config.decoder_kernel_sizes, config.decoder_rates, strict=False)
        )
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        )
        self.num_kernels = len(config.resblock_kernel_sizes)
        self.activation_post = AliasFreeActivation(widths[-1])
        self.conv_post = nn.Conv1d(widths[-1], 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor, on_stage: OnStage | None = None) -> Tensor:
        taps = lowpass_taps().to(x)
        x = self.conv_pre(x)
        for stage, (up,) in enumerate(self.ups):
            x = up(x)
            first, *others = self.resblocks[stage * self.num_kernels : (stage + 1) * self.num_kernels]
            total = first(x, taps)
            for block in others:
                total.add_(block(x, taps))
            x = total.div_(self.num_kernels)
            if on_stage is not None:
                on_stage(stage + 1, len(self.ups))
        return self.conv_post(self.activation_post(x, taps)).clamp(-1, 1)
