"""What is kept between nodes and prompts, and when it goes (host contract, sections 2c, 2d, 2j and 9)."""

import gc
import json
import weakref

import pytest
from embedded_nodes import Handle, Trace, chain, node, node_class, recording_host
from lazy_h3.host.embedded import current_host
from lazy_h3.host.embedded.caching import RamLimits

CACHES = ("ram", "classic", "lru", "none")
ENDLESS = RamLimits(active=0, inactive=0)
TIGHT = RamLimits(active=1, inactive=1, available=lambda: 0)


@pytest.fixture
def trace():
    with Trace() as trace:
        yield trace


def other():
    """A prompt that has nothing in common with the chain."""
    return {"7": node("Load", name="other"), "8": node("Show", value=["7", 0])}


@pytest.mark.parametrize("cache", CACHES)
def test_fingerprints_are_asked_once_in_prompt_order_also_of_nodes_that_do_not_run(trace, cache):
    prompt = {"9": node("Load", name="unused")} | chain() | {"11": node("Load", name="later")}
    recording_host(trace, cache=cache).run(prompt)
    assert trace.fingerprints == ([] if cache == "none" else ["9 unused", "1 te", "11 later"])


def test_fingerprint_of_a_node_comes_before_those_of_its_ancestors_and_sees_none_for_links(trace):
    asked = []

    def fingerprint(cls, model, text):
        asked.append((text, model))
        return 0

    use = node_class(
        lambda self, model, text: (text,), {"model": ("*",), "text": ("STRING",)}, IS_CHANGED=classmethod(fingerprint)
    )
    prompt = {
        "3": node("Show", value=["2", 0]),
        "2": node("Twice", model=["1", 0], text="below"),
        "1": node("Twice", model="constant", text="above"),
    }
    recording_host(trace, {"Twice": use}).run(prompt)
    assert asked == [("below", None), ("above", "constant")]


def test_async_fingerprints_and_the_newer_name_count_too(trace):
    async def fingerprint(cls, value):
        return len(trace.events)

    load = node_class(lambda self, value: (trace.executed(),), {"value": ("INT",)}, fingerprint_inputs=classmethod(fingerprint))
    host = recording_host(trace, {"Fresh": load})
    prompt = {"1": node("Fresh", value=1), "2": node("Show", value=["1", 0])}
    first, second = host.run(prompt), host.run(prompt)
    assert (first.prompt["1"]["is_changed"], second.executed) == ([0], ["1", "2"])


def test_resubmitted_prompt_carries_its_fingerprints_and_is_not_asked(trace):
    host = recording_host(trace)
    prompt = chain()
    ran = host.run(prompt).prompt
    assert ran["1"]["is_changed"] == ["te"]
    assert "is_changed" not in prompt["1"]
    assert host.run(json.loads(json.dumps(ran))).executed == []
    assert trace.fingerprints == ["1 te"]


@pytest.mark.parametrize("fingerprint", [lambda cls: float("nan"), lambda cls: 1 / 0], ids=["nan", "raises"])
def test_fingerprint_without_a_value_runs_the_node_and_what_follows_again(trace, fingerprint):
    load = node_class(lambda self: (trace.executed(),), {}, IS_CHANGED=classmethod(fingerprint))
    host = recording_host(trace, {"Fresh": load})
    prompt = {"1": node("Fresh"), "2": node("Show", value=["1", 0])}
    assert [host.run(prompt).executed for _ in range(2)] == [["1", "2"]] * 2


@pytest.mark.parametrize("cache", ["ram", "classic", "lru"])
def test_changed_constant_runs_the_node_and_what_follows_only(trace, cache):
    host = recording_host(trace, cache=cache)
    host.run(chain())
    assert host.run(chain(text="b")).executed == ["2", "3"]


def test_outputs_are_found_by_content_not_by_id(trace):
    host = recording_host(trace)
    host.run(chain())
    renamed = {"a": node("Load", name="te"), "b": node("Use", model=["a", 0], text="a"), "c": node("Show", value=["b", 0])}
    assert host.run(renamed).cached == ["a", "b", "c"]


def test_nodes_that_know_their_id_are_never_shared(trace):
    class Named:
        RETURN_TYPES = ("STRING",)
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls):
            return {"hidden": {"me": "UNIQUE_ID"}}

        def run(self, me):
            return (me,)

    prompt = {
        "1": node("Named"),
        "2": node("Named"),
        "3": node("Show", value=["1", 0]),
        "4": node("Show", value=["2", 0]),
    }
    result = recording_host(trace, {"Named": Named}).run(prompt)
    assert {key: ui["text"] for key, ui in result.outputs.items()} == {"3": ["1"], "4": ["2"]}


@pytest.mark.parametrize(
    ("cache", "options", "is_kept"),
    [
        ("classic", {}, False),
        ("lru", {"lru_size": 10}, True),
        ("lru", {"lru_size": 3}, True),
        ("ram", {"ram_limits": ENDLESS}, True),
        ("ram", {"ram_limits": TIGHT}, False),
        ("none", {}, False),
    ],
)
def test_another_prompt_in_between_forgets_what_the_cache_says(trace, cache, options, is_kept):
    host = recording_host(trace, cache=cache, **options)
    host.run(chain())
    host.run(other())
    assert host.run(chain()).executed == ([] if is_kept else ["1", "2", "3"])


