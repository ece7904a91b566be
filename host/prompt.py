"""The running prompt of a ComfyUI-like executor, as a session sees it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..memory.graph import ANY, PLAIN_TYPES, Key, Needed, Node, NodeClass, Output, link_of
from ..memory.handle import Handle
from ..memory.resource import Cost, Identity, Mode, Parts
from ..memory.session import GraphView
from .interface import Host
from .origins import Wiring, released
from .probe import Executor, find_executor


class RunningPrompt:
    """One prompt, read through the progress registry that the host makes anew for each. It is told of starts and finishes.

    ``followed``: keys of loaders that are not ours, whose objects are released after their last use all the same.
    """

    def __init__(self, registry: Any, host: Host, followed: Callable[[], Set[Key]] = frozenset) -> None:
        self.prompt_id: str = registry.prompt_id
        self.registry = weakref.ref(registry)
        self._dynprompt = registry.dynprompt
        self._host = host
        self._followed = followed
        self._executor: Executor | None = None
        self._finished: set[str] = set()
        self._wiring: _Wiring | None = None
        self._listed: _Listed | None = None
        self._wanted: _Wanted | None = None

    def started(self, node: str) -> None:
        """The node begins, perhaps again."""
        if node in self._finished:
            self._finished.discard(node)
            self._wanted = None

    def finished(self, node: str) -> None:
        """The node has outputs."""
        self._finished.add(node)
        if self._wanted is not None:
            self._wanted.finish(node)

    def version(self) -> Any:
        """Grows with every expansion, and with every override of a node."""
        overrides = getattr(self._dynprompt, "node_overrides", ())
        return len(self._dynprompt.ephemeral_prompt), len(overrides)

    def view(self) -> GraphView:
        """The graph with all expansions so far. Entries without a class (unknown to the front end) are left out."""
        wiring = self._read()
        return GraphView(wiring.version, wiring.nodes, self._constants(wiring.nodes), plain_types)

    def may_run(self) -> Container[str]:
        """Nodes that may still run, best source first: the executor's pending nodes, else what unfinished outputs need.

        Follows the prompt; nodes that have finished may be among them.
        """
        wiring = self._read()
        self._executor = self._executor or find_executor()
        if self._executor is not None:
            self._listed = self._listed or _Listed(self._executor, wiring, self._finished)
            return self._listed
        if self._wanted is None:
            self._wanted = _Wanted(self._output_nodes(wiring.nodes), wiring)
            for node in self._finished:
                self._wanted.finish(node)
        return self._wanted

    def will_run(self, node: str) -> bool:
        """Whether the executor has the node on its list: what lies behind lazy links is not, until it is asked for."""
        executor, wiring = self._executor, self._wiring
        is_listed = executor is not None and node in executor.pending
        return is_listed and node not in self._finished and (wiring is None or node not in wiring.expanded)

    def classes(self, class_type: str) -> NodeClass | None:
        """What a node class declares about its outputs."""
        return declared_class(self._host.node_class(class_type))

    def sources(self, nodes: Mapping[str, Node]) -> dict[Output, Key]:
        """Outputs of our loaders, and what they load according to their widgets; and of others whose objects are followed."""
        found, followed = loaded_resources(nodes, self._host), self._followed()
        others = wiring(nodes, self._host, found).loaders() if followed else {}
        return found | {output: key for output, key in others.items() if key in followed}

    def origins(self, node: str, name: str) -> tuple[Key, ...]:
        """Keys of the loaders that the object at a node's input may be from."""
        nodes = self._read().nodes
        link = link_of(nodes[node].inputs.get(name))
        return () if link is None else tuple(wiring(nodes, self._host, self.sources(nodes)).origins(link).values())

    def _read(self) -> _Wiring:
        version = self.version()
        if self._wiring is None or self._wiring.version != version:
            self._wiring = _Wiring.of(self._dynprompt, self._host, version)
            self._listed = self._wanted = None
        return self._wiring

    def _output_nodes(self, nodes: Mapping[str, Node]) -> Iterable[str]:
        """What the prompt was queued for, if the host tells, and output nodes of expansions; else all output nodes."""
        queued = self._host.outputs_to_execute()
        added = nodes if queued is None else self._dynprompt.ephemeral_prompt.keys() & nodes.keys()
        outputs = [node for node in added if getattr(self._host.node_class(nodes[node].class_type), "OUTPUT_NODE", False)]
        return [*(queued or ()), *outputs]

    def _constants(self, nodes: Mapping[str, Node]) -> dict[str, list[Key]]:
        """Handles that an expansion passed as plain objects."""
        ephemeral = {node: nodes[node] for node in self._dynprompt.ephemeral_prompt if node in nodes}
        held = {n: [v.component.identity for v in spec.inputs.values() if isinstance(v, Handle)] for n, spec in ephemeral.items()}
        return {node: keys for node, keys in held.items() if keys}


