"""SIGTERM and Ctrl-C during a run: the report is there at once, everything is freed, and the exit code says which it was."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lazy_h3.commands import interruption
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.commands.interruption import Interruption, SignalWatch
from small_models import DECODE_VIDEO, ENCODE, tiny_models

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals of this kind")

CHILD = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell, which ignores it
here, component, *arguments = sys.argv[1:]
from lazy_h3 import cli
from lazy_h3.memory import component as components, reader

read_at, read = reader._read_at, components.Component._read
reading = []

def slow(descriptor, buffer, position):
    if reading and reading[-1].startswith(component):
        pathlib.Path(here, "reading").touch()
        while not pathlib.Path(here, "go on").exists():
            time.sleep(0.01)
    return read_at(descriptor, buffer, position)

def noted(self, *arguments):
    reading.append(self.name)
    return read(self, *arguments)

reader._read_at, components.Component._read = slow, noted
sys.exit(cli.main(arguments))
"""
SMALL = ("--set", "6.width=32", "--set", "6.height=32", "--set", "7.steps=1", "--no-stream", "--no-fold")


def waited_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def child_that_reads(component: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """A run that hangs in its first read of a component until ``folder / "go on"`` is there."""
    command = ["run", str(WORKFLOW), "--models", str(tiny_models()), "--out", str(folder / "out"), *SMALL, *arguments]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), component, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    ) as child:
        try:
            waited_for(lambda: (folder / "reading").exists() or child.poll() is not None)
            yield child
        finally:
            child.kill()


def report_in(folder: Path) -> dict:
    return json.loads((folder / "out" / "report.json").read_text())


@pytest.mark.parametrize(
    ("number", "code", "component", "node", "policy"),
    [
        (signal.SIGTERM, 143, "video VAE", DECODE_VIDEO, "keep"),
        (signal.SIGINT, 130, "text encoder", ENCODE, "free"),
    ],
)
def test_a_signal_writes_the_report_at_once_and_frees_everything(tmp_path, number, code, component, node, policy):
    with child_that_reads(component, tmp_path, "--policy", policy, "--repeat", "2", "--json") as child:
        child.send_signal(number)
        child.send_signal(number)  # as ``timeout`` does: once to the process, once to its group
        waited_for((tmp_path / "out" / "report.json").exists)
        waited_for(lambda: (tmp_path / "out" / "report.json").read_text().endswith("}"))
        early = report_in(tmp_path)
        assert child.poll() is None  # it still hangs in its read
        (tmp_path / "go on").touch()
        stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == code, stderr
    final = report_in(tmp_path)
    assert json.loads(stdout) == final
    for report in (early, final):
        assert (report["status"], report["error"]["type"], report["error"]["node"]) == ("error", "Interrupted", node)
        message = report["error"]["message"]
        assert message.startswith(f"{signal.Signals(number).name} ended the run at node {node} with ")
        assert component in message
        assert report["peak_resident_bytes"] > 0
        assert report["outputs"] == []
    assert ("text encoder" in message) == (component == "text encoder" or policy == "keep")
    assert (len(early["runs"]), len(final["runs"])) == (0, 1)
    assert [event["event"] for event in early["events"]][-1] == "load_begin"
    assert final["events"][-1]["resident_bytes"] == 0
    assert stderr.splitlines()[-1] == f"lazy-h3: {message}"


@pytest.fixture
def usual() -> Iterator[list[int]]:
    """What a SIGTERM does without us: it is counted here."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    yield came
    signal.signal(signal.SIGTERM, before)


def test_a_second_signal_does_what_it_would_do_without_us_unless_it_is_an_echo(usual, monkeypatch):
    begun: list[signal.Signals] = []
    interrupts: list[bool] = []
    with SignalWatch().watched(begun.append, lambda: interrupts.append(True)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        waited_for(lambda: len(interrupts) > 1)
        assert (begun, usual) == ([signal.SIGTERM], [])
        monkeypatch.setattr(interruption, "ECHO_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert usual == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert len(usual) == 2
    assert begun == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begun: list[signal.Signals] = []
        with SignalWatch().watched(begun.append, lambda: None):
            signal.raise_signal(signal.SIGINT)
        assert begun == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_without_weights_says_so():
    message = Interruption(signal.SIGTERM).message
    assert message == "SIGTERM ended the run between two nodes with no weights in memory; start it again to have its results."