def test_lru_forgets_the_oldest_prompt_when_it_is_too_large(trace):
    host = recording_host(trace, cache="lru", lru_size=2)
    host.run(chain())
    host.run(other())
    host.run(chain(text="b"))  # begins with 5 entries; the loader of the first prompt is used again
    assert len(host.executor.outputs) == 5
    assert host.run(other()).executed == []
    assert host.run({"1": node("Many", count=1), "2": node("Show", value=["1", 0])}).executed == ["1", "2"]
    assert host.run(chain()).executed == ["1", "2", "3"]


def test_ram_pressure_keeps_handles_of_the_running_prompt_and_drops_the_rest(trace):
    host = recording_host(trace, cache="ram", ram_limits=TIGHT)
    result = host.run(chain())
    assert result.status == "success"
    assert host.run(chain()).cached == ["1", "3"]  # 3 has no outputs that could be dropped


def handle_lifetime(cache, trace, **options):
    """How long the loader's handle lives when the next prompt is another one: events at which it was still alive."""
    host = recording_host(trace, cache=cache, **options)
    host.run(chain())
    handle = weakref.ref(trace.handles[0][1])
    trace.handles.clear()
    alive = ["first end"] if handle() else []

    def look(name, data):
        if handle():
            alive.append(f"{name} {data.get('node', '')}".strip())

    host.on_event(look)
    host.run(other())
    return alive


def test_without_a_cache_the_handle_dies_with_its_last_consumer(trace):
    assert handle_lifetime("none", trace) == []


def test_classic_cache_drops_the_handle_when_the_next_prompt_begins(trace):
    assert handle_lifetime("classic", trace) == ["first end", "execution_start"]


def test_ram_cache_drops_the_handle_after_the_first_node_of_the_next_prompt(trace):
    alive = handle_lifetime("ram", trace, ram_limits=TIGHT)
    assert alive[-1] == "node_finished 7"


def test_lru_cache_keeps_the_handle(trace):
    assert handle_lifetime("lru", trace)[-1] == "execution_success"


@pytest.mark.parametrize("cache", CACHES)
def test_constants_of_an_expansion_live_until_the_next_prompt(trace, cache):
    given = []

    def expand(self, value):
        handle = Handle("constant")
        given.append(weakref.ref(handle))
        return {"expand": {"2.0.0.1": node("Use", model=handle, text="x")}, "result": (["2.0.0.1", 0],)}

    host = recording_host(trace, {"Constant": node_class(expand, {"value": ("INT",)})}, cache=cache, ram_limits=ENDLESS)
    host.run({"2": node("Constant", value=1), "3": node("Show", value=["2", 0])})
    trace.handles.clear()
    gc.collect()
    assert given[0]() is not None
    host.run(other())
    gc.collect()
    assert given[0]() is None


@pytest.mark.parametrize(("cache", "instances"), [("ram", 1), ("classic", 1), ("lru", 1), ("none", 2)])
def test_node_objects_stay_while_their_node_does(trace, cache, instances):
    made = []

    class Counted:
        RETURN_TYPES = ()
        FUNCTION = "run"
        OUTPUT_NODE = True
        IS_CHANGED = classmethod(lambda cls: float("nan"))

        def __init__(self):
            made.append(self)

        @classmethod
        def INPUT_TYPES(cls):
            return {}

        def run(self):
            return ()

    host = recording_host(trace, {"Counted": Counted}, cache=cache)
    for _ in range(2):
        host.run({"1": node("Counted")})
    assert len(made) == instances


@pytest.mark.parametrize("bad", ["Fail", "Stop"])
def test_failure_leaves_what_was_done_before_it_in_the_cache(trace, bad):
    host = recording_host(trace)
    host.run({"1": node("Load", name="te"), "2": node(bad, value=["1", 0]), "3": node("Show", value=["2", 0])})
    assert host.run(chain()).cached == ["1"]


def test_free_memory_forgets_all_outputs_and_their_handles(trace):
    host = recording_host(trace)
    host.run(chain())
    handle = weakref.ref(trace.handles[0][1])
    trace.handles.clear()
    host.free(unload_models=True)
    assert handle() is not None
    host.free(free_memory=True)
    assert handle() is None
    assert host.run(chain()).executed == ["1", "2", "3"]


def test_free_while_a_prompt_runs_waits_for_its_end(trace):
    freed = []

    def show(self, value):
        host = current_host()
        host.model_management.unload_all_models = lambda: freed.append(host.running)
        host.free(unload_models=True)
        assert freed == []
        return ()

    extra = {"Show": node_class(show, {"value": ("*",)}, (), OUTPUT_NODE=True)}
    assert recording_host(trace, extra).run(chain()).status == "success"
    assert freed == [None]


def test_history_keeps_results_by_prompt_id(trace):
    host = recording_host(trace)
    result = host.run(chain(), prompt_id="p")
    assert host.history == {"p": result}


def test_unknown_cache_is_refused_with_the_choices(trace):
    with pytest.raises(ValueError, match="'redis': choose one of ram, classic, lru, none"):
        recording_host(trace, cache="redis")
