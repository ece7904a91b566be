"""Bytes that each network takes beside its weights while it works, from its numbers and the geometry alone.

A forward pass holds most at a few moments. Each function names the tensors that are alive then and takes the largest sum. What
is small whatever the geometry (positions of a prompt, modulations of a few timesteps) is left out. ``itemsize`` is that of the
compute dtype in bytes. Results that a pass leaves behind belong to whoever asked for them and are not counted.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from .config import STEREO, AudioVAEConfig, DiTConfig, TextEncoderConfig, VideoVAEConfig
from .geometry import LatentSize
from .tiling import AxisTiles, Grid, tile_axis
from .windows import decode_plan

FP32 = 4
KERNEL_CHANNELS = 16  # oneDNN's convolutions copy what they read and write with channels in groups of so many


def text_encoding(config: TextEncoderConfig, num_rows: int, itemsize: int) -> int:
    """Of ``TextEncoder.forward``.

    The residual stream as it entered the layer and its norm, beside the queries while they are normalised in fp32, or beside
    queries, keys, values, the mixed values in two orders, and their projection; or with the stream after attention, beside gate,
    value and product of the feed-forward.
    """
    stream = config.hidden_size * itemsize
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    rounded = itemsize if itemsize < FP32 else 0
    normalising = 2 * stream + queries * (itemsize + 2 * FP32 + rounded)  # the projection, x, x / rms(x), and that rounded
    attending = 3 * stream + (3 * queries + 2 * keys) * itemsize
    feed_forward = 3 * stream + 3 * config.intermediate_size * itemsize
    rotary = config.head_dim * itemsize
    return num_rows * (max(normalising, attending, feed_forward) + rotary)


def sampling(config: DiTConfig, num_text_rows: int, size: LatentSize, itemsize: int) -> int:
    """Of ``sampling.sample``.

    In a block: residual stream and norm, beside q, k and v in one buffer while the queries are normalised in fp32, or beside both
    halves of the feed-forward and its result. Around it: rope tables, the refined text, and the latents four times, as noise, as
    they are, as rows, and the velocity of the step before. Kernels that fuse the norm take less than is counted here.
    """
    size = size.padded
    num_video, num_audio = size.frames * size.tokens_per_frame, STEREO * size.audio
    num_rows = num_text_rows + num_video + num_audio
    stream = config.hidden_size * itemsize
    upcast = FP32 if itemsize < FP32 else 0
    normalising = 2 * stream + config.inner_dim * (3 * itemsize + upcast + 2 * FP32)  # x, x / rms(x), and that times the weight
    feed_forward = 3 * stream + 2 * config.ffn_dim * itemsize
    rotary = 2 * 3 * config.rope_freq_dim * itemsize
    latents = 4 * FP32 * (num_video * config.video_features + num_audio * config.audio_in_channels)
    return num_rows * (max(normalising, feed_forward) + rotary) + num_text_rows * stream + latents


def video_decoding(config: VideoVAEConfig, size: LatentSize, itemsize: int) -> int:
    """Of ``VideoVAE.decode_stream``, without the frames that it has given away.

    One call of the network, beside the canvas of a window, the edges of its tiles, and the tail of the window before; or the
    canvas and its tail, beside the finished frames of the window in fp32. What is made of one tile or one window has less around.
    """
    ratio, num_frames = config.spatial_ratio, config.window_length * config.temporal_ratio
    height, width = size.height * ratio, size.width * ratio
    rows, columns = (tile_axis(side, config.tile_size, config.tile_overlap, ratio) for side in (height, width))
    pixel = config.in_channels * itemsize
    canvas, tail = num_frames * height * width * pixel, config.frame_overlap * height * width * pixel
    calling = _video_call(config, rows.length // ratio * (columns.length // ratio), itemsize)
    if Grid(rows, columns).num_tiles > 1:
        calling += canvas + num_frames * pixel * _edge_area(rows, columns)
    plan = decode_plan(size.frames, config)
    if plan.num_windows > 1:
        calling += tail
    finishing = canvas + tail + min(config.clip_length, plan.num_frames) * height * width * config.in_channels * FP32
    return max(calling, finishing)


def audio_decoding(config: AudioVAEConfig, num_latents: int) -> int:
    """Of ``AudioVAE.decode`` in fp32.

    At the widest stage: its input, the sum over its residual blocks, a block's input and that of one of its activations; beside
    them the activation at twice the rate, which takes three such tensors, or the convolution that brings it back.
    """
    moments = []
    for stage in range(len(config.decoder_rates)):
        channels, length = config.decoder_dim >> (stage + 1), num_latents * prod(config.decoder_rates[: stage + 1])
        signal, padded = (STEREO * length * c * FP32 for c in (channels, -(-channels // KERNEL_CHANNELS) * KERNEL_CHANNELS))
        back = 2 * signal + (3 * padded if channels > 1 else signal + padded)  # a lone channel is read where it lies
        moments.append(4 * signal + max(6 * signal, back))
    return max(moments)


def _video_call(config: VideoVAEConfig, tile_area: int, itemsize: int) -> int:
    """One call of the decoder.

    The residual stream twice and its norm, all fp32, beside both halves of the feed-forward, the SiLU of one and their product;
    or at its end the norm beside all pixels, as rows and as pictures.
    """
    tokens = config.window_length * tile_area + config.decoder_num_register_tokens + 1
    stream = config.decoder_width * FP32
    rounded = config.decoder_width * itemsize if itemsize < FP32 else 0
    feed_forward = 3 * stream + rounded + 4 * config.decoder_width * config.decoder_ffn_mult * itemsize
    pixels = stream + 2 * config.in_channels * config.temporal_ratio * config.spatial_ratio**2 * itemsize
    return tokens * max(feed_forward, pixels)


def _edge_area(rows: AxisTiles, columns: AxisTiles) -> int:
    """Pixels of copied edges at most: below this row of tiles and the one above, at the right of this tile and the one before."""
    below = max(above + own for above, own in pairwise((0, *rows.overlaps, 0)))
    return below * len(columns.starts) * columns.length + 2 * max(columns.overlaps, default=0) * rows.length