@dataclass(frozen=True)
class _Wiring:
    """``needs``: node -> producers of its inputs. ``lazily``: node -> producers behind its lazy links.

    ``expanded``: nodes that have children. They have run, wait for their children and give out what those give: in ``nodes``
    they are linked to them.
    """

    version: Any
    nodes: Mapping[str, Node]
    needs: Mapping[str, list[str]]
    lazily: Mapping[str, list[str]]
    expanded: Set[str]

    @classmethod
    def of(cls, dynprompt: Any, host: Host, version: Any) -> _Wiring:
        specs = {node: dynprompt.get_node(node) for node in [*dynprompt.original_prompt, *dynprompt.ephemeral_prompt]}
        nodes = {node: Node(s["class_type"], s.get("inputs", {})) for node, s in specs.items() if "class_type" in s}
        children = defaultdict(list)
        for child in dynprompt.ephemeral_prompt:
            children[dynprompt.get_parent_node_id(child)].append(child)
        for parent in children.keys() & nodes.keys():
            links = [link for child in children[parent] for link in _outputs(child, nodes, host)]
            nodes[parent] = Node(nodes[parent].class_type, {**nodes[parent].inputs, **{str(link): link for link in links}})
        needs = {node: _producers(spec.inputs) for node, spec in nodes.items()}
        lazily = {node: _producers(_lazy_inputs(host.node_class(spec.class_type), spec.inputs)) for node, spec in nodes.items()}
        return cls(version, nodes, needs, {node: producers for node, producers in lazily.items() if producers}, children.keys())


class _Listed:
    """By the executor's list: pending nodes, and what a pending node may still ask for behind its lazy links."""

    def __init__(self, executor: Executor, wiring: _Wiring, finished: Set[str]) -> None:
        self._executor = executor
        self._finished = finished  # a node that has just finished is pending for another moment
        self._expanded = wiring.expanded
        self._lazily = wiring.lazily
        self._undecided: set[str] = set()  # nodes that may ask
        self._behind = Needed(wiring.needs)

    def __contains__(self, node: object) -> bool:
        if node in self._executor.pending:
            return node not in self._expanded
        self._follow_decisions()
        return node in self._behind and node not in self._executor.cached

    def _follow_decisions(self) -> None:
        pending = self._executor.pending
        for node, producers in self._lazily.items():
            is_undecided = node in pending and node not in self._finished
            if is_undecided and node not in self._undecided:
                self._undecided.add(node)
                self._behind.enter(producers)
            elif not is_undecided and node in self._undecided:
                self._undecided.discard(node)
                self._behind.leave(producers)


class _Wanted:
    """By the outputs: what those that have not finished need, directly or not."""

    def __init__(self, outputs: Iterable[str], wiring: _Wiring) -> None:
        self._expanded = wiring.expanded
        self._needed = Needed(wiring.needs)
        self._needed.enter(outputs)

    def __contains__(self, node: object) -> bool:
        return node in self._needed and node not in self._expanded

    def finish(self, node: str) -> None:
        self._needed.finish(node)


def _outputs(node: str, nodes: Mapping[str, Node], host: Host) -> Iterable[list[Any]]:
    """Links to all outputs of a node, and to one at least."""
    cls: Any = host.node_class(nodes[node].class_type) if node in nodes else None
    return ([node, slot] for slot in range(max(1, len(cls.RETURN_TYPES or ()) if cls is not None else 0)))


def _producers(inputs: Mapping[str, Any]) -> list[str]:
    links = map(link_of, inputs.values())
    return [link[0] for link in links if link is not None]


