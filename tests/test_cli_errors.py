"""What is wrong with the input is said in one line, with exit code 2; a run that fails has exit code 1. No traceback."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from lazy_h3 import cli
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.commands.make_checkpoint import FOLDER, SINGLE_FILES
from lazy_h3.memory import reader
from lazy_h3.nodes import LazyH3DecodeAudio, runtime
from small_models import copied_models, folder_prompt, shared_catalogue, tiny_folder_models, tiny_models

SMALL = ("--set", "6.width=32", "--set", "6.height=32", "--set", "7.steps=1")


@pytest.fixture
def lazy_h3(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = error.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def run(lazy_h3, tmp_path, monkeypatch):
    """The small workflow with the tiny model; files below ``tmp_path / "models"`` come first."""
    monkeypatch.setattr(runtime, "Catalogue", lambda: shared_catalogue()[0])

    def of_workflow(*arguments: object, workflow: Path = WORKFLOW) -> tuple[int, str, str]:
        (tmp_path / "models").mkdir(exist_ok=True)
        folders = ("--models", tmp_path / "models", "--models", tiny_models(), "--out", tmp_path / "out")
        return lazy_h3("run", workflow, *folders, *SMALL, *arguments)

    return of_workflow


@pytest.fixture
def dit_file(tmp_path) -> Path:
    """Where a file hides the transformer of the tiny model."""
    path = tmp_path / "models" / SINGLE_FILES["dit"]
    path.parent.mkdir(parents=True)
    return path


def assert_one_line(found: tuple[int, str, str], *words: str, code: int = 2) -> str:
    exit_code, _, stderr = found
    assert exit_code == code, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("lazy-h3")
    for word in words:
        assert word in line
    return line


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


DAMAGES = {
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    "web page": (b"<!DOCTYPE html><html>Not found</html>", "is a web page"),
    "pickle": (b"\x80\x02}q\x00X\x04\x00\x00\x00test", "pickled checkpoint under another name"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_what_it_is(run, dit_file, damage):
    content, words = DAMAGES[damage]
    dit_file.write_bytes(content)
    assert_one_line(run(), str(dit_file), words)


def test_a_truncated_file_is_named(run, dit_file):
    dit_file.write_bytes((tiny_models() / SINGLE_FILES["dit"]).read_bytes()[:-1])
    assert_one_line(run(), str(dit_file), "truncated", "download it again")


def test_a_truncated_file_of_the_last_node_is_named_before_a_weight_is_read(run, tmp_path, bytes_read):
    path = tmp_path / "models" / SINGLE_FILES["video_vae"]
    path.parent.mkdir(parents=True)
    path.write_bytes((tiny_models() / SINGLE_FILES["video_vae"]).read_bytes()[:-1])
    assert_one_line(run(), str(path), "truncated", "download it again")
    assert bytes_read == []


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("suffix", ["ckpt", "bin"])
def test_a_pickle_is_refused_by_its_name_and_never_opened(run, dit_file, tmp_path, suffix):
    dit_file.with_name(f"model.{suffix}").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    assert_one_line(run("--set", f"2.file=model.{suffix}"), f"model.{suffix}", "never opened")
    assert not (tmp_path / "sprung").exists()


def test_a_file_in_the_wrong_loader_names_the_right_node(run, dit_file):
    shutil.copy(tiny_models() / SINGLE_FILES["text_encoder"], dit_file)
    assert_one_line(run(), "is a checkpoint of the text encoder", "use the node Load text encoder (Lazy H3)")


def test_a_component_in_the_wrong_sub_folder_names_the_right_node(run, tmp_path):
    root = copied_models(tmp_path / "models", tiny_folder_models()) / FOLDER
    (root / "vae").rename(root / "spare")
    (root / "audio_vae").rename(root / "vae")
    (root / "spare").rename(root / "audio_vae")
    workflow = written(tmp_path / "folder.json", without_keepers(folder_prompt("minimax_h3")))
    assert_one_line(run(workflow=workflow), "is a checkpoint of the audio VAE", "use the node Load audio VAE (Lazy H3)")


def without_keepers(prompt: dict) -> dict:
    """The graph ends in a saved video, as a user's does."""
    saving = {node: spec for node, spec in json.loads(WORKFLOW.read_text()).items() if node in ("10", "11")}
    return {node: spec for node, spec in prompt.items() if spec["class_type"] != "Keep"} | saving


