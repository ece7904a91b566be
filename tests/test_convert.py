"""Loaders are replaced and nothing else changes; the way back gives the same file; the canvas command does the same as Python."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import core_graphs
import pytest
from lazy_h3 import cli
from lazy_h3.host.convert import TABLE, Conversion, convert, table, twins
from lazy_h3.nodes import NODE_CLASS_MAPPINGS

Json = dict[str, Any]

WEB = TABLE.parent
NODE = shutil.which("node")
TEMPLATES = "comfyui_workflow_templates_json"  # the official templates, as a package
H3_TEMPLATES = ("video_minimax_h3_t2v", "video_minimax_h3_i2v", "video_minimax_h3_r2v")
OUTER, INNER = "11111111-2222-3333-4444-555555555555", "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
CORE = {"cnr_id": "comfy-core", "ver": "0.33.0"}


def node(id_: int, kind: str, widgets: Any = None, inputs: Any = (), **more: Any) -> Json:
    """A node as the front end saves it."""
    properties = {**CORE, "Node name for S&R": kind, "models": [{"name": "x.safetensors", "directory": "vae"}]}
    own = {"id": id_, "type": kind, "pos": [10.5, 20], "size": [640, 100], "flags": {}, "order": id_, "mode": 0}
    return {**own, "inputs": list(inputs), "outputs": [], "properties": properties, "widgets_values": widgets, **more}


def unet(id_: int = 1, **more: Any) -> Json:
    return node(id_, "UNETLoader", ["dit.safetensors", "default"], **more)


def vae(id_: int = 2, file: str = "vae.safetensors", **more: Any) -> Json:
    return node(id_, "VAELoader", [file], **more)


def canvas(*nodes: Json, links: Any = (), **more: Any) -> Json:
    """A canvas file of version 0.4."""
    groups = [{"id": 1, "title": "Models", "bounding": [0, 0, 900, 900], "color": "#3f789e"}]
    return {"nodes": list(nodes), "links": list(links), "groups": groups, "config": {}, "extra": {}, "version": 0.4, **more}


def subgraph(id_: str, name: str, *nodes: Json, links: Any = (), **more: Any) -> Json:
    return {
        "id": id_,
        "name": name,
        "version": 1,
        "nodes": list(nodes),
        "links": list(links),
        "inputs": [],
        "outputs": [],
        **more,
    }


def linked(name: str, link: int, kind: str = "COMBO") -> Json:
    return {"name": name, "type": kind, "widget": {"name": name}, "link": link}


def giving(*types: str) -> list[Json]:
    return [{"name": kind, "type": kind, "links": []} for kind in types]


def object_link(id_: int, origin: int, target: int) -> Json:
    return {"id": id_, "origin_id": origin, "origin_slot": 0, "target_id": target, "target_slot": 0, "type": "COMBO"}


NAME_LINK = [7, 9, 0, 2, 0, "COMBO"]
UNKNOWN = node(3, "MysteryNode", [1, {"a": None}], outputs=giving("MYSTERY"))
ALL_LOADERS = [
    unet(1, title="My model", color="#232", bgcolor="#353"),
    vae(2, mode=4),
    node(3, "CLIPLoader", ["te.safetensors", "minimax", "default"], mode=2),
    node(4, "DualCLIPLoader", ["a.safetensors", "b.sft", "flux", "default"]),
    node(5, "LoraLoaderModelOnly", ["lora.safetensors", 0.8]),
]

CANVASES: dict[str, Json] = {
    "all loaders": canvas(*ALL_LOADERS),
    "version 1": {**canvas(unet(), links=[object_link(7, 9, 1)]), "version": 1, "state": {"lastNodeId": 9}},
    "subgraph": canvas(node(8, OUTER), definitions={"subgraphs": [subgraph(OUTER, "Blueprint", unet(), UNKNOWN)]}),
    "nested, in one list": canvas(
        node(8, OUTER),
        definitions={"subgraphs": [subgraph(OUTER, "Outer", node(9, INNER)), subgraph(INNER, "Inner", vae())]},
    ),
    "nested, each in its own": canvas(
        node(8, OUTER),
        definitions={
            "subgraphs": [
                subgraph(OUTER, "Outer", node(9, INNER), definitions={"subgraphs": [subgraph(INNER, "Inner", vae(), unet())]})
            ]
        },
    ),
    "promoted widget": canvas(
        node(8, OUTER),
        definitions={"subgraphs": [subgraph(OUTER, "S", vae(inputs=[linked("vae_name", 7)]), links=[object_link(7, -10, 2)])]},
    ),
    "file from a node": canvas(vae(inputs=[linked("vae_name", 7)]), node(9, "StringNode"), links=[NAME_LINK]),
    "file from a muted node": canvas(vae(inputs=[linked("vae_name", 7)]), node(9, "StringNode", mode=2), links=[NAME_LINK]),
    "file from a primitive": canvas(vae(inputs=[linked("vae_name", 7)]), node(9, "PrimitiveNode"), links=[NAME_LINK]),
    "file name of another kind behind a link": canvas(
        vae(file="vae.pt", inputs=[linked("vae_name", 7)]), node(9, "PrimitiveNode"), links=[NAME_LINK]
    ),
    "widgets by name": canvas(node(1, "UNETLoader", {"unet_name": "dit.safetensors", "weight_dtype": "default"})),
    "name of one's own": canvas(unet(properties={"Node name for S&R": "the model"})),
    "name in a text": canvas(unet(), node(2, "SaveVideo", ["video/%UNETLoader.unet_name%"])),
    "of another pack's fork": canvas(
        unet(properties={"aux_id": "someone/pack", "ver": "abc", "Node name for S&R": "UNETLoader"})
    ),
    "without properties": canvas({"id": 1, "type": "VAELoader", "widgets_values": ["v.safetensors"]}),
    "checkpoint": canvas(node(1, "CheckpointLoaderSimple", ["x.safetensors"]), vae()),
    "lora with clip": canvas(node(1, "LoraLoader", ["l.safetensors", 1, 1]), unet(2)),
    "three files": canvas(node(1, "TripleCLIPLoader", ["a", "b", "c"]), unet(2)),
    "gguf": canvas(node(1, "UnetLoaderGGUF", ["x.gguf"]), vae()),
    "no safetensors": canvas(vae(file="pixel_space"), node(5, "LoraLoaderModelOnly", ["lora.$&.pt", 1.0])),
    "another pack's source": canvas(
        node(1, "GiveMeAModel", outputs=giving("MODEL")),
        node(2, "PatchIt", inputs=[{"name": "model", "type": "MODEL", "link": None}], outputs=giving("MODEL")),
    ),
    "handles": canvas(node(1, "LazyH3DiTLoader", ["dit.safetensors"]), node(2, "LazyH3Sampler")),
    "group node": canvas(node(1, "workflow>Old"), extra={"groupNodes": {"Old": {"nodes": [{"type": "UNETLoader"}]}}}),
    "group node of others": canvas(node(1, "workflow/Old"), extra={"groupNodes": {"Old": {"nodes": [{"type": "KSampler"}]}}}),
    "lost definition": canvas(node(1, OUTER), vae()),
    "names of the language": canvas(node(1, "constructor"), node(2, "toString"), node(3, "__proto__Loader")),
    "empty": canvas(),
}
each_canvas = pytest.mark.parametrize("name", CANVASES)


def remarks(found: list[Any]) -> dict[str, str]:
    return {f"{each.node} {each.kind}": each.remark for each in found}


def everything_but(workflow: Json, *names: str) -> Any:
    """The workflow without some keys, wherever they stand."""
    return json.loads(json.dumps(workflow), object_hook=lambda found: {k: v for k, v in found.items() if k not in names})


def all_nodes(workflow: Json) -> Iterator[Json]:
    yield from workflow["nodes"]
    for inner in (workflow.get("definitions") or {}).get("subgraphs") or []:
        yield from all_nodes(inner)


@each_canvas
def test_lazy_and_stock_again_is_the_same_file(name: str) -> None:
    original = copy.deepcopy(CANVASES[name])
    lazy = convert(CANVASES[name], "lazy")
    assert convert(lazy.workflow, "stock").workflow == CANVASES[name] == original
    assert convert(lazy.workflow, "lazy").workflow == lazy.workflow


@each_canvas
def test_only_class_and_provenance_change(name: str) -> None:
    lazy = convert(CANVASES[name], "lazy").workflow
    assert everything_but(lazy, "type", "properties") == everything_but(CANVASES[name], "type", "properties")
    changed = [(a["type"], b["type"]) for a, b in zip(all_nodes(CANVASES[name]), all_nodes(lazy), strict=True) if a != b]
    assert all(twins("lazy")[before] == after for before, after in changed)


@pytest.mark.parametrize("name", ["all loaders", "subgraph", "nested, in one list", "nested, each in its own", "promoted widget"])
def test_every_loader_is_replaced_and_nothing_is_remarked(name: str) -> None:
    done = convert(CANVASES[name], "lazy")
    left = [each["type"] for each in all_nodes(done.workflow) if each["type"] in table()["loaders"]]
    assert (left, done.left_alone) == ([], [])
    assert {found.remark for found in done.replaced} == {""}


def test_a_loader_says_in_which_subgraph_it_is() -> None:
    done = convert(CANVASES["nested, each in its own"], "lazy")
    assert [(found.node, found.place) for found in done.replaced] == [("2", "Inner"), ("1", "Inner")]


def test_the_provenance_is_the_packs_while_the_node_is_lazy() -> None:
    (lazy,) = convert(canvas(unet()), "lazy").workflow["nodes"]
    assert lazy["properties"]["cnr_id"] == "lazy-h3"
    assert "ver" not in lazy["properties"]
    assert lazy["properties"]["Node name for S&R"] == "LazyH3UNETLoader"
    assert lazy["properties"]["models"] == unet()["properties"]["models"]
    dragged = node(1, "LazyH3UNETLoader", ["d.safetensors", "default"], properties={"Node name for S&R": "LazyH3UNETLoader"})
    (stock,) = convert(canvas(dragged), "stock").workflow["nodes"]
    assert stock["properties"] == {"Node name for S&R": "UNETLoader", "cnr_id": "comfy-core"}


@pytest.mark.parametrize(("name", "kept"), [("name of one's own", "the model"), ("name in a text", "UNETLoader")])
def test_a_name_that_somebody_uses_stays(name: str, kept: str) -> None:
    first = convert(CANVASES[name], "lazy").workflow["nodes"][0]
    assert (first["type"], first["properties"]["Node name for S&R"]) == ("LazyH3UNETLoader", kept)


LEFT_ALONE = {
    "checkpoint": {"1 CheckpointLoaderSimple": "several models from one file"},
    "lora with clip": {"1 LoraLoader": "patches a CLIP"},
    "three files": {"1 TripleCLIPLoader": "three files"},
    "gguf": {"1 UnetLoaderGGUF": "GGUF"},
    "no safetensors": {"2 VAELoader": "pixel_space is no safetensors file", "5 LoraLoaderModelOnly": "lora.$&.pt is no"},
    "another pack's source": {"1 GiveMeAModel": "has no lazy counterpart"},
    "handles": {"1 LazyH3DiTLoader": "is lazy already"},
    "group node": {"1 workflow>Old": "turn it into a subgraph first"},
    "group node of others": {},
    "lost definition": {f"1 {OUTER}": "not in this file"},
    "file name of another kind behind a link": {},
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone_is_named_with_the_reason(name: str) -> None:
    found = remarks(convert(CANVASES[name], "lazy").left_alone)
    assert found.keys() == LEFT_ALONE[name].keys()
    assert all(words in found[label] for label, words in LEFT_ALONE[name].items())


def test_on_the_way_back_other_things_are_left_alone() -> None:
    mixed = canvas(unet(), node(2, "LazyH3DiTLoader"), node(3, "CheckpointLoaderSimple"), node(4, "LazyH3VAELoader", ["v.pt"]))
    done = convert(mixed, "stock")
    assert [found.kind for found in done.replaced] == ["LazyH3VAELoader"]
    assert list(remarks(done.left_alone)) == ["1 UNETLoader", "2 LazyH3DiTLoader"]


def test_a_file_that_comes_over_a_link_is_remarked_only_if_a_node_computes_it() -> None:
    def remark(name: str) -> str:
        return remarks(convert(CANVASES[name], "lazy").replaced)["2 VAELoader"]

    assert "vae_name comes over a link" in remark("file from a node")
    assert remark("file from a primitive") == remark("file from a muted node") == remark("promoted widget") == ""


def test_an_api_prompt_is_converted_like_a_canvas() -> None:
    prompt = core_graphs.text_to_video()
    prompt["1"]["_meta"] = {"title": "My model"}
    done = convert(prompt, "lazy")
    assert done.workflow == core_graphs.lazily(prompt)
    assert [found.node for found in done.replaced] == ["1", "2", "3", "4"]
    assert convert(done.workflow, "stock").workflow == prompt


def test_an_api_prompt_may_hold_links_foreign_loaders_and_entries_without_a_class() -> None:
    prompt = {
        "3:1": {"class_type": "VAELoader", "inputs": {"vae_name": ["9", 0]}},
        "2": {"class_type": "VAELoader", "inputs": {"vae_name": "taesd"}},
        "4": {"class_type": "UnetLoaderGGUF", "inputs": {}},
        "5": {"inputs": {}},
        "6": {"class_type": "LazyH3UNETLoader", "inputs": {"unet_name": "d.safetensors"}},
    }
    done = convert(prompt, "lazy")
    assert {node: spec.get("class_type") for node, spec in done.workflow.items() if spec != prompt[node]} == {
        "3:1": "LazyH3VAELoader"
    }
    assert "vae_name comes over a link" in done.replaced[0].remark
    assert list(remarks(done.left_alone)) == ["2 VAELoader", "4 UnetLoaderGGUF", "6 LazyH3UNETLoader"]


@pytest.mark.parametrize("damaged", [[], {}, {"1": 2}, {"nodes": [3]}, {"nodes": [{"id": 1}]}, {"nodes": [], "links": 5}])
def test_what_is_no_workflow_is_refused(damaged: Any) -> None:
    with pytest.raises(ValueError, match="save it again from ComfyUI"):
        convert(damaged, "lazy")


def test_the_table_names_the_nodes_of_the_pack() -> None:
    assert twins("lazy") == {cls.CORE: name for name, cls in NODE_CLASS_MAPPINGS.items() if hasattr(cls, "CORE")}
    assert set(core_graphs.LOADERS) == table()["loaders"].keys()


SCRIPT = """
import { readFileSync } from "node:fs";
import { convertCanvas } from "./convert.mjs";
const { table, canvases } = JSON.parse(readFileSync(0, "utf-8"));
const both = (canvas) => ["lazy", "stock"].map((target) => convertCanvas(canvas, target, table));
console.log(JSON.stringify(canvases.map(both)));
"""


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_the_canvas_command_finds_and_changes_the_same(tmp_path: Path) -> None:
    shutil.copy(WEB / "convert.js", tmp_path / "convert.mjs")
    (tmp_path / "main.mjs").write_text(SCRIPT)
    canvases = [*CANVASES.values(), *(convert(each, "lazy").workflow for each in CANVASES.values())]
    given = json.dumps({"table": table(), "canvases": canvases})
    ended = subprocess.run([NODE, "main.mjs"], input=given, capture_output=True, text=True, cwd=tmp_path, check=True)
    for workflow, found in zip(canvases, json.loads(ended.stdout), strict=True):
        assert found == [as_json(convert(workflow, "lazy")), as_json(convert(workflow, "stock"))]


def as_json(done: Conversion) -> Json:
    return {
        "workflow": done.workflow,
        "replaced": [vars(found) for found in done.replaced],
        "left_alone": [vars(found) for found in done.left_alone],
    }


def templates() -> Path:
    spec = importlib.util.find_spec(TEMPLATES)
    if spec is None or spec.origin is None:
        pytest.skip("the package comfyui-workflow-templates-json is not installed")
    return Path(spec.origin).parent / "templates"


@pytest.mark.parametrize("name", H3_TEMPLATES)
def test_an_official_template_becomes_lazy_without_a_remark(name: str) -> None:
    template = json.loads((templates() / f"{name}.json").read_text("utf-8"))
    done = convert(template, "lazy")
    kinds = ["CLIPLoader", "LoraLoaderModelOnly", "UNETLoader", "VAELoader", "VAELoader"]
    assert sorted(found.kind for found in done.replaced) == kinds
    assert ({found.remark for found in done.replaced}, done.left_alone) == ({""}, [])


def test_every_official_template_comes_back_as_it_was() -> None:
    for path in sorted(templates().glob("*.json")):
        template = json.loads(path.read_text("utf-8"))
        if isinstance(template, dict) and "nodes" in template:
            assert convert(convert(template, "lazy").workflow, "stock").workflow == template, path.stem


@pytest.fixture
def lazy_h3(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_the_command_writes_beside_and_says_what_it_did(lazy_h3: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CANVASES["checkpoint"], indent=1))
    code, report, _ = lazy_h3("convert", path)
    assert code == 0
    assert json.loads(path.read_text()) == CANVASES["checkpoint"]
    assert json.loads((tmp_path / "mine_lazy.json").read_text()) == convert(CANVASES["checkpoint"], "lazy").workflow
    assert "2 VAELoader is now LazyH3VAELoader" in report
    assert "left alone: 1 CheckpointLoaderSimple gives several models" in report


def test_the_command_goes_back_and_writes_where_it_is_told(lazy_h3: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(convert(CANVASES["subgraph"], "lazy").workflow))
    assert lazy_h3("convert", path, "--stock", "--out", path)[0] == 0
    assert json.loads(path.read_text()) == CANVASES["subgraph"]


def test_the_command_is_content_with_nothing_to_do(lazy_h3: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(canvas(UNKNOWN)))
    code, report, _ = lazy_h3("convert", path)
    assert (code, report.startswith("Loaders replaced: 0, left alone: 0.")) == (0, True)


def test_the_command_overwrites_nothing_unasked(lazy_h3: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(canvas(unet())))
    (tmp_path / "mine_lazy.json").write_text("precious")
    code, _, message = lazy_h3("convert", tmp_path / "mine.json")
    assert (code, (tmp_path / "mine_lazy.json").read_text()) == (2, "precious")
    assert message.count("\n") == 1
    assert "--out" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"nodes": [1]}', b"\xff\xfe"])
def test_the_command_says_in_a_sentence_what_is_no_workflow(lazy_h3: Any, tmp_path: Path, content: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, message = lazy_h3("convert", path)
    assert (code, message.count("\n"), list(tmp_path.iterdir())) == (2, 1, [path])
    assert message.startswith("lazy-h3: ")


EXAMPLE = Path(__file__).parent.parent / "example_workflows" / "core_text_to_video_lazy_api.json"


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_stock_graph_is_sent_to_comfyui_by_the_command_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, str(EXAMPLE), "--models", str(tmp_path)]) == 2
    assert "LazyH3UNETLoader, which stands in for ComfyUI's UNETLoader; run it there." in capsys.readouterr().err


def test_a_plan_of_nodes_that_only_comfyui_has_says_so(tmp_path, capsys):
    stock = tmp_path / "stock.json"
    stock.write_text(
        json.dumps({"1": {"class_type": "UNETLoader", "inputs": {"unet_name": "x", "weight_dtype": "default"}}}), "utf-8"
    )
    assert cli.main(["plan", str(stock), "--models", str(tmp_path)]) == 2
    assert "UNETLoader, which only ComfyUI knows" in capsys.readouterr().err
