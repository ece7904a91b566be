"""Running nodes: lists, lazy inputs, blockers, expansions, async, loops, errors, interrupts (host contract, sections 2, 3, 9)."""

import asyncio
import gc
import signal
import threading
import time
import weakref

import pytest
import torch
from embedded_nodes import Handle, Trace, chain, node, node_class, recording_host
from lazy_h3.host.embedded import (
    EmbeddedHost,
    ExecutionBlocker,
    ProgressBar,
    current_host,
    get_executing_context,
    throw_exception_if_processing_interrupted,
)
from lazy_h3.host.embedded.errors import InterruptProcessingException

ANY = ("*",)
CACHES = ("ram", "classic", "lru", "none")


@pytest.fixture
def trace():
    with Trace() as trace:
        yield trace


def output(function, **required):
    return node_class(function, required or {"value": ANY}, (), OUTPUT_NODE=True)


def shown(trace, prompt, extra=None, **options):
    """What output node "end" gave to look at."""
    result = recording_host(trace, extra, **options).run(prompt)
    assert result.status == "success", result.error
    return result.outputs["end"]["text"]


def test_shorter_lists_repeat_their_last_value(trace):
    join = node_class(lambda self, a, b: (f"{a}{b}",), {"a": ANY, "b": ANY})
    prompt = {
        "1": node("Many", count=3),
        "2": node("Many", count=2),
        "3": node("Join", a=["1", 0], b=["2", 0]),
        "end": node("Show", value=["3", 0]),
    }
    assert shown(trace, prompt, {"Join": join}) == ["item0item0", "item1item1", "item2item1"]


def test_node_that_takes_lists_is_called_once_with_them(trace):
    prompt = {"1": node("Many", count=3), "2": node("Together", values=["1", 0]), "end": node("Show", value=["2", 0])}
    assert shown(trace, prompt) == ["['item0', 'item1', 'item2']"]


def test_empty_list_is_an_error_that_names_the_input(trace):
    prompt = {"1": node("Many", count=0), "end": node("Show", value=["1", 0])}
    error = recording_host(trace).run(prompt).error
    assert (error.node_id, error.message) == (
        "end",
        "Input 'value' of node end received an empty list: give it at least one value.",
    )


def test_blocker_in_a_list_blocks_its_item_only_and_tells_its_message_once(trace):
    told = []
    make = node_class(lambda self: ([1, ExecutionBlocker("too big"), 3],), {}, OUTPUT_IS_LIST=(True,))
    host = recording_host(trace, {"Make": make})
    host.on_event(lambda name, data: told.append((data["node"], data["message"])) if name == "execution_blocked" else None)
    prompt = {"1": node("Make"), "2": node("Use", model=["1", 0], text="x"), "end": node("Show", value=["2", 0])}
    assert host.run(prompt).outputs["end"]["text"] == ["1+x", "3+x"]
    assert told == [("2", "too big")]


def test_lazy_nodes_ask_again_until_they_are_content(trace):
    class Sum:
        RETURN_TYPES = ("INT",)
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"a": ("INT", {"lazy": True}), "b": ("INT", {"lazy": True})}}

        def check_lazy_status(self, a=None, b=None):
            trace.events.append(f"asks {a} {b}")
            return ["a"] if a is None else ["b"] if b is None else None

        def run(self, a, b):
            return (a + b,)

    prompt = {
        "1": node("PrimitiveInt", value=2),
        "2": node("PrimitiveInt", value=3),
        "3": node("Sum", a=["1", 0], b=["2", 0]),
        "end": node("Show", value=["3", 0]),
    }
    assert shown(trace, prompt, {"Sum": Sum}) == ["5"]
    assert [event for event in trace.events if event.startswith("asks")] == ["asks None None", "asks 2 None", "asks 2 3"]


def test_lazy_node_that_asks_for_a_constant_fails_by_name(trace):
    class Greedy:
        RETURN_TYPES = ("INT",)
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"a": ("INT", {"lazy": True})}}

        def check_lazy_status(self, a=None):
            return ["b"]

        def run(self, a):
            return (a,)

    error = recording_host(trace, {"Greedy": Greedy}).run({"1": node("Greedy", a=1), "2": node("Show", value=["1", 0])}).error
    assert error.message == "Node 1 asks for its input 'b', which is not linked: link it or give it a value."


