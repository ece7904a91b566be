"""Core's loader nodes replaced by the lazy ones, and back, in API prompts and in canvas files. JSON in, JSON out.

Only the class changes: ids, links, positions, sizes, widgets and titles stay. Which loader is which stands in
``web/loaders.json``; ``web/convert.js`` does the same on the open canvas, from the same table.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..memory.graph import link_of

TABLE = Path(__file__).parent.parent / "web" / "loaders.json"
SEARCH_NAME = "Node name for S&R"  # texts refer to a node's widgets by it, as in %UNETLoader.unet_name%
PROVENANCE = ("cnr_id", "aux_id", "ver")  # which pack a node is from; a front end without the class offers that pack
STASH = "lazy_h3_stock"  # the property in which a lazy node keeps the provenance of the stock one
VIRTUAL = frozenset({"PrimitiveNode", "Reroute"})  # the front end resolves them before it queues a prompt
GROUP_NODE = re.compile(r"workflow[>/](.*)", re.DOTALL)
SUBGRAPH = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)

Target = Literal["lazy", "stock"]
Json = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A loader, by its id and class, and the name of the subgraph that it is in. ``remark``: why left alone, or what to know."""

    node: str
    kind: str
    place: str
    remark: str


@dataclass
class Conversion:
    """A converted copy, the loaders that were replaced in it, and those that were left alone."""

    workflow: Json
    replaced: list[Found] = field(default_factory=list)
    left_alone: list[Found] = field(default_factory=list)


@functools.cache
def table() -> Json:
    """The content of ``web/loaders.json``."""
    loaded: Json = json.loads(TABLE.read_text("utf-8"))
    return loaded


def twins(target: Target) -> dict[str, str]:
    """Class to replace -> class in its place."""
    pairs = {stock: loader["lazy"] for stock, loader in table()["loaders"].items()}
    return pairs if target == "lazy" else {lazy: stock for stock, lazy in pairs.items()}


def convert(workflow: Any, target: Target) -> Conversion:
    """A canvas file or an API prompt with the other loaders. Raises ValueError for what is neither."""
    if isinstance(workflow, Mapping) and isinstance(workflow.get("nodes"), list):
        return convert_canvas(workflow, target)
    if isinstance(workflow, Mapping) and any(isinstance(node, Mapping) and "class_type" in node for node in workflow.values()):
        return convert_prompt(workflow, target)
    raise ValueError("This is neither a canvas workflow nor a prompt in API format; save it again from ComfyUI.")


def convert_prompt(prompt: Mapping[str, Any], target: Target) -> Conversion:
    """A prompt in API format. Entries that are no nodes of a known class are copied as they are."""
    done, rules = Conversion(copy.deepcopy(dict(prompt))), _Rules(target)
    for node, spec in done.workflow.items():
        if isinstance(spec, dict) and isinstance(spec.get("class_type"), str):
            _convert_entry(str(node), spec, rules, done)
    return done


def _convert_entry(node: str, spec: Json, rules: _Rules, done: Conversion) -> None:
    kind, inputs = spec["class_type"], spec.get("inputs")
    files = {name: inputs.get(name) for name in rules.file_widgets(kind)} if isinstance(inputs, dict) else {}
    if reason := rules.why_left(kind, list(files.values())):
        done.left_alone.append(Found(node, kind, "", reason))
    elif kind in rules.twins:
        computed = [name for name, value in files.items() if link_of(value) is not None]
        done.replaced.append(Found(node, kind, "", rules.remark(computed)))
        spec["class_type"] = rules.twins[kind]


def convert_canvas(workflow: Mapping[str, Any], target: Target) -> Conversion:
    """A canvas file of version 0.4 or 1, subgraphs included. Raises ValueError for one whose nodes cannot be read."""
    done = Conversion(copy.deepcopy(dict(workflow)))
    try:
        _Canvas(done, _Rules(target)).convert()
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"The canvas of the workflow is damaged ({error!r}); save it again from ComfyUI.") from error
    return done


class _Rules:
    """Which class is replaced by which, and why others are not."""

    def __init__(self, target: Target) -> None:
        self.is_lazy = target == "lazy"
        self.twins = twins(target)
        self.reasons: dict[str, str] = table()["reasons"]
        self._stock_of = twins("stock")

    def file_widgets(self, kind: str) -> list[str]:
        """Names of the widgets that name files: the first ones of a loader, in this order."""
        loader = table()["loaders"].get(self._stock_of.get(kind, kind))
        return list(loader["files"]) if loader is not None else []

    def why_left(self, kind: str, files: Sequence[Any] = ()) -> str:
        """Why a node is left alone; nothing for one that is replaced, and for one that is no loader."""
        if kind in self.twins:
            return self._why_not_lazy(files) if self.is_lazy else ""
        is_loader, is_ours = "loader" in kind.lower(), kind.startswith("LazyH3")
        if kind in table()["loaders"]:
            return self.reasons["already stock"]
        if is_ours:
            return self.reasons["already lazy" if self.is_lazy else "handle"] if is_loader else ""
        if not self.is_lazy:
            return ""
        if kind in table()["left_alone"]:
            return str(table()["left_alone"][kind])
        return self.reasons["gguf" if "gguf" in kind.lower() else "no counterpart"] if is_loader else ""

    def remark(self, computed: Sequence[str]) -> str:
        """What to know of a loader that is replaced, some of whose files are named by other nodes."""
        return self.reasons["linked"].replace("{input}", computed[0]) if computed and self.is_lazy else ""

    def _why_not_lazy(self, files: Sequence[Any]) -> str:
        bad = [file for file in files if isinstance(file, str) and not file.endswith(tuple(table()["suffixes"]))]
        return self.reasons["file"].replace("{file}", bad[0]) if bad else ""


