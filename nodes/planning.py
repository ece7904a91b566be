"""The plan of a prompt: who needs what when, at what cost, from its graph and the headers of its files."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from ..host.interface import Host
from ..host.prompt import declared_class, loaded_resources
from ..memory.component import Component
from ..memory.device import heap_slack, is_unified
from ..memory.graph import Key, Node, trails
from ..memory.plan import Item, Plan, Policy, Stage, Use, make_plan
from ..memory.resource import Cost, Mode
from ..memory.turns import grouped_order
from .demand import Demand, GraphSizes
from .widgets import checked

Find = Callable[[Key], Component | None]


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
    paths = trails(nodes, lambda name: declared_class(classes.get(name)), loaded_resources(nodes, host))
    needs = {
        node: frozenset(key for key, trail in paths.items() if node in trail.consumers)
        for node, spec in nodes.items()
        if hasattr(classes[spec.class_type], "demand") and (may_run is None or node in may_run)
    }
    components = {key: found for key in paths if (found := find(key)) is not None}
    valid = {node: checked(node, spec, classes[spec.class_type]) for node, spec in nodes.items()}
    sizes = GraphSizes(valid, {name: cls for name, cls in classes.items() if cls is not None})
    demands = {}
    for node in grouped_order(nodes, needs):
        cls: Any = classes[nodes[node].class_type]
        used = [key for key in needs[node] if key in components and components[key].kind == cls.USES]
        demands[node] = {key: cls.demand(valid[node].inputs, sizes, components[key]) for key in used}
    stages = _stages(demands, components, options)
    plan = make_plan(
        stages, _items(demands, components, options), room=options.room, budget=options.budget, policy=options.policy,
        streams_single_passes=options.may_stream,
    )  # fmt: skip
    return plan if not sizes.guesses else plan.warned(sizes.guesses)


def _stages(
    demands: Mapping[str, Mapping[Key, Demand]], components: Mapping[Key, Component], options: PlanOptions
) -> list[Stage]:
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


def _items(demands: Mapping[str, Mapping[Key, Demand]], components: Mapping[Key, Component], options: PlanOptions) -> list[Item]:
    """All components that are asked for, with the parts and points of all who ask."""
    by_key: dict[Key, list[Demand]] = {}
    for asked in demands.values():
        for key, demand in asked.items():
            by_key.setdefault(key, []).append(demand)
    items = []
    for key, wanted in by_key.items():
        component = components[key]
        parts = frozenset().union(*(demand.parts for demand in wanted)) & component.parts
        points = tuple(sorted({point for demand in wanted for point in demand.points})) if options.may_fold else ()
        items.append(_item(key, component, parts, points))
    return items


def _item(key: Key, component: Component, parts: frozenset[str], points: tuple[float, ...]) -> Item:
    """What is resident already stays as it is."""
    is_resident = parts <= component.resident_parts() and component.is_ready_for(points)
    costs: Mapping[Mode, Cost] = {"whole": Cost(component.live_bytes())} if is_resident else component.costs(parts, points)
    return Item(key, component.name, costs, component.nbytes(), points, parts, is_resident)
