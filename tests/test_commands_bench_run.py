"""The benchmark of whole runs: what its measuring process says of the tiny model, and what is concluded from figures."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
from lazy_h3 import cli
from lazy_h3.commands import bench_run
from lazy_h3.commands.bench_run import Variant, measure, shown
from small_models import USERS, tiny_models

MIB = 1 << 20
ROW = {
    "latents": ["a", "b"],
    "seconds": [3.0, 2.5],
    "rss_after_bytes": [500 * MIB, 510 * MIB],
    "predicted_peak_bytes": 300 * MIB,
    "peak_resident_bytes": 300 * MIB,
    "largest_bytes": 300 * MIB,
    "sum_bytes": 900 * MIB,
    "activation_bytes": {"7": 40 * MIB, "8": 60 * MIB},
    "refused": None,
}
REFUSAL = {
    **ROW,
    "refused": "video VAE (x) needs at least 9 GiB",
    "seconds": [0.3],
    "read_bytes": 300_000,
    "header_bytes": 200_000,
    "peak_resident_bytes": 0,
}


@pytest.fixture(autouse=True)
def no_latents_of_earlier_runs(monkeypatch):
    monkeypatch.setattr(bench_run.LatentHash, "found", [])


def test_a_run_that_fits_says_what_was_alive_and_what_came_out():
    found = measure(tiny_models(), Variant("free", is_plain=True), 1)
    assert found["refused"] is None
    assert len(found["latents"]) == len(found["seconds"]) == 1
    assert found["peak_resident_bytes"] == found["largest_bytes"] < found["sum_bytes"]
    assert found["read_bytes"] > found["sum_bytes"]
    assert found["activation_bytes"].keys() >= set(USERS.values())


def test_a_run_that_is_refused_reads_headers_alone():
    found = measure(tiny_models(), Variant("free", budget=1), 3)
    assert "available for weights" in found["refused"]
    assert (found["latents"], found["peak_resident_bytes"], len(found["seconds"])) == ([], 0, 1)
    assert found["read_bytes"] < found["header_bytes"] + bench_run.TOKENIZER_AND_CODE


def test_skeletons_are_built_without_the_compiler_of_torch():
    """Importing it takes a second and 70 MiB, inside the first prompt."""
    code = """
import sys, torch
from lazy_h3.commands.presets import build, tiny
with torch.device("meta"):
    for kind, config in tiny().components().items():
        build(kind, config)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_wrong_with_the_machine_is_no_refusal(tmp_path):
    with pytest.raises(RuntimeError, match="minimax_h3"):
        measure(tmp_path, Variant("free"), 1)


def bench(monkeypatch, changes: dict[str, dict[str, Any]] | None = None, growth: dict[str, int] | None = None) -> dict[str, Any]:
    """All of it with figures out of thin air: those of ``changes`` by row, ``growth`` in MiB."""

    def child(models: Any, variant: Variant, repeats: int) -> tuple[dict[str, Any], int]:
        name = name_of(variant)
        row = deepcopy(REFUSAL if name == "1/13" else ROW)
        if name.startswith("1/"):
            row["predicted_peak_bytes"] = row["peak_resident_bytes"] = min(row["peak_resident_bytes"], variant.budget or 0)
        return row | (changes or {}).get(name, {}), (growth or {}).get(name, 60) * MIB

    def name_of(variant: Variant) -> str:
        if variant.budget is not None:
            return f"1/{round(300 * MIB / variant.budget)}"
        return "warm" if variant.is_warm else f"{variant.policy}{', whole' * variant.is_plain}"

    monkeypatch.setattr(bench_run, "replica_models", lambda folder, scale, name: folder)
    monkeypatch.setattr(bench_run, "_watched_child", child)
    return bench_run.bench_run(tiny_models(), 32, 2)


def failed(found: dict[str, Any]) -> list[str]:
    return [check for check, passed in found["checks"].items() if not passed]


def test_every_figure_has_its_bound(monkeypatch):
    found = bench(monkeypatch)
    assert failed(found) == []
    assert found["ok"]
    lines = list(shown(found))
    assert sum(line.startswith("ok  ") for line in lines) == len(found["checks"])
    assert any("video VAE (x) needs" in line for line in lines)


@pytest.mark.parametrize(
    ("row", "change", "check"),
    [
        ("free, whole", {"rss_after_bytes": [0, 65 * MIB]}, "free, whole: no growth beyond 64 MiB after run 1"),
        ("free, whole", {"largest_bytes": 299 * MIB}, "free, whole: peak resident == largest < sum"),
        ("free", {"latents": ["a", "c"]}, "all latents are bit-identical"),
        ("free", {"predicted_peak_bytes": 316 * MIB}, "free: predicted peak within 5% of measured"),
        ("1/3", {"peak_resident_bytes": 101 * MIB}, "1/3 of the sum: weights stay under the budget at every event"),
        ("1/13", {"refused": "text encoder needs"}, "1/13 of the sum: refused, naming the video VAE"),
        ("1/13", {"refused": None}, "1/13 of the sum: refused, naming the video VAE"),
        ("1/13", {"seconds": [1.2]}, "1/13 of the sum: refused in less than 1 s"),
        (
            "1/13",
            {"read_bytes": 2 * MIB},
            "1/13 of the sum: refused, no weight read and no byte beyond headers, tokenizer and code",
        ),
    ],
)
def test_a_figure_beyond_its_bound_is_named(monkeypatch, row, change, check):
    assert failed(bench(monkeypatch, {row: change})) == [check]


@pytest.mark.parametrize(
    ("row", "most", "check"),
    [
        ("free, whole", 390, "free, whole: growth <= 1.1 x largest + activations of a node"),
        ("1/3", 100 + 60 + 64, "1/3 of the sum: growth <= budget + activations + 64 MiB"),
        ("1/8", 37 + 60 + 64, "1/8 of the sum: growth <= budget + activations + 64 MiB"),
    ],
)
def test_growth_of_the_process_has_a_bound(monkeypatch, row, most, check):
    assert failed(bench(monkeypatch, growth={row: most})) == []
    assert failed(bench(monkeypatch, growth={row: most + 1})) == [check]


def test_bench_all_runs_every_benchmark_and_fails_if_one_does(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_measured", lambda name, options: ({"ok": name != "graph"}, [f"figures of {name}"]))
    assert cli.main(["bench", "all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line for name in cli.BENCH_REPEATS for line in (f"bench {name}", f"figures of {name}")]
    assert cli.main(["bench", "all", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {name: {"ok": name != "graph"} for name in cli.BENCH_REPEATS}
    assert cli.main(["bench", "load"]) == 0
    assert capsys.readouterr().out == "figures of load\n"
