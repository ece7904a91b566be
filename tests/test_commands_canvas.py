"""Saved canvases to prompts: widgets, links, and the nodes that exist only in the front end."""

import json

import pytest
from lazy_h3.commands.canvas import api_prompt
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.host.embedded.core_nodes import CORE_NODE_CLASSES
from lazy_h3.nodes import NODE_CLASS_MAPPINGS
from small_models import stage

MUTED, BYPASSED = 2, 4


class Source:
    RETURN_TYPES = ("LATENT",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": ("STRING", {"default": ""})}}


class Worker:
    RETURN_TYPES = ("LATENT", "INT")

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "latent": ("LATENT",),
                "seed": ("INT", {"control_after_generate": True}),
                "mode": (["slow", "fast"],),
                "forced": ("INT", {"forceInput": True}),
            },
            "optional": {"scale": ("FLOAT", {}), "other": ("LATENT",)},
        }


CLASSES = {"Source": Source, "Worker": Worker}


def node(node_id: int, kind: str, widgets=(), inputs=(), outputs=("LATENT",), mode: int = 0) -> dict:
    """A node as the front end saves it; ``inputs``: (name, type, link)."""
    return {
        "id": node_id,
        "type": kind,
        "mode": mode,
        "widgets_values": widgets if isinstance(widgets, dict) else list(widgets),
        "inputs": [{"name": name, "type": kind, "link": link} for name, kind, link in inputs],
        "outputs": [{"type": kind} for kind in outputs],
    }


def canvas(*nodes: dict, links=()) -> dict:
    """``links``: (id, origin, slot of origin)."""
    return {"nodes": list(nodes), "links": [[link, origin, slot, 0, 0, "LATENT"] for link, origin, slot in links]}


def worker_inputs(*nodes: dict, links=()) -> dict:
    """The inputs of node 9 after conversion."""
    return api_prompt(canvas(*nodes, links=links), CLASSES)["9"]["inputs"]


def test_widgets_and_links_become_inputs_by_name():
    worker = node(9, "Worker", [7, "randomize", "fast", 0.5], [("latent", "LATENT", 1)])
    prompt = api_prompt(canvas(node(2, "Source", ["a"]), worker, links=[(1, 2, 0)]), CLASSES)
    assert prompt == {
        "2": {"class_type": "Source", "inputs": {"name": "a"}},
        "9": {"class_type": "Worker", "inputs": {"seed": 7, "mode": "fast", "scale": 0.5, "latent": ["2", 0]}},
    }


@pytest.mark.parametrize("control", ["fixed", "increment", "decrement", "randomize"])
def test_what_happens_to_a_seed_after_a_run_is_no_input(control):
    assert worker_inputs(node(9, "Worker", [7, control, "fast"])) == {"seed": 7, "mode": "fast"}


def test_a_seed_saved_without_its_control_shifts_nothing():
    assert worker_inputs(node(9, "Worker", [7, "fast", 2.0])) == {"seed": 7, "mode": "fast", "scale": 2.0}


def test_widgets_saved_by_name_are_taken_by_name():
    assert worker_inputs(node(9, "Worker", {"seed": 3, "mode": "slow", "preview": "x"})) == {"seed": 3, "mode": "slow"}


def test_a_widget_that_was_made_an_input_takes_its_link():
    worker = node(9, "Worker", [7, "fixed", "fast"], [("seed", "INT", 1)])
    assert worker_inputs(node(2, "Worker"), worker, links=[(1, 2, 1)])["seed"] == ["2", 1]


def test_a_slot_of_a_widget_without_a_link_leaves_the_widget_alone():
    assert worker_inputs(node(9, "Worker", [7, "fixed", "fast"], [("seed", "INT", None)]))["seed"] == 7


def test_a_primitive_gives_its_value():
    worker = node(9, "Worker", [7, "fixed", "fast"], [("seed", "INT", 1)])
    primitive = node(3, "PrimitiveNode", [42, "fixed"], outputs=["INT"])
    assert worker_inputs(primitive, worker, links=[(1, 3, 0)])["seed"] == 42


