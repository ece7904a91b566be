from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from lazy_h3.h3.dit import DiT
from lazy_h3.h3.sampling import Schedule
from lazy_h3.memory.checkpoint import CheckpointError
from lazy_h3.memory.component import Component
from lazy_h3.memory.folding import KnownRows
from lazy_h3.memory.handle import Handle
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import FillRequest
from lazy_h3.memory.store import Store
from memory_models import PLENTY, BytesRead
from streamed_models import DIT, POINTS, SCHEDULE, deep_dit, denoised, held, threads, whole
from torch import Tensor

OTHER = Schedule.official(5, video_shift=5.0)
OTHER_POINTS = tuple(sorted({time for times in OTHER.times for time in times}))
DENOISER = frozenset({"denoiser"})
MODES = {"whole": None, "streamed": 0, "two blocks held": 2}
ADALN_ROWS = (6 * 18 + 2) * DIT.hidden_size  # of all projections
PROJECTION_BYTES = ADALN_ROWS * (DIT.time_embed_dim + 1) * 2
BLOCK_PROJECTION_BYTES = 18 * DIT.hidden_size * (DIT.time_embed_dim + 1) * 2


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("folding") / "dit.safetensors"


@pytest.fixture(scope="module")
def expected(path) -> dict[Schedule, Tensor]:
    """What the unfolded model makes of both schedules."""
    component = whole(deep_dit(path))
    results = {schedule: denoised(component.module, schedule) for schedule in (SCHEDULE, OTHER)}
    component.drop()
    assert all(result.isfinite().all() for result in results.values())
    assert not torch.equal(results[SCHEDULE], results[OTHER][: len(results[SCHEDULE])])
    return results


def folded(component: Component, num_held: int | None = None, points: tuple[float, ...] = POINTS) -> Component:
    """Filled with its projections folded: whole, or streamed with so many blocks held."""
    if num_held is not None:
        return held(component, num_held, points=points)
    component.fill(FillRequest(component.parts, points=points))
    return component


def assert_gone(component: Component) -> None:
    component.drop()
    assert_empty(component)


def assert_empty(component: Component) -> None:
    assert component.live_bytes() == 0
    assert component.resident_parts() == frozenset()
    assert not any("forward" in module.__dict__ for module in component.module.modules())
    assert all(tensor.is_meta for tensor in component.module.state_dict(keep_vars=True).values())


# The same bits as with the projections in memory.


@pytest.mark.parametrize("num_held", MODES.values(), ids=MODES)
def test_a_folded_model_has_the_bits_of_the_unfolded_one(path, expected, num_held):
    count = BytesRead()
    component = folded(deep_dit(path, reader=count.reader), num_held, POINTS[::-1])
    assert not any(slot.is_filled for name, slot in component._slots.items() if "adaln_proj" in name)
    before = count.total
    for _ in range(2):
        assert torch.equal(denoised(component.module), expected[SCHEDULE])
    if num_held is None:
        assert count.total == before
    assert_gone(component)


@pytest.mark.parametrize("compute", [torch.float32, torch.float16], ids=str)
def test_it_has_them_in_every_dtype(path, compute):
    component = deep_dit(path, compute=compute)
    unfolded = denoised(whole(component).module)
    component.drop()
    for num_held in MODES.values():
        assert torch.equal(denoised(folded(component, num_held).module), unfolded)
        assert_gone(component)


@pytest.mark.parametrize("num_points", [1, 2, 7, 8, 9, 17])
def test_a_row_has_the_same_bits_however_many_points_there_are(path, num_points):
    component = whole(deep_dit(path))
    points = tuple(torch.linspace(0, 1, num_points).tolist())
    with torch.inference_mode():
        features = [component.module.time_features(torch.tensor([point])) for point in points]
        unfolded = [block.adaln_proj(row) for row in features for block in component.module.blocks]
        component.drop()
        folded(component, points=points)
        rows = [component.module.time_features(torch.tensor([point])) for point in points]
        found = [block.adaln_proj(row) for row in rows for block in component.module.blocks]
    assert all(map(torch.equal, found, unfolded))
    component.drop()


