"""How the pack meets a prompt: one session each, that ends with it however it ends, whatever the host shows of itself."""

import gc
from types import SimpleNamespace

import pytest
from lazy_h3.host.attachment import HANDLER_NAME, Attachment
from lazy_h3.host.embedded import progress
from lazy_h3.host.embedded.graph import DynamicPrompt
from lazy_h3.memory.store import Store
from small_models import SAMPLER, USERS, stage, text_to_video

HOSTS = {
    "everything shown": {},
    "executor hidden": {"expose_probe": False},
    "executor and queue hidden": {"expose_probe": False, "expose_queue": False},
}


def plain_node(function) -> type:
    """A node of another pack: takes and gives a latent."""
    inputs = classmethod(lambda cls: {"required": {"latent": ("LATENT",)}})
    return type("Foreign", (), {"INPUT_TYPES": inputs, "RETURN_TYPES": ("LATENT",), "FUNCTION": "run", "run": function})


def with_foreign_node(after: str) -> dict:
    """The small workflow with a node "Foreign" between a node that gives a latent and its users."""
    prompt = text_to_video()
    for spec in prompt.values():
        spec["inputs"] = {name: ["foreign", 0] if value == [after, 0] else value for name, value in spec["inputs"].items()}
    return {**prompt, "foreign": {"class_type": "Foreign", "inputs": {"latent": [after, 0]}}}


@pytest.mark.parametrize("options", HOSTS.values(), ids=HOSTS.keys())
def test_release_points_are_the_same_whatever_the_host_shows(tmp_path, options):
    with stage(tmp_path, **options) as running:
        for seed in (1, 2):
            running.succeed(text_to_video({"7.seed": seed}))
            expected = {kind: node for kind, node in USERS.items() if seed == 1 or kind != "text_encoder"}
            assert dict(running.happened("release")) == expected
            assert running.store.resident() == []


@pytest.mark.parametrize("options", HOSTS.values(), ids=HOSTS.keys())
def test_only_what_the_wanted_outputs_need_is_loaded(tmp_path, options):
    with stage(tmp_path, **options) as running:
        result = running.host.run(text_to_video(), outputs=["latent"])
        assert result.status == "success"
        loaded = {running.runtime.catalogue.kinds[e.component] for e in running.ledger.events if e.event == "load_end"}
        released = {e.component.split(" (")[0]: e.node for e in running.ledger.events if e.event == "release"}
        assert loaded == {"text_encoder", "dit"}
        assert released == {"text encoder": "5", "diffusion transformer": SAMPLER}


def test_a_prompt_has_one_session_and_the_next_has_another(tmp_path):
    sessions = []

    def look(self, latent):
        registry = progress.get_progress_state()
        sessions.append((running.runtime.attachment.session, list(registry.handlers).count(HANDLER_NAME)))
        return (latent,)

    with stage(tmp_path, classes={"Foreign": plain_node(look)}) as running:
        for seed in (1, 2):
            running.succeed({**with_foreign_node(SAMPLER), "7": text_to_video({"7.seed": seed})["7"]})
            assert running.runtime.attachment.session is None
        (first, count), (second, again) = sessions
        assert first is not second
        assert (count, again) == (1, 1)
        assert first.is_over
        assert second.is_over


def test_an_error_in_a_node_of_another_pack_ends_the_session_and_frees_everything(tmp_path):
    def fail(self, latent):
        raise KeyError("not ours")

    with stage(tmp_path, policy="free", classes={"Foreign": plain_node(fail)}) as running:
        prompt = with_foreign_node(SAMPLER)
        prompt["again"] = {**prompt[SAMPLER], "inputs": {**prompt[SAMPLER]["inputs"], "latent": ["foreign", 0]}}
        prompt["latent"]["inputs"]["value"] = ["again", 0]  # so the transformer is still wanted when the node fails
        result = running.run(prompt)
        assert (result.status, result.error.node_id) == ("error", "foreign")
        assert running.happened("release")[-1] == ("dit", None)
        assert running.store.resident() == []
        assert running.runtime.attachment.session is None
        running.succeed(text_to_video())


def test_a_garbage_collection_does_not_end_the_session(tmp_path):
    """Event loops hold their tasks weakly: a sentinel that nobody else held was collected, and with it the end of the prompt."""

    def collect_and_fail(self, latent):
        gc.collect()
        assert running.runtime.attachment.session is not None
        raise RuntimeError("stop here")

    with stage(tmp_path, classes={"Foreign": plain_node(collect_and_fail)}) as running:
        prompt = with_foreign_node("6")  # before the sampler, which wants the text encoder's output
        result = running.run(prompt)
        assert result.error.message == "stop here"
        assert running.runtime.attachment.session is None
        assert running.store.resident() == []


