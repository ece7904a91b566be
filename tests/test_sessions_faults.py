"""What goes wrong changes when weights come and go, and never a result; a prompt that fails leaves nothing behind."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from embedded_nodes import node
from lazy_h3.host import prompt as host_prompt
from lazy_h3.host.attachment import Attachment
from lazy_h3.host.probe import find_executor
from lazy_h3.host.prompt import RunningPrompt
from lazy_h3.memory import turns
from session_cases import (
    CACHES,
    Kind,
    Scene,
    branch,
    chain,
    loaders,
    quick_collections,  # noqa: F401  (a fixture)
    scene,
)
from small_models import DECODE_VIDEO, ENCODE, SAMPLER, Stage, stage, text_to_video

KINDS: tuple[Kind, ...] = ("component", "foreign")
MIXED = {
    **chain(),
    **{"8": node("Passes", value="a dog"), **branch(["8", 0], 14)},
    "9": node("Repeats", model=["2", 0], value=["5", 0], times=2),
    "10": node("ComfySwitchNode", switch=True, on_true=["9", 0], on_false=["14", 0]),
    "11": node("UsesLate", model=["1", 0], value=["10", 0], seconds=0.001),
    "12": node("Show", value=["11", 0]),
}  # a little of everything


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that are made up leave heavy nodes waiting for what never comes, until they lose patience."""
    monkeypatch.setattr(turns, "ROUND_SECONDS", 0.001)


@functools.cache
def calm_results(kind: Kind) -> dict[str, Any]:
    with scene(kind, policy="keep", take_turns=False) as calm:
        calm.succeed(MIXED)
        return dict(calm.kept)


def assert_as_calm(played: Scene, wanted: dict[str, Any]) -> None:
    assert played.kept.keys() == wanted.keys()
    assert all(torch.equal(played.kept[name], value) for name, value in wanted.items())


def assert_empty(played: Scene) -> None:
    assert played.store.live_bytes() == 0
    assert played.store.resident() == []
    assert played.host.model_management.current_loaded_models == []


# The analysis fails.


def sometimes(rng: random.Random, call: Callable[..., Any], share: float) -> Callable[..., Any]:
    """Raises in that share of all calls."""

    def disturbed(*args: Any) -> Any:
        if rng.random() < share:
            raise ArithmeticError("disturbed")
        return call(*args)

    return disturbed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("question", ["version", "view", "may_run", "classes", "sources"])
def test_a_prompt_that_can_never_be_read_is_released_at_its_end(question, kind, monkeypatch, caplog):
    wanted = calm_results(kind)
    monkeypatch.setattr(RunningPrompt, question, sometimes(random.Random(0), getattr(RunningPrompt, question), 1))
    with scene(kind) as played:
        played.succeed(MIXED)
        assert_as_calm(played, wanted)
        assert_empty(played)
        assert caplog.text.count("the analysis of prompt") == 1
        monkeypatch.undo()
        played.succeed(chain("another text"))
        assert played.record.stays("te") == [("X4", "F4")]


@pytest.mark.parametrize("seed", range(24))
def test_a_prompt_that_can_only_be_read_sometimes_gives_the_same(seed, monkeypatch):
    rng = random.Random(seed)
    kind, cache = rng.choice(KINDS), rng.choice(CACHES)
    wanted = calm_results(kind)
    for question in ("version", "view", "may_run", "classes", "sources"):
        monkeypatch.setattr(RunningPrompt, question, sometimes(rng, getattr(RunningPrompt, question), rng.choice([0, 0.1, 0.5])))
    with scene(kind, cache=cache, seed=seed) as played:
        played.succeed(MIXED)
        assert_as_calm(played, wanted)
        assert_empty(played)


@pytest.mark.parametrize("cache", CACHES)
def test_an_executor_that_cannot_be_looked_at_is_done_without(cache, monkeypatch):
    """Its frame is private: it may look like anything."""
    wanted = calm_results("component")
    frames = iter(range(1 << 30))

    def probe() -> Any:
        if next(frames) % 2:
            raise AttributeError("no such local")
        return None

    monkeypatch.setattr(host_prompt, "find_executor", probe)
    with scene(cache=cache) as played:
        played.succeed(MIXED)
        assert_as_calm(played, wanted)
        assert_empty(played)


class Slotted:
    """Cannot be referred to weakly."""

    __slots__ = ("pendingNodes",)

    def __init__(self) -> None:
        self.pendingNodes = {"1": True}


class Listing:
    pendingNodes: ClassVar = {"1": True}


@pytest.mark.parametrize("stranger", [None, {}, object(), Slotted()], ids=["none", "dict", "object", "slotted"])
def test_a_frame_that_does_not_look_like_an_executor_is_passed_by(stranger):
    def execute_async(execution_list: Any, call: Callable[[], Any]) -> Any:
        return call()

    assert execute_async(stranger, find_executor) is None
    listing = Listing()
    found = execute_async(listing, lambda: execute_async(stranger, find_executor))
    assert (set(found.pending), found.cached) == ({"1"}, frozenset())
    del listing
    assert set(found.pending) == set()


