"""``lazy-h3 demo``: nothing but a command, and at the end a video with sound and a report that says what memory saw."""

import contextlib
import io
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import av
import pytest
from lazy_h3 import cli
from lazy_h3.commands import demo as demo_command
from lazy_h3.commands.demo import WORKFLOW, demo_models
from lazy_h3.h3.geometry import aligned_frames

AAC_FRAME = 1024  # samples
FPS, SAMPLE_RATE = 24, 32000
NUMBER = (int, float)
REPORT_FIELDS = {
    "status": str,
    "error": type(None),
    "seconds": float,
    "runs": list,
    "components": list,
    "sum_bytes": int,
    "largest_bytes": int,
    "peak_resident_bytes": int,
    "predicted_peak_bytes": (int, type(None)),
    "predicted_growth_bytes": (int, type(None)),
    "budget_bytes": type(None),
    "rss_before_bytes": int,
    "rss_peak_bytes": int,
    "rss_after_bytes": int,
    "events": list,
    "outputs": list,
}
RUN_FIELDS = {"seconds": NUMBER, "peak_resident_bytes": int, "loads": dict, "load_seconds": dict, "nodes": dict}
COMPONENT_FIELDS = {
    "name": str,
    "kind": str,
    "bytes": int,
    "mode": str,
    "loads": int,
    "load_seconds": NUMBER,
    "released_after": list,
}
EVENT_FIELDS = {
    "t": NUMBER,
    "run": int,
    "event": str,
    "component": str,
    "node": (str, type(None)),
    "bytes": int,
    "resident_bytes": int,
    "reason": str,
}
EVENTS = {"load_begin", "load_end", "pin", "unpin", "release", "keep", "refuse"}
OUTPUT_FIELDS = {"node": str, "path": str, "kind": str}


@dataclass
class Demo:
    """One run of the command."""

    out: Path
    code: int
    stdout: str
    models: Path

    @property
    def report(self) -> dict:
        return json.loads(self.stdout)

    @property
    def video(self) -> Path:
        (output,) = self.report["outputs"]
        return Path(output["path"])

    def events(self, kind: str) -> list[dict]:
        return [event for event in self.report["events"] if event["event"] == kind]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The user's cache folder, empty at first."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
            patch.setenv(name, str(folder))
        yield folder


@pytest.fixture(scope="module")
def demo(cache, tmp_path_factory) -> Demo:
    return run_demo(tmp_path_factory.mktemp("first"))


def run_demo(out: Path) -> Demo:
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        code = cli.main(["demo", "--out", str(out), "--json"])
    return Demo(out, code, stdout.getvalue(), demo_models())


def users_by_loader() -> dict[str, list[str]]:
    """Loader node -> the nodes that its handle is wired to, in the workflow that the demo runs."""
    workflow = json.loads(WORKFLOW.read_text())
    users = defaultdict(list)
    for node, spec in workflow.items():
        for value in spec["inputs"].values():
            if isinstance(value, list) and workflow[value[0]]["class_type"].endswith("Loader"):
                users[value[0]].append(node)
    return users


def assert_fields(entry: dict, fields: dict) -> None:
    assert entry.keys() == fields.keys()
    for name, kinds in fields.items():
        assert isinstance(entry[name], kinds), name
        assert not isinstance(entry[name], bool), name


def test_the_demo_succeeds_and_prints_one_json_document(demo):
    assert demo.code == 0
    assert demo.report["status"] == "ok"
    _, end = json.JSONDecoder().raw_decode(demo.stdout)
    assert demo.stdout[end:].strip() == ""


