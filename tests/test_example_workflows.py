"""The shipped workflows: canvas and API file of a pair are one prompt, and every node of it accepts its inputs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_h3.commands.canvas import api_prompt
from lazy_h3.commands.make_checkpoint import make_checkpoint
from lazy_h3.commands.presets import tiny
from lazy_h3.host.embedded.host import EmbeddedHost
from lazy_h3.host.embedded.port import EmbeddedPort
from lazy_h3.nodes import NODE_CLASS_MAPPINGS
from lazy_h3.nodes.runtime import Runtime, installed

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / "example_workflows"
API_FILES = sorted(WORKFLOWS.glob("*_api.json"))
CANVASES = sorted(set(WORKFLOWS.glob("*.json")) - set(API_FILES))
FOR_COMFYUI = set(WORKFLOWS.glob("core_*.json"))  # core's own nodes, which only ComfyUI has: see test_convert_browser.py
NOTE = "MarkdownNote"  # only the front end knows it
WEIGHTS = re.compile(r"[\w.-]+\.safetensors")

each_own_canvas = pytest.mark.parametrize("canvas", sorted(set(CANVASES) - FOR_COMFYUI), ids=lambda path: path.stem)
each_canvas = pytest.mark.parametrize("canvas", CANVASES, ids=lambda path: path.stem)
each_workflow = pytest.mark.parametrize("workflow", CANVASES + API_FILES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedHost]:
    """With our nodes, and a tiny model under the published names."""
    folder = tmp_path_factory.mktemp("host")
    make_checkpoint(folder / "models", tiny())
    with (
        EmbeddedHost(NODE_CLASS_MAPPINGS, models=[folder / "models"], output_directory=folder / "output") as host,
        installed(Runtime(EmbeddedPort(host, torch.device("cpu")))),
    ):
        yield host


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def prompt_of(path: Path) -> dict[str, Any]:
    """An API file without what only people read."""
    return {node: {k: v for k, v in spec.items() if k != "_meta"} for node, spec in read(path).items()}


def test_every_canvas_has_an_api_file_and_every_api_file_a_canvas() -> None:
    assert CANVASES
    assert [f"{path.stem}_api" for path in CANVASES] == [path.stem for path in API_FILES]


@each_own_canvas
def test_the_canvas_is_the_prompt_of_its_api_file(canvas: Path, host: EmbeddedHost) -> None:
    assert api_prompt(read(canvas), host.node_classes) == prompt_of(canvas.with_name(f"{canvas.stem}_api.json"))


@pytest.mark.parametrize("path", sorted(set(API_FILES) - FOR_COMFYUI), ids=lambda path: path.stem)
def test_the_prompt_is_valid_and_sets_every_input_of_our_nodes(path: Path, host: EmbeddedHost) -> None:
    prompt = prompt_of(path)
    validation = host.validate(prompt)
    assert (validation.error, validation.node_errors) == (None, {})
    assert validation.outputs
    for spec in prompt.values():
        if spec["class_type"] in NODE_CLASS_MAPPINGS:
            declared = NODE_CLASS_MAPPINGS[spec["class_type"]].INPUT_TYPES()
            assert list(spec["inputs"]) == [*declared["required"], *declared.get("optional", {})]


@each_own_canvas
def test_a_seed_is_followed_by_what_happens_to_it_after_a_run(canvas: Path) -> None:
    samplers = [node for node in read(canvas)["nodes"] if node["type"] == "LazyH3Sampler"]
    assert [sampler["widgets_values"][1] for sampler in samplers] == ["fixed"]


@each_canvas
def test_links_of_a_canvas_join_slots_that_exist_and_know_of_them(canvas: Path) -> None:
    workflow = read(canvas)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for link, origin, out_slot, target, in_slot, kind in workflow["links"]:
        output, received = nodes[origin]["outputs"][out_slot], nodes[target]["inputs"][in_slot]
        assert output["type"] == received["type"] == kind
        assert link in output["links"]
        assert received["link"] == link
        assert nodes[origin]["order"] < nodes[target]["order"]
    linked = [slot["link"] for node in nodes.values() for slot in node["inputs"]]
    given = [link for node in nodes.values() for slot in node["outputs"] for link in slot["links"] or ()]
    assert sorted(linked) == sorted(given) == [link[0] for link in workflow["links"]]


@each_canvas
def test_the_head_of_a_canvas_fits_its_nodes(canvas: Path) -> None:
    workflow = read(canvas)
    assert workflow["version"] == 0.4
    assert workflow["last_node_id"] == max(node["id"] for node in workflow["nodes"])
    assert workflow["last_link_id"] == max(link[0] for link in workflow["links"])
    assert sorted(node["order"] for node in workflow["nodes"]) == list(range(len(workflow["nodes"])))


@each_canvas
def test_our_nodes_on_a_canvas_have_the_outputs_of_their_classes(canvas: Path) -> None:
    for node in read(canvas)["nodes"]:
        cls = NODE_CLASS_MAPPINGS.get(node["type"])
        if cls is not None:
            slots = [(slot["name"], slot["type"]) for slot in node["outputs"]]
            assert slots == list(zip(cls.RETURN_NAMES, cls.RETURN_TYPES, strict=True))


@each_canvas
def test_every_node_of_a_canvas_lies_in_a_group(canvas: Path) -> None:
    workflow = read(canvas)
    for node in workflow["nodes"]:
        left, top = node["pos"]
        right, bottom = left + node["size"][0], top + node["size"][1]
        frames = [(x, y, x + width, y + height) for x, y, width, height in (g["bounding"] for g in workflow["groups"])]
        is_inside = any(x <= left and y <= top and right <= x2 and bottom <= y2 for x, y, x2, y2 in frames)
        assert is_inside or node["type"] == NOTE


@each_workflow
def test_only_files_of_the_readmes_table_are_named(workflow: Path) -> None:
    listed = re.findall(r"^\| `([^`]+\.safetensors)` \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    named = set(WEIGHTS.findall(workflow.read_text("utf-8")))
    assert named
    assert named <= set(listed)