NAMES = ["../x", "/etc/passwd", "nothing.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_escapes_or_is_missing_is_refused_before_anything_runs(run, name):
    found = run("--set", f"2.file={name}", "--json")
    assert_one_line(found, name, "choose a")
    assert json.loads(found[1])["events"] == []


def test_a_missing_tokenizer_says_where_to_get_one(run, tmp_path):
    lonely = tmp_path / "models" / SINGLE_FILES["text_encoder"]
    lonely.parent.mkdir(parents=True)
    shutil.copy(tiny_models() / SINGLE_FILES["text_encoder"], lonely)
    assert_one_line(run(), "tokenizer.json from", str(lonely.with_suffix("")))


def test_an_unknown_node_class_is_named(run, tmp_path):
    prompt = json.loads(WORKFLOW.read_text())
    prompt["7"]["class_type"] = "SamplerOfSomebodyElse"
    del prompt["7"]["_meta"]
    assert_one_line(run(workflow=written(tmp_path / "w.json", prompt)), "SamplerOfSomebodyElse")


def test_a_workflow_without_an_output_is_refused(run, tmp_path):
    prompt = json.loads(WORKFLOW.read_text())
    del prompt["11"]
    assert_one_line(run(workflow=written(tmp_path / "w.json", prompt)), "no outputs")


SETTINGS = {
    "no equals sign": ("7.seed", "write it as NODE.INPUT=VALUE, such as 6.width="),
    "no node": ("seed=7", "write it as NODE.INPUT=VALUE"),
    "unknown node": ("70.seed=7", "no node '70'"),
    "unknown input": ("7.sead=7", "no input 'sead'"),
    "no number": ("7.seed=abc", "is not a whole number"),
    "no truth value": ("9.limit_loudness=False", "is not true or false"),
    "out of range": ("7.steps=0", "smaller than min"),
    "no choice": ("7.schedule=magic", "magic"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_bad_setting_says_what_is_wrong_with_it(run, case):
    setting, words = SETTINGS[case]
    assert_one_line(run("--set", setting), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", WORKFLOW, "--budget", "12XB"), "'12XB' is not a size"),
        (("run", WORKFLOW, "--memory", "-1"), "memory"),
        (("run", WORKFLOW, "--repeat", "0"), "'0' is not a whole number from 1 on"),
        (("run", WORKFLOW, "--policy", "sometimes"), "sometimes"),
        (("run", WORKFLOW, "--cache", "all"), "all"),
        (("run",), "workflow"),
        (("make-checkpoint", "x", "--preset", "replica", "--scale", "0"), "'0' is not a number from 1 on"),
        (("make-checkpoint", "x", "--preset", "replica", "--scale", "many"), "'many' is not a number from 1 on"),
        (("make-checkpoint", "x", "--preset", "replica", "--scale", "1e6"), "less than its layers take"),
        (("make-checkpoint", "x", "--preset", "huge"), "huge"),
        (("inspect", "nothing.safetensors"), "nothing.safetensors"),
        (("plan", WORKFLOW, "--size", "minimax-h3"), "see lazy-h3 plan --help"),
        (("run", WORKFLOW, "--models", "nowhere"), "--models nowhere: is not a folder"),
        (("plan", WORKFLOW, "--models", "nowhere"), "--models nowhere: is not a folder"),
        (("plan", WORKFLOW, "--sizes", "minimax-h3", "--models", "."), "leave one of the two out"),
        (("plan", WORKFLOW, "--sizes", "minimax-h4"), "is not a published model; choose one of minimax-h3,"),
        (("plan", WORKFLOW, "--sizes", "minimax-h3", "--budget", "24"), "--budget 24GiB is another size than --budget 24."),
        (("dance",), "dance"),
        ((), "COMMAND"),
    ],
)
def test_bad_usage_is_one_line(lazy_h3, arguments, words):
    assert_one_line(lazy_h3(*arguments), words)


WORKFLOWS = {
    "not JSON": ("{oops", "is not JSON"),
    "a list": ([1, 2], "is not a workflow"),
    "nothing": ({}, "neither a canvas workflow nor an API-format prompt"),
    "something else": ({"weights": {"a": 1}}, "neither a canvas workflow nor an API-format prompt"),
    "subgraphs": ({"nodes": [], "links": [], "definitions": {"subgraphs": [{"id": "x"}]}}, "has subgraphs"),
    "a node of ComfyUI": ({"nodes": [{"id": 1, "type": "KSampler"}], "links": []}, "KSampler"),
    "inputs that are no object": (
        {"1": {"class_type": "SaveVideo", "inputs": 5}},
        "node 1 has no text as class_type, or no object",
    ),
    "a class that is no text": ({"1": {"class_type": [], "inputs": {}}}, "node 1 has no text as class_type, or no object"),
    "a damaged canvas": ({"nodes": [{"type": "SaveVideo"}], "links": []}, "damaged"),
}


@pytest.mark.parametrize("case", WORKFLOWS)
def test_a_file_that_is_no_workflow_says_why(run, tmp_path, case):
    content, words = WORKFLOWS[case]
    assert_one_line(run(workflow=written(tmp_path / "w.json", content)), words)


BAD_VALUES = {
    "1.file": (None, "choose one from its list"),
    "2.file": ({"__value__": ["a", 0]}, "would be taken for a link"),
    "5.prompt": ("\ud800", "half of a pair"),
    "5.text_encoder": ("1", "wire in the node Load text encoder (Lazy H3)"),
    "6.duration": (float("nan"), "duration"),
    "7.denoise": (float("inf"), "denoise"),
    "11.filename_prefix": ("a\0b", "holds a character that no file name can have"),
}


@pytest.mark.parametrize("target", BAD_VALUES)
def test_a_value_of_a_prompt_that_makes_no_sense_is_one_line(run, tmp_path, target):
    (node, name), (value, words) = target.split("."), BAD_VALUES[target]
    prompt = json.loads(WORKFLOW.read_text())
    prompt[node]["inputs"][name] = value
    assert words in run(workflow=written(tmp_path / "w.json", prompt))[2].splitlines()[-1]
    assert_one_line(run(workflow=tmp_path / "w.json"), words)


def test_a_workflow_that_is_missing_is_named(run, tmp_path):
    assert_one_line(run(workflow=tmp_path / "nothing.json"), str(tmp_path / "nothing.json"), "check the name")


@pytest.fixture
def bytes_read(monkeypatch):
    """Bytes of weights read from files, by any reader."""
    counts: list[int] = []
    read_at = reader._read_at

    def counted(descriptor, buffer, position) -> int:
        counts.append(len(buffer))
        return read_at(descriptor, buffer, position)

    monkeypatch.setattr(reader, "_read_at", counted)
    return counts


def test_too_small_a_budget_is_refused_with_numbers_before_a_byte_is_read(run, tmp_path, bytes_read):
    found = run("--json", "--budget", "1KiB")
    report = json.loads(found[1])
    error = report["error"]
    assert_one_line(found, error["component"], "1.00 KiB")
    assert (report["status"], error["type"], report["budget_bytes"]) == ("refused", "MemoryRefused", 1 << 10)
    assert error["need_bytes"] > error["have_bytes"] >= 0
    assert "refuse" in {event["event"] for event in report["events"]}
    assert bytes_read == []
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


def test_too_small_a_machine_is_refused_before_a_byte_is_read(run, bytes_read):
    found = run("--json", "--memory", "1MiB")
    assert_one_line(found)
    assert json.loads(found[1])["status"] == "refused"
    assert bytes_read == []


def test_enough_memory_reads_and_runs(run, bytes_read):
    code, _, stderr = run("--budget", "64MiB")
    assert (code, stderr) == (0, "")
    assert sum(bytes_read) > 0  # so the counts above could have been others


def test_a_run_that_fails_inside_a_node_has_exit_code_1(run, monkeypatch):
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the sound\nis broken")

    monkeypatch.setattr(LazyH3DecodeAudio, "decode", fail)
    found = run("--json")
    assert_one_line(found, "the sound is broken", code=1)
    report = json.loads(found[1])
    assert (report["status"], report["error"]["type"], report["error"]["node"]) == ("error", "RuntimeError", "9")
    assert report["error"]["need_bytes"] is report["error"]["have_bytes"] is report["error"]["component"] is None
    assert report["events"][-1]["resident_bytes"] == 0


def test_an_error_in_the_first_of_several_runs_ends_them(run):
    code, stdout, _ = run("--repeat", "3", "--budget", "1KiB", "--json")
    assert code == 2
    assert len(json.loads(stdout)["runs"]) == 1


@pytest.mark.parametrize("place", [("--debug", "run"), ("run", "--debug")])
def test_debug_shows_the_traceback(place):
    with pytest.raises(ValueError, match="check the name of the workflow"):
        cli.main([*place, "nothing.json"])


def test_an_interrupt_by_the_user_is_one_line_and_exit_code_130(lazy_h3, monkeypatch):
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lazy_h3.commands.inspect_path.inspect_path", interrupted)
    assert_one_line(lazy_h3("inspect", "x"), "interrupted", code=130)


@pytest.mark.parametrize("arguments", [("plan", WORKFLOW, "--sizes", "nope"), ("run", "nothing.json"), ("inspect", "\0")])
def test_an_error_before_there_is_a_report_is_one_json_document_too(lazy_h3, arguments):
    found = lazy_h3(*arguments, "--json")
    document = json.loads(found[1])
    assert document["status"] == "error"
    assert_one_line(found, document["error"]["message"])


def test_a_budget_without_a_unit_is_hinted_at_where_it_is_too_small(run):
    assert_one_line(run("--budget", "24"), "available for weights", "--budget 24GiB is another size than --budget 24.")
    assert "another size" not in run("--budget", "1KiB")[2]


@pytest.mark.parametrize(("command", "default"), [("run", "output"), ("demo", "free"), ("make-checkpoint", "50.0")])
def test_help_names_defaults(lazy_h3, command, default):
    code, stdout, _ = lazy_h3(command, "--help")
    assert (code, f"(default: {default})" in " ".join(stdout.split())) == (0, True)
    assert not re.search(r"default: (None|False|\[|==)", stdout)


def test_help_is_no_error(lazy_h3):
    code, stdout, stderr = lazy_h3("--help")
    assert (code, stderr) == (0, "")
    assert all(command in stdout for command in ("demo", "run", "make-checkpoint", "inspect", "bench"))


def test_the_name_of_a_model_may_hold_any_letters(run, dit_file):
    shutil.copy(tiny_models() / SINGLE_FILES["dit"], dit_file.with_name("mödel 模型 [1].safetensors"))
    code, _, stderr = run("--set", "2.file=mödel 模型 [1].safetensors")
    assert (code, stderr) == (0, "")
