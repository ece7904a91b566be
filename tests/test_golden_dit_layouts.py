"""Packed sequences against the reference: order, positions, row lists; latents to rows and back."""

import json

import pytest
import torch
from dit_fixtures import layout_of, reference_of
from golden_files import Fixture, golden
from lazy_h3.h3.geometry import LatentSize
from lazy_h3.h3.packing import Keyframe, Kind, PackedLayout, pack, pack_audio, patchify, unpack_audio, unpatchify

POSITION_TOLERANCE = 1e-12
KINDS = [kind.value for kind in Kind]


def packed(case: dict) -> PackedLayout:
    keyframes = [
        Keyframe(entry["resolved_frame_index"], entry.get("latent_t", 0), entry.get("audio_latent_t", 0))
        for entry in case["keyframes"]
    ]
    target = LatentSize(case["latent_t"], case["latent_h"], case["latent_w"], case["audio_t"])
    tags = torch.ones(case["text_len"], dtype=torch.long)
    return pack(tags, target, keyframes, [reference_of(entry) for entry in case["refs"]])


def assert_layout(layout: PackedLayout, expected: dict[str, torch.Tensor], kinds: list[str]) -> None:
    segments = [[s.start, s.stop, kinds.index(s.kind.value)] for s in layout.segments]
    assert segments == expected["segments"].tolist()
    torch.testing.assert_close(layout.position_ids, expected["position_ids"], rtol=0, atol=POSITION_TOLERANCE)
    for group, target, prefix in ((layout.visual, Kind.VIDEO, "img"), (layout.sound, Kind.AUDIO, "audio")):
        rows = [row for segment in group for row in range(segment.start, segment.stop)]
        updated = [int(segment.kind is target) for segment in group for _ in range(segment.num_rows)]
        assert rows == expected[f"{prefix}_pos"].tolist()
        assert updated == expected[f"{prefix}_update"].tolist()


def test_every_listed_request_is_laid_out_as_in_the_reference() -> None:
    fixture = golden("dit_layouts")
    cases = json.loads(fixture.metadata["cases"])
    assert cases
    for case in cases:
        layout = packed(case)
        assert layout.num_rows == case["seq_len"]
        assert_layout(layout, fixture.groups[case["name"]], json.loads(fixture.metadata["segment_kinds"]))


@pytest.mark.parametrize("name", ["dit_t2va", "dit_text_tags", "dit_oddsize", "dit_fl2va", "dit_guides", "dit_ref2va"])
def test_the_network_fixtures_are_laid_out_as_in_the_reference(name: str) -> None:
    fixture: Fixture = golden(name)
    layout = layout_of(fixture)
    assert_layout(layout, fixture.output, KINDS)
    if "text_token_tags" in fixture.input:
        assert layout.tags[layout.text.rows].tolist() == fixture.input["text_token_tags"].tolist()


def test_rows_hold_the_reference_features_and_come_back_unchanged() -> None:
    fixture = golden("dit_patchify")
    video, audio = fixture.input["video"], fixture.input["audio"]
    rows, audio_rows = patchify(video), pack_audio(audio)
    assert torch.equal(rows, fixture.output["video_rows"])
    assert torch.equal(audio_rows, fixture.output["audio_rows"])
    size = LatentSize(*video.shape[2:], audio.shape[-1])
    clips = rows.chunk(len(video))
    assert torch.equal(torch.cat([unpatchify(clip, size) for clip in clips]), video)
    assert torch.equal(unpack_audio(audio_rows), audio)
