"""``lazy-h3 run``: policies, repetitions, caches and settings, as the report shows them."""

import json
from pathlib import Path

import pytest
from lazy_h3 import cli
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.commands.make_checkpoint import FOLDER
from lazy_h3.nodes import runtime
from small_models import folder_prompt, shared_catalogue, tiny_folder_models, tiny_models

SMALL = ("--set", "6.width=32", "--set", "6.height=32", "--set", "7.steps=1")
KINDS = {"text_encoder", "dit", "video_vae", "audio_vae"}


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """The report of a successful run at the smallest size."""
    monkeypatch.setattr(runtime, "Catalogue", lambda: shared_catalogue()[0])

    def reported(*arguments: object, workflow: Path = WORKFLOW, models: Path | None = None) -> dict:
        fixed = ("run", workflow, "--models", models or tiny_models(), "--out", tmp_path / "out", "--json", *SMALL)
        code = cli.main([str(argument) for argument in (*fixed, *arguments)])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return json.loads(captured.out)

    return reported


def loaded(report: dict, run: int) -> set[str]:
    """Kinds of the components that a run loaded, each of them once."""
    kinds = {component["name"]: component["kind"] for component in report["components"]}
    loads = report["runs"][run]["loads"]
    assert set(loads.values()) <= {1}
    assert loads.keys() == report["runs"][run]["load_seconds"].keys()
    return {kinds[name] for name in loads}


def test_repetitions_of_a_cached_prompt_load_nothing_after_the_first(run):
    report = run("--repeat", 3, "--policy", "free")
    assert [loaded(report, number) for number in range(3)] == [KINDS, set(), set()]
    assert [entry["peak_resident_bytes"] for entry in report["runs"]] == [report["largest_bytes"], 0, 0]
    assert [component["loads"] for component in report["components"]] == [1] * len(KINDS)
    (output,) = report["outputs"]
    assert Path(output["path"]).is_file()


def test_without_a_cache_policy_free_loads_everything_in_every_run(run):
    report = run("--repeat", 3, "--cache", "none", "--policy", "free")
    assert [loaded(report, number) for number in range(3)] == [KINDS] * 3
    assert [component["loads"] for component in report["components"]] == [3] * len(KINDS)
    assert report["peak_resident_bytes"] == report["largest_bytes"]
    assert {event["run"] for event in report["events"]} == {0, 1, 2}


def test_without_a_cache_policy_keep_loads_in_the_first_run_alone(run):
    report = run("--repeat", 3, "--cache", "none", "--policy", "keep")
    assert [loaded(report, number) for number in range(3)] == [KINDS, set(), set()]
    assert report["peak_resident_bytes"] == report["sum_bytes"]
    assert [component["released_after"] for component in report["components"]] == [[]] * len(KINDS)
    assert {event["event"] for event in report["events"]} >= {"keep"}


def test_settings_change_the_workflow(run):
    report = run(
        "--set", "6.duration=5", "--set", "5.prompt=a, b = c", "--set", "9.limit_loudness=true", "--set", "11.format=mkv"
    )
    (output,) = report["outputs"]
    assert output["path"].endswith(".mkv")
    assert (output["node"], output["kind"]) == ("11", "video")


def test_a_budget_is_in_the_report(run):
    assert run("--budget", "1GiB")["budget_bytes"] == 1 << 30


def test_a_canvas_runs_like_its_prompt(run):
    report = run(workflow=WORKFLOW.with_name("text_to_video_small.json"))
    assert loaded(report, 0) == KINDS


def test_a_model_folder_is_named_in_the_report(run, tmp_path):
    saving = {node: spec for node, spec in json.loads(WORKFLOW.read_text()).items() if node in ("10", "11")}
    prompt = {node: spec for node, spec in folder_prompt("minimax_h3").items() if spec["class_type"] != "Keep"}
    workflow = tmp_path / "folder.json"
    workflow.write_text(json.dumps(prompt | saving))
    report = run(workflow=workflow, models=tiny_folder_models())
    assert {c["name"] for c in report["components"]} >= {"text encoder (minimax_h3/text_encoder)", "video VAE (minimax_h3/vae)"}
    assert (tiny_folder_models() / FOLDER).is_dir()


def test_an_output_that_is_invalid_is_left_out_with_a_warning(run, tmp_path, caplog):
    prompt = json.loads(WORKFLOW.read_text())
    prompt["spare"] = {"class_type": "SaveVideo", "inputs": {"video": ["10", 0], "filename_prefix": "spare", "format": "magic"}}
    workflow = tmp_path / "two.json"
    workflow.write_text(json.dumps(prompt))
    report = run(workflow=workflow)
    assert [output["node"] for output in report["outputs"]] == ["11"]
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("Node spare (SaveVideo) was left out: Value not in list")


def test_people_get_a_table_with_the_peak_beside_the_sum(capsys, tmp_path):
    code = cli.main(["run", str(WORKFLOW), "--models", str(tiny_models()), "--out", str(tmp_path), "--policy", "free", *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    known = [line for line in lines if "loaded 1x in" in line or "  streamed, " in line]
    assert sum("released after node" in line for line in known) == len(KINDS)
    report = json.loads((tmp_path / "report.json").read_text())
    assert any(line.startswith("sum of what was held") for line in lines)
    assert any(line.startswith("peak resident weights") for line in lines)
    assert lines[-1] == f"video: {report['outputs'][0]['path']}"
