"""The vision tower: patches of frame blocks to rows of the prompt (text encoder spec, section 4).

A frame block is one still image or one pair of video frames. Blocks go through the tower together, but no block sees another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt, prod

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate

from .attention import attention
from .config import VisionConfig
from .rotary import inverse_frequencies, rotated

NO_TOWER = "The text encoder's file has no vision tower (visual.*): load a complete file to encode pictures."

Grid = tuple[int, int]  # rows and columns of a frame block, in patches


@dataclass(frozen=True)
class VisionFeatures:
    """What replaces, and what is added at, the picture rows of a prompt; rows of all blocks in sequence order."""

    embeds: Tensor  # [N, out_hidden_size], N = patches / spatial_merge_size ** 2
    deepstack: tuple[Tensor, ...]  # one [N, out_hidden_size] per tap, for the first layers of the language model


def blank_embedding(num_rows: int, width: int) -> nn.Embedding:
    """A table without initial values: to draw them on the meta device, torch imports its compiler (0.9 s, 70 MiB)."""
    return nn.Embedding.from_pretrained(torch.empty(num_rows, width))


def in_merge_order(grid_rows: Tensor, merge: int) -> Tensor:
    """[h, w, C] -> [h * w, C], the patches of each merge x merge square next to each other."""
    h, w, width = grid_rows.shape
    squares = grid_rows.view(h // merge, merge, w // merge, merge, width)
    return squares.transpose(1, 2).reshape(h * w, width)


def resampled_positions(table: Tensor, grid: Grid, merge: int) -> Tensor:
    """The square position table [side * side, C], bilinear with aligned corners: [h * w, C] fp32 in merge order."""
    side = isqrt(len(table))
    planes = table.float().T.view(1, -1, side, side)
    resized = interpolate(planes, size=grid, mode="bilinear", align_corners=True)
    return in_merge_order(resized[0].permute(1, 2, 0), merge)


def rope_angles(grid: Grid, merge: int, head_dim: int, theta: float) -> Tensor:
    """[h * w, head_dim / 2] fp32 in merge order: the row turns the first half of the angles, the column the second."""
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float32, device="cpu") for n in grid), indexing="ij")
    coordinates = in_merge_order(torch.stack([rows, columns], dim=-1), merge)  # [h * w, 2]
    return (coordinates[..., None] * inverse_frequencies(head_dim // 2, theta)).flatten(1)


class PatchEmbed(nn.Module):
    """A convolution whose stride is its kernel, applied to patches that are cut already."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        cells = patches.to(self.proj.weight).unflatten(-1, self.proj.weight.shape[1:])  # [P, C, T, p, p]
        return self.proj(cells).flatten(1)


class Attention(nn.Module):
    """Full attention inside each frame block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, self.num_heads, -1)).permute(1, 2, 3, 0, 4)  # 3 x [1, H, P, D]
        q, k = rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype)
        blocks = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
        out = torch.cat([attention(*block) for block in blocks], dim=2)
        return self.proj(out[0].transpose(0, 1).flatten(1))  # [1, H, P, D] -> [P, H * D]


class MLP(nn.Module):
    """Two linears around the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(gelu(self.linear_fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm attention, then pre-norm MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, lengths)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """A merge square of patches to one row: the main merger normalises each patch, those of deepstack the whole square."""

    def __init__(self, config: VisionConfig, norm_size: int) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(norm_size, config.norm_eps)
        self.linear_fc1 = nn.Linear(self.merged_size, self.merged_size)
        self.linear_fc2 = nn.Linear(self.merged_size, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.reshape(-1, *self.norm.normalized_shape))
        return self.linear_fc2(gelu(self.linear_fc1(normed.view(-1, self.merged_size))))


class VisionTower(nn.Module):
    """Patches [P, C * T * p * p] of frame blocks to ``VisionFeatures``."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        merged_size = config.hidden_size * config.spatial_merge_size**2
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = blank_embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, config.hidden_size)
        self.deepstack_merger_list = nn.ModuleList(PatchMerger(config, merged_size) for _ in config.deepstack_visual_indexes)

    def forward(
        self, patches: Tensor, grids: Sequence[Grid], on_layer: Callable[[int, int], None] | None = None
    ) -> VisionFeatures:
        x = self.patch_embed(patches)
        x = x + self.positions(grids).to(x.dtype)
        cos, sin = (table.to(x.device) for table in self._rotation(grids))
        lengths = [prod(grid) for grid in grids]
        taps = dict(zip(self.config.deepstack_visual_indexes, self.deepstack_merger_list, strict=True))
        deepstack = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, lengths)
            if index in taps:
                deepstack.append(taps[index](x))
            if on_layer is not None:
                on_layer(index + 1, len(self.blocks))
        return VisionFeatures(self.merger(x), tuple(deepstack))

    def positions(self, grids: Sequence[Grid]) -> Tensor:
        """[P, hidden_size] fp32: the position table resampled to each block."""
        table, merge = self.pos_embed.weight, self.config.spatial_merge_size
        return torch.cat([resampled_positions(table, grid, merge) for grid in grids])

    def _rotation(self, grids: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """cos and sin [P, head_dim / 2], fp32 on the CPU: q and k of the tower are rotated in fp32."""
        c = self.config
        angles = [rope_angles(g, c.spatial_merge_size, c.hidden_size // c.num_heads, c.rope_theta) for g in grids]
        turns = torch.cat(angles)
        return turns.cos(), turns.sin()
