"""Report, release and policy nodes in running prompts."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from lazy_h3.memory.handle import Handle
from lazy_h3.nodes.inspect import ALL, ANY, THIS
from lazy_h3.nodes.timeline import COLOURS
from small_models import DECODE_AUDIO, ENCODE, SAMPLER, USERS, Stage, stage, text_to_video

REPORT, RELEASE, POLICY = "report", "release now", "policy"
SLOTS = {"passed": 0, "text": 1, "picture": 2, "document": 3}


def with_report(prompt: dict[str, Any], after: list[Any]) -> dict[str, Any]:
    keepers = {name: {"class_type": "Keep", "inputs": {"value": [REPORT, slot]}} for name, slot in SLOTS.items()}
    return {**prompt, REPORT: {"class_type": "LazyH3MemoryReport", "inputs": {"anything": after}}, **keepers}


def with_release(prompt: dict[str, Any], target: str, what: str) -> dict[str, Any]:
    """The release node on the wire into ``target``: "NODE.INPUT"."""
    node, name = target.split(".")
    link = prompt[node]["inputs"][name]
    prompt[node]["inputs"][name] = [RELEASE, 0]
    return {**prompt, RELEASE: {"class_type": "LazyH3ReleaseNow", "inputs": {"anything": link, "what": what}}}


def with_policy(prompt: dict[str, Any], **nodes: Any) -> dict[str, Any]:
    """Policy nodes that are wired to nothing."""
    return {**prompt, **{name: {"class_type": "LazyH3Policy", "inputs": {"policy": value}} for name, value in nodes.items()}}


def resident(running: Stage) -> set[str]:
    return {resource.identity.kind for resource in running.store.resident()}


def colours(picture: torch.Tensor) -> set[tuple[int, ...]]:
    return set(map(tuple, (picture[0] * 255).round().int().flatten(0, 1).unique(dim=0).tolist()))


def test_a_report_at_the_end_tells_of_every_component(tmp_path):
    with stage(tmp_path) as running:
        result = running.succeed(with_report(text_to_video(), [DECODE_AUDIO, 0]))
        kept, names = running.kept, {kind: name for name, kind in running.runtime.catalogue.kinds.items()}
        assert kept["passed"] is kept["audio"]
        assert result.outputs[REPORT] == {"text": [kept["text"]]}
        for kind in USERS:
            (row,) = [line for line in kept["text"].splitlines() if line.startswith(names[kind])]
            assert row.endswith(f"freed after node {USERS[kind]}")
            assert "1x in" in row
        found = json.loads(kept["document"])
        assert {c["name"] for c in found["components"]} == set(names.values())
        assert found["peak_bytes"] == running.ledger.peak_bytes == found["largest_bytes"]
        assert found["sum_bytes"] == sum(e.bytes for e in running.ledger.events if e.event == "load_end")
        assert found["events"] == [e.as_dict() for e in running.ledger.events][: len(found["events"])]
        assert kept["picture"].shape[0::3] == (1, 3)
        wanted = {tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in COLOURS[: len(USERS)]}
        assert wanted <= colours(kept["picture"])


def test_a_report_runs_in_every_prompt_and_tells_of_that_prompt_alone(tmp_path):
    prompt = with_report(text_to_video(), [DECODE_AUDIO, 0])
    with stage(tmp_path) as running:
        running.succeed(prompt)
        for _ in range(2):
            assert REPORT in running.succeed(prompt).executed
            assert running.kept["text"] == "No component was in memory in this prompt."
            assert running.loaded() == []


def test_a_report_loads_and_keeps_nothing(tmp_path):
    prompt = text_to_video()
    with stage(tmp_path) as running:
        running.succeed(with_report({node: prompt[node] for node in "1234"}, ["1", 0]))
        assert isinstance(running.kept["passed"], Handle)
        assert (running.reads, running.store.resident()) == ([], [])


def test_a_report_needs_no_input(tmp_path):
    with stage(tmp_path) as running:
        result = running.succeed({REPORT: {"class_type": "LazyH3MemoryReport", "inputs": {}}})
        assert result.outputs[REPORT]["text"] == ["No component was in memory in this prompt."]


def test_what_was_kept_from_the_run_before_is_in_the_report(tmp_path):
    with stage(tmp_path, policy="keep") as running:
        running.succeed(text_to_video())
        running.succeed(with_report(text_to_video(), [DECODE_AUDIO, 0]))
        found = json.loads(running.kept["document"])
        assert [c["loads"] for c in found["components"]] == [0] * len(USERS)
        assert found["sum_bytes"] == found["peak_bytes"] == running.store.live_bytes()


@pytest.mark.parametrize(
    "node", [{"class_type": "LazyH3MemoryReport", "inputs": {}}, {"class_type": "LazyH3Policy", "inputs": {"policy": "free"}}]
)
def test_a_handle_is_followed_through_the_nodes(tmp_path, node):
    prompt = text_to_video({"7.dit": ["through", 0]})
    prompt["through"] = {**node, "inputs": {**node["inputs"], "anything": ["2", 0]}}
    with stage(tmp_path) as running:
        running.succeed(prompt)
        assert ("dit", SAMPLER) in running.happened("release")
        assert running.loaded().count("dit") == 1


def test_the_any_type_differs_from_no_type():
    """Older hosts compare the types of a link with ``!=``, also with a list of choices, in either order."""
    for other in ("IMAGE", "LAZYH3_DIT", ["one", "two"]):
        assert not (ANY != other)  # noqa: SIM202, SIM300
        assert not (other != ANY)  # noqa: SIM202
    assert json.dumps(ANY) == '"*"'


def test_release_now_frees_everything_at_its_place(tmp_path):
    """Under the policy keep, the text encoder would still be there when the transformer is read."""
    prompt = with_release(text_to_video(), f"{SAMPLER}.positive", ALL)
    with stage(tmp_path, policy="keep") as running:
        running.succeed(prompt)
        assert running.happened("release") == [("text_encoder", RELEASE)]
        events = [(e.event, running.runtime.catalogue.kinds[e.component]) for e in running.ledger.events]
        assert events.index(("release", "text_encoder")) < events.index(("load_begin", "dit"))
        assert resident(running) == {"dit", "video_vae", "audio_vae"}


def test_release_now_frees_the_component_whose_handle_it_gets_and_no_other(tmp_path):
    with stage(tmp_path, policy="keep") as running:
        running.succeed(text_to_video())
        running.succeed(with_release(text_to_video({"7.seed": 1}), f"{SAMPLER}.dit", THIS))
        assert running.happened("release") == [("dit", RELEASE)]
        assert running.loaded() == ["dit"]
        (event,) = [e for e in running.ledger.of_run(2) if e.event == "release"]
        assert event.reason == f"node {RELEASE} asked for it"


def test_release_now_passes_on_what_it_gets(tmp_path):
    with stage(tmp_path) as running:
        running.succeed(with_release(text_to_video(), f"{ENCODE}.text_encoder", THIS))
        plain = running.kept["latent"]["samples"].unbind()
        running.succeed(text_to_video())
        assert all(map(torch.equal, plain, running.kept["latent"]["samples"].unbind()))


def test_release_now_says_what_to_do_when_it_gets_no_handle(tmp_path):
    with stage(tmp_path) as running:
        result = running.run(with_release(text_to_video(), f"{SAMPLER}.latent", THIS))
        assert (result.status, result.error.node_id) == ("error", RELEASE)
        assert result.error.message == (
            'Release now: the input is a dict, not the handle of a loader; wire in one, or choose "all components".'
        )


@pytest.mark.parametrize(
    ("general", "asked", "left"), [("free", "keep", set(USERS)), ("keep", "free", set()), ("free", "auto", set(USERS))]
)
def test_a_policy_node_takes_the_place_of_the_general_policy_for_its_prompts(tmp_path, general, asked, left):
    with stage(tmp_path, policy=general) as running:
        running.succeed(with_policy(text_to_video(), one=asked))
        assert resident(running) == left
        running.succeed(text_to_video({"7.seed": 1}))
        assert resident(running) == (set(USERS) - {"text_encoder"} if general == "keep" else set())


def test_a_policy_node_counts_although_it_is_cached(tmp_path):
    """Here it is on the wire of a handle, and in the second run the wire is cached."""
    prompt = text_to_video({"7.dit": [POLICY, 0]})
    prompt[POLICY] = {"class_type": "LazyH3Policy", "inputs": {"policy": "keep", "anything": ["2", 0]}}
    with stage(tmp_path, policy="free") as running:
        assert POLICY in running.succeed(prompt).executed
        prompt[SAMPLER]["inputs"]["seed"] = 1
        assert POLICY in running.succeed(prompt).cached
        assert (running.loaded(), resident(running)) == ([], set(USERS))


def test_the_strictest_of_several_policy_nodes_holds_and_it_is_said_once(tmp_path, caplog):
    with stage(tmp_path, policy="keep") as running:
        running.succeed(with_policy(text_to_video(), one="keep", two="auto", three="free"))
        assert resident(running) == set()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["Lazy H3: policy nodes of one prompt ask for free and auto and keep; free holds."]


@pytest.mark.parametrize("value", ["sometimes", ["any", 0]], ids=["no policy", "a link"])
def test_a_policy_must_be_chosen_in_the_node(tmp_path, value):
    prompt = with_report({}, [POLICY, 0])
    prompt["any"] = {"class_type": "LazyH3MemoryReport", "inputs": {}}
    prompt[POLICY] = {"class_type": "LazyH3Policy", "inputs": {"policy": value}}
    with stage(tmp_path) as running:
        result = running.run(prompt)
        assert "the policy must be chosen in the node itself, as one of auto, free, keep" in str(result.node_errors)


def test_one_line_a_prompt_says_the_peak_and_what_was_freed_where(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lazy_h3")
    with stage(tmp_path) as running:
        result = running.succeed(text_to_video())
        (line,) = [r.getMessage() for r in caplog.records if result.prompt_id in r.getMessage()]
        for name, kind in running.runtime.catalogue.kinds.items():
            assert f"{name} freed after node {USERS[kind]}" in line
    released = [r.getMessage() for r in caplog.records if ": released " in r.getMessage()]
    assert len(released) == len(USERS)