def test_values_of_two_streams_come_in_the_order_of_the_step(path):
    component = whole(deep_dit(path))
    times = torch.tensor([POINTS[3], POINTS[0], POINTS[3], POINTS[5]])
    with torch.inference_mode():
        unfolded = component.module.final_layer.adaln_proj(component.module.time_features(times))
        component.drop()
        folded(component)
        found = component.module.final_layer.adaln_proj(component.module.time_features(times))
    assert torch.equal(found, unfolded)
    component.drop()


# Other points than those it was folded for.


@pytest.mark.parametrize("num_held", MODES.values(), ids=MODES)
def test_a_point_outside_is_read_again_and_never_guessed(path, expected, num_held):
    component = folded(deep_dit(path), num_held)
    alive = component.live_bytes()
    assert torch.equal(denoised(component.module, OTHER), expected[OTHER])
    assert torch.equal(denoised(component.module), expected[SCHEDULE])
    assert component.live_bytes() == alive
    assert_gone(component)


def test_the_nearest_number_is_another_point(path):
    """However near it is to a known one, and beside a known one."""
    times = torch.tensor([POINTS[1], POINTS[2] + 1e-3])
    count = BytesRead()
    component = whole(deep_dit(path, reader=count.reader))
    projection = component.module.blocks[1].adaln_proj
    with torch.inference_mode():
        unfolded = projection(component.module.time_features(times))
        neighbour = projection(component.module.time_features(torch.tensor(POINTS[1:3])))
        component.drop()
        folded(component)
        before = count.total
        found = projection(component.module.time_features(times))
    assert torch.equal(found, unfolded)
    assert not torch.equal(found, neighbour)
    assert count.total - before == BLOCK_PROJECTION_BYTES
    component.drop()


def test_one_unknown_step_reads_each_projection_once(path):
    count = BytesRead()
    component = folded(deep_dit(path, reader=count.reader))
    before = count.total
    denoised(component.module, Schedule((0.123, 0.0), (0.456, 0.0)))
    assert count.total - before == PROJECTION_BYTES
    component.drop()


@pytest.mark.parametrize("num_held", MODES.values(), ids=MODES)
def test_a_new_schedule_reads_only_the_projections(path, expected, num_held):
    count = BytesRead()
    component = folded(deep_dit(path, reader=count.reader), num_held, POINTS)
    for stream in [stream for fill in component._streamed for stream in fill._streams]:
        stream._reading.submit(lambda: None).result(20)
    before = count.total
    component.expect(OTHER_POINTS)
    assert count.total - before == PROJECTION_BYTES
    component.expect(OTHER_POINTS[1:])
    component.expect(())
    assert count.total - before == PROJECTION_BYTES
    resident = component.resident_parts()
    assert torch.equal(denoised(component.module, OTHER), expected[OTHER])
    if num_held is None:
        assert count.total - before == PROJECTION_BYTES
    assert resident == component.parts
    assert (
        component.live_bytes()
        == component.costs(component.parts, OTHER_POINTS)["whole" if num_held is None else "streamed"]
        .holding(num_held or 0)
        .resident
    )
    assert_gone(component)


@pytest.mark.parametrize("num_held", MODES.values(), ids=MODES)
def test_a_schedule_for_which_folding_does_not_pay_brings_the_projections_back(path, expected, num_held):
    component = folded(deep_dit(path), num_held)
    component.expect(tuple(n / 100 for n in range(101)))
    assert component.resident_parts() == component.parts - DENOISER
    component.fill(FillRequest(DENOISER, "whole" if num_held is None else "streamed"))
    assert component.resident_parts() == component.parts
    for schedule in (SCHEDULE, OTHER):
        assert torch.equal(denoised(component.module, schedule), expected[schedule])
    assert_gone(component)


def test_prompts_with_other_schedules_take_a_kept_model_in_turn(path, expected):
    store = Store(pretended_total=PLENTY)
    component = deep_dit(path)
    handle = Handle(component, store)
    for schedule, points in [(SCHEDULE, POINTS), (OTHER, OTHER_POINTS), (SCHEDULE, POINTS)]:
        with handle.use(num_passes=schedule.num_steps, points=points) as model:
            assert torch.equal(denoised(model, schedule), expected[schedule])
        assert component.resident_parts() == component.parts
    handle.release("test")
    assert_gone(component)


# When it pays.