def loaded_resources(nodes: Mapping[str, Node], host: Host) -> dict[Output, Key]:
    """Outputs of our loaders, and what they load according to their widgets."""
    found: dict[Output, Key] = {}
    for node, spec in nodes.items():
        cls = host.node_class(spec.class_type)
        if hasattr(cls, "lazy_h3_resources"):
            found.update({(node, slot): key for slot, key in _loaded(cls, spec.inputs).items()})
    releasing = [(node, name) for node, spec in nodes.items() if (name := released_input(host.node_class(spec.class_type)))]
    return found | released(nodes, releasing, wiring(nodes, host, found)) if releasing else found


def openings(nodes: Mapping[str, Node], host: Host) -> Iterator[Callable[[], object]]:
    """A call for each of our loaders whose widgets say what it loads: it raises what the loader will say of a bad file."""
    for spec in nodes.values():
        cls: Any = host.node_class(spec.class_type)
        if hasattr(cls, "components"):
            inputs = {name: value for name, value in spec.inputs.items() if name in _declared_inputs(cls)}
            if not any(map(link_of, inputs.values())):
                yield functools.partial(cls.components, **inputs)


def released_input(cls: Any) -> str | None:
    """The input whose object a node wants to be released after its last use, wherever it is from."""
    return getattr(cls, "RELEASES", None)


def wiring(nodes: Mapping[str, Node], host: Host, known: Mapping[Output, Key]) -> Wiring:
    """The nodes, to be asked where objects are from."""
    return Wiring(nodes, lambda class_type: declared_class(host.node_class(class_type)), known)


def plain_types(key: Key) -> frozenset[str]:
    """What carries nothing of a resource: core's conditions and samplers hold no weights of core's models."""
    return PLAIN_TYPES | {"CONDITIONING", "SAMPLER"} if is_core(key) else PLAIN_TYPES


def is_core(key: Key) -> bool:
    """Whether it is one of core's own models."""
    return isinstance(key, Identity) and key.kind.startswith("core ")


class Unmade:
    """One of core's models that no loader has made yet, as a plan sees it: as large as its files."""

    is_hosted = True
    parts = frozenset({"weights"})

    def __init__(self, identity: Identity, device: torch.device) -> None:
        self.identity = identity
        self.device = device
        self.name = f"{identity.kind} ({', '.join(Path(file.path).stem for file in identity.files)})"

    def nbytes(self) -> int:
        return sum(file.size for file in self.identity.files)

    def costs(self, parts: Parts, points: tuple[float, ...] = ()) -> Mapping[Mode, Cost]:
        return {"whole": Cost(self.nbytes())}

    def resident_parts(self) -> Parts:
        return frozenset()


def declared_class(cls: type | None) -> NodeClass | None:
    """What a node class declares about its outputs; None for a class that nobody knows."""
    return None if cls is None else _declared(cls)


def _loaded(cls: Any, inputs: Mapping[str, Any]) -> Mapping[int, Key]:
    """Slot -> resource; a loader with a computed input may load anything."""
    inputs = {name: value for name, value in inputs.items() if name in _declared_inputs(cls)}  # others never reach a node
    if any(link_of(value) is not None for value in inputs.values()):
        return dict.fromkeys(range(len(cls.RETURN_TYPES)), ANY)
    return cls.lazy_h3_resources(**inputs)


@functools.lru_cache(maxsize=4096)
def _declared(cls: Any) -> NodeClass:
    carries = getattr(cls, "CARRIES", None)
    slots = None if carries is None else frozenset(carries)
    is_async = inspect.iscoroutinefunction(getattr(cls, getattr(cls, "FUNCTION", ""), None))
    return NodeClass(tuple(map(str, cls.RETURN_TYPES or ())), slots, getattr(cls, "TAKES_TURNS", False), is_async)


@functools.lru_cache(maxsize=4096)
def _lazy_names(cls: Any) -> frozenset[str]:
    inputs = _declared_inputs(cls)
    return frozenset(name for name, spec in inputs.items() if len(spec) > 1 and isinstance(spec[1], dict) and spec[1].get("lazy"))


def _lazy_inputs(cls: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    names = frozenset() if cls is None else _lazy_names(cls)
    return {name: inputs[name] for name in names & inputs.keys()}


def _declared_inputs(cls: Any) -> dict[str, Any]:
    kinds = cls.INPUT_TYPES()
    return {**kinds.get("required", {}), **kinds.get("optional", {})}
