"""One evaluation of the transformer against the reference: every form of it, every step inside it."""

import pytest
import torch
from dit_fixtures import (
    latents_of,
    layout_of,
    model_of,
    num_cases,
    prepared,
    states_of,
    tags_of,
    times_of,
)
from golden_files import Fixture, assembled, described, golden
from lazy_h3.h3.dit import DiT, Request
from lazy_h3.h3.formats.dit import recognise
from lazy_h3.h3.packing import pack, pack_audio, patchify, unpack_audio, unpatchify, whole_patches
from lazy_h3.h3.sampling import Latents, velocity
from torch.nn.functional import silu

TOLERANCE = 1e-4
BF16_RELATIVE_TOLERANCE = 4e-2
PLAIN = ("dit_t2va", "dit_text_tags", "dit_oddsize", "dit_adaln_curve")
CONDITIONED = ("dit_fl2va", "dit_guides", "dit_ref2va")
DATAWARD_ROWS = ("dit_t2va_diffusers_keys", "dit_adaln_rank")


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def assert_relatively_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    expected = expected.float()
    assert (actual.float() - expected).norm() <= BF16_RELATIVE_TOLERANCE * expected.norm()


def conditioned_rows(fixture: Fixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Video and audio rows, the reference's own condition rows in front."""
    video, audio = latents_of(fixture)
    rows = [patchify(whole_patches(video)), pack_audio(audio)]
    conditions = [fixture.output.get(f"cond_{stream}_rows") for stream in ("video", "audio")]
    video_rows, audio_rows = (row if cond is None else torch.cat([cond, row]) for cond, row in zip(conditions, rows, strict=True))
    return video_rows, audio_rows


def evaluated(model: DiT, request: Request, fixture: Fixture, case: int) -> Latents:
    """The velocity with conditions: as rows in front, so that only the layout knows of them."""
    video, audio = model(*conditioned_rows(fixture), request, *times_of(fixture, case))
    size = latents_of(fixture).size
    return Latents(unpatchify(video, size.padded)[..., : size.height, : size.width], unpack_audio(audio))


@torch.inference_mode()
@pytest.mark.parametrize("name", PLAIN)
def test_text_to_video_forward_matches_the_reference(name: str) -> None:
    fixture = golden(name)
    model = model_of(fixture)
    request = prepared(model, fixture)
    for case in range(num_cases(fixture)):
        result = velocity(model, request, latents_of(fixture), *times_of(fixture, case))
        assert_close(-result.video, fixture.output[f"s{case}.video"])
        assert_close(-result.audio, fixture.output[f"s{case}.audio"])


@torch.inference_mode()
@pytest.mark.parametrize("name", CONDITIONED)
def test_conditioned_forward_matches_the_reference(name: str) -> None:
    fixture = golden(name)
    model = model_of(fixture)
    request = prepared(model, fixture)
    for case in range(num_cases(fixture)):
        result = evaluated(model, request, fixture, case)
        assert_close(-result.video, fixture.output[f"s{case}.video"])
        assert_close(-result.audio, fixture.output[f"s{case}.audio"])


@torch.inference_mode()
@pytest.mark.parametrize("name", DATAWARD_ROWS)
def test_hugging_face_names_give_the_reference_rows(name: str) -> None:
    fixture = golden(name)
    model = model_of(fixture)
    request = prepared(model, fixture)
    for case in range(num_cases(fixture)):
        video, audio = model(*conditioned_rows(fixture), request, *times_of(fixture, case))
        assert_close(video, fixture.output[f"s{case}.video_rows_dataward"])
        assert_close(audio, fixture.output[f"s{case}.audio_rows_dataward"])


@torch.inference_mode()
def test_a_hugging_face_config_gives_the_same_model_as_the_shapes() -> None:
    fixture = golden("dit_t2va_diffusers_keys")
    layout = recognise(described(fixture.weights), {}, fixture.config)
    other = model_of(golden("dit_t2va"))
    model = assembled(layout, fixture.weights)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@torch.inference_mode()
def test_bf16_compute_with_fp32_islands_stays_near_the_reference() -> None:
    fixture = golden("dit_t2va_bf16")
    model = model_of(fixture, compute=torch.bfloat16)
    for name, tensor in fixture.weights.items():
        assert model.state_dict()[name].dtype == tensor.dtype, name
    request = prepared(model, fixture)
    assert_relatively_close(request.text, fixture.output["s0.trace.text_refined"])
    for case in range(num_cases(fixture)):
        result = velocity(model, request, latents_of(fixture), *times_of(fixture, case))
        assert result.video.dtype == result.audio.dtype == torch.float32
        assert_relatively_close(-result.video, fixture.output[f"s{case}.video"])
        assert_relatively_close(-result.audio, fixture.output[f"s{case}.audio"])


@torch.inference_mode()
@pytest.mark.parametrize("name", [*PLAIN, *CONDITIONED])
def test_every_step_inside_the_forward_matches_the_trace(name: str) -> None:
    fixture = golden(name)
    model = model_of(fixture)
    request = prepared(model, fixture)
    seen: dict[str, torch.Tensor] = {}
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(block0_in=args[0].clone()))
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, x, i=i: seen.update({f"block{i}_out": x.clone()}))
    seen["final.0"], seen["final.1"] = model(*conditioned_rows(fixture), request, *times_of(fixture, 0))
    seen["text_refined"] = request.text
    for key, value in seen.items():
        assert_close(value, fixture.output[f"s0.trace.{key}"])
    angles = model.rope(request.layout.position_ids)
    assert_close(torch.cat([angles, angles], dim=1), fixture.output["rope_angles"])


@torch.inference_mode()
@pytest.mark.parametrize("name", [*PLAIN, *CONDITIONED])
def test_rows_get_the_reference_timesteps_and_modulations(name: str) -> None:
    fixture = golden(name)
    model, layout = model_of(fixture), layout_of(fixture)
    times, time_of = layout.row_times(*times_of(fixture, 0))
    rows = torch.cat([torch.full((run.rows.stop - run.rows.start,), time_of[run.kind] * 3 + run.tag) for run in layout.runs])
    assert rows.tolist() == fixture.output["s0.trace.mod_rows"].tolist()
    expected = fixture.output["s0.trace.t_emb_in"]
    assert_close(model.time_features(times), expected if model.config.adaln_curve else silu(expected))


@torch.inference_mode()
def test_a_forward_leaves_its_inputs_alone() -> None:
    fixture = golden("dit_t2va")
    model = model_of(fixture)
    request = model.prepare(states_of(fixture), pack(tags_of(fixture), latents_of(fixture).size))
    text = request.text.clone()
    video, audio = conditioned_rows(fixture)
    before = video.clone(), audio.clone()
    first = model(video, audio, request, *times_of(fixture, 1))
    second = model(video, audio, request, *times_of(fixture, 1))
    assert torch.equal(request.text, text)
    assert torch.equal(video, before[0])
    assert torch.equal(audio, before[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
