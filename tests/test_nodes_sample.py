"""The sampler node: what it refuses, what its options mean, and that it leaves its inputs alone."""

import asyncio

import pytest
import torch
from lazy_h3.h3.sampling import comfy_noise
from lazy_h3.host.nested import NestedLatent
from lazy_h3.memory.store import MemoryRefused
from lazy_h3.nodes import LazyH3DiTLoader, LazyH3EmptyLatent, LazyH3Sampler, sample
from small_models import DIT, SAMPLER, stage, text_to_video

VIDEO, AUDIO = (1, 24, 7, 2, 2), (1, 32, 2, 37)
NUM_TOKENS = 5


@pytest.fixture
def running(tmp_path):
    with stage(tmp_path) as found:
        yield found


@pytest.fixture
def dit(running):
    (handle,) = LazyH3DiTLoader().load(file=DIT)
    return handle


def nested(video=VIDEO, audio=AUDIO, value=0.0) -> dict:
    return {"samples": NestedLatent((torch.full(video, value), torch.full(audio, value)))}


def condition(dit, **options) -> list:
    states = torch.randn(1, NUM_TOKENS, dit.config.text_dim, generator=torch.Generator().manual_seed(1))
    return [[states, options]]


def sampled(dit, latent=None, positive=None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    positive = condition(dit) if positive is None else positive
    options = {"seed": 3, "steps": 2, **options}
    (result,) = asyncio.run(LazyH3Sampler().sample(dit, positive, latent or nested(), **options))
    return result["samples"].unbind()


REFUSED = {
    "several conditions": ("takes one condition, and 2 are combined", lambda d: {"positive": condition(d) * 2}),
    "no condition": ("takes one condition, and 0 are combined", lambda d: {"positive": []}),
    "keyframes": ("minimax_keyframes", lambda d: {"positive": condition(d, minimax_keyframes=[1])}),
    "references": ("minimax_refs", lambda d: {"positive": condition(d, minimax_refs=[1])}),
    "states of another encoder": (
        "has 3 numbers a token, but this diffusion model takes 16",
        lambda d: {"positive": [[torch.zeros(1, 5, 3), {}]]},
    ),
    "no sound": ("holds no sound", lambda d: {"latent": {"samples": torch.zeros(VIDEO)}}),
    "a mask": ("noise mask", lambda d: {"latent": {**nested(), "noise_mask": torch.ones(1)}}),
    "a batch": ("a batch of 3", lambda d: {"latent": nested(video=(3, *VIDEO[1:]))}),
    "video of another model": (
        r"video has the shape \[1, 16, .* makes \[1, 24, T, h, w\]",
        lambda d: {"latent": nested((1, 16, 7, 2, 2))},
    ),
    "an image latent": (r"video has the shape \[1, 24, 2, 2\]", lambda d: {"latent": nested((1, 24, 2, 2))}),
    "sound of another model": (
        r"sound has the shape \[1, 8, .* makes \[1, 32, 2, T\]",
        lambda d: {"latent": nested(audio=(1, 8, 2, 37))},
    ),
    "mono sound": (r"sound has the shape \[1, 32, 1, 37\]", lambda d: {"latent": nested(audio=(1, 32, 1, 37))}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_are_not_of_this_model_are_refused_in_one_sentence(dit, case):
    message, inputs = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        sampled(dit, **inputs(dit))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_latent_or_condition_costs_no_reading(running, dit, case):
    with pytest.raises(ValueError, match=REFUSED[case][0]):
        sampled(dit, **REFUSED[case][1](dit))
    assert running.reads == []


def test_the_seed_decides_the_result(dit):
    first, again, other = (sampled(dit, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


@pytest.mark.parametrize(
    "options", [{"steps": 3}, {"video_shift": 7.0}, {"audio_shift": 5.0}, {"schedule": "simple"}, {"noise": "official"}]
)
def test_every_option_changes_the_result(dit, options):
    plain, changed = sampled(dit), sampled(dit, **options)
    assert not torch.equal(plain[0], changed[0]) or not torch.equal(plain[1], changed[1])
    assert all(stream.isfinite().all() for stream in changed)


def test_a_full_denoise_ignores_what_the_latent_holds(dit):
    empty, filled = sampled(dit), sampled(dit, nested(value=2.0))
    assert torch.equal(empty[0], filled[0])


def test_a_partial_denoise_starts_from_what_the_latent_holds(dit):
    low, high = (sampled(dit, nested(value=value), denoise=0.1) for value in (-20.0, 20.0))
    assert low[0].mean() < -5 < 5 < high[0].mean()
    assert low[1].mean() < -5 < 5 < high[1].mean()


def test_the_tags_of_the_condition_reach_the_model(dit):
    as_text = sampled(dit, positive=condition(dit, minimax_token_tags=torch.ones(NUM_TOKENS, dtype=torch.int64)))
    as_vision = sampled(dit, positive=condition(dit, minimax_token_tags=torch.zeros(NUM_TOKENS, dtype=torch.int64)))
    assert torch.equal(as_text[0], sampled(dit)[0])  # a condition without tags is all text
    assert not torch.equal(as_text[0], as_vision[0])


def test_the_result_is_fp32_on_the_cpu_with_the_shape_of_the_latent(dit):
    video, audio = sampled(dit, nested(video=(1, 24, 2, 3, 5), audio=(1, 32, 2, 9)))
    assert (video.shape, audio.shape) == ((1, 24, 2, 3, 5), (1, 32, 2, 9))
    assert {video.dtype, audio.dtype} == {torch.float32}
    assert {video.device, audio.device} == {torch.device("cpu")}


def test_the_latent_that_came_in_is_unchanged_and_its_other_entries_travel_on(dit):
    latent = {**nested(value=0.5), "batch_index": [4]}
    (result,) = asyncio.run(LazyH3Sampler().sample(dit, condition(dit), latent, seed=1, steps=1))
    assert result["batch_index"] == [4]
    assert (latent["samples"].unbind()[0] == 0.5).all()


def test_the_same_noise_is_drawn_as_in_comfy(dit, monkeypatch):
    """ComfyUI draws both streams one after the other from one CPU generator."""
    drawn = []
    monkeypatch.setitem(sample.NOISES, "comfy", lambda *args: drawn.append(comfy_noise(*args)) or drawn[-1])
    sampled(dit, seed=11)
    generator = torch.Generator().manual_seed(11)
    assert torch.equal(drawn[0].video, torch.randn(VIDEO, generator=generator))
    assert torch.equal(drawn[0].audio, torch.randn(AUDIO, generator=generator))


def test_noise_is_drawn_only_when_the_model_fits(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setitem(sample.NOISES, "comfy", lambda *args: drawn.append(comfy_noise(*args)) or drawn[-1])
    with stage(tmp_path, budget=1024):
        (dit,) = LazyH3DiTLoader().load(file=DIT)
        with pytest.raises(MemoryRefused):
            sampled(dit)
        assert drawn == []


@pytest.mark.parametrize("schedule", ["official", "simple"])
def test_the_lowest_denoise_samples_with_any_number_of_steps(dit, schedule):
    assert all(stream.isfinite().all() for stream in sampled(dit, schedule=schedule, steps=40, denoise=0.01, video_shift=100.0))


def test_a_latent_that_is_not_finite_is_said_once(dit, caplog):
    sampled(dit)
    assert not caplog.records
    sampled(dit, positive=[[torch.full((1, NUM_TOKENS, dit.config.text_dim), float("nan")), {}]])
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith(f"Lazy H3: the latent holds NaN or infinite values: {dit.component.name} overflows in")


def test_a_chain_of_samplers_asks_for_the_size_of_its_latent_once(tmp_path, monkeypatch):
    asked = []
    size_of = LazyH3EmptyLatent.latent_size
    monkeypatch.setattr(LazyH3EmptyLatent, "latent_size", lambda *args, **inputs: asked.append(args) or size_of(*args, **inputs))
    prompt = text_to_video()
    for number in range(20):
        spec = prompt[SAMPLER]
        prompt[f"s{number}"] = {**spec, "inputs": {**spec["inputs"], "latent": [f"s{number - 1}" if number else SAMPLER, 0]}}
    with stage(tmp_path) as running:
        plan = running.runtime.plan_of(prompt)
    assert len({stage.activation_bytes for stage in plan.stages if stage.node[0] in {"s", SAMPLER}}) == 1
    assert len(asked) == 1


def test_a_schedule_of_computed_values_is_planned_without_folding_for_it(tmp_path):
    """Which would be for wrong clean-times, or keep the whole prompt from being planned."""
    linked = {f"{SAMPLER}.steps": ["6", 1]}
    another = {"again": text_to_video()[SAMPLER], **text_to_video(linked)}
    with stage(tmp_path, may_plan=True, policy="auto") as running:
        plans = [running.runtime.plan_of(prompt) for prompt in (text_to_video(), text_to_video(linked), another)]
        folded, unfolded, mixed = ({c.item.key.kind: c for c in plan.choices}["dit"] for plan in plans)
        assert (bool(folded.item.points), unfolded.item.points, mixed.item.points) == (True, (), ())
        assert folded.resident_bytes < unfolded.resident_bytes == mixed.resident_bytes
        assert [any("nothing is folded for it" in note for note in plan.warnings) for plan in plans] == [False, True, True]
        running.succeed(text_to_video(linked))
        assert running.runtime.plan().peak_bytes == plans[1].peak_bytes