def test_switch_reads_one_branch_only(trace):
    prompt = {
        "1": node("Load", name="used"),
        "2": node("Load", name="unused"),
        "3": node("ComfySwitchNode", switch=False, on_false=["1", 0], on_true=["2", 0]),
        "4": node("Use", model=["3", 0], text="x"),
        "end": node("Show", value=["4", 0]),
    }
    assert shown(trace, prompt) == ["used+x"]
    assert "X2" not in trace.events


def test_expansion_in_a_list_and_an_expansion_inside_an_expansion(trace):
    def deeper(self, level):
        node_id = f"{get_executing_context().node_id}.{get_executing_context().list_index}.0."
        if level == 0:
            return (f"leaf of {get_executing_context().node_id}",)
        return {"expand": {f"{node_id}1": node("Deeper", level=level - 1)}, "result": ([f"{node_id}1", 0],)}

    levels = node_class(lambda self: ([0, 2],), {}, OUTPUT_IS_LIST=(True,))
    prompt = {"1": node("Levels"), "2": node("Deeper", level=["1", 0]), "end": node("Show", value=["2", 0])}
    extra = {"Deeper": node_class(deeper, {"level": ("INT",)}), "Levels": levels}
    assert shown(trace, prompt, extra) == ["leaf of 2", "leaf of 2.1.0.1.0.0.1"]


def test_error_in_a_child_is_told_of_the_submitted_node(trace):
    expand = node_class(lambda self: {"expand": {"7.0.0.1": node("Fail", value=1)}, "result": (["7.0.0.1", 0],)}, {})
    result = recording_host(trace, {"Make": expand}).run({"7": node("Make"), "8": node("Show", value=["7", 0])})
    assert (result.error.node_id, result.error.class_type, result.error.message) == ("7", "Make", "no good")


def test_cycle_made_by_an_expansion_is_an_error(trace):
    children = {"7.a": node("Use", model=["7.b", 0], text=""), "7.b": node("Use", model=["7.a", 0], text="")}
    expand = node_class(lambda self: {"expand": children, "result": (["7.a", 0],)}, {})
    result = recording_host(trace, {"Make": expand}).run({"7": node("Make"), "8": node("Show", value=["7", 0])})
    assert (result.status, result.error.type, result.error.node_id) == ("error", "DependencyCycleError", "7")


def test_expansion_of_an_unknown_class_is_an_error_that_names_it(trace):
    expand = node_class(lambda self: {"expand": {"7.a": node("Nowhere")}, "result": (["7.a", 0],)}, {})
    error = recording_host(trace, {"Make": expand}).run({"7": node("Make"), "8": node("Show", value=["7", 0])}).error
    assert error.message == "There is no node class 'Nowhere': is its node pack installed?"


@pytest.mark.parametrize("cache", CACHES)
def test_loop_inhibits_its_body_whose_nodes_vanish_without_finishing(trace, cache):
    class Loop:
        RETURN_TYPES = ("*",)
        FUNCTION = "run"
        IS_CHANGED = classmethod(lambda cls, **inputs: float("nan"))

        @classmethod
        def INPUT_TYPES(cls):
            return {
                "required": {"rounds": ("INT",)},
                "hidden": {"prompt": "DYNPROMPT", "todo": "EXECUTION_LIST", "me": "UNIQUE_ID"},
            }

        def run(self, rounds, prompt, todo, me):
            todo.inhibit_nodes(["2"])
            prompt.override_node("3", node("Use", model=[me, 0], text="close"))
            todo.add_link(me, "3")
            copies = {
                f"{me}.{index}": node("Use", model=[f"{me}.{index - 1}", 0] if index else "start", text="body")
                for index in range(rounds)
            }
            return {"expand": copies, "result": ([f"{me}.{rounds - 1}", 0],)}

    prompt = {
        "1": node("Loop", rounds=2),
        "2": node("Use", model=["1", 0], text="body"),
        "3": node("Use", model=["2", 0], text="close"),
        "end": node("Show", value=["3", 0]),
    }
    assert shown(trace, prompt, {"Loop": Loop}, cache=cache) == ["start+body+body+close"]
    assert not {"S2", "X2", "F2"} & set(trace.events)


