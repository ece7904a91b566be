"""The plan of a prompt: who needs what when, at what cost, from its graph and the headers of its files."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..host.interface import Host
from ..host.prompt import declared_class, loaded_resources, plain_types
from ..memory.device import heap_slack, is_unified
from ..memory.graph import Key, Node, needs_of, trails
from ..memory.plan import Item, Plan, Policy, Stage, Use, make_plan
from ..memory.resource import Cost, Foldable, Mode, is_hosted
from ..memory.turns import grouped_order
from .demand import Demand, GraphSizes
from .widgets import checked

COMPUTED_TYPES = frozenset({"CONDITIONING", "LATENT", "IMAGE", "AUDIO", "VIDEO"})

Find = Callable[[Key], Any]  # a Component, a hosted resource, or None


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may do. ``room``: bytes for weights and activations together; ``budget``: for weights alone."""

    room: int | None = None
    budget: int | None = None
    policy: Policy = "auto"
    may_stream: bool = True
    may_fold: bool = True


def planned(
    nodes: Mapping[str, Node], host: Host, find: Find, options: PlanOptions, may_run: Container[str] | None = None
) -> Plan:
    """Plan the heavy nodes of a prompt that may run (all, without ``may_run``). ``find`` gives the component of a key.

    Raises ValueError for a widget value that no validation would let through.
    """
    classes = {spec.class_type: host.node_class(spec.class_type) for spec in nodes.values()}
    paths = trails(nodes, lambda name: declared_class(classes.get(name)), loaded_resources(nodes, host), plain=plain_types)
    heavy = [node for node, spec in nodes.items() if _computes(classes[spec.class_type])]
    needs = needs_of((node for node in heavy if may_run is None or node in may_run), paths)
    components = {key: found for key in paths if (found := find(key)) is not None}
    valid = {node: checked(node, spec, classes[spec.class_type]) for node, spec in nodes.items()}
    sizes = GraphSizes(valid, {name: cls for name, cls in classes.items() if cls is not None})
    demands = {}
    for node in grouped_order(nodes, needs):
        reaching = {key: components[key] for key in needs[node] if key in components}
        demands[node] = _demands(classes[nodes[node].class_type], valid[node], sizes, reaching)
    plan = make_plan(
        _stages(demands, components, options),
        _items(demands, components, options),
        room=options.room,
        budget=options.budget,
        policy=options.policy,
        streams_single_passes=options.may_stream,
    )
    return plan.warned(sizes.guesses)


def _demands(cls: Any, node: Node, sizes: GraphSizes, reaching: Mapping[Key, Any]) -> dict[Key, Demand]:
    """What a node asks of what may reach it: of the kind that it uses, if it says so, else of all that the host lists."""
    if hasattr(cls, "demand"):
        used = {key: found for key, found in reaching.items() if found.identity.kind == cls.USES}
        return {key: cls.demand(node.inputs, sizes, found) for key, found in used.items()}
    return {key: Demand(found.parts, may_stream=False) for key, found in reaching.items() if is_hosted(found)}


def _stages(demands: Mapping[str, Mapping[Key, Demand]], components: Mapping[Key, Any], options: PlanOptions) -> list[Stage]:
    """One for each node that asks for something. What the RAM holds takes room for weights only where they are in it, too."""
    stages, results = [], 0
    for node, asked in demands.items():
        if asked:
            uses = tuple(Use(key, demand.num_passes, demand.may_stream and options.may_stream) for key, demand in asked.items())
            activations = max(demand.activation_bytes for demand in asked.values())
            if any(is_unified(components[key].device) for key in asked):
                results += max(demand.output_bytes for demand in asked.values())
                activations += heap_slack(activations)
            stages.append(Stage(node, uses, activations, results))
    return stages


def _items(demands: Mapping[str, Mapping[Key, Demand]], components: Mapping[Key, Any], options: PlanOptions) -> list[Item]:
    """All components that are asked for, with the parts and points of all who ask."""
    by_key: dict[Key, list[Demand]] = {}
    for asked in demands.values():
        for key, demand in asked.items():
            by_key.setdefault(key, []).append(demand)
    items = []
    for key, wanted in by_key.items():
        component = components[key]
        parts = frozenset().union(*(demand.parts for demand in wanted)) & component.parts
        items.append(_item(key, component, parts, _points(wanted) if options.may_fold else ()))
    return items


def _points(wanted: Sequence[Demand]) -> tuple[float, ...]:
    """What to fold for; nothing if somebody may ask for anything, since each row that is not known is read for."""
    points = [demand.points for demand in wanted]
    return () if None in points else tuple(sorted({point for known in points if known for point in known}))


def _item(key: Key, component: Any, parts: frozenset[str], points: tuple[float, ...]) -> Item:
    """What is resident already stays as it is."""
    is_ready = not isinstance(component, Foldable) or component.is_ready_for(points)
    is_resident = parts <= component.resident_parts() and is_ready
    costs: Mapping[Mode, Cost] = {"whole": Cost(component.live_bytes())} if is_resident else component.costs(parts, points)
    return Item(key, component.name, costs, component.nbytes(), points, parts, is_resident, is_hosted(component))


def _computes(cls: type | None) -> bool:
    """Whether a node computes with weights: ours say so; of others, those that give out what takes weights to make."""
    return hasattr(cls, "demand") or not COMPUTED_TYPES.isdisjoint(map(str, getattr(cls, "RETURN_TYPES", None) or ()))