def test_reroutes_are_followed_to_their_source():
    worker = node(9, "Worker", inputs=[("latent", "LATENT", 3)])
    reroutes = [node(4, "Reroute", inputs=[("", "*", 1)]), node(5, "Reroute", inputs=[("", "*", 2)])]
    assert worker_inputs(node(2, "Source"), *reroutes, worker, links=[(1, 2, 0), (2, 4, 0), (3, 5, 0)])["latent"] == ["2", 0]


def test_a_long_chain_of_reroutes_has_an_end_and_a_circle_is_refused():
    count = 3000
    reroutes = [node(100 + i, "Reroute", inputs=[("", "*", i)]) for i in range(count)]
    links = [(0, 2, 0), *((i + 1, 100 + i, 0) for i in range(count))]
    worker = node(9, "Worker", inputs=[("latent", "LATENT", count)])
    assert worker_inputs(node(2, "Source"), *reroutes, worker, links=links)["latent"] == ["2", 0]
    circle = [(0, 101, 0), *links[1:]]
    with pytest.raises(ValueError, match="run in a circle through node"):
        worker_inputs(*reroutes, worker, links=circle)


def test_a_bypassed_node_hands_on_the_input_of_its_outputs_type():
    inputs = [("seed", "INT", 2), ("latent", "LATENT", 1)]
    bypassed = node(4, "Worker", inputs=inputs, mode=BYPASSED)
    worker = node(9, "Worker", inputs=[("latent", "LATENT", 3)])
    links = [(1, 2, 0), (2, 3, 0), (3, 4, 0)]
    prompt = api_prompt(canvas(node(2, "Source"), node(3, "Worker"), bypassed, worker, links=links), CLASSES)
    assert prompt["9"]["inputs"]["latent"] == ["2", 0]
    assert "4" not in prompt


def test_a_bypassed_node_without_a_fitting_input_hands_on_nothing():
    bypassed = node(4, "Source", mode=BYPASSED)
    assert worker_inputs(bypassed, node(9, "Worker", inputs=[("latent", "LATENT", 1)]), links=[(1, 4, 0)]) == {}


def test_a_muted_node_and_its_links_are_gone():
    muted = node(2, "Source", mode=MUTED)
    prompt = api_prompt(canvas(muted, node(9, "Worker", inputs=[("latent", "LATENT", 1)]), links=[(1, 2, 0)]), CLASSES)
    assert prompt == {"9": {"class_type": "Worker", "inputs": {}}}


def test_notes_are_no_nodes():
    assert api_prompt(canvas(node(1, "Note", ["hello"]), node(2, "MarkdownNote", ["# hello"])), CLASSES) == {}


def test_subgraphs_and_unknown_nodes_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match="has subgraphs; open it in ComfyUI and export it in API format"):
        api_prompt({**canvas(), "definitions": {"subgraphs": [{}]}}, CLASSES)
    with pytest.raises(ValueError, match="uses the node KSampler, which only ComfyUI knows"):
        api_prompt(canvas(node(1, "KSampler")), CLASSES)


@pytest.mark.parametrize("damaged", [{"type": "Source"}, {"id": 1}, "Source", {"id": 1, "type": "Source", "inputs": 5}])
def test_a_damaged_canvas_is_refused(damaged):
    with pytest.raises(ValueError, match="is damaged"):
        api_prompt({"nodes": [damaged], "links": []}, CLASSES)


def test_the_shipped_canvas_is_the_prompt_of_the_demo(tmp_path):
    saved = json.loads(WORKFLOW.with_name("text_to_video_small.json").read_text())
    expected = {node: spec["inputs"] for node, spec in json.loads(WORKFLOW.read_text()).items()}
    with stage(tmp_path):
        prompt = api_prompt(saved, {**CORE_NODE_CLASSES, **NODE_CLASS_MAPPINGS})
    assert {node: spec["inputs"] for node, spec in prompt.items()} == expected