def test_async_nodes_overlap_and_their_lists_too(trace):
    running, most = set(), []

    async def wait(self, value):
        me = (get_executing_context().node_id, get_executing_context().list_index)
        running.add(me)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.discard(me)
        return (f"{value}",)

    prompt = {
        "1": node("Many", count=2),
        "2": node("Slow", value=["1", 0]),
        "3": node("Slow", value="alone"),
        "end": node("Show", value=["2", 0]),
        "also": node("Show", value=["3", 0]),
    }
    assert shown(trace, prompt, {"Slow": node_class(wait, {"value": ANY})}) == ["item0", "item1"]
    assert max(most) == 3


def test_error_after_an_await_fails_the_node(trace):
    async def wait(self, value):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise KeyError("late")

    result = recording_host(trace, {"Slow": node_class(wait, {"value": ANY})}).run(
        {"2": node("Slow", value=1), "3": node("Show", value=["2", 0])}
    )
    assert (result.error.node_id, result.error.type) == ("2", "KeyError")


@pytest.mark.parametrize("how", ["success", "Fail", "Stop"])
def test_tasks_left_at_the_end_are_cancelled_on_the_worker_thread(trace, how):
    ended = []

    async def sentinel(self, value):
        task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
        task.add_done_callback(note)
        keep.append(task)
        threads.append(threading.current_thread())
        return (value,)

    def note(task):
        ended.append(
            (task.cancelled(), threading.current_thread() in threads, torch.is_inference_mode_enabled(), trace.taken()[-3:])
        )

    keep, threads = [], []
    prompt = {"1": node("Attach", value=1), "2": node("Use", model=["1", 0], text="x"), "3": node("Show", value=["2", 0])}
    if how != "success":
        prompt["2"] = node(how, value=["1", 0])
    recording_host(trace, {"Attach": node_class(sentinel, {"value": ANY})}).run(prompt)
    assert ended == [(True, True, False, "end")]


def test_nodes_run_under_inference_mode_on_one_worker_thread(trace):
    seen = set()

    def look(self, value):
        seen.add((torch.is_inference_mode_enabled(), threading.current_thread()))
        return ()

    host = recording_host(trace, {"Look": output(look)})
    for value in range(2):
        host.run({"1": node("Look", value=value)})
    ((is_inference, thread),) = seen
    assert is_inference
    assert thread is not threading.current_thread()


def test_interrupt_from_another_thread_stops_at_the_next_check(trace):
    def work(self, value):
        timer = threading.Timer(0.01, current_host().interrupt)
        timer.start()
        bar = ProgressBar(10**6)
        for _ in range(10**6):
            bar.update(1)
        return ()

    result = recording_host(trace, {"Work": output(work)}).run({"1": node("Work", value=1)})
    assert (result.status, result.error.node_id) == ("interrupted", "1")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs a signal that wakes the main thread")
def test_ctrl_c_interrupts_the_prompt_and_is_raised_when_it_has_ended(trace):
    def work(self, value):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            throw_exception_if_processing_interrupted()
            time.sleep(0.001)

    host = recording_host(trace, {"Work": output(work)})
    with pytest.raises(KeyboardInterrupt):
        host.run({"1": node("Work", value=1)}, prompt_id="p")
    assert host.history["p"].status == "interrupted"


def test_interrupt_wakes_nodes_that_poll_while_they_wait(trace):
    async def wait(self, value):
        threading.Timer(0.01, current_host().interrupt).start()
        while True:
            throw_exception_if_processing_interrupted()
            await asyncio.sleep(0.005)

    result = recording_host(trace, {"Wait": output(wait)}).run({"1": node("Wait", value=1)})
    assert result.status == "interrupted"


def test_interrupt_before_a_prompt_does_not_stop_it(trace):
    host = recording_host(trace)
    host.interrupt()
    assert host.run(chain()).status == "success"


def test_nodes_that_catch_every_exception_do_not_catch_interrupts():
    assert not issubclass(InterruptProcessingException, Exception)


