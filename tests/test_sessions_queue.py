"""Prompts one after the other in a queue, and a host that is asked to free its memory between and during them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SAMPLER, USERS, Stage, stage, text_to_video

NUM_QUEUED = 5
ROOM = 1 << 30  # the tiny models take less than a MiB
ONCE = dict.fromkeys(USERS, 1)
FREE = {"unload models": {"unload_models": True}, "free memory": {"free_memory": True}}
FORMS = pytest.mark.parametrize("form", FREE.values(), ids=FREE)
ANY_POLICY = pytest.mark.parametrize("policy", ["auto", "keep"])


def prompt_of(number: int) -> dict[str, Any]:
    return text_to_video({"5.prompt": f"take {number}", "7.seed": number})


@contextmanager
def with_room(out: Path, policy: Any) -> Iterator[Stage]:
    with stage(out, policy=policy, budget=ROOM, may_plan=True) as running:
        yield running


def queue(running: Stage, count: int) -> list[Counter[str]]:
    """Loads of each of so many prompts that wait in the host's queue together."""

    def begins(name: str, _: Any) -> None:
        if name == "execution_start":
            running.ledger.begin_run(running.ledger.run + 1)

    undo = running.host.on_event(begins)
    with ThreadPoolExecutor(count) as users:
        results = list(users.map(running.host.run, map(prompt_of, range(count))))
    undo()
    assert [result.status for result in results] == ["success"] * count
    return [Counter(running.loaded(run)) for run in range(1, count + 1)]


def resident(running: Stage) -> set[str]:
    return {resource.kind for resource in running.store.resident()}


def latents(running: Stage) -> tuple[torch.Tensor, ...]:
    return running.kept["latent"]["samples"].unbind()


@contextmanager
def at_step(running: Stage, step: int, action: Callable[[], object]) -> Iterator[None]:
    """Inside, ``action`` happens on the executor's thread when the sampler has done this many steps."""

    def follow(name: str, data: dict[str, Any]) -> None:
        if name == "node_progress" and (data["node"], data["value"]) == (SAMPLER, step):
            action()

    undo = running.host.on_event(follow)
    try:
        yield
    finally:
        undo()


def test_with_room_five_queued_prompts_load_each_component_once_in_all(tmp_path):
    with with_room(tmp_path, "auto") as running:
        first, *others = queue(running, NUM_QUEUED)
        assert first == ONCE
        assert others == [Counter()] * (NUM_QUEUED - 1)
        assert resident(running) == USERS.keys()


def test_under_policy_free_five_queued_prompts_load_each_component_once_a_run(tmp_path):
    with with_room(tmp_path, "free") as running:
        assert queue(running, NUM_QUEUED) == [ONCE] * NUM_QUEUED
        assert resident(running) == set()


@ANY_POLICY
@FORMS
def test_free_between_prompts_drops_everything_and_the_next_prompt_keeps_again(tmp_path, form, policy):
    with with_room(tmp_path, policy) as running:
        running.succeed(prompt_of(0))
        assert resident(running) == USERS.keys()
        running.host.free(**form)
        assert resident(running) == set()
        assert running.store.live_bytes() == 0
        for number, loads in ((1, ONCE), (2, {})):
            running.succeed(prompt_of(number))
            assert Counter(running.loaded()) == loads


def test_free_memory_forgets_outputs_and_unload_models_does_not(tmp_path):
    with with_room(tmp_path, "auto") as running:
        for form, loads in (({"unload_models": True}, {}), ({"free_memory": True}, ONCE)):
            running.succeed(prompt_of(0))
            running.host.free(**form)
            running.succeed(prompt_of(0))
            assert Counter(running.loaded()) == loads


@ANY_POLICY
@FORMS
def test_free_during_a_prompt_waits_for_its_end_and_then_nothing_is_kept(tmp_path, form, policy):
    """Hosts get to it between prompts: what the prompt still needs is not read twice."""
    with with_room(tmp_path, policy) as running:
        running.succeed(prompt_of(0))
        calm = latents(running)
        running.host.free(free_memory=True)
        with at_step(running, 1, lambda: running.host.free(**form)):
            running.succeed(prompt_of(0))
        assert Counter(running.loaded()) == ONCE
        assert all(map(torch.equal, latents(running), calm))
        assert resident(running) == set()
        running.succeed(prompt_of(1))
        assert Counter(running.loaded()) == ONCE
        assert resident(running) == USERS.keys()


@ANY_POLICY
def test_a_host_that_unloads_at_once_gets_the_unpinned_now_and_the_rest_at_unpin(tmp_path, policy):
    """As when a node runs out of memory. What is kept is forgotten; what is read afterwards is kept as before."""
    with with_room(tmp_path, policy) as running:
        running.succeed(prompt_of(0))
        calm = latents(running)
        running.host.free(free_memory=True)
        seen: list[set[str]] = []

        def unload() -> None:
            seen.append(resident(running))
            running.host.model_management.unload_all_models()
            seen.append(resident(running))

        with at_step(running, 1, unload):
            running.succeed(prompt_of(0))
        before, after = seen
        assert before >= {"text_encoder", "dit"}
        assert "dit" in after
        assert "text_encoder" not in after
        assert ("dit", SAMPLER) in running.happened("release")
        assert all(map(torch.equal, latents(running), calm))
        assert resident(running) == USERS.keys() - {"text_encoder", "dit"}
        running.succeed(prompt_of(1))
        assert Counter(running.loaded()) == {"text_encoder": 1, "dit": 1}