def test_without_an_event_loop_the_session_ends_when_the_next_prompt_begins(monkeypatch):
    """Executors of others may run nodes in no loop of ours."""
    monkeypatch.setattr(Attachment, "_post_sentinel", lambda *_: None)
    with scene() as played:
        assert played.run({**chain(), "5": node("FailsInside", model=["1", 0], value=["4", 0])}).status == "error"
        assert played.store.resident() == [played.resources["te"]]
        played.succeed({"1": node("Many", values="no model"), "2": node("Show", value=["1", 0])})
        assert_empty(played)


# Events that nobody expects.


@pytest.mark.parametrize("seed", range(20))
def test_starts_and_finishes_in_any_order_change_no_result(seed):
    """Whatever a host tells, and whenever: also of nodes that run at this moment, have not run, or do not exist."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    wanted = calm_results(kind)
    with scene(kind, sees=rng.choice(["list", "queued"]), cache=rng.choice(CACHES), seed=seed) as played:
        attachment = played.runtime.attachment

        def disturb(name: str, data: dict[str, Any]) -> None:
            for _ in range(rng.randrange(3)):
                rng.choice([attachment.started, attachment.finished])(rng.choice([*MIXED, "9.0.0.1", "never was"]))

        played.host.on_event(disturb)
        if kind == "component":  # what its owner manages is not pinned, so an early release would be the owner's fault
            played.during = lambda name: disturb(name, {})
        played.succeed(MIXED)
        assert_as_calm(played, wanted)
        assert_empty(played)


@pytest.mark.parametrize("seed", range(8))
def test_a_handler_that_is_reset_too_early_leaves_its_work_to_the_next_prompt(seed):
    rng = random.Random(seed)
    wanted = calm_results("component")
    with scene(seed=seed) as played:
        reset_at = rng.choice([name for name in MIXED if name not in loaders()])
        played.during = lambda name: played.host.progress.handlers["lazy_h3"].reset() if name == reset_at else None
        played.succeed(MIXED)
        assert_as_calm(played, wanted)
        played.during = lambda name: None
        played.succeed(chain("another text"))
        assert_empty(played)


# Nodes fail, and people lose patience.


class Bad(Exception):
    """The error of a node."""


def fail(running: Stage) -> None:
    raise Bad("the original error")


def interrupt(running: Stage) -> None:
    running.host.interrupt()


MOMENTS = {
    "while the text encoder is read": ("read", "text_encoder"),
    "while the transformer is read": ("read", "dit"),
    "while the video VAE is read": ("read", "video_vae"),
    "in the second layer of the encoder": ("step", ENCODE, 2),
    "in the third of eight steps": ("step", SAMPLER, 3),
    "while a video is decoded": ("step", DECODE_VIDEO, 1),
}


def disturb(running: Stage, moment: tuple[Any, ...], action: Callable[[Stage], None]) -> Callable[[], None]:
    """Arrange for ``action`` at a moment of the next runs; returns the undo."""
    what, where, *count = moment
    if what == "read":

        def on_fill(resource: Any, done: int, total: int) -> None:
            if resource.kind == where:
                action(running)

        running.store.on_fill.insert(0, on_fill)
        return lambda: running.store.on_fill.remove(on_fill)

    def on_event(name: str, data: dict[str, Any]) -> None:
        progress = (data.get("node"), data.get("value"))
        if name == "node_progress" and progress == (where, *count) and running.store.is_pinned(resource_of(running, where)):
            action(running)

    return running.host.on_event(on_event)


def resource_of(running: Stage, name: str) -> Any:
    kind = {ENCODE: "text_encoder", SAMPLER: "dit", DECODE_VIDEO: "video_vae"}[name]
    return next(status.resource for status in running.store.statuses() if status.resource.kind == kind)


@pytest.fixture(scope="module")
def calm_images(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    with stage(tmp_path_factory.mktemp("calm"), policy="keep") as calm:
        calm.succeed(text_to_video({"7.steps": 8}))
        return calm.kept["images"]


@pytest.mark.parametrize(("action", "status"), [(fail, "error"), (interrupt, "interrupted")], ids=["fails", "interrupted"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_ends_early_leaves_nothing_and_the_next_one_is_undisturbed(tmp_path, moment, action, status, calm_images):
    prompt = text_to_video({"7.steps": 8})
    with stage(tmp_path, policy="free") as running:
        undo = disturb(running, MOMENTS[moment], action)
        result = running.run(prompt)
        assert result.status == status
        if action is fail:
            assert (result.error.type, result.error.message) == ("Bad", "the original error")
        assert running.store.live_bytes() == 0
        assert running.store.resident() == []
        assert not any(status.is_pinned for status in running.store.statuses())
        assert running.host.model_management.current_loaded_models == []
        undo()
        done = set(result.executed)
        again = running.succeed(prompt)
        assert done <= set(again.cached)
        assert torch.equal(running.kept["images"], calm_images)
        assert running.store.live_bytes() == 0
