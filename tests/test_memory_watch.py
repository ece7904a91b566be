"""The floor at run time: what is kept goes first, then the run stops; nobody is stopped who could not help."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lazy_h3.memory import watch as watching
from lazy_h3.memory.store import Decision, Store
from lazy_h3.memory.watch import FloorWatch, MemoryShort
from memory_models import PLENTY, Foreign, codec
from small_models import DECODE_VIDEO, SAMPLER, stage, text_to_video
from streamed_models import tower

FLOOR = 10_000  # so that the weights of small models are material
ENOUGH, LOW, HARD = FLOOR + 1, FLOOR - 1, FLOOR // 2 - 1
IDS = torch.tensor([1, 2, 3])
GPU = torch.device("cuda", 0)  # a label: nothing is put there


class Machine:
    """Free memory as the watch sees it, of RAM and of every device."""

    def __init__(self) -> None:
        self.free = ENOUGH
        self.process = 0
        self.unified = True

    def status(self, device: torch.device, pretended_total: int | None = None) -> SimpleNamespace:
        free = self.free if device.type != "cpu" or self.unified else ENOUGH
        return SimpleNamespace(free=free, floor=FLOOR, unified=self.unified)


@pytest.fixture
def machine(monkeypatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(watching, "pool_status", found.status)
    monkeypatch.setattr(watching, "process_bytes", lambda: found.process)
    return found


@pytest.fixture
def store() -> Store:
    return Store(pretended_total=PLENTY)


@pytest.fixture
def watch(store, machine, monkeypatch) -> FloorWatch:
    """A watch that looks when the test says so."""
    monkeypatch.setattr(FloorWatch, "_run", lambda self: None)
    return FloorWatch(store)


def large(store: Store, tmp_path, name: str = "large"):
    return store.add(codec(tmp_path / f"{name}.safetensors", width=32, kind=name))  # 20 KiB


def waited_for(condition) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lazy-h3-floor"]


# What is done about a shortage.


def test_nothing_happens_while_there_is_enough(store, watch, tmp_path):
    kept = large(store, tmp_path, "kept")
    with store.use(kept):
        pass
    with store.use(large(store, tmp_path)):
        watch.look()
        watch.check()
    assert kept in store.resident()


def test_what_is_kept_goes_below_the_floor_and_the_run_goes_on(store, watch, machine, tmp_path):
    kept, used = large(store, tmp_path, "kept"), large(store, tmp_path)
    with store.use(kept):
        pass
    with store.use(used):
        machine.free = LOW
        watch.look()
        assert kept in store.resident()  # only a thread that computes may touch the host's list of models
        watch.check()
        assert store.resident() == [used]
        assert store.ledger.events[-1].reason == "9.76 KiB of memory are left"
        watch.look()
        watch.check()
    assert store.resident() == [used]


def test_below_the_hard_line_the_run_stops_with_one_sentence_and_nothing_stays(store, watch, machine, tmp_path):
    used = large(store, tmp_path)
    store.ledger.current_node = lambda: "7"
    with store.use(used):
        machine.free = HARD
        watch.look()
        with pytest.raises(MemoryShort) as raised:
            watch.check()
    assert str(raised.value) == (
        "Node 7 was stopped while it used large: 4.88 KiB of memory are left on this machine, and 9.77 KiB should be; "
        "close other programs, set a smaller budget or choose a smaller picture."
    )
    assert store.resident() == []
    assert store.live_bytes() == 0


def test_what_is_kept_goes_before_anything_is_stopped(store, watch, machine, tmp_path):
    kept, used = large(store, tmp_path, "kept"), large(store, tmp_path)
    with store.use(kept):
        pass
    store.on_change.append(lambda *_: setattr(machine, "free", ENOUGH))  # its release is enough
    with store.use(used):
        machine.free = HARD
        watch.look()
        watch.check()
    assert store.resident() == [used]


def test_a_shortage_that_is_over_stops_nobody(store, watch, machine, tmp_path):
    with store.use(large(store, tmp_path)):
        machine.free = HARD
        watch.look()
        machine.free = ENOUGH
        watch.check()


def test_who_holds_next_to_nothing_is_not_stopped_for_what_others_take(store, watch, machine):
    with store.use(Foreign(store, "small", nbytes=(FLOOR - HARD) // watching.MIN_SHARE - 1)):
        machine.free = HARD
        watch.look()
        watch.check()
        machine.process += FLOOR // 4  # activations: now it is us
        with pytest.raises(MemoryShort):
            watch.check()


def test_a_discrete_gpu_raises_its_own_error_but_what_is_kept_there_goes(store, watch, machine):
    kept, used = (Foreign(store, name, nbytes=2 * FLOOR, device=GPU) for name in ("kept", "used"))
    machine.unified = False
    for resource in (kept, used):
        resource._allocate()
    with store.filling(kept, 0), store.filling(used, 0):
        pass
    with store.use(used):
        machine.free = HARD
        watch.look()
        watch.check()
        assert store.resident() == [used]


# Where a computation stops.


def test_a_shortage_during_a_fill_ends_the_fill(store, watch, machine, tmp_path):
    used = large(store, tmp_path)

    def run_short(*_: object) -> None:
        machine.free = HARD
        watch.look()

    store.on_fill.insert(0, run_short)
    with pytest.raises(MemoryShort), store.use(used):
        raise AssertionError("the fill went on")
    assert store.resident() == []
    assert store.ledger.events[-2].reason == "failed: MemoryShort"


@pytest.mark.parametrize("mode", ["whole", "streamed"])
def test_a_long_step_stops_at_its_next_block(store, watch, machine, tmp_path, mode):
    component = store.add(tower(tmp_path / "tower.safetensors"))
    store.decide = lambda *_: Decision(mode)
    ran: list[int] = []

    def note(number: int) -> None:
        ran.append(number)
        if number == 2:
            machine.process, machine.free = FLOOR, HARD
            watch.look()

    for number, block in enumerate(component.module.blocks):
        block.norm.register_forward_hook(lambda *_, number=number: note(number))
    with pytest.raises(MemoryShort), torch.inference_mode():
        component.module(IDS)
    assert ran == [0, 1, 2]
    assert store.live_bytes() == 0


def test_blocks_are_as_before_when_the_shortage_is_over(store, watch, machine, tmp_path):
    component = store.add(tower(tmp_path / "tower.safetensors"))
    with store.use(component):
        machine.process, machine.free = FLOOR, HARD
        watch.look()
        hooked = [len(block._forward_pre_hooks) for block in component.module.blocks]
        machine.free = ENOUGH
        watch.look()
        assert hooked == [1] * len(component.module.blocks)
        assert not any(block._forward_pre_hooks for block in component.module.blocks)


# The thread.


def test_it_watches_by_itself_while_something_is_in_use_and_only_then(store, machine, monkeypatch, tmp_path):
    monkeypatch.setattr(watching, "PERIOD_SECONDS", 0.01)
    watch, used = FloorWatch(store), large(store, tmp_path)
    assert watchers() == []
    for _ in range(2):
        with store.use(used), store.use(used):
            assert len(watchers()) == 1
        assert waited_for(lambda: watchers() == [])
    with store.use(used):
        machine.free = HARD
        assert waited_for(lambda: watch._is_low)
        with pytest.raises(MemoryShort):
            watch.check()
    assert waited_for(lambda: watchers() == [])


# With the nodes.


@pytest.mark.parametrize("node", [SAMPLER, DECODE_VIDEO])
def test_a_node_that_runs_short_fails_with_the_sentence_and_the_next_prompt_runs(machine, monkeypatch, tmp_path, node):
    monkeypatch.setattr(watching, "PERIOD_SECONDS", 0.01)
    prompt = text_to_video({"7.steps": 4, "6.duration": 56})

    def run_short(name: str, data: dict) -> None:
        if name == "node_progress" and data["node"] == node and data["value"] < data["max"] < 10:
            machine.free = HARD
            assert waited_for(lambda: running.runtime.watch._is_low)

    with stage(tmp_path, policy="keep") as running:
        undo = running.host.on_event(run_short)
        result = running.run(prompt)
        undo()
        assert (result.status, result.error.type, result.error.node_id) == ("error", "MemoryShort", node)
        assert result.error.message.startswith(f"Node {node} was stopped while it used ")
        assert running.store.resident() == []
        machine.free = ENOUGH
        running.succeed(prompt)


def test_a_run_with_enough_memory_is_not_disturbed(tmp_path):
    with stage(tmp_path, policy="keep") as running:
        running.succeed(text_to_video())
        assert len(running.store.resident()) == 4
        assert waited_for(lambda: watchers() == [])


def test_a_watch_that_fails_begins_again_with_the_next_pin(tmp_path, monkeypatch, caplog):
    store = Store(pretended_total=PLENTY)
    watch = FloorWatch(store)
    looks = []

    def failing() -> None:
        looks.append(1)
        raise OSError("no such file")

    monkeypatch.setattr(watch, "look", failing)
    for number in (1, 2):
        with store.use(codec(tmp_path / f"{number}.safetensors", kind=str(number))):
            assert waited_for(lambda: watch._thread is None)
    assert len(looks) == 2
    assert "no longer watched" in caplog.text
