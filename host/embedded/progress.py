"""Start, progress and finish of every node, told to handlers (host contract, sections 1 to 3)."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypedDict

from .context import find_host, get_executing_context, throw_exception_if_processing_interrupted
from .graph import DynamicPrompt


class NodeState(Enum):
    Pending = "pending"
    Running = "running"
    Finished = "finished"
    Error = "error"


class NodeProgressState(TypedDict):
    state: NodeState
    value: float
    max: float


class ProgressHandler:
    """Override what is of interest. Nothing here may raise: only a raising start_handler is survived, by failing its node."""

    def __init__(self, name: str):
        self.name = name
        self.enabled = True

    def set_registry(self, registry: ProgressRegistry) -> None:
        """The handler joins ``registry``."""

    def start_handler(self, node_id: str, state: NodeProgressState, prompt_id: str) -> None:
        """A node begins, or begins again because a lazy input has arrived."""

    def update_handler(
        self, node_id: str, value: float, max_value: float, state: NodeProgressState, prompt_id: str, image: Any = None
    ) -> None:
        """A node made ``value`` of ``max_value`` steps."""

    def finish_handler(self, node_id: str, state: NodeProgressState, prompt_id: str) -> None:
        """A node has outputs: it ran, or they were cached (then nothing was started)."""

    def reset(self) -> None:
        """Another prompt is about to begin."""

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False


class ProgressRegistry:
    """Handlers and node states of one prompt. It stays reachable, prompt_id included, until the next prompt begins."""

    def __init__(self, prompt_id: str, dynprompt: DynamicPrompt):
        self.prompt_id = prompt_id
        self.dynprompt = dynprompt
        self.nodes: dict[str, NodeProgressState] = {}
        self.handlers: dict[str, ProgressHandler] = {}

    def register_handler(self, handler: ProgressHandler) -> None:
        self.handlers[handler.name] = handler

    def unregister_handler(self, handler_name: str) -> None:
        if handler_name in self.handlers:
            self.handlers.pop(handler_name).reset()

    def start_progress(self, node_id: str) -> None:
        state = self._entry(node_id, NodeState.Running, 0.0, 1.0)
        for handler in self._enabled():
            handler.start_handler(node_id, state, self.prompt_id)

    def update_progress(self, node_id: str, value: float, max_value: float, image: Any = None) -> None:
        state = self._entry(node_id, NodeState.Running, value, max_value)
        for handler in self._enabled():
            handler.update_handler(node_id, value, max_value, state, self.prompt_id, image)

    def finish_progress(self, node_id: str) -> None:
        total = self.nodes[node_id]["max"] if node_id in self.nodes else 1.0
        state = self._entry(node_id, NodeState.Finished, total, total)
        for handler in self._enabled():  # unguarded on purpose: a handler that raises here must not go unnoticed
            handler.finish_handler(node_id, state, self.prompt_id)

    def reset_handlers(self) -> None:
        for handler in self.handlers.values():
            handler.reset()

    def _enabled(self) -> list[ProgressHandler]:
        return [handler for handler in self.handlers.values() if handler.enabled]

    def _entry(self, node_id: str, state: NodeState, value: float, total: float) -> NodeProgressState:
        entry = self.nodes.setdefault(node_id, NodeProgressState(state=state, value=value, max=total))
        entry.update(state=state, value=value, max=total)
        return entry


def get_progress_state() -> ProgressRegistry:
    """The registry of the prompt that runs or ran last; an empty one if none did."""
    host = find_host()
    return ProgressRegistry("", DynamicPrompt({})) if host is None else host.progress


def add_progress_handler(handler: ProgressHandler) -> None:
    """Let ``handler`` join the current registry, in place of one with the same name."""
    registry = get_progress_state()
    handler.set_registry(registry)
    registry.register_handler(handler)


class ProgressBar:
    """Progress of the node that creates it, also when a helper thread moves it. Moving it honours interrupts."""

    def __init__(self, total: float, node_id: str | None = None):
        context = get_executing_context()
        self.total = total
        self.current: float = 0
        self.node_id = node_id or (context.node_id if context else None)

    def update_absolute(self, value: float, total: float | None = None, preview: Any = None) -> None:
        if total is not None:
            self.total = total
        self.current = min(value, self.total)
        throw_exception_if_processing_interrupted()
        if self.node_id is not None:
            get_progress_state().update_progress(self.node_id, self.current, self.total, preview)

    def update(self, value: float) -> None:
        self.update_absolute(self.current + value)
