"""What stays in memory between nodes and between prompts, by policy; and what a stray reference does."""

import gc

import pytest
import torch
from lazy_h3.memory.units import shown_bytes
from small_models import DIT, SAMPLER, TEXT_ENCODER, USERS, folder_prompt, stage, text_to_video, tiny_folder_models

ALL = set(USERS)
SEEDS = (7, 8)


def latents(kept: dict) -> tuple[torch.Tensor, ...]:
    return kept["latent"]["samples"].unbind()


def latents_by_seed(out, policy: str) -> list[tuple[torch.Tensor, ...]]:
    found = []
    with stage(out, policy=policy) as running:
        for seed in SEEDS:
            running.succeed(text_to_video({"7.seed": seed}))
            found.append(latents(running.kept))
    return found


def test_policies_free_and_keep_give_the_same_bits(tmp_path):
    free, keep = latents_by_seed(tmp_path, "free"), latents_by_seed(tmp_path, "keep")
    for one, other in zip(free, keep, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert not torch.equal(free[0][0], free[1][0])


def test_each_component_is_gone_after_its_last_user(tmp_path):
    with stage(tmp_path, policy="free") as running:
        running.succeed(text_to_video())
        assert dict(running.happened("load_end")) == dict(running.happened("release")) == USERS
        assert len(running.loaded()) == len(USERS)
        assert running.store.resident() == []
        sizes = [event.bytes for event in running.ledger.events if event.event == "load_end"]
        assert running.ledger.peak_bytes == max(sizes)


def test_a_new_seed_loads_only_what_has_to_run_again(tmp_path):
    with stage(tmp_path, policy="free") as running:
        for seed in SEEDS:
            running.succeed(text_to_video({"7.seed": seed}))
        assert set(running.loaded(run=1)) == ALL
        assert set(running.loaded(run=2)) == ALL - {"text_encoder"}  # its output is cached


def test_the_same_prompt_again_loads_nothing(tmp_path):
    with stage(tmp_path, policy="free") as running:
        for _ in range(2):
            running.succeed(text_to_video())
        assert running.loaded(run=2) == []


def test_what_is_kept_is_not_loaded_again(tmp_path):
    with stage(tmp_path, policy="keep") as running:
        for seed in SEEDS:
            running.succeed(text_to_video({"7.seed": seed}))
        assert set(running.loaded(run=1)) == ALL
        assert running.loaded(run=2) == []
        assert {kind for kind, _ in running.happened("keep", run=1)} == ALL
        assert {resource.kind for resource in running.store.resident()} == ALL
        assert running.ledger.peak_bytes == running.store.live_bytes() > 0
    assert running.store.live_bytes() == 0  # the host is gone


def test_without_a_cache_everything_is_loaded_in_every_run(tmp_path):
    with stage(tmp_path, policy="free", cache="none") as running:
        for _ in range(2):
            running.succeed(text_to_video())
        assert set(running.loaded(run=1)) == set(running.loaded(run=2)) == ALL


def test_a_component_with_two_users_is_loaded_once_and_released_after_the_second(tmp_path):
    prompt = text_to_video()
    prompt["again"] = {**prompt[SAMPLER], "inputs": {**prompt[SAMPLER]["inputs"], "latent": [SAMPLER, 0], "denoise": 0.5}}
    prompt["latent"]["inputs"]["value"] = ["again", 0]
    with stage(tmp_path) as running:
        running.succeed(prompt)
        assert [node for kind, node in running.happened("load_end") if kind == "dit"] == [SAMPLER]
        assert [node for kind, node in running.happened("release") if kind == "dit"] == ["again"]


def test_two_precisions_of_one_file_are_never_resident_together(tmp_path):
    prompt = text_to_video()
    prompt["fp32"] = {"class_type": "LazyH3DiTLoader", "inputs": {"file": DIT, "dtype": "fp32"}}
    prompt["again"] = {**prompt[SAMPLER], "inputs": {**prompt[SAMPLER]["inputs"], "dit": ["fp32", 0], "latent": [SAMPLER, 0]}}
    prompt["latent"]["inputs"]["value"] = ["again", 0]
    with stage(tmp_path, policy="keep") as running:
        running.succeed(prompt)
        loaded = [e for e in running.ledger.events if e.event == "load_end" and e.component.startswith("diffusion transformer")]
        assert [event.node for event in loaded] == [SAMPLER, "again"]
        assert loaded[0].component != loaded[1].component
        assert [resource.name for resource in running.store.resident() if resource.kind == "dit"] == [loaded[1].component]


class Hoarder:
    """A node that keeps a parameter of the transformer for ever."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "take"
    hoard: list[torch.Tensor] = []  # noqa: RUF012  (that is its fault)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"dit": ("LAZYH3_DIT",), "latent": ("LATENT",)}}

    def take(self, dit, latent):
        with dit.use() as model:
            self.hoard.append(model.blocks[0].mlp.fc1.weight)
        return (latent,)


@pytest.fixture
def hoarder():
    yield Hoarder
    Hoarder.hoard.clear()
    gc.collect()


def test_a_stray_reference_shows_in_the_peak_and_in_a_warning(tmp_path, hoarder, caplog):
    prompt = text_to_video({"7.latent": ["hoarder", 0]})
    prompt["hoarder"] = {"class_type": "Hoarder", "inputs": {"dit": ["2", 0], "latent": ["6", 0]}}
    with stage(tmp_path, classes={"Hoarder": hoarder}) as running:
        running.succeed(text_to_video())
        honest = running.ledger.peak_bytes
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        running.succeed({**prompt, SAMPLER: {**prompt[SAMPLER], "inputs": {**prompt[SAMPLER]["inputs"], "seed": 1}}})
        stray = sum(tensor.untyped_storage().nbytes() for tensor in hoarder.hoard)
        assert stray > 0
        assert running.ledger.peak_bytes == honest + stray
        assert running.store.live_bytes() == stray
        (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
        assert warning.startswith("diffusion transformer")
        assert f"{shown_bytes(stray)} of its weights are still alive after release" in warning


def test_a_changed_weight_is_kept_and_named(tmp_path, caplog):
    class Editor(Hoarder):
        def take(self, dit, latent):
            with dit.use() as model:
                model.final_layer.video_out.bias.data.add_(1)
            return (latent,)

    prompt = text_to_video({"7.latent": ["editor", 0]})
    prompt["editor"] = {"class_type": "Editor", "inputs": {"dit": ["2", 0], "latent": ["6", 0]}}
    with stage(tmp_path, classes={"Editor": Editor}) as running:
        running.succeed(prompt)
        assert [resource.kind for resource in running.store.resident()] == ["dit"]
        assert "final_layer.video_out.bias" in caplog.text


def test_a_budget_of_the_largest_component_is_enough_and_one_byte_less_is_not(tmp_path):
    with stage(tmp_path) as running:
        running.succeed(text_to_video())
        largest = running.ledger.peak_bytes
    with stage(tmp_path, budget=largest) as running:
        running.succeed(text_to_video())
    with stage(tmp_path, budget=largest - 1) as running:
        result = running.run(text_to_video())
        assert (result.status, result.error.type) == ("error", "MemoryRefused")
        assert running.store.last_refusal.need_bytes == largest
        assert running.store.last_refusal.have_bytes == largest - 1
        assert running.store.resident() == []


def test_under_keep_a_budget_drops_what_was_kept_before_it_refuses(tmp_path):
    with stage(tmp_path) as running:
        running.succeed(text_to_video())
        largest = running.ledger.peak_bytes
    with stage(tmp_path, policy="keep", budget=largest) as running:
        running.succeed(text_to_video())
        assert running.ledger.peak_bytes <= largest
        assert set(running.loaded()) == ALL


def test_the_sharing_of_one_folder_by_two_loaders_is_one_set_of_components(tmp_path):
    prompt = folder_prompt("minimax_h3", {"7.dit": ["second", 1]})
    prompt["second"] = prompt["1"]
    with stage(tmp_path, tiny_folder_models()) as running:
        running.succeed(prompt)
        assert dict(running.happened("load_end")) == dict(running.happened("release")) == USERS


def test_names_in_the_ledger_are_those_of_the_files(tmp_path):
    with stage(tmp_path) as running:
        running.succeed(text_to_video())
        names = {event.component for event in running.ledger.events}
        assert f"text encoder ({TEXT_ENCODER.removesuffix('.safetensors')})" in names
        assert f"diffusion transformer ({DIT.removesuffix('.safetensors')})" in names
