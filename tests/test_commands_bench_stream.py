"""The benchmark of streaming on a model so small that its times say nothing: what it measures, not how fast that is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lazy_h3.commands import bench_stream
from lazy_h3.commands.bench_stream import Claim, Throttle, denoising, encoding, median_ratio, pairs, shown
from lazy_h3.commands.make_checkpoint import make_checkpoint
from lazy_h3.commands.presets import tiny
from lazy_h3.memory.reader import Reader
from streamed_models import DIT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bench")
    make_checkpoint(made / "minimax-h3-9", replace(tiny(), dit=DIT))
    return made


def test_all_figures_of_one_round_are_there_and_both_modes_agree(folder):
    threads = torch.get_num_threads()
    found = bench_stream.bench_stream(folder, 9, 1)
    assert torch.get_num_threads() == threads
    assert found["rows"].keys() == {f"{name}, {state}" for name in ("text encoder", "DiT") for state in ("cold", "warm")}
    assert found["checks"]["all results are bit-identical"]
    assert any(passed for name, passed in found["checks"].items() if name.startswith("text encoder: weights held"))
    assert all(0 < row["streamed_bytes"] < row["whole_bytes"] for row in found["memory"].values())
    lines = list(shown(found))
    assert sum(line.startswith(("ok", "FAIL")) for line in lines) == len(found["checks"]) == 6


@pytest.mark.parametrize("make", [encoding, lambda models, reader: denoising(models, reader, 2)], ids=["text encoder", "DiT"])
def test_pairs_go_first_in_turn_and_leave_nothing_in_memory(folder, make, monkeypatch):
    job = make(folder / "minimax-h3-9", Reader())
    modes = []
    fill = job.component.fill
    monkeypatch.setattr(job.component, "fill", lambda request: (modes.append(request.mode), fill(request)))
    row = pairs(job, "warm", 3)
    assert modes == ["whole", "streamed", "streamed", "whole", "whole", "streamed"]
    assert len(row["whole_seconds"]) == len(row["streamed_seconds"]) == 3
    assert job.component.live_bytes() == 0


@pytest.mark.parametrize(("is_most", "holds"), [(True, [True, True, False]), (False, [False, True, True])])
def test_a_claim_says_its_ratio_and_its_limit(is_most, holds):
    claims = [Claim(ratio, 1.2, is_most) for ratio in (1.1, 1.2, 1.3)]
    assert [claim.holds for claim in claims] == holds
    assert str(claims[0]) == f"1.10 (at {'most' if is_most else 'least'} 1.2)"


def test_a_ratio_is_taken_within_each_pair():
    """A machine that is ten times slower for one pair does not move it."""
    assert median_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 3.0]) == 0.5


def test_a_throttled_reader_takes_its_time_for_every_byte(folder, monkeypatch):
    slept = []
    monkeypatch.setattr(bench_stream.time, "sleep", slept.append)
    throttle = Throttle()
    job = denoising(folder / "minimax-h3-9", throttle.reader, 2, is_folded=False)
    throttle.seconds_per_byte = 2.0
    job.run("whole")
    assert sum(slept) == 2.0 * job.component.nbytes()