def test_the_video_has_the_requested_frames(demo):
    requested = json.loads(WORKFLOW.read_text())["6"]["inputs"]
    with av.open(str(demo.video)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
    assert stream.average_rate == FPS
    assert len(frames) == aligned_frames(requested["duration"])
    assert {(frame.width, frame.height) for frame in frames} == {(requested["width"], requested["height"])}
    assert len(set(decoded(demo.video))) > 1  # the picture moves


def test_the_track_is_stereo_and_as_long_as_the_video(demo):
    with av.open(str(demo.video)) as container:
        num_frames = sum(1 for _ in container.decode(video=0))
    with av.open(str(demo.video)) as container:
        stream = container.streams.audio[0]
        num_samples = sum(frame.samples for frame in container.decode(stream))
    assert (stream.rate, stream.channels) == (SAMPLE_RATE, 2)
    assert abs(num_samples / SAMPLE_RATE - num_frames / FPS) <= 1 / 40 + AAC_FRAME / SAMPLE_RATE


def test_each_component_is_loaded_once_at_its_first_user_and_released_after_its_last(demo):
    order = {node: position for position, node in enumerate(demo.report["runs"][0]["nodes"])}
    users = [sorted(nodes, key=order.__getitem__) for nodes in users_by_loader().values()]
    loaded = {event["component"]: event["node"] for event in demo.events("load_begin")}
    released = {c["name"]: c["released_after"] for c in demo.report["components"]}
    assert len(demo.events("load_begin")) == len(loaded) == len(users) == 4
    assert sorted(loaded.values()) == sorted(nodes[0] for nodes in users)
    assert sorted(released.values()) == sorted([nodes[-1]] for nodes in users)
    assert {name: [node] for name, node in loaded.items()} == released  # in this workflow first and last are one
    assert [c["loads"] for c in demo.report["components"]] == [1, 1, 1, 1]


def test_the_peak_is_the_largest_component_and_not_the_sum(demo):
    report = demo.report
    assert report["peak_resident_bytes"] == report["largest_bytes"] < report["sum_bytes"]
    assert report["largest_bytes"] == max(event["resident_bytes"] for event in report["events"])
    assert report["sum_bytes"] == sum(event["bytes"] for event in demo.events("load_end"))
    assert report["events"][-1]["resident_bytes"] == 0


def test_the_report_has_every_field_with_its_type(demo):
    report = demo.report
    assert_fields(report, REPORT_FIELDS)
    for fields, entries in (
        (RUN_FIELDS, report["runs"]),
        (COMPONENT_FIELDS, report["components"]),
        (EVENT_FIELDS, report["events"]),
        (OUTPUT_FIELDS, report["outputs"]),
    ):
        assert entries
        for entry in entries:
            assert_fields(entry, fields)
    assert {event["event"] for event in report["events"]} <= EVENTS
    assert {component["mode"] for component in report["components"]} <= {"whole", "streamed"}
    assert {component["kind"] for component in report["components"]} == {"text_encoder", "dit", "video_vae", "audio_vae"}
    assert [output["kind"] for output in report["outputs"]] == ["video"]


def test_the_times_of_the_report_are_in_order_and_within_the_run(demo):
    times = [event["t"] for event in demo.report["events"]]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= demo.report["seconds"]
    assert demo.report["rss_before_bytes"] <= demo.report["rss_peak_bytes"]


def test_the_report_is_also_written_beside_the_video(demo):
    assert json.loads((demo.out / "report.json").read_text()) == demo.report


def test_a_second_demo_uses_the_same_model_and_makes_the_same_video(demo, tmp_path):
    before = {path: path.stat() for path in demo.models.rglob("*.safetensors")}
    second = run_demo(tmp_path)
    after = {path: path.stat() for path in demo.models.rglob("*.safetensors")}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in after.items()} == {p: (s.st_ino, s.st_mtime_ns) for p, s in before.items()}
    assert second.code == 0
    assert decoded(second.video) == decoded(demo.video)


def test_the_demo_leaves_nothing_but_its_model_in_the_cache(demo, cache):
    assert [path for path in (cache / "lazy-h3").iterdir() if path.is_dir()] == [demo.models]


def test_a_demo_that_finds_another_making_the_model_uses_that_one(monkeypatch, tmp_path):
    """Both made the model at the same time, and the other was ready first."""

    def overtaken(folder: Path, preset) -> None:
        for place in (folder, folder.with_name(demo_command.MODEL_VERSION)):
            place.mkdir(parents=True)
            (place / "model").write_text(place.name)

    monkeypatch.setattr(demo_command, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(demo_command, "make_checkpoint", overtaken)
    assert (demo_command.demo_models() / "model").read_text() == demo_command.MODEL_VERSION
    assert [place.name for place in tmp_path.iterdir()] == [demo_command.MODEL_VERSION]


def decoded(video: Path) -> list[bytes]:
    with av.open(str(video)) as container:
        return [frame.to_ndarray(format="rgb24").tobytes() for frame in container.decode(video=0)]
