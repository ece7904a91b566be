"""The embedded host as the pack sees it."""

import pytest
import torch
from lazy_h3.host.embedded.host import EmbeddedHost
from lazy_h3.host.embedded.port import EmbeddedPort
from lazy_h3.host.interface import Host
from small_models import CPU, DIT, stage, text_to_video, tiny_models


@pytest.fixture
def port(tmp_path):
    with EmbeddedHost({}, models=tiny_models(), output_directory=tmp_path, input_directory=tmp_path) as host:
        yield EmbeddedPort(host, CPU)


def test_it_answers_every_question_of_the_interface(port):
    questions = [name for name in vars(Host) if not name.startswith("_")]
    assert questions
    assert [name for name in questions if not hasattr(port, name)] == []


def test_model_files_are_found_by_the_names_it_lists(port):
    assert port.model_files("diffusion_models") == [DIT]
    assert port.model_path("diffusion_models", DIT) == tiny_models() / "diffusion_models" / DIT
    assert port.model_folders("diffusers") == []


def test_between_prompts_nobody_executes_and_nothing_is_queued(port):
    assert port.executing() is None
    assert port.outputs_to_execute() is None
    assert port.node_class("SaveVideo") is not None
    assert port.node_class("Nobody") is None


def test_a_nested_latent_unbinds_to_its_streams_and_moves_as_one(port):
    video, audio = torch.zeros(1, 24, 2, 2, 2), torch.ones(1, 32, 2, 9)
    nested = port.nested_latent(video, audio)
    assert nested.is_nested
    assert [stream.shape for stream in nested.unbind()] == [video.shape, audio.shape]
    assert nested.to(torch.float64).dtype == torch.float64
    assert nested.device == CPU


def test_inside_a_node_it_knows_who_executes_and_for_which_outputs(tmp_path):
    seen = {}

    class Look:
        RETURN_TYPES = ()
        FUNCTION = "look"
        OUTPUT_NODE = True

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"latent": ("LATENT",)}}

        def look(self, latent):
            seen.update(executing=running.runtime.host.executing(), outputs=list(running.runtime.host.outputs_to_execute()))
            return ()

    prompt = {"6": text_to_video()["6"], "look": {"class_type": "Look", "inputs": {"latent": ["6", 0]}}}
    with stage(tmp_path, classes={"Look": Look}) as running:
        result = running.succeed(prompt)
    assert seen == {"executing": (result.prompt_id, "look"), "outputs": ["look"]}


def test_progress_reports_to_the_host_and_lets_an_interrupt_through(tmp_path):
    reported = []

    class Work:
        RETURN_TYPES = ()
        FUNCTION = "work"
        OUTPUT_NODE = True

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"steps": ("INT", {})}}

        def work(self, steps):
            report = running.runtime.host.progress(steps)
            for step in range(steps):
                report(step + 1, steps)
                if step == 1:
                    running.host.interrupt()
            return ()

    with stage(tmp_path, classes={"Work": Work}) as running:
        running.host.on_event(lambda name, data: name == "node_progress" and reported.append((data["value"], data["max"])))
        result = running.run({"1": {"class_type": "Work", "inputs": {"steps": 4}}})
    assert (result.status, result.error.node_id) == ("interrupted", "1")
    assert reported == [(1, 4), (2, 4)]