def test_error_has_the_traceback_as_text_and_keeps_nothing_alive(trace):
    held = []

    def fail(self, value):
        local = Handle("local")
        held.append(weakref.ref(local))
        raise ValueError("no good")

    result = recording_host(trace, {"Bad": node_class(fail, {"value": ANY})}).run(
        {"1": node("Bad", value=1), "2": node("Show", value=["1", 0])}
    )
    assert any('raise ValueError("no good")' in line for line in result.error.traceback)
    assert held[0]() is None


def test_out_of_memory_unloads_all_models(trace):
    unloaded = []

    def fail(self, value):
        current_host().model_management.unload_all_models = lambda: unloaded.append(get_executing_context())
        raise torch.cuda.OutOfMemoryError("full")

    recording_host(trace, {"Big": output(fail)}).run({"1": node("Big", value=1)})
    assert unloaded == [None]


def test_progress_reaches_the_handler_also_from_a_helper_thread(trace):
    def work(self, value):
        bar = ProgressBar(4)
        bar.update(1)
        helper = threading.Thread(target=lambda: bar.update_absolute(4, 8))
        helper.start()
        helper.join()
        return ()

    progress = []
    host = recording_host(trace, {"Work": output(work)})
    host.on_event(
        lambda name, data: progress.append((data["node"], data["value"], data["max"])) if name == "node_progress" else None
    )
    host.run({"1": node("Work", value=1)})
    assert progress == [("1", 1, 4), ("1", 4, 8)]
    assert host.progress.nodes["1"] == {"state": host.progress.nodes["1"]["state"], "value": 8, "max": 8}


def test_hidden_inputs_bring_graph_metadata_and_id(trace):
    class Curious:
        RETURN_TYPES = ()
        FUNCTION = "run"
        OUTPUT_NODE = True

        @classmethod
        def INPUT_TYPES(cls):
            return {"hidden": {"prompt": "PROMPT", "dynamic": "DYNPROMPT", "info": "EXTRA_PNGINFO", "me": "UNIQUE_ID"}}

        def run(self, prompt, dynamic, info, me):
            seen.append((prompt, dynamic.get_node(me), info, me))
            return ()

    seen = []
    prompt = {"5": node("Curious")}
    recording_host(trace, {"Curious": Curious}).run(prompt, extra_data={"extra_pnginfo": {"workflow": 1}})
    assert seen == [(prompt, prompt["5"], {"workflow": 1}, "5")]


def test_node_that_returns_nothing_is_told_what_to_return(trace):
    result = recording_host(trace, {"Silent": output(lambda self, value: None)}).run({"1": node("Silent", value=1)})
    assert result.error.message.endswith("returned NoneType; a node returns a tuple, or a dict of result, ui and expand.")


def test_partial_run_executes_the_targets_and_what_they_need(trace):
    prompt = chain() | {"4": node("Use", model=["1", 0], text="b"), "5": node("Show", value=["4", 0])}
    assert recording_host(trace).run(prompt, outputs=["5"]).executed == ["1", "4", "5"]


def test_seconds_are_measured_per_node_that_ran(trace):
    host = recording_host(trace)
    host.run(chain())
    assert set(host.run(chain(text="b")).seconds) == {"2", "3"}


def test_node_cannot_run_a_prompt_in_its_own_host(trace):
    result = recording_host(trace, {"Again": output(lambda self, value: current_host().run(chain()))}).run(
        {"1": node("Again", value=1)}
    )
    assert "return an expansion instead" in result.error.message


def test_two_hosts_do_not_share_anything(trace):
    first, second = recording_host(trace), recording_host(trace)
    first.run(chain())
    assert second.run(chain()).executed == ["1", "2", "3"]
    assert current_host() is second


def test_a_host_that_nobody_needs_goes_with_its_thread():
    before = set(threading.enumerate())
    host = EmbeddedHost()
    (thread,) = set(threading.enumerate()) - before
    gone = weakref.ref(host)
    del host
    gc.collect()
    thread.join(timeout=5)
    assert gone() is None
    assert not thread.is_alive()


def test_long_chain_runs(trace):
    prompt = {"0": node("Load", name="te")} | {str(i): node("Use", model=[str(i - 1), 0], text="") for i in range(1, 1500)}
    result = recording_host(trace).run(prompt | {"end": node("Show", value=["1499", 0])})
    assert len(result.executed) == 1501