def test_costs_are_those_of_the_tables(path):
    component = deep_dit(path)
    plain, less = component.costs(component.parts), component.costs(component.parts, POINTS)
    tables = ADALN_ROWS * 2 * len(POINTS)
    assert plain["whole"].resident - less["whole"].resident == PROJECTION_BYTES - tables
    assert less["whole"].read_bytes(9) == plain["whole"].read_bytes(9) == component.nbytes()
    assert plain["streamed"].block_bytes - less["streamed"].block_bytes == BLOCK_PROJECTION_BYTES
    for mode, num_held in (("whole", None), ("streamed", 0), ("streamed", 3)):
        folded(component, num_held)
        assert component.live_bytes() == less[mode].holding(num_held or 0).resident
        component.drop()
    assert component.costs(component.parts, POINTS + POINTS) == less


@pytest.mark.parametrize("number", range(DIT.time_embed_dim - 1, DIT.time_embed_dim + 4))
def test_it_is_used_while_the_tables_take_less_than_the_weights(path, number):
    """A projection has time_embed_dim weights and a bias in each row, a table has a value for each point."""
    component = deep_dit(path)
    points = tuple(n / 1000 for n in range(number))
    folded(component, points=points)
    is_folded = component.live_bytes() < component.nbytes()
    assert is_folded is (number <= DIT.time_embed_dim)
    assert component.live_bytes() == component.costs(component.parts, points)["whole"].resident
    assert component.resident_parts() == component.parts
    component.drop()


@pytest.mark.parametrize("config", [{"adaln_rank": 5}, {"adaln_curve": (17, 4)}], ids=["rank", "curve"])
def test_variants_with_small_projections_keep_them(tmp_path, config):
    component = deep_dit(tmp_path / "dit.safetensors", **config)
    unfolded = denoised(whole(component).module)
    component.drop()
    folded(component)
    assert component.live_bytes() == component.nbytes()
    assert component.costs(component.parts, POINTS) == component.costs(component.parts)
    assert torch.equal(denoised(component.module), unfolded)
    component.drop()


def test_nothing_is_folded_for_no_points(path):
    component = folded(deep_dit(path), points=())
    assert component.live_bytes() == component.nbytes()
    assert component.module.blocks[0].adaln_proj.linear.weight.device.type == "cpu"
    component.drop()


# How many bytes are alive.


class Peak:
    """The most that is alive before any read."""

    def __init__(self) -> None:
        self.component: Component | None = None
        self.bytes = 0
        self.reader = Reader(num_threads=1, before_chunk=lambda _: self.measure())

    def measure(self) -> None:
        if self.component is not None:
            self.bytes = max(self.bytes, self.component.live_bytes())


@pytest.mark.parametrize("num_held", MODES.values(), ids=MODES)
@pytest.mark.parametrize("config", [{}, {"time_embed_dim": 400}, {"time_embed_hidden_dim": 4000}], ids=["real", "wide", "inputs"])
def test_folding_takes_no_more_than_the_final_size_or_what_its_cost_says(tmp_path, config, num_held):
    """In the proportions of the real model nothing on top: a projection takes less than the rest of its block."""
    peak = Peak()
    component = deep_dit(tmp_path / "dit.safetensors", reader=peak.reader, **config)
    peak.component = component
    cost = component.costs(component.parts, POINTS)["whole" if num_held is None else "streamed"].holding(num_held or 0)
    folded(component, num_held)
    peak.measure()
    assert component.live_bytes() == cost.resident
    assert cost.resident <= peak.bytes <= cost.resident + cost.transient
    if not config:
        assert peak.bytes == cost.resident
    elif "time_embed_dim" in config and num_held == 0:
        assert peak.bytes > cost.resident  # else this case shows nothing
    assert_gone(component)


# Whatever goes wrong.


class Failing:
    """A reader that fails after so many reads, until it is mended."""

    def __init__(self, error: type[BaseException]) -> None:
        self.left: int | None = None
        self.error = error
        self.reader = Reader(num_threads=1, before_chunk=self._count)

    def _count(self, _: int) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise self.error("the disk is gone")


@pytest.mark.parametrize("error", [CheckpointError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 4, 5, 10, 18, 30, 70])
def test_a_fill_that_fails_while_folding_leaves_nothing(path, expected, after, error):
    failing = Failing(error)
    component = deep_dit(path, reader=failing.reader)
    failing.left = after
    with pytest.raises(error):
        folded(component)
    assert_empty(component)
    failing.left = None
    assert torch.equal(denoised(folded(component).module), expected[SCHEDULE])
    component.drop()


