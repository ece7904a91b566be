"""Event orders of the host contract, section 3, and the hooks of section 2."""

import sys

import pytest
from embedded_nodes import Trace, chain, node, node_class, recording_host
from lazy_h3.host.embedded import ProgressHandler, add_progress_handler, get_executing_context, get_progress_state

CACHES = ("ram", "classic", "lru", "none")


@pytest.fixture
def trace():
    with Trace() as trace:
        yield trace


def branch(trace):
    """The chain, and a second consumer of the same loader that is not cached."""
    return chain() | {"4": node("Use", model=["1", 0], text="new"), "5": node("Show", value=["4", 0])}


def test_plain_chain(trace):
    recording_host(trace).run(chain())
    assert trace.taken() == "S1 X1 F1 S2 X2 F2 S3 X3 F3 end"


@pytest.mark.parametrize("cache", CACHES)
def test_cached_output_finishes_without_start(trace, cache):
    host = recording_host(trace, cache=cache)
    host.run(chain())
    trace.taken()
    result = host.run(chain())
    if cache == "none":
        assert trace.taken() == "S1 X1 F1 S2 X2 F2 S3 X3 F3 end"
    else:
        assert trace.taken() == "F3 end"
        assert result.outputs == {"3": {"text": ["te+a"]}}
        assert (result.cached, result.executed) == (["1", "2", "3"], [])


def test_cached_output_is_pending_when_it_finishes(trace):
    pending = []

    class Spy(ProgressHandler):
        def finish_handler(self, node_id, state, prompt_id):
            pending.append((node_id, sorted(probed().f_locals["execution_list"].pendingNodes)))

    host = recording_host(trace, {"Show": with_handler(trace, Spy)})
    host.run(chain())
    trace.taken(), pending.clear()
    host.run(branch(trace))
    events = trace.taken()
    assert events in ("F3 S4 X4 F4 S5 X5 F5 end", "S4 X4 F4 S5 X5 F5 F3 end")
    if events.startswith("F3"):
        assert pending[0] == ("3", ["3", "4", "5"])
    assert all(node_id in still for node_id, still in pending)


def probed():
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "execute_async":
        frame = frame.f_back
    return frame


def with_handler(trace, handler_class):
    """An output node whose fingerprint attaches a handler, as packs do."""

    def attach(cls, value):
        add_progress_handler(handler_class("spy"))
        return "same"

    def show(self, value):
        trace.executed(value)
        return {"ui": {"text": [str(value)]}}

    return node_class(show, {"value": ("*",)}, (), OUTPUT_NODE=True, IS_CHANGED=classmethod(attach))


def test_branches_come_in_any_order_which_the_seed_fixes():
    def order(seed):
        with Trace() as trace:
            recording_host(trace, seed=seed).run(branch(trace))
            return trace.taken()

    orders = [order(seed) for seed in range(6)]
    assert len(set(orders)) == 2
    assert orders == [order(seed) for seed in range(6)]


@pytest.mark.parametrize(("bad", "status"), [("Fail", "error"), ("Stop", "interrupted")])
def test_failed_or_interrupted_node_does_not_finish(trace, bad, status):
    prompt = {"1": node("Load", name="te"), "2": node(bad, value=["1", 0]), "3": node("Show", value=["2", 0])}
    result = recording_host(trace).run(prompt)
    assert trace.taken() == "S1 X1 F1 S2 X2 end"
    assert (result.status, result.error.node_id, result.executed) == (status, "2", ["1"])


def test_lazy_input_that_is_wanted_starts_the_node_twice(trace):
    prompt = {
        "1": node("Load", name="te"),
        "2": node("ComfySwitchNode", switch=True, on_true=["1", 0], on_false="plain"),
        "3": node("Show", value=["2", 0]),
    }
    recording_host(trace).run(prompt)
    assert trace.taken() == "S2 S1 X1 F1 S2 F2 S3 X3 F3 end"
    assert trace.handles[0][0] == "3"  # a pass-through hands on the same object


