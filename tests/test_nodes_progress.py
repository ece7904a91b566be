"""Long steps say how far they are, and stop when asked: while loading, encoding, sampling, decoding."""

import pytest
import torch
from lazy_h3.commands.presets import tiny
from lazy_h3.h3.windows import decode_plan
from small_models import DECODE_AUDIO, DECODE_VIDEO, ENCODE, SAMPLER, USERS, stage, text_to_video

STEPS = 4
FRAMES = 56  # several windows
PROMPT = text_to_video({"6.duration": FRAMES, "7.steps": STEPS})


class Progress:
    """What every node reported, and where to interrupt: at the first report of a node that ``is_point`` accepts."""

    def __init__(self, running, node=None, is_point=lambda value, total: False):
        self.reports: dict[str, list[tuple[float, float]]] = {}
        self.interrupted_at: tuple[float, float] | None = None
        self._host = running.host
        self._node, self._is_point = node, is_point
        running.host.on_event(self._observe)

    def _observe(self, name: str, data: dict) -> None:
        if name != "node_progress":
            return
        report = (data["value"], data["max"])
        self.reports.setdefault(data["node"], []).append(report)
        if self.interrupted_at is None and data["node"] == self._node and self._is_point(*report):
            self.interrupted_at = report
            self._host.interrupt()


@pytest.fixture
def running(tmp_path):
    with stage(tmp_path) as found:
        yield found


def results(kept: dict) -> tuple[torch.Tensor, ...]:
    return (*kept["latent"]["samples"].unbind(), kept["images"], kept["audio"]["waveform"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[torch.Tensor, ...]:
    with stage(tmp_path_factory.mktemp("out")) as running:
        running.succeed(PROMPT)
        return results(running.kept)


def test_loads_and_steps_report_up_to_the_end(running):
    progress = Progress(running)
    running.succeed(PROMPT)
    (encoder, vae) = (component_of(running, kind) for kind in ("text_encoder", "video_vae"))
    plan = decode_plan((FRAMES - 5) // 17 * 5 + 2, vae.module.config)
    num_layers = encoder.module.config.num_hidden_layers
    num_stages = len(tiny().audio_vae.decoder_rates)
    steps = {ENCODE: num_layers, SAMPLER: STEPS, DECODE_VIDEO: plan.num_windows, DECODE_AUDIO: num_stages}
    for node, total in steps.items():
        *loading, last = progress.reports[node][:-total]
        assert progress.reports[node][-total:] == [(i + 1, total) for i in range(total)]
        assert loading == sorted(loading)
        assert last[0] == last[1] > 50_000  # bytes, not steps


def component_of(running, kind: str):
    loaders = {"text_encoder": "1", "video_vae": "3"}
    spec = PROMPT[loaders[kind]]
    (handle,) = running.host.node_classes[spec["class_type"]]().load(**spec["inputs"])
    return handle.component


def test_a_fill_is_logged_with_its_component_and_bytes(running, caplog):
    with caplog.at_level("INFO", logger="lazy_h3"):
        running.succeed(PROMPT)
    assert any(record.message.startswith("text encoder") and " of " in record.message for record in caplog.records)


@pytest.mark.parametrize("kind", USERS)
def test_an_interrupt_while_loading_leaves_nothing_and_does_no_harm(running, undisturbed, kind):
    """Asked for when the fill begins, seen at its first report."""

    def observe(event) -> None:
        if event.event == "load_begin" and running.runtime.catalogue.kinds[event.component] == kind:
            running.host.interrupt()

    with running.ledger.observed(observe):
        assert_interrupted(running, USERS[kind], PROMPT)
    assert running.happened("load_end")[-1] == (kind, USERS[kind])
    assert [e.bytes for e in running.ledger.events if e.event == "load_end"][-1] == 0
    assert_undisturbed(running, undisturbed)


POINTS = {
    "layer 10 of the encoder": (ENCODE, lambda value, total: (value, total) == (10, 50)),
    "step 2 of the sampler": (SAMPLER, lambda value, total: (value, total) == (2, STEPS)),
    "window 1 of the video": (DECODE_VIDEO, lambda value, total: (value, total) == (1, 3)),
    "stage 1 of the sound": (DECODE_AUDIO, lambda value, total: (value, total) == (1, 2)),
}


@pytest.mark.parametrize("point", POINTS)
def test_an_interrupt_inside_a_node_leaves_nothing_and_does_no_harm(running, undisturbed, point):
    node, is_point = POINTS[point]
    progress = Progress(running, node, is_point)
    assert_interrupted(running, node, PROMPT)
    value, total = progress.interrupted_at
    assert progress.reports[node][-1] == (value, total)  # it went no further
    assert value < total
    assert_undisturbed(running, undisturbed)


def assert_interrupted(running, node: str, prompt: dict) -> None:
    result = running.run(prompt)
    assert (result.status, result.error.node_id) == ("interrupted", node)
    assert running.store.resident() == []
    assert running.store.live_bytes() == 0
    assert running.runtime.attachment.session is None


def assert_undisturbed(running, expected: tuple[torch.Tensor, ...]) -> None:
    running.succeed(PROMPT)
    assert all(torch.equal(found, wanted) for found, wanted in zip(results(running.kept), expected, strict=True))