@pytest.mark.parametrize("after", [0, 1, 5, 13])
def test_a_new_schedule_that_cannot_be_read_leaves_right_answers(path, expected, after):
    failing = Failing(CheckpointError)
    component = folded(deep_dit(path, reader=failing.reader))
    failing.left = after
    with pytest.raises(CheckpointError):
        component.expect(OTHER_POINTS)
    failing.left = None
    assert component.resident_parts() == component.parts
    for schedule in (SCHEDULE, OTHER):
        assert torch.equal(denoised(component.module, schedule), expected[schedule])
    component.expect(OTHER_POINTS)
    assert torch.equal(denoised(component.module, OTHER), expected[OTHER])
    assert_gone(component)


def test_a_projection_that_cannot_be_read_again_is_an_error_and_nothing_stays(path, expected):
    failing = Failing(CheckpointError)
    component = folded(deep_dit(path, reader=failing.reader))
    alive = component.live_bytes()
    failing.left = 3
    with pytest.raises(CheckpointError, match="the disk is gone"):
        denoised(component.module, OTHER)
    failing.left = None
    assert torch.equal(denoised(component.module, OTHER), expected[OTHER])
    assert component.live_bytes() == alive
    assert_gone(component)


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("points", [POINTS, POINTS + OTHER_POINTS, POINTS[:2]], ids=["one known", "both known", "none known"])
def test_two_threads_with_other_schedules_share_a_folded_model(path, expected, points):
    component = folded(deep_dit(path), points=points)

    def sampled(schedule: Schedule) -> None:
        for _ in range(3):
            assert_equal(denoised(component.module, schedule), expected[schedule])

    with threads(lambda: sampled(SCHEDULE), lambda: sampled(OTHER), lambda: sampled(OTHER)):
        pass
    assert_gone(component)


def test_a_schedule_that_changes_while_another_thread_samples_gives_right_answers(path, expected):
    component = folded(deep_dit(path))

    def sampled() -> None:
        for _ in range(6):
            assert_equal(denoised(component.module), expected[SCHEDULE])

    with threads(sampled):
        for points in (OTHER_POINTS, POINTS) * 4:
            component.expect(points)
    assert_gone(component)


def test_a_question_of_another_thread_in_between_does_not_mix_places():
    known = KnownRows(torch.arange(12.0).view(4, 3))
    first, second = known.features[[2, 0]], known.features[[1]]
    assert known.places(first).tolist() == [2, 0]
    assert known.places(second).tolist() == [1]
    assert known.places(first).tolist() == [2, 0]
    assert known.places(known.features[[3, 3]] + 1) is None
    assert known.places(torch.cat([first, first + 0.5])) is None


# The rest of the component.


def test_folding_is_no_change_by_hand_and_hides_none(path):
    component = folded(deep_dit(path))
    denoised(component.module)
    denoised(component.module, OTHER)
    assert component.dirty() is None
    component.module.blocks[3].mlp.fc1.weight.data.add_(1)
    assert component.dirty() == "blocks.3.mlp.fc1.weight was edited in place"
    component.drop()


def test_a_fill_in_inference_mode_makes_ordinary_tables(path, expected):
    component = deep_dit(path)
    with torch.inference_mode():
        folded(component)
    tables = [module._values[1] for module in component._foldings[0]._modules]
    assert len(tables) == 7
    assert not any(table.is_inference() or table.requires_grad for table in tables)
    assert torch.equal(denoised(component.module), expected[SCHEDULE])
    component.drop()


def test_compiled_blocks_stay_compiled_while_they_are_folded(path):
    torch.compiler.reset()
    component = deep_dit(path)
    counts = itertools.count()

    def backend(graph: torch.fx.GraphModule, _: object):
        next(counts)
        return graph.forward

    for block in component.module.blocks:
        block.compile(backend=backend)
    seen = []
    for _ in range(3):
        folded(component, 2)
        denoised(component.module)
        component.drop()
        seen.append(next(counts))
    first, *later = seen
    assert later == [first + 1, first + 2]  # the counting itself
    assert first < 6 * 8  # shared by all blocks and steps
    for block in component.module.blocks:
        block._compiled_call_impl = None
    assert isinstance(component.module, DiT)
