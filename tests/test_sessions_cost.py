"""What the bridge costs a prompt; ``bench graph`` prints more."""

from __future__ import annotations

import logging

import pytest
from lazy_h3.commands import bench_graph
from lazy_h3.commands.bench_graph import Measured, branches, measure
from session_cases import quick_collections  # noqa: F401  (a fixture)

SIGHTS = pytest.mark.parametrize("is_probe_exposed", [True, False], ids=["list", "queued"])


def best(size: int, is_probe_exposed: bool) -> Measured:
    return min((measure(size, is_probe_exposed) for _ in range(3)), key=lambda measured: measured.seconds)


@SIGHTS
def test_a_prompt_of_500_nodes_costs_less_than_50_milliseconds(is_probe_exposed):
    assert best(500, is_probe_exposed).seconds < 0.05


@SIGHTS
def test_an_event_costs_less_than_50_microseconds(is_probe_exposed):
    assert best(50, is_probe_exposed).event_seconds < 50e-6


@SIGHTS
def test_four_times_the_nodes_cost_about_four_times_as_much(is_probe_exposed):
    small, large = best(150, is_probe_exposed), best(600, is_probe_exposed)
    assert large.seconds_per_part <= bench_graph.MOST_GROWTH * small.seconds_per_part


@pytest.mark.parametrize("size", bench_graph.SIZES)
def test_prompts_have_the_size_that_is_asked_for(size):
    assert len(branches(size)) == size


def test_the_bench_prints_a_table_and_says_whether_it_holds(monkeypatch):
    monkeypatch.setattr(bench_graph, "SIZES", (23, 33, 43, 53))
    found = bench_graph.bench_graph(1)
    assert found["ok"] == all(found["checks"].values())
    assert [[row["nodes"] for row in rows] for rows in found["tables"].values()] == [[23, 33, 43, 53]] * 2
    lines = list(bench_graph.shown(found))
    assert len(lines) == 1 + 8 + 6
    assert logging.getLogger("lazy_h3").level == logging.NOTSET


def test_a_prompt_that_does_not_share_its_models_is_no_measurement(monkeypatch):
    monkeypatch.setattr(bench_graph, "MODELS", ("text encoder", "text encoder", "video VAE"))
    with pytest.raises(RuntimeError, match="did not run as it should"):
        measure(33, True)