def test_a_node_of_another_pack_may_hold_a_handle_on_its_way(tmp_path):
    """A reroute of any type: the transformer is wanted behind it."""

    class AnyPass:
        RETURN_TYPES = ("*",)
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"anything": ("*",)}}

        def run(self, anything):
            return (anything,)

    prompt = text_to_video({"7.dit": ["pass", 0]})
    prompt["pass"] = {"class_type": "AnyPass", "inputs": {"anything": ["2", 0]}}
    with stage(tmp_path, classes={"AnyPass": AnyPass}) as running:
        running.succeed(prompt)
        assert dict(running.happened("load_end")) == dict(running.happened("release")) == USERS


class LazyBoth:
    """Asks for its first input, and only then for its second."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"first": ("LATENT", {"lazy": True}), "second": ("LATENT", {"lazy": True})}}

    def check_lazy_status(self, first=None, second=None):
        return ["first"] if first is None else ["second"] if second is None else []

    def run(self, first, second):
        return (second,)


@pytest.mark.parametrize("options", HOSTS.values(), ids=HOSTS.keys())
def test_a_component_behind_a_lazy_link_is_not_released_before_that_is_decided(tmp_path, options):
    prompt = text_to_video()
    prompt["other"] = {**prompt[SAMPLER], "inputs": {**prompt[SAMPLER]["inputs"], "seed": 99}}
    prompt["both"] = {"class_type": "LazyBoth", "inputs": {"first": [SAMPLER, 0], "second": ["other", 0]}}
    prompt = {node: spec for node, spec in prompt.items() if node not in ("8", "9", "images", "audio")}
    prompt["latent"]["inputs"]["value"] = ["both", 0]
    with stage(tmp_path, classes={"LazyBoth": LazyBoth}, **options) as running:
        running.succeed(prompt)
        assert [node for kind, node in running.happened("load_end") if kind == "dit"] == [SAMPLER]
        assert [node for kind, node in running.happened("release") if kind == "dit"] == ["other"]


class Unfold:
    """Expands into two samplers that hold the handle as a plain object."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"dit": ("LAZYH3_DIT",), "positive": ("CONDITIONING",), "latent": ("LATENT",)}}

    def run(self, **inputs):
        common = {**inputs, "steps": 1}
        children = {
            "child1": {"class_type": "LazyH3Sampler", "inputs": {**common, "seed": 1}},
            "child2": {"class_type": "LazyH3Sampler", "inputs": {**common, "seed": 2, "latent": ["child1", 0]}},
        }
        return {"result": (["child2", 0],), "expand": children}


@pytest.mark.parametrize("options", HOSTS.values(), ids=HOSTS.keys())
def test_children_of_an_expansion_count_as_users(tmp_path, options):
    prompt = text_to_video()
    inputs = {name: prompt[SAMPLER]["inputs"][name] for name in ("dit", "positive", "latent")}
    prompt[SAMPLER] = {"class_type": "Unfold", "inputs": inputs}
    with stage(tmp_path, classes={"Unfold": Unfold}, **options) as running:
        running.succeed(prompt)
        assert [node for kind, node in running.happened("load_end") if kind == "dit"] == ["child1"]
        assert [node for kind, node in running.happened("release") if kind == "dit"] == ["child2"]
        assert running.store.resident() == []


def test_a_loader_whose_file_is_computed_keeps_everything_that_it_might_have_loaded(tmp_path):
    class Name:
        RETURN_TYPES = ("*",)
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"text": ("STRING", {})}}

        def run(self, text):
            return (text,)

    prompt = text_to_video({"2.file": ["name", 0]})
    prompt["name"] = {"class_type": "Name", "inputs": {"text": text_to_video()["2"]["inputs"]["file"]}}
    with stage(tmp_path, classes={"Name": Name}) as running:
        running.succeed(prompt)
        assert dict(running.happened("load_end")) == USERS
        assert dict(running.happened("release"))["dit"] == SAMPLER
        assert running.store.resident() == []


def test_outside_a_prompt_nothing_is_attached(tmp_path):
    with stage(tmp_path) as running:
        assert running.runtime.attachment.touch() is None
        assert running.runtime.attachment.prompt_id is None


def test_in_a_host_without_an_event_loop_the_session_ends_when_the_next_prompt_begins():
    registries = [progress.ProgressRegistry(f"prompt {number}", DynamicPrompt({})) for number in (1, 2)]
    current = SimpleNamespace(registry=registries[0])
    module = SimpleNamespace(get_progress_state=lambda: current.registry, ProgressHandler=progress.ProgressHandler)
    host = SimpleNamespace(
        progress_module=module, executing=lambda: None, node_class=lambda name: None, outputs_to_execute=lambda: None
    )
    attachment = Attachment(host, Store())
    first = attachment.touch()
    assert attachment.touch() is first
    assert (first.prompt_id, first.is_over) == ("prompt 1", False)
    current.registry = registries[1]
    second = attachment.touch()
    assert (first.is_over, second.prompt_id, second.is_over) == (True, "prompt 2", False)
    registries[1].reset_handlers()
    assert second.is_over
    assert attachment.session is None