class _Canvas:
    """Converts a canvas where it stands."""

    def __init__(self, done: Conversion, rules: _Rules) -> None:
        self._done = done
        self._rules = rules
        self._scopes = list(_scopes(done.workflow))
        self._definitions = {scope.get("id") for scope in self._scopes[1:]}
        self._group_nodes = (done.workflow.get("extra") or {}).get("groupNodes") or {}
        self._text = json.dumps(done.workflow, ensure_ascii=False)

    def convert(self) -> None:
        for scope in self._scopes:
            origins = _origins(scope)
            place = "" if scope is self._done.workflow else str(scope.get("name") or scope.get("id"))
            for node in scope["nodes"]:
                self._convert_node(node, place, origins)

    def _convert_node(self, node: Json, place: str, origins: Mapping[Any, Json]) -> None:
        kind, names = node["type"], self._rules.file_widgets(node["type"])
        if reason := self._why_left(node) or self._rules.why_left(kind, _files(node, names)):
            self._done.left_alone.append(Found(str(node["id"]), kind, place, reason))
        elif kind in self._rules.twins:
            computed = [name for name in names if _is_computed(node, name, origins)]
            self._done.replaced.append(Found(str(node["id"]), kind, place, self._rules.remark(computed)))
            node["type"] = self._rules.twins[kind]
            if isinstance(node.get("properties"), dict):
                node["properties"] = self._properties(node["properties"], kind)

    def _why_left(self, node: Json) -> str:
        """Why a node must stay that is a loader only on the canvas, where slots and definitions are known."""
        rules, kind = self._rules, node["type"]
        if group := GROUP_NODE.fullmatch(kind):
            inside = (self._group_nodes.get(group[1]) or {}).get("nodes") or []
            return rules.reasons["group node"] if any(each.get("type") in rules.twins for each in inside) else ""
        if SUBGRAPH.fullmatch(kind):
            return "" if kind in self._definitions else rules.reasons["no definition"]
        is_known = rules.file_widgets(kind) or kind.startswith("LazyH3") or kind in VIRTUAL or rules.why_left(kind)
        return rules.reasons["no counterpart"] if rules.is_lazy and not is_known and _makes_models(node) else ""

    def _properties(self, properties: Json, kind: str) -> Json:
        """With the other pack's name, and the other class's where no text refers to this one."""
        changed = {name: value for name, value in properties.items() if name not in (*PROVENANCE, STASH)}
        if changed.get(SEARCH_NAME) == kind and f"%{kind}." not in self._text:
            changed[SEARCH_NAME] = self._rules.twins[kind]
        packs = table()["packs"]
        if not self._rules.is_lazy:
            return {**changed, **properties.get(STASH, {"cnr_id": packs["stock"]})}
        stash = {name: properties[name] for name in PROVENANCE if name in properties}
        return {**changed, "cnr_id": packs["lazy"], STASH: stash}


def _scopes(workflow: Json) -> Iterator[Json]:
    """The canvas, and the definitions of all subgraphs, nested ones included."""
    yield workflow
    for subgraph in (workflow.get("definitions") or {}).get("subgraphs") or []:
        yield from _scopes(subgraph)


def _origins(scope: Json) -> dict[Any, Json]:
    """Link id -> the node that it comes from; links from a subgraph's own inputs are left out."""
    nodes = {str(node["id"]): node for node in scope["nodes"]}
    links = [(link["id"], link["origin_id"]) if isinstance(link, dict) else link[:2] for link in scope.get("links") or [] if link]
    return {link: nodes[str(origin)] for link, origin in links if str(origin) in nodes}


def _files(node: Json, names: Sequence[str]) -> list[Any]:
    """Names of the files, without those that come over a link."""
    linked = {slot["name"] for slot in node.get("inputs") or [] if slot.get("link") is not None}
    values = node.get("widgets_values") or []
    named = values if isinstance(values, dict) else dict(zip(names, values, strict=False))
    return [named.get(name) for name in names if name not in linked]


def _is_computed(node: Json, name: str, origins: Mapping[Any, Json]) -> bool:
    """Whether the input gets its value from a node that runs."""
    links = [slot.get("link") for slot in node.get("inputs") or [] if slot["name"] == name]
    senders = [origins[link] for link in links if link in origins]
    return any(sender["type"] not in VIRTUAL and not sender.get("mode") for sender in senders)


def _makes_models(node: Json) -> bool:
    """Whether models come out of the node and none goes in."""
    types = table()["model_types"]
    gives = any(slot.get("type") in types for slot in node.get("outputs") or [])
    return gives and not any(slot.get("type") in types for slot in node.get("inputs") or [])
