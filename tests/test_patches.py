from __future__ import annotations

import pytest
import torch
from lazy_h3.h3.config import VisionConfig
from lazy_h3.h3.patches import COMFY, OFFICIAL, PixelPolicy, image_block, image_size, video_blocks, video_size

VISION = VisionConfig()


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("policy", [OFFICIAL, COMFY])
def test_bytes_and_their_fractions_give_the_same_patches(policy: PixelPolicy) -> None:
    image = noise(100, 300, 3)
    whole, fractions = image_block(image, VISION, policy), image_block(image / 255, VISION, policy)
    torch.testing.assert_close(whole.patches, fractions.patches, atol=1e-6, rtol=0)


def test_patches_run_channel_frame_row_column_and_squares_stay_together() -> None:
    """A picture whose every pixel is its own patch's number shows the order of the patches."""
    rows, columns = torch.meshgrid(torch.arange(64) // 16, torch.arange(64) // 16, indexing="ij")
    image = ((rows * 4 + columns) / 15)[..., None].expand(-1, -1, 3)
    block = image_block(image, VISION, COMFY)
    numbers = ((block.patches + 1) / 2 * 15).round().int()
    assert (numbers == numbers[:, :1]).all()
    assert numbers[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_features_of_a_patch_run_channel_frame_row_column() -> None:
    frames = noise(2, 64, 64, 3)
    (block,) = video_blocks(frames, VISION, COMFY)
    features = block.patches[0].view(3, 2, 16, 16)
    torch.testing.assert_close(features, frames[:, :16, :16].permute(3, 0, 1, 2) / 127.5 - 1, atol=1e-6, rtol=0)


def test_still_image_fills_both_frames_and_an_odd_last_frame_is_repeated() -> None:
    frames = noise(3, 64, 64, 3)
    blocks = video_blocks(frames, VISION, COMFY)
    assert len(blocks) == 2
    torch.testing.assert_close(blocks[1].patches, image_block(frames[2], VISION, COMFY).patches, atol=0, rtol=0)


def test_transparency_is_dropped() -> None:
    image = noise(64, 64, 4)
    torch.testing.assert_close(
        image_block(image, VISION, COMFY).patches, image_block(image[..., :3], VISION, COMFY).patches, atol=0, rtol=0
    )


def test_canvas_of_the_model_is_left_as_it_is() -> None:
    assert image_size((768, 1344), 32, OFFICIAL.image_limits) == (768, 1344)
    assert video_size(25, (768, 1344), 32, OFFICIAL.video_limits) == (768, 1344)
    assert video_size(30, (768, 1344), 32, OFFICIAL.video_limits) == (672, 1184)


def test_video_of_a_single_sampled_frame_counts_as_a_pair() -> None:
    """Counted as no frame at all it would be too small for the limits, and shrink to a thumbnail."""
    assert video_size(1, (768, 1344), 32, OFFICIAL.video_limits) == (768, 1344)
