"""Our nodes with the tiny model: the next component is read while a node computes, and nothing else changes by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from embedded_nodes import node_class
from small_models import CPU, DECODE_AUDIO, DECODE_VIDEO, ENCODE, SAMPLER, Stage, stage, text_to_video
from torch import Tensor

POLICIES = ("free", "auto", "keep")
AHEAD = "ahead of its first user"
WAIT_SECONDS = 20.0


def read_ahead(running: Stage) -> dict[str, str | None]:
    """Kind -> node during which it was begun."""
    events = running.ledger.of_run(running.ledger.run)
    begun = [event for event in events if event.event == "load_begin" and event.reason == AHEAD]
    return {running.runtime.catalogue.kinds[event.component]: event.node for event in begun}


def results(running: Stage) -> list[Tensor]:
    return [*running.kept["latent"]["samples"].unbind(), running.kept["images"], running.kept["audio"]["waveform"]]


def resident(running: Stage) -> set[str]:
    return {status.resource.kind for status in running.store.statuses() if status.state == "resident"}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("lazy-h3-prefetch", "lazy-h3-read"))]


def at_first_step(running: Stage, action: Callable[[], object]) -> None:
    """Do this once in each run, in the middle of the sampler."""

    def follow(name: str, data: dict[str, Any]) -> None:
        if name == "node_progress" and (data["node"], data["value"], data["max"]) == (SAMPLER, 1, 2):
            action()

    running.host.on_event(follow)


@contextmanager
def slow_reads(running: Stage, kind: str) -> Iterator[None]:
    """From when a kind is begun to be read ahead, each piece takes a moment."""

    def slow(nbytes: int) -> None:
        if kind in read_ahead(running):
            time.sleep(0.005)

    running.reads.before_each = slow
    yield
    running.reads.before_each = lambda nbytes: None


# What is read when.


@pytest.mark.parametrize("policy", ["auto", "keep"])
def test_the_decoder_is_read_while_the_sampler_computes(tmp_path, policy):
    with stage(tmp_path, policy=policy, may_plan=True) as running:
        at_first_step(running, lambda: wait_until(lambda: "video_vae" in resident(running)))
        running.succeed(text_to_video())
        assert read_ahead(running) == {"dit": ENCODE, "video_vae": SAMPLER, "audio_vae": DECODE_VIDEO}
        assert sorted(running.loaded()) == ["audio_vae", "dit", "text_encoder", "video_vae"]


def test_with_the_policy_free_it_is_read_ahead_only_below_the_peak(tmp_path):
    """The video decoder is the largest: beside it there is no room, but beside the encoder there is, for the transformer."""
    with stage(tmp_path, policy="free", may_plan=True) as running:
        running.succeed(text_to_video())
        assert read_ahead(running) == {"dit": ENCODE}
        assert running.store.live_bytes() == 0
        assert dict(running.happened("release")) == {
            "text_encoder": ENCODE,
            "dit": SAMPLER,
            "video_vae": DECODE_VIDEO,
            "audio_vae": DECODE_AUDIO,
        }


@pytest.mark.parametrize("cache", ["ram", "classic", "lru", "none"])
def test_it_is_read_ahead_in_every_run_that_needs_it(tmp_path, cache):
    with stage(tmp_path, policy="free", may_plan=True, cache=cache) as running:
        for text in ("a cat", "a dog", "a cow"):
            running.succeed(text_to_video({"5.prompt": text}))
            assert read_ahead(running) == {"dit": ENCODE}
            assert running.loaded().count("dit") == 1


def test_what_is_there_already_is_not_read_again(tmp_path):
    with stage(tmp_path, policy="keep", may_plan=True) as running:
        running.succeed(text_to_video())
        running.succeed(text_to_video({"5.prompt": "a dog", "7.seed": 8}))
        assert running.loaded() == []


def test_a_budget_without_room_for_two_reads_nothing_ahead(tmp_path):
    with stage(tmp_path, policy="auto", may_plan=True) as running:
        running.succeed(text_to_video())
        largest = max(event.bytes for event in running.ledger.events if event.event == "load_end")
    with stage(tmp_path, policy="auto", may_plan=True, budget=largest) as running:
        running.succeed(text_to_video())
        assert "video_vae" not in read_ahead(running)
        assert running.ledger.peak_bytes <= largest


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"7.steps": 3, "6.width": 64}], ids=["smallest", "wider"])
def test_the_peak_is_not_above_the_predicted_one_and_all_bits_are_those_without_it(tmp_path, policy, changes):
    made = []
    for may_prefetch in (True, False):
        with stage(tmp_path, policy=policy, may_plan=True, may_prefetch=may_prefetch) as running:
            running.succeed(text_to_video(changes))
            assert bool(read_ahead(running)) is may_prefetch
            assert running.ledger.page().peak_bytes <= running.runtime.plan().peak_bytes
            made.append(results(running))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


# Only for what is certain to run.


def decided_late(chooses_decoder: bool) -> dict[str, Any]:
    """Whether the video is decoded is known when it has been sampled."""
    prompt = text_to_video()
    keeper = next(name for name, spec in prompt.items() if spec["inputs"].get("value") == [DECODE_VIDEO, 0])
    decides = {"value": [SAMPLER, 0], "answer": chooses_decoder}
    prompt["decides"] = {"class_type": "Decides", "inputs": decides}
    switch = {"switch": ["decides", 0], "on_true": [DECODE_VIDEO, 0], "on_false": "nothing"}
    prompt["switch"] = {"class_type": "ComfySwitchNode", "inputs": switch}
    prompt[keeper]["inputs"]["value"] = ["switch", 0]
    return prompt


DECIDES = node_class(lambda self, value, answer: (answer,), {"value": ("*",), "answer": ("BOOLEAN",)}, ("BOOLEAN",))


@pytest.mark.parametrize("is_decoded", [True, False])
def test_what_lies_behind_a_lazy_input_is_read_when_it_is_asked_for(tmp_path, is_decoded):
    with stage(tmp_path, policy="keep", may_plan=True, classes={"Decides": DECIDES}) as running:
        running.succeed(decided_late(is_decoded))
        assert SAMPLER not in [node for kind, node in read_ahead(running).items() if kind == "video_vae"]
        assert ("video_vae" in running.loaded()) is is_decoded


def test_a_host_that_does_not_tell_what_is_certain_reads_nothing_ahead(tmp_path):
    with stage(tmp_path, policy="keep", may_plan=True, expose_probe=False) as running:
        running.succeed(text_to_video())
        assert read_ahead(running) == {}


def test_texts_in_a_list_begin_one_read(tmp_path):
    texts = node_class(lambda self: (["a cat", "a dog"],), {}, ("STRING",), OUTPUT_IS_LIST=(True,))
    prompt = {"texts": {"class_type": "Texts", "inputs": {}}, **text_to_video({"5.prompt": ["texts", 0]})}
    with stage(tmp_path, policy="free", may_plan=True, classes={"Texts": texts}) as running:
        running.succeed(prompt)
        assert read_ahead(running) == {"dit": ENCODE}
        assert running.loaded().count("dit") == 1


# When the node that computes meanwhile does not end well.


@pytest.mark.parametrize("policy", ["free", "keep"])
@pytest.mark.parametrize("how", ["error", "interrupt"])
@pytest.mark.parametrize("moment", ["being read", "read"])
def test_after_a_node_that_fails_nobody_reads_and_nothing_stays_but_what_is_kept(tmp_path, how, moment, policy):
    with stage(tmp_path, policy=policy, may_plan=True) as running:

        def fail(resource: Any) -> None:
            if resource.kind != "text_encoder":
                return
            wait_until(lambda: "dit" in (resident(running) if moment == "read" else read_ahead(running)))
            if how == "error":
                raise ArithmeticError("no good")
            running.host.interrupt()
            running.host.throw_if_interrupted()

        running.store.on_ready.append(fail)
        with slow_reads(running, "dit" if moment == "being read" else "none"):
            result = running.run(text_to_video())
            wait_until(lambda: not reading_threads())
        assert result.status == ("interrupted" if how == "interrupt" else "error")
        kept = {"text_encoder"} | ({"dit"} if moment == "read" else set())
        assert resident(running) == (set() if policy == "free" else kept)
        assert {status.state for status in running.store.statuses()} <= {"absent", "resident"}
        listed = {entry.model.resource.kind for entry in running.host.model_management.current_loaded_models}
        assert listed == resident(running)
        running.store.on_ready.remove(fail)
        running.succeed(text_to_video())
        is_there = policy == "keep" and moment == "read"
        assert running.loaded().count("dit") == (0 if is_there else 1)


@pytest.mark.parametrize("pressure", ["the host needs room", "all is released", "a request from elsewhere"])
def test_pressure_while_it_is_being_read_takes_it(tmp_path, pressure):
    with stage(tmp_path, policy="keep", may_plan=True) as running, slow_reads(running, "dit"):

        def press(resource: Any) -> None:
            if resource.kind != "text_encoder":
                return
            (dit,) = [other for other in running.store.resident() if other.kind == "dit"]
            if pressure == "the host needs room":
                running.host.model_management.free_memory(1 << 60, CPU)
            elif pressure == "all is released":
                running.store.release_all("pressure", force=True)
            else:
                running.store.release_later(dit, "asked", force=True)
            wait_until(lambda: not reading_threads())
            assert dit.live_bytes() == 0
            running.store.on_ready.remove(press)

        running.store.on_ready.append(press)
        running.succeed(text_to_video())
        assert running.store.on_ready.count(press) == 0
        ends = [event for event in running.ledger.events if event.event == "load_end"]
        assert [bool(e.bytes) for e in ends if running.runtime.catalogue.kinds[e.component] == "dit"] == [False, True]