def test_lazy_input_that_is_not_wanted_never_runs(trace):
    prompt = {
        "1": node("Load", name="te"),
        "2": node("ComfySwitchNode", switch=False, on_true=["1", 0], on_false="plain"),
        "3": node("Show", value=["2", 0]),
    }
    recording_host(trace).run(prompt)
    assert trace.taken() == "S2 F2 S3 X3 F3 end"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("by", ["link", "object"])
def test_expansion_starts_once_and_finishes_after_the_linked_child(trace, cache, by):
    trace_host = recording_host(trace, cache=cache)
    trace.links["2"] = ["1", 0]
    prompt = {"1": node("Load", name="te"), "2": node("Expand", model=["1", 0], by=by), "3": node("Show", value=["2", 0])}
    result = trace_host.run(prompt)
    events = trace.taken().split()
    children = [event for event in events if "." in event]
    assert sorted(children) == sorted(f"{kind}2.0.0.{child}" for kind in "SXF" for child in (1, 2))
    assert events[events.index("S2") : events.index("S2") + 2] == ["S2", "X2"]
    assert events.count("S2") == events.count("F2") == 1
    assert events.index("F2.0.0.1") < events.index("F2") < events.index("S3")
    assert result.outputs["3"]["text"] == ["te+child"]
    reruns = 2 if cache == "none" and by == "link" else 1  # without a cache, a new link to a node that ran runs it again
    assert events.count("X1") == reruns


def test_list_input_executes_once_per_item(trace):
    prompt = {"1": node("Many", count=3), "2": node("Use", model=["1", 0], text="x"), "3": node("Show", value=["2", 0])}
    result = recording_host(trace).run(prompt)
    assert trace.taken() == "S1 X1 F1 S2 X2 X2 X2 F2 S3 X3 X3 X3 F3 end"
    assert [context.list_index for context in trace.contexts if context.node_id == "2"] == [0, 1, 2]
    assert result.outputs["3"]["text"] == ["item0+x", "item1+x", "item2+x"]


def test_blocked_input_starts_and_finishes_without_executing(trace):
    prompt = {"1": node("Block", message=""), "2": node("Use", model=["1", 0], text="x"), "3": node("Show", value=["2", 0])}
    assert recording_host(trace).run(prompt).status == "success"
    assert trace.taken() == "S1 X1 F1 S2 F2 S3 F3 end"


def test_async_nodes_start_first_and_wait_while_others_run(trace):
    prompt = {
        "1": node("Load", name="te"),
        "2": node("Wait", model="x", seconds=0.02),
        "4": node("Wait", model="y", seconds=0.01),
        "6": node("Use", model="z", text="sync"),
        "9": node("Show", value=["7", 0]),
        "7": node("Together", values=["8", 0]),
        "8": node("Join3", a=["2", 0], b=["4", 0], c=["6", 0]),
    }
    join = node_class(lambda self, a, b, c: ([a, b, c],), {"a": ("*",), "b": ("*",), "c": ("*",)})
    recording_host(trace, {"Join3": join}).run(prompt)
    events = trace.taken().split()
    assert {events[0], events[2]} == {"S2", "S4"}
    assert events[4:7] == ["S6", "X6", "F6"]
    assert set(events[7:9]) == {"F2", "F4"}
    waits = [context for context in trace.contexts if context.node_id in "24"]
    assert sorted(context.node_id for context in waits) == ["2", "2", "4", "4"]  # before and after the await


@pytest.mark.parametrize("cache", CACHES)
def test_equal_loaders_share_one_handle_unless_nothing_is_cached(trace, cache):
    prompt = {
        "1": node("Load", name="te"),
        "11": node("Load", name="te"),
        "2": node("Use", model=["1", 0], text="a"),
        "12": node("Use", model=["11", 0], text="b"),
        "3": node("Show", value=["2", 0]),
        "13": node("Show", value=["12", 0]),
    }
    recording_host(trace, cache=cache).run(prompt)
    events = trace.taken().split()
    handles = {id(handle) for _, handle in trace.handles}
    if cache == "none":
        assert {"S1", "X1", "F1", "S11", "X11", "F11"} <= set(events)
        assert len(handles) == 2
    else:
        assert {"F1", "F11"} <= set(events)
        assert len({"S1", "S11"} & set(events)) == 1
        assert len(handles) == 1


