"""Small node classes, and a host that writes down what happens to them: S7 started, X7 executed, F7 finished, end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lazy_h3.host.embedded import EmbeddedHost, ExecutionBlocker, ExecutionContext, get_executing_context, interrupt

ANY = ("*",)
PROMPT_ENDS = ("execution_success", "execution_error", "execution_interrupted")


class Handle:
    """Stands for a model on a wire."""

    def __init__(self, name: str):
        self.name = name

    def is_dynamic(self) -> bool:
        return True


class Trace:
    """What happened, in order, and what was seen on the way."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.contexts: list[ExecutionContext] = []
        self.handles: list[tuple[str, Handle]] = []  # (node, what it used)
        self.fingerprints: list[str] = []
        self.hosts: list[EmbeddedHost] = []

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for host in self.hosts:
            host.close()

    def executed(self, handle: Any = None) -> str:
        context = get_executing_context()
        self.contexts.append(context)
        self.events.append(f"X{context.node_id}")
        if isinstance(handle, Handle):
            self.handles.append((context.node_id, handle))
        return context.node_id

    def observe(self, name: str, data: dict[str, Any]) -> None:
        if name in ("node_started", "node_finished"):
            self.events.append(f"{'S' if name == 'node_started' else 'F'}{data['node']}")
        elif name in PROMPT_ENDS:
            self.events.append("end")

    def taken(self) -> str:
        """The events since the last call, as one line."""
        line = " ".join(self.events)
        self.events.clear()
        return line


def recording_host(trace: Trace, extra: dict[str, type] | None = None, **options: Any) -> EmbeddedHost:
    host = EmbeddedHost(node_classes(trace) | (extra or {}), **{"seed": 0} | options)
    host.on_event(trace.observe)
    trace.hosts.append(host)
    return host


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def node_class(
    function: Callable[..., Any], required: dict[str, Any], returns: tuple[str, ...] = ("*",), **attributes: Any
) -> type:
    """A class whose FUNCTION is ``function(self, **inputs)``."""
    members = {"INPUT_TYPES": classmethod(lambda cls: {"required": required}), "RETURN_TYPES": returns, "FUNCTION": "run"}
    return type(function.__name__, (), {**members, "run": function, **attributes})


def node_classes(trace: Trace) -> dict[str, type]:
    def load(self, name):
        trace.executed()
        return (Handle(name),)

    def fingerprint(cls, name):
        trace.fingerprints.append(f"{get_executing_context().node_id} {name}")
        return name

    def use(self, model, text):
        trace.executed(model)
        return (f"{getattr(model, 'name', model)}+{text}",)

    def show(self, value):
        trace.executed(value)
        return {"ui": {"text": [str(value)]}, "result": ()}

    async def wait(self, model, seconds):
        trace.executed(model)
        await asyncio.sleep(seconds)
        trace.contexts.append(get_executing_context())
        return (model,)

    def fail(self, value):
        trace.executed(value)
        raise ValueError("no good")

    def stop(self, value):
        trace.executed(value)
        interrupt()
        from lazy_h3.host.embedded import throw_exception_if_processing_interrupted

        throw_exception_if_processing_interrupted()

    def many(self, count):
        trace.executed()
        return ([f"item{index}" for index in range(count)],)

    def together(self, values):
        trace.executed()
        return (values,)

    def block(self, message):
        trace.executed()
        return (ExecutionBlocker(message or None),)

    def expand(self, model, by):
        node_id = trace.executed(model)
        child, shown = f"{node_id}.0.0.1", f"{node_id}.0.0.2"
        link = trace.links[node_id]
        graph = {
            child: node("Use", model=link if by == "link" else model, text="child"),
            shown: node("Show", value=link if by == "link" else model),
        }
        return {"result": ([child, 0],), "expand": graph}

    trace.links = {}  # node that expands -> the link by which it got its model
    loader = node_class(load, {"name": ("STRING",)}, ("MODEL",), IS_CHANGED=classmethod(fingerprint))
    return {
        "Load": loader,
        "Use": node_class(use, {"model": ANY, "text": ("STRING", {})}),
        "Show": node_class(show, {"value": ANY}, (), OUTPUT_NODE=True),
        "Wait": node_class(wait, {"model": ANY, "seconds": ("FLOAT", {"default": 0.01})}),
        "Fail": node_class(fail, {"value": ANY}),
        "Stop": node_class(stop, {"value": ANY}),
        "Many": node_class(many, {"count": ("INT",)}, OUTPUT_IS_LIST=(True,)),
        "Together": node_class(together, {"values": ANY}, INPUT_IS_LIST=True),
        "Block": node_class(block, {"message": ("STRING",)}),
        "Expand": node_class(expand, {"model": ANY, "by": (["link", "object"],)}),
    }


def chain(*, text: str = "a") -> dict[str, Any]:
    """1 loads, 2 uses, 3 shows."""
    return {"1": node("Load", name="te"), "2": node("Use", model=["1", 0], text=text), "3": node("Show", value=["2", 0])}
