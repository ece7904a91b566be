"""The conversion in ComfyUI's real front end: official templates open, convert in both directions, and come back by one undo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from comfy_server import FOLDER, Server, started
from front_end import BROWSER, HAS_PLAYWRIGHT, opened
from lazy_h3.host.convert import convert, table, twins

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="LAZY_H3_COMFYUI does not name the folder of a ComfyUI server"),
    pytest.mark.timeout(600),
]
needs_browser = pytest.mark.skipif(
    not HAS_PLAYWRIGHT or BROWSER is None, reason="no Playwright, or no Chromium in the path or named by LAZY_H3_BROWSER"
)
TEMPLATES = ("video_minimax_h3_t2v", "video_minimax_h3_i2v", "video_minimax_h3_r2v")
EXAMPLE = Path(__file__).parent.parent / "example_workflows" / "core_text_to_video_lazy.json"
RENDERERS = {"canvas": False, "Vue": True}

Json = dict[str, Any]

SERIALIZE = "() => app.rootGraph.serialize()"
GRAPHS = "[app.rootGraph, ...app.rootGraph.subgraphs.values()]"
NODE_TYPES = f"() => {GRAPHS}.flatMap((graph) => graph.nodes.map((node) => node.type))"
UNKNOWN_TYPES = f"() => ({NODE_TYPES})().filter((type) => !(type in LiteGraph.registered_node_types))"
RUN_COMMAND = "(id) => app.extensionManager.command.execute(id)"
COUNT_TYPE = f"([type, count]) => ({NODE_TYPES})().filter((each) => each === type).length === count"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("comfyui"), tmp_path_factory.mktemp("models")) as running:
        yield running


@pytest.fixture(scope="module", params=RENDERERS)
def page(server: Server, request: pytest.FixtureRequest) -> Iterator[Page]:
    with opened(server, RENDERERS[request.param]) as page:
        yield page


def template(server: Server, name: str) -> Json:
    """An official template, which the server has at hand."""
    loaded: Json = server.get(f"/templates/{name}.json")
    return loaded


def load(page: Page, workflow: Json) -> None:
    page.evaluate("(workflow) => app.loadGraphData(workflow)", workflow)
    page.wait_for_function("(count) => app.rootGraph.nodes.length === count", arg=len(workflow["nodes"]))


def run(page: Page, command: str, until: tuple[str, int]) -> None:
    """Run a command and wait until there are so many nodes of a type."""
    page.evaluate(RUN_COMMAND, command)
    page.wait_for_function(COUNT_TYPE, arg=list(until))


def on_canvas(page: Page) -> Json:
    """The graph without the view and without sizes, which the front end fits whenever it lays nodes out; links in one order."""
    graph = page.evaluate(SERIALIZE)
    graph["extra"].pop("ds", None)
    return json.loads(json.dumps(graph), object_hook=_comparable)


def _comparable(found: Json) -> Json:
    return {k: sorted(v, key=json.dumps) if k in ("links", "linkIds") and v else v for k, v in found.items() if k != "size"}


def queued(page: Page) -> Json:
    """The prompt that the front end would queue."""
    return untitled(page.evaluate("() => app.graphToPrompt().then(({ output }) => output)"))


def untitled(prompt: Json) -> Json:
    return {node: {key: value for key, value in spec.items() if key != "_meta"} for node, spec in prompt.items()}


@pytest.mark.parametrize("stock", list(twins("lazy")))
def test_the_first_widgets_of_a_loader_name_its_files_and_its_counterpart_has_the_same(server: Server, stock: str) -> None:
    lazy = twins("lazy")[stock]
    found = {name: server.get(f"/object_info/{name}")[name] for name in (stock, lazy)}
    widgets = [name for name in found[stock]["input_order"]["required"] if name != "model"]
    files = table()["loaders"][stock]["files"]
    assert widgets[: len(files)] == files
    for key in ("input", "input_order", "output", "output_is_list"):
        assert found[lazy][key] == found[stock][key]


@needs_browser
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_converted_template_opens_and_misses_no_node_that_the_stock_one_has(page: Page, server: Server, name: str) -> None:
    load(page, template(server, name))
    stock, unknown = queued(page), page.evaluate(UNKNOWN_TYPES)
    load(page, convert(template(server, name), "lazy").workflow)
    assert page.evaluate(UNKNOWN_TYPES) == unknown  # of a server that lacks a package of its own
    assert set(page.evaluate(NODE_TYPES)) >= {"LazyH3UNETLoader", "LazyH3CLIPLoader", "LazyH3VAELoader"}
    assert queued(page) == convert(stock, "lazy").workflow != stock


@needs_browser
def test_the_example_has_only_known_nodes_and_is_the_prompt_of_its_api_file(page: Page) -> None:
    load(page, json.loads(EXAMPLE.read_text("utf-8")))
    assert page.evaluate(UNKNOWN_TYPES) == []
    assert queued(page) == untitled(json.loads(EXAMPLE.with_name(f"{EXAMPLE.stem}_api.json").read_text("utf-8")))


@needs_browser
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_command_changes_the_graph_as_the_converter_does_and_back(page: Page, server: Server, name: str) -> None:
    load(page, template(server, name))
    before = on_canvas(page)
    run(page, "LazyH3.MakeLazy", until=("LazyH3VAELoader", 2))
    assert on_canvas(page) == convert(before, "lazy").workflow
    run(page, "LazyH3.MakeStock", until=("VAELoader", 2))
    assert on_canvas(page) == before


@needs_browser
def test_the_command_is_one_step_to_undo_and_to_redo(page: Page, server: Server) -> None:
    load(page, template(server, TEMPLATES[0]))
    before = on_canvas(page)
    run(page, "LazyH3.MakeLazy", until=("LazyH3VAELoader", 2))
    lazy = on_canvas(page)
    run(page, "Comfy.Undo", until=("VAELoader", 2))
    assert on_canvas(page) == before
    run(page, "Comfy.Redo", until=("LazyH3VAELoader", 2))
    assert on_canvas(page) == lazy


@needs_browser
def test_the_user_stays_in_the_subgraph_and_at_the_place_that_was_in_view(page: Page, server: Server) -> None:
    load(page, template(server, TEMPLATES[0]))
    page.evaluate("() => app.canvas.setGraph([...app.rootGraph.subgraphs.values()][0])")
    page.evaluate("() => { app.canvas.ds.scale = 0.5; app.canvas.ds.offset = [2100, -4600]; }")
    view = "() => [app.canvas.graph.id, app.canvas.ds.scale, ...app.canvas.ds.offset]"
    before = page.evaluate(view)
    run(page, "LazyH3.MakeLazy", until=("LazyH3VAELoader", 2))
    assert page.evaluate(view) == before
    assert page.evaluate("() => app.canvas.graph === app.rootGraph.subgraphs.get(app.canvas.graph.id)")


@needs_browser
def test_a_notice_says_how_many_were_changed_and_what_was_left_alone(page: Page, server: Server) -> None:
    workflow = template(server, TEMPLATES[2])
    workflow["nodes"].append(
        {"id": 999, "type": "CheckpointLoaderSimple", "pos": [0, 0], "size": [300, 100], "widgets_values": ["x.safetensors"]}
    )
    load(page, workflow)
    run(page, "LazyH3.MakeLazy", until=("LazyH3VAELoader", 2))
    page.get_by_text("Loaders made lazy: 5, left alone: 1").last.wait_for()
    page.get_by_text("999 CheckpointLoaderSimple: gives several models from one file").last.wait_for()


@needs_browser
def test_the_menu_of_the_canvas_has_both_directions(page: Page) -> None:
    labels = page.evaluate("() => app.canvas.getCanvasMenuOptions().map((item) => item?.content)")
    assert {"Lazy H3: make loaders lazy", "Lazy H3: make loaders stock again"} <= set(labels)