def test_context_is_set_in_nodes_and_unset_in_handlers(trace):
    seen = []

    class Spy(ProgressHandler):
        def start_handler(self, node_id, state, prompt_id):
            seen.append(get_executing_context())

        finish_handler = start_handler

    recording_host(trace, {"Show": with_handler(trace, Spy)}).run(chain(), prompt_id="p")
    assert seen == [None] * 6
    assert trace.contexts[0] == ("p", "1", 0)
    assert get_executing_context() is None


def test_handlers_of_a_prompt_are_reset_when_the_next_begins(trace):
    resets = []

    class Spy(ProgressHandler):
        def reset(self):
            resets.append(get_progress_state().prompt_id)

    host = recording_host(trace, {"Show": with_handler(trace, Spy)})
    host.run(chain(), prompt_id="first")
    registry = get_progress_state()
    assert (registry.prompt_id, set(registry.handlers), resets) == ("first", {"webui", "spy"}, [])
    host.run({"1": node("Many", count=1), "2": node("Quiet", value=["1", 0])}, prompt_id="refused")
    assert resets == []  # a prompt that does not run resets nothing
    host.run(chain(text="b"), prompt_id="second")
    assert resets == ["first"]
    assert get_progress_state().prompt_id == "second"


def test_raising_start_handler_fails_the_node(trace):
    class Spy(ProgressHandler):
        def start_handler(self, node_id, state, prompt_id):
            raise RuntimeError("spy")

    result = recording_host(trace, {"Show": with_handler(trace, Spy)}).run(chain())
    assert (result.status, result.error.node_id, result.error.message) == ("error", "1", "spy")


@pytest.mark.parametrize("where", ["finish_handler", "reset"])
def test_raising_finish_handler_or_reset_is_not_survived(trace, where):
    def explode(self, *args):
        raise RuntimeError("spy")

    spy = type("Spy", (ProgressHandler,), {where: explode})
    host = recording_host(trace, {"Show": with_handler(trace, spy)})
    prompts = [chain(text="a"), chain(text="b")]
    if where == "reset":  # which comes when the next prompt begins
        host.run(prompts.pop(0))
    with pytest.raises(RuntimeError, match="spy"):
        host.run(prompts[0])
    assert host.running is None


@pytest.mark.parametrize("expose", [True, False])
def test_probe_finds_the_execution_list_unless_it_is_hidden(trace, expose):
    seen = []

    def show(self, value):
        frame = probed()
        seen.append(frame and (list(frame.f_locals["execution_list"].pendingNodes), frame.f_locals["self"].status_messages[1][0]))
        return ()

    extra = {"Show": node_class(show, {"value": ("*",)}, (), OUTPUT_NODE=True)}
    assert recording_host(trace, extra, expose_probe=expose).run(chain()).status == "success"
    assert seen == [(["3"], "execution_cached")] if expose else seen == [None]


@pytest.mark.parametrize("expose", [True, False])
def test_running_item_tells_the_wanted_outputs(trace, expose):
    seen = []
    extra = {"Show": node_class(lambda self, value: seen.append(host.running) or (), {"value": ("*",)}, (), OUTPUT_NODE=True)}
    host = recording_host(trace, extra, expose_queue=expose)
    host.run(branch(trace), prompt_id="p", outputs=["5"])
    assert [item and (item[1], item[4]) for item in seen] == ([("p", ["5"])] if expose else [None])
    assert host.running is None


def test_steps_of_a_prompt_come_in_order(trace):
    steps = []

    class Provider:
        def on_prompt_start(self, prompt_id):
            steps.append(f"start, registry {get_progress_state().prompt_id or 'none'}")

        def on_prompt_end(self, prompt_id):
            steps.append("end")

    class Spy(ProgressHandler):
        def start_handler(self, node_id, state, prompt_id):
            steps.append(f"S{node_id}")

    host = recording_host(trace, {"Show": with_handler(trace, Spy)})
    host.executor.cache_providers.append(Provider())
    host.on_event(lambda name, data: steps.append(name) if name.startswith("execution") else None)
    host.run(chain(), prompt_id="p")
    assert steps == ["execution_start", "start, registry none", "execution_cached", "S1", "S2", "S3", "execution_success", "end"]
