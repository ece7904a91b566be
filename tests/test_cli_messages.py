"""What the commands say to people is true, says what to do, and holds no numbers of the operating system."""

import json
import shutil
from pathlib import Path

import pytest
from lazy_h3 import cli
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.commands.make_checkpoint import SINGLE_FILES
from lazy_h3.commands.report import Report, RunRecord
from lazy_h3.commands.summary import summary
from lazy_h3.host.embedded.host import RunResult
from lazy_h3.memory.device import PoolStatus
from lazy_h3.memory.ledger import Ledger
from lazy_h3.nodes import runtime
from small_models import copied_models, shared_catalogue, tiny_folder_models, tiny_models

SMALL = ("--set", "6.width=32", "--set", "6.height=32", "--set", "7.steps=1")


@pytest.fixture
def lazy_h3(capsys, monkeypatch):
    """Runs a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(runtime, "Catalogue", lambda: shared_catalogue()[0])

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def run(lazy_h3, tmp_path):
    return lambda *more: lazy_h3("run", WORKFLOW, "--models", tiny_models(), "--out", tmp_path / "out", *SMALL, *more)


@pytest.fixture
def blocked(tmp_path) -> Path:
    """A folder that cannot be made, by no user: a file is in its place."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "folder"


def test_a_budget_of_nothing_is_blamed_on_the_budget(run):
    code, _, stderr = run("--budget", "0")
    assert code == 2
    assert stderr.startswith("lazy-h3: The budget is 0, which is too small for any weights; ")
    assert "activations" not in stderr


def test_a_machine_that_is_full_before_the_run_is_blamed_on_other_programs(run, monkeypatch):
    monkeypatch.setattr(runtime, "pool_status", lambda *_: PoolStatus(16 << 30, 1 << 30, unified=True))  # below its floor
    code, stdout, stderr = run("--json")
    report = json.loads(stdout)
    assert (code, report["status"], report["error"]["have_bytes"]) == (2, "refused", 0)
    assert "no memory is free beyond what must be left for the rest of the machine; close other programs" in stderr


def test_an_output_folder_that_cannot_be_written_to_is_refused_before_anything_runs(lazy_h3, blocked):
    code, stdout, stderr = lazy_h3("run", WORKFLOW, "--models", tiny_models(), "--out", blocked, "--json")
    assert (code, json.loads(stdout)["error"]["type"]) == (2, "ValueError")
    assert stderr.startswith(f"lazy-h3: {blocked}: nothing can be written there (")
    assert stderr.endswith("choose another folder by --out.\n")
    assert "Errno" not in stderr


def test_other_errors_of_the_system_are_sentences(lazy_h3, blocked):
    code, _, stderr = lazy_h3("make-checkpoint", blocked, "--preset", "tiny")
    assert code == 2
    assert stderr.startswith(f"lazy-h3: {blocked}")
    assert stderr.endswith("; check the path and who may use it.\n")
    assert "Errno" not in stderr


@pytest.mark.parametrize("command", ["run", "plan"])
def test_files_that_are_missing_for_want_of_a_models_folder_lead_to_its_option(lazy_h3, tmp_path, command):
    code, _, stderr = lazy_h3(command, WORKFLOW, *(("--out", tmp_path) if command == "run" else ()))
    assert code == 2
    assert (
        f"{Path(SINGLE_FILES['text_encoder']).name} is not there, for want of a folder with models; name it with --models."
        in stderr
    )


def test_a_fill_is_not_logged_before_a_byte_is_there(run, caplog):
    with caplog.at_level("INFO", logger="lazy_h3"):
        run("--policy", "free")
    progress = [record.message for record in caplog.records if ": reading, " in record.message]
    assert progress
    assert not any("reading, 0 B of" in line for line in progress)


ENDS = {"free": "released after node ", "keep": "kept"}


@pytest.mark.parametrize("policy", ENDS)
def test_the_table_says_where_the_weights_went(run, policy):
    code, stdout, _ = run("--policy", policy)
    lines = [line for line in stdout.splitlines() if "loaded 1x in" in line or "  streamed, " in line]
    assert (code, len(lines)) == (0, 4)
    assert all(line.partition("streamed, " if "streamed" in line else " s, ")[2].startswith(ENDS[policy]) for line in lines)
    assert ("of weights kept; " in stdout) == (policy == "keep")


def test_a_streamed_component_has_no_seconds_of_its_own():
    ledger = Ledger()
    ledger.record("load_begin", "dit", 70, "streamed: it does not fit whole")
    ledger.record("load_end", "dit", 70)
    ledger.record("release", "dit", 70, "node 7 was its last user", "7")
    report = Report(ledger, {"dit": "dit"}, [RunRecord(RunResult("id", "success", {}), 1.0, 70)])
    assert next(summary(report)).endswith("  streamed, released after node 7")


def test_the_command_line_has_a_table_in_place_of_the_line_of_each_prompt(run, caplog, tmp_path):
    with caplog.at_level("INFO", logger="lazy_h3"):
        _, stdout, _ = run()
    assert not any(record.message.startswith("Lazy H3, prompt") for record in caplog.records)
    assert f"report: {tmp_path / 'out' / 'report.json'}" in stdout.splitlines()


ENDINGS = {
    "after its node": ([("release", "7", "node 7 was its last user")], "released after node 7"),
    "with the prompt": ([("release", None, "end of the prompt")], "released (end of the prompt)"),
    "with the host": ([("keep", "7", "policy keep"), ("release", None, "the host is closing")], "kept"),
    "kept first": ([("keep", "7", "policy keep"), ("release", "9", "room for vae")], "released after node 9"),
    "never": ([], "kept"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_is_told_as_it_was(ending):
    events, words = ENDINGS[ending]
    ledger = Ledger()
    ledger.record("load_begin", "dit", 70)
    ledger.record("load_end", "dit", 70)
    for event, node, reason in events:
        ledger.record(event, "dit", 70, reason, node)
    report = Report(ledger, {"dit": "dit"}, [RunRecord(RunResult("id", "success", {}), 1.0, 70)])
    lines = list(summary(report))
    assert lines[0].endswith(f" s, {words}")
    assert lines[1].startswith("sum of what was held")


def components_of(lazy_h3, path: Path) -> tuple[int, list[str | None], str]:
    code, stdout, stderr = lazy_h3("inspect", path, "--json")
    return code, [entry["component"] for entry in json.loads(stdout)["checkpoints"]], stderr


@pytest.mark.parametrize("models", [tiny_models, tiny_folder_models])
def test_a_folder_with_models_is_inspected_file_by_file(lazy_h3, models):
    code, found, stderr = components_of(lazy_h3, models())
    assert (code, stderr) == (0, "")
    assert sorted(found) == ["audio_vae", "dit", "text_encoder", "video_vae"]


def test_a_foreign_file_in_a_folder_with_models_is_named(lazy_h3, tmp_path):
    models = copied_models(tmp_path / "models")
    (models / "vae" / "broken.safetensors").write_bytes(b"")
    code, found, stderr = components_of(lazy_h3, models)
    assert (code, len(found), found.count(None)) == (2, 5, 1)
    assert "broken.safetensors" in stderr


def test_a_folder_without_models_is_inspected_itself(lazy_h3, tmp_path):
    shutil.copy(tiny_models() / SINGLE_FILES["dit"], tmp_path)
    assert components_of(lazy_h3, tmp_path)[1] == ["dit"]
