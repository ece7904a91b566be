"""Canvas workflows (what ComfyUI saves) to API-format prompts (what a server runs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MUTED, BYPASSED = 2, 4
VIRTUAL = frozenset({"Note", "MarkdownNote", "PrimitiveNode", "Reroute"})
WIDGET_TYPES = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"})
SEED_CONTROLS = frozenset({"fixed", "increment", "decrement", "randomize"})


def api_prompt(workflow: Mapping[str, Any], classes: Mapping[str, type]) -> dict[str, Any]:
    """The prompt that the front end would send. Raises ValueError for what it cannot convert: subgraphs and unknown nodes."""
    if (workflow.get("definitions") or {}).get("subgraphs"):
        raise ValueError("The workflow has subgraphs; open it in ComfyUI and export it in API format.")
    try:
        return _converted(_Canvas(workflow), classes)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"The canvas of the workflow is damaged ({error!r}); save it again from ComfyUI.") from error


def _converted(canvas: _Canvas, classes: Mapping[str, type]) -> dict[str, Any]:
    prompt = {}
    for node in canvas.active():
        cls = classes.get(node["type"])
        if cls is None:
            raise ValueError(f"The workflow uses the node {node['type']}, which only ComfyUI knows; run it there.")
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": canvas.inputs(node, cls)}
    return prompt


class _Canvas:
    def __init__(self, workflow: Mapping[str, Any]) -> None:
        self._nodes = {node["id"]: node for node in workflow["nodes"]}
        self._origins = {link[0]: (link[1], link[2]) for link in workflow.get("links", []) if link}

    def active(self) -> list[Mapping[str, Any]]:
        """Nodes that run: neither muted, bypassed nor virtual."""
        return [n for n in self._nodes.values() if n.get("mode", 0) not in (MUTED, BYPASSED) and n["type"] not in VIRTUAL]

    def inputs(self, node: Mapping[str, Any], cls: Any) -> dict[str, Any]:
        """Widget values and links of a node."""
        declared = cls.INPUT_TYPES()
        specs = {**declared.get("required", {}), **declared.get("optional", {})}
        values = self._widget_values(node, specs)
        for slot in node.get("inputs") or []:
            source = self._source(slot.get("link"))
            if source is not None:
                values[slot["name"]] = source
        return values

    def _widget_values(self, node: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
        stored = node.get("widgets_values") or []
        if isinstance(stored, Mapping):
            return {name: value for name, value in stored.items() if name in specs}
        values: dict[str, Any] = {}
        remaining = list(stored)
        for name, spec in specs.items():
            if not _is_widget(spec) or not remaining:
                continue
            values[name] = remaining.pop(0)
            if _has_seed_control(spec) and remaining and remaining[0] in SEED_CONTROLS:
                remaining.pop(0)
        return values

    def _source(self, link: int | None) -> Any:
        """What feeds a link: [node, slot], the value of a primitive, or None; goes through reroutes and bypassed nodes."""
        followed = set()
        while link is not None and link in self._origins:
            origin, slot = self._origins[link]
            if link in followed:
                raise ValueError(f"The links of the canvas run in a circle through node {origin}; remove one of them in ComfyUI.")
            followed.add(link)
            node = self._nodes.get(origin)
            if node is None or node.get("mode", 0) == MUTED:
                return None
            if node["type"] == "PrimitiveNode":
                return (node.get("widgets_values") or [None])[0]
            if node["type"] == "Reroute":
                link = node["inputs"][0].get("link")
            elif node.get("mode", 0) == BYPASSED:
                link = self._bypassed(node, slot)
            else:
                return [str(origin), slot]
        return None

    def _bypassed(self, node: Mapping[str, Any], slot: int) -> int | None:
        """A bypassed node forwards the link at the same index if its type fits, else the first that does."""
        kind = node["outputs"][slot]["type"]
        inputs = node.get("inputs") or []
        same_place = inputs[slot : slot + 1]
        fitting = [i for i in [*same_place, *inputs] if i["type"] == kind]
        return fitting[0].get("link") if fitting else None


def _is_widget(spec: Any) -> bool:
    options = spec[1] if len(spec) > 1 and isinstance(spec[1], Mapping) else {}
    return (isinstance(spec[0], (list, tuple)) or spec[0] in WIDGET_TYPES) and not options.get("forceInput")


def _has_seed_control(spec: Any) -> bool:
    return len(spec) > 1 and isinstance(spec[1], Mapping) and bool(spec[1].get("control_after_generate"))
