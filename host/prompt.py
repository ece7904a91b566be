"""The running prompt of a ComfyUI-like executor, as a session sees it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ..memory.graph import ANY, Key, Node, NodeClass, Output, ancestors, link_of
from ..memory.handle import Handle
from ..memory.session import GraphView
from .interface import Host
from .probe import executor_view


class RunningPrompt:
    """One prompt, read through the progress registry that the host makes anew for each."""

    def __init__(self, registry: Any, host: Host) -> None:
        self.prompt_id: str = registry.prompt_id
        self.registry = weakref.ref(registry)
        self._dynprompt = registry.dynprompt
        self._host = host
        self._nodes: dict[str, Node] = {}
        self._cached: frozenset[str] = frozenset()

    def version(self) -> Any:
        """Grows with every expansion, and with every override of a node."""
        overrides = getattr(self._dynprompt, "node_overrides", ())
        return len(self._dynprompt.ephemeral_prompt), len(overrides)

    def view(self) -> GraphView:
        """The graph with all expansions so far. Entries without a class (unknown to the front end) are left out."""
        version = self.version()
        ids = [*self._dynprompt.original_prompt, *self._dynprompt.ephemeral_prompt]
        specs = {node: self._dynprompt.get_node(node) for node in ids}
        self._nodes = {n: Node(s["class_type"], s.get("inputs", {})) for n, s in specs.items() if "class_type" in s}
        return GraphView(version, self._nodes, self._constants())

    def may_run(self) -> set[str]:
        """Nodes that may still run, best source first: the executor's pending nodes, else what the outputs need."""
        seen = executor_view()
        if seen is not None:
            self._cached = seen.cached
            return set(seen.pending) | self._behind_lazy_links(seen.pending)
        return ancestors(self._nodes, self._output_nodes()) - self._cached

    def classes(self, class_type: str) -> NodeClass | None:
        """What a node class declares about its outputs."""
        cls = self._host.node_class(class_type)
        return None if cls is None else _declared(cls)

    def sources(self, nodes: Mapping[str, Node]) -> dict[Output, Key]:
        """Outputs of our loaders, and what they load according to their widgets."""
        found: dict[Output, Key] = {}
        for node, spec in nodes.items():
            cls = self._host.node_class(spec.class_type)
            if hasattr(cls, "resources"):
                found.update({(node, slot): key for slot, key in _loaded(cls, spec.inputs).items()})
        return found

    def _constants(self) -> dict[str, list[Key]]:
        """Handles that an expansion passed as plain objects."""
        ephemeral = {node: self._nodes[node] for node in self._dynprompt.ephemeral_prompt if node in self._nodes}
        held = {n: [v.component.identity for v in spec.inputs.values() if isinstance(v, Handle)] for n, spec in ephemeral.items()}
        return {node: keys for node, keys in held.items() if keys}

    def _behind_lazy_links(self, pending: Iterable[str]) -> set[str]:
        """Nodes that a pending node may still ask for: they are not pending themselves until it does."""
        targets = []
        for node in pending:
            spec = self._nodes.get(node)
            cls = spec and self._host.node_class(spec.class_type)
            for name in _lazy_inputs(cls) if cls else ():
                link = link_of(spec.inputs.get(name)) if spec else None
                targets += [link[0]] if link else []
        return ancestors(self._nodes, targets) - self._cached

    def _output_nodes(self) -> list[str]:
        queued = self._host.outputs_to_execute()
        if queued is not None:
            return list(queued)
        classes = {node: self._host.node_class(spec.class_type) for node, spec in self._nodes.items()}
        return [node for node, cls in classes.items() if getattr(cls, "OUTPUT_NODE", False)]


def _loaded(cls: Any, inputs: Mapping[str, Any]) -> Mapping[int, Key]:
    """Slot -> resource; a loader with a computed input may load anything."""
    inputs = {name: value for name, value in inputs.items() if name in _declared_inputs(cls)}  # others never reach a node
    if any(link_of(value) is not None for value in inputs.values()):
        return dict.fromkeys(range(len(cls.RETURN_TYPES)), ANY)
    return cls.resources(**inputs)


@functools.lru_cache(maxsize=4096)
def _declared(cls: Any) -> NodeClass:
    carries = getattr(cls, "CARRIES", None)
    slots = None if carries is None else frozenset(carries)
    return NodeClass(tuple(map(str, cls.RETURN_TYPES or ())), slots, getattr(cls, "TAKES_TURNS", False))


@functools.lru_cache(maxsize=4096)
def _lazy_inputs(cls: Any) -> tuple[str, ...]:
    inputs = _declared_inputs(cls)
    return tuple(name for name, spec in inputs.items() if len(spec) > 1 and isinstance(spec[1], dict) and spec[1].get("lazy"))


def _declared_inputs(cls: Any) -> dict[str, Any]:
    kinds = cls.INPUT_TYPES()
    return {**kinds.get("required", {}), **kinds.get("optional", {})}
