"""Our own nodes with the tiny model: what is read when, and that freeing never changes a result."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lazy_h3.memory.ledger import Event
from session_cases import CACHES
from small_models import CPU, DECODE_AUDIO, DECODE_VIDEO, ENCODE, SAMPLER, USERS, Stage, stage, text_to_video
from torch import Tensor

SEEDS = (7, 8, 9)
LOADERS = ("1", "2", "3", "4")


def results(running: Stage) -> dict[str, Tensor]:
    """Everything that the last run made."""
    video, audio = running.kept["latent"]["samples"].unbind()
    return {"video": video, "audio": audio, "images": running.kept["images"], "waveform": running.kept["audio"]["waveform"]}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def num_living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def watch_reading(running: Stage, reader: str, other: str) -> list[int]:
    """Bytes of the kind ``other`` that are alive while ``reader`` is read, from the first question to the last byte."""
    seen: list[int] = []

    def look(resource: Any, *_: Any) -> None:
        if resource.kind == reader:
            seen.append(sum(r.live_bytes() for r in running.store.resident() if r.kind == other))

    running.store.before_fill.append(look)
    running.store.on_fill.append(look)
    return seen


def bytes_read(running: Stage) -> dict[int, dict[str, list[int]]]:
    """Run -> kind -> bytes that came from disk, for each time that it was read; kept up while the stage runs."""
    read: dict[int, dict[str, list[int]]] = {}
    began: list[int] = []

    def look(event: Event) -> None:
        if event.event == "load_begin":
            began.append(sum(running.reads))
        elif event.event == "load_end":
            kind = running.runtime.catalogue.kinds[event.component]
            read.setdefault(event.run, {}).setdefault(kind, []).append(sum(running.reads) - began.pop())

    running.ledger.observers.append(look)
    return read


# What is in memory together.


@pytest.mark.parametrize("order", list(itertools.permutations(LOADERS))[::5], ids="".join)
@pytest.mark.parametrize("policy", ["free", "auto"])
def test_no_byte_of_the_transformer_is_alive_while_the_text_encoder_is_read(tmp_path, order, policy):
    """Two big models were once built before the encoder ran, and the process died."""
    prompt = text_to_video()
    prompt = {**{name: prompt[name] for name in order}, **prompt}
    with stage(tmp_path, policy=policy) as running:
        while_encoder_is_read = watch_reading(running, "text_encoder", "dit")
        while_transformer_is_read = watch_reading(running, "dit", "text_encoder")
        running.succeed(prompt)
        assert len(while_encoder_is_read) > 1
        assert not any(while_encoder_is_read)
        if policy == "free":
            assert not any(while_transformer_is_read)
            sizes = [event.bytes for event in running.ledger.events if event.event == "load_end"]
            assert running.ledger.peak_bytes == max(sizes)


@pytest.mark.parametrize("sees", [True, False], ids=["list", "queued"])
@pytest.mark.parametrize("cache", CACHES)
def test_each_model_is_gone_after_the_node_that_computes_with_it(tmp_path, cache, sees):
    with stage(tmp_path, policy="free", cache=cache, expose_probe=sees) as running:
        running.succeed(text_to_video())
        assert dict(running.happened("load_end")) == dict(running.happened("release")) == USERS
        assert running.store.live_bytes() == 0


@pytest.mark.parametrize("cache", CACHES)
def test_two_texts_are_encoded_sampled_and_decoded_with_one_load_of_each_model(tmp_path, cache):
    one, other = text_to_video(), text_to_video({"5.prompt": "a dog"})
    twin = {f"{name}b": spec for name, spec in renamed(other, "b").items() if name not in LOADERS}
    with stage(tmp_path, policy="free", cache=cache) as running:
        running.succeed({**one, **twin})
        assert sorted(running.loaded()) == sorted(USERS)
        assert {kind: node.rstrip("b") for kind, node in running.happened("release")} == USERS
        sizes = [event.bytes for event in running.ledger.events if event.event == "load_end"]
        assert running.ledger.peak_bytes == max(sizes)
        both = dict(running.kept)
        result = running.succeed({**one, **renamed_seed(twin)})
        expected = {"dit", "video_vae", "audio_vae"} if cache != "none" else set(USERS)
        assert set(running.loaded()) == expected
        assert len(running.loaded()) == len(expected)
        if cache != "none":
            assert {ENCODE, SAMPLER, DECODE_VIDEO, DECODE_AUDIO} <= set(result.cached)
        assert torch.equal(both["images"], running.kept["images"])
        assert not torch.equal(both["imagesb"], running.kept["imagesb"])


def renamed(prompt: dict[str, Any], suffix: str) -> dict[str, Any]:
    """The same nodes with links to those of the same suffix, but for the loaders."""

    def link(value: Any) -> Any:
        is_link = isinstance(value, list) and value[0] not in LOADERS
        return [f"{value[0]}{suffix}", value[1]] if is_link else value

    return {
        name: {**spec, "inputs": {key: link(value) for key, value in spec["inputs"].items()}} for name, spec in prompt.items()
    }


def renamed_seed(twin: dict[str, Any]) -> dict[str, Any]:
    """The second branch with another seed."""
    sampler = twin[f"{SAMPLER}b"]
    return {**twin, f"{SAMPLER}b": {**sampler, "inputs": {**sampler["inputs"], "seed": 99}}}


# Run after run.


def runs(running: Stage) -> Iterator[dict[str, Tensor]]:
    for seed in SEEDS:
        running.succeed(text_to_video({"7.seed": seed}))
        yield results(running)


@pytest.mark.parametrize("cache", ["ram", "classic", "lru"])
def test_with_another_seed_only_the_sampler_and_what_follows_reads(tmp_path, cache):
    with stage(tmp_path / "free", policy="free", cache=cache) as running:
        read = bytes_read(running)
        freed, total = [], []
        for made in runs(running):
            freed.append(made)
            total.append(sum(running.reads) - sum(total))
        first, *others = [read[run] for run in (1, 2, 3)]
        assert {kind: len(sizes) for kind, sizes in first.items()} == dict.fromkeys(USERS, 1)
        assert others == [{kind: sizes for kind, sizes in first.items() if kind != "text_encoder"}] * 2
        assert total[1] == total[2] == total[0] - sum(first["text_encoder"])
    with stage(tmp_path / "keep", policy="keep", cache=cache) as running:
        for one, other in zip(freed, runs(running), strict=True):
            assert_equal(one, other)


def test_nothing_grows_from_run_to_run(tmp_path):
    with stage(tmp_path, policy="free") as running:
        living = [num_living_tensors() for _ in runs(running)]
        assert living[1] == living[2]
        assert running.store.live_bytes() == 0


@pytest.mark.parametrize("policy", ["free", "keep"])
@pytest.mark.parametrize("action", ["free", "pressure"])
def test_a_host_that_wants_its_memory_in_the_middle_of_sampling_spoils_nothing(tmp_path, action, policy):
    prompt, other = text_to_video({"7.steps": 4}), text_to_video({"7.steps": 4, "7.seed": 8})
    with stage(tmp_path / "calm", policy="keep") as calm:
        wanted = []
        for each in (prompt, other):
            calm.succeed(each)
            wanted.append(results(calm))
    with stage(tmp_path / "disturbed", policy=policy) as running:

        def disturb(name: str, data: dict[str, Any]) -> None:
            if name == "node_progress" and (data["node"], data["value"]) == (SAMPLER, 2):
                if action == "free":
                    running.host.free(unload_models=True)
                else:
                    running.host.model_management.free_memory(1 << 60, CPU)

        undo = running.host.on_event(disturb)
        running.succeed(prompt)
        assert_equal(results(running), wanted[0])
        assert not [resource for resource in running.store.resident() if resource.kind == "dit"]
        undo()
        running.succeed(other)
        assert_equal(results(running), wanted[1])
        assert running.loaded().count("dit") == 1


# Sound and pictures, in either order.


class After:
    """A node that makes its value wait for another one."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "wait"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("LATENT",), "other": ("*",)}}

    def wait(self, value: Any, other: Any) -> tuple[Any]:
        return (value,)


def decoded_in_order(first: str, second: str) -> dict[str, Any]:
    prompt = text_to_video({f"{second}.latent": ["after", 0]})
    prompt["after"] = {"class_type": "After", "inputs": {"value": [SAMPLER, 0], "other": [first, 0]}}
    return prompt


def test_sound_decoded_before_and_after_the_video_is_the_same(tmp_path):
    kinds = {DECODE_AUDIO: "audio_vae", DECODE_VIDEO: "video_vae"}
    made = []
    for order in itertools.permutations(kinds):
        with stage(tmp_path, policy="free", classes={"After": After}) as running:
            running.succeed(decoded_in_order(*order))
            made.append(results(running))
            released = [(kind, node) for kind, node in running.happened("release") if node in kinds]
            assert released == [(kinds[node], node) for node in order]
            loaded = [kind for kind in running.loaded() if kind in kinds.values()]
            assert loaded == [kinds[node] for node in order]
            sizes = [event.bytes for event in running.ledger.events if event.event == "load_end"]
            assert running.ledger.peak_bytes == max(sizes)
    assert_equal(*made)
