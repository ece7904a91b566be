"""The run report: what it makes of the events of a ledger, and which ends it tells apart."""

import pytest
from lazy_h3.commands.process_memory import sampled_memory
from lazy_h3.commands.report import Report, RunRecord
from lazy_h3.host.embedded.executor import NodeError
from lazy_h3.host.embedded.host import RunResult
from lazy_h3.memory.ledger import Ledger
from lazy_h3.memory.store import MemoryRefused

KINDS = {"big": "dit", "small": "video_vae"}


def record_of(status: str = "success", error: NodeError | None = None) -> RunRecord:
    return RunRecord(RunResult("id", status, {}, error), 1.5, 70)


def report_of(*events: tuple, record: RunRecord | None = None, refusal: MemoryRefused | None = None) -> Report:
    """``events``: (event, component, bytes[, node])."""
    ledger = Ledger()
    for event, component, nbytes, *node in events:
        ledger.record(event, component, nbytes, node=node[0] if node else None)
    return Report(ledger, KINDS, [record or record_of()], refusal=refusal)


def load(component: str, nbytes: int) -> list[tuple]:
    return [("load_begin", component, nbytes), ("load_end", component, nbytes)]


def test_a_component_is_as_large_as_its_parts_that_were_resident_together():
    events = [*load("big", 40), *load("big", 30), ("release", "big", 70, "7"), *load("big", 40), ("release", "big", 40, "9")]
    (component,) = report_of(*events).as_dict()["components"]
    assert (component["bytes"], component["loads"], component["released_after"]) == (70, 3, ["7", "9"])


def test_sums_and_largest_are_over_components():
    document = report_of(*load("big", 70), ("release", "big", 70, "7"), *load("small", 30)).as_dict()
    assert (document["sum_bytes"], document["largest_bytes"], document["peak_resident_bytes"]) == (100, 70, 70)
    assert {c["name"]: (c["kind"], c["released_after"]) for c in document["components"]} == {
        "big": ("dit", ["7"]),
        "small": ("video_vae", []),
    }


def test_a_load_that_failed_is_no_load():
    document = report_of(("load_begin", "big", 70), ("load_end", "big", 0), *load("big", 70)).as_dict()
    assert document["runs"][0]["loads"] == {"big": 1}
    assert [component["loads"] for component in document["components"]] == [1]


def test_a_release_at_the_end_of_the_prompt_is_after_no_node():
    (component,) = report_of(*load("big", 70), ("release", "big", 70)).as_dict()["components"]
    assert component["released_after"] == []


def test_an_empty_run_has_an_empty_report():
    document = report_of().as_dict()
    assert (document["components"], document["sum_bytes"], document["largest_bytes"], document["status"]) == ([], 0, 0, "ok")


ENDS = {
    "refused": (NodeError("MemoryRefused", "too large", "7"), "refused", True),
    "bad file": (NodeError("lazy_h3.memory.checkpoint.CheckpointError", "x.safetensors: is truncated", "2"), "error", True),
    "invalid prompt": (NodeError("prompt_no_outputs", "Prompt has no outputs"), "error", True),
    "failed node": (NodeError("RuntimeError", "broken", "7"), "error", False),
}


@pytest.mark.parametrize("end", ENDS)
def test_ends_are_told_apart(end):
    error, status, is_bad_input = ENDS[end]
    refusal = MemoryRefused("big", 70, 60, "use smaller files.")
    report = report_of(record=record_of("error", error), refusal=refusal)
    found = report.as_dict()["error"]
    assert (report.status, report.is_bad_input) == (status, is_bad_input)
    assert (found["type"], found["node"]) == (error.type.rpartition(".")[2], error.node_id)
    numbers = (found["component"], found["need_bytes"], found["have_bytes"])
    assert numbers == (("big", 70, 60) if end == "refused" else (None, None, None))  # a refusal that a node survived is no end


def test_a_message_is_one_line():
    error = NodeError("RuntimeError", "first\n  second\n", "7")
    assert report_of(record=record_of("error", error)).message == "first second"


def test_memory_is_watched_while_the_block_runs():
    with sampled_memory() as memory:
        block = bytearray(b"x") * (64 << 20)
        assert block[-1] == ord("x")
    del block
    assert memory.peak - memory.before > 32 << 20
    assert memory.peak >= max(memory.before, memory.after) > 0
