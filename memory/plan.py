"""What to hold, when and how, decided before anything is read. Pure: integers in, a plan out.

A *stage* is one heavy node, in the order in which they will run. An *item* is a resource with its costs. A plan gives each item
a mode and says whether it is kept for the next prompt, so that at no stage the weights exceed what the budget and the machine
leave beside the stage's own activations. If nothing can do that, it is a refusal with numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .graph import Key
from .resource import Cost, Mode, Parts
from .units import shown_bytes

Policy = Literal["auto", "free", "keep"]


@dataclass(frozen=True)
class Use:
    """What a stage does with an item: ``passes`` runs through its blocks; ``may_stream`` if reading them each time can pay."""

    key: Key
    passes: int = 1
    may_stream: bool = True


@dataclass(frozen=True)
class Stage:
    """One heavy node: what it uses, the bytes of its activations, and of all results up to its own that the host keeps."""

    node: str
    uses: tuple[Use, ...]
    activation_bytes: int = 0
    result_bytes: int = 0

    @property
    def bytes_beside_weights(self) -> int:
        return self.activation_bytes + self.result_bytes


@dataclass(frozen=True)
class Item:
    """A resource as a plan sees it.

    ``parts``: what the prompt needs of it; ``points``: what it is folded for; ``total_bytes``: all of its parts, whole;
    ``is_resident``: nothing of it has to be read. ``leaves``: it goes after each use that no other use follows at once.
    """

    key: Key
    name: str
    costs: Mapping[Mode, Cost]
    total_bytes: int = 0
    points: tuple[float, ...] = ()
    parts: Parts = frozenset()
    is_resident: bool = False
    leaves: bool = False

    @property
    def whole(self) -> Cost:
        return self.costs["whole"]


@dataclass(frozen=True)
class Choice:
    """The decision about one item.

    ``first`` and ``last``: stages that use it; ``prefetch_at``: an earlier one, during which it may be read; ``read_bytes``: all
    that the prompt reads of it.
    """

    item: Item
    mode: Mode
    resident_bytes: int
    transient_bytes: int
    first: int
    last: int
    read_bytes: int
    num_held: int = 0
    is_kept: bool = False
    reason: str = ""
    prefetch_at: int | None = None

    @property
    def begin(self) -> int:
        """The stage since which it may be in memory."""
        return self.first if self.prefetch_at is None else self.prefetch_at

    @property
    def grant(self) -> int | None:
        return self.resident_bytes if self.mode == "streamed" else None


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan: the item that decides, the bytes it needs at least, the bytes there are, and what would help."""

    name: str
    node: str
    need_bytes: int
    have_bytes: int
    message: str


@dataclass(frozen=True)
class Plan:
    """Decisions in the order of first use, and the predicted peak of weight bytes and the stage where it is reached.

    ``peak_growth_bytes`` and ``growth_node``: the same of weights, activations and results together.
    """

    stages: tuple[Stage, ...]
    choices: tuple[Choice, ...]
    peak_bytes: int
    peak_node: str | None
    refusal: Refusal | None = None
    warnings: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()
    peak_growth_bytes: int = 0
    growth_node: str | None = None

    def warned(self, more: Sequence[str]) -> Plan:
        """The plan with these warnings, too."""
        return replace(self, warnings=(*self.warnings, *dict.fromkeys(more)))

    def choice(self, key: Key) -> Choice | None:
        return next((choice for choice in self.choices if choice.item.key == key), None)


def make_plan(
    stages: Sequence[Stage],
    items: Sequence[Item],
    *,
    room: int | None = None,
    budget: int | None = None,
    policy: Policy = "auto",
    streams_single_passes: bool = True,
) -> Plan:
    """Plan one prompt.

    ``room``: bytes that weights and activations may take on the machine together, None for no limit; ``budget``: cap on weights
    alone. ``streams_single_passes``: stream what runs once, since one pass costs one read either way.
    """
    draft = _Draft(stages, items, room, budget, streams_single_passes)
    refusal = draft.refusal()
    if refusal is not None:
        return Plan(tuple(stages), (), 0, None, refusal, items=tuple(items))
    choices = draft.kept(policy)
    peak_bytes, peak_node = draft.peak(choices)
    growth_bytes, growth_node = draft.growth(choices)
    is_short = policy == "keep" and not all(choice.is_kept for choice in choices)
    return Plan(
        tuple(stages),
        tuple(draft.prefetched(choices)),
        peak_bytes,
        peak_node,
        warnings=("Not everything that should be kept fits.",) if is_short else (),
        items=tuple(items),
        peak_growth_bytes=growth_bytes,
        growth_node=growth_node,
    )


def _limit(stage: Stage, room: int | None, budget: int | None) -> int | None:
    """Bytes for weights at a stage; None for no limit."""
    bounds = [budget, None if room is None else room - stage.bytes_beside_weights]
    return min((bound for bound in bounds if bound is not None), default=None)


class _Draft:
    """Stages and items with the room of each stage."""

    def __init__(
        self, stages: Sequence[Stage], items: Sequence[Item], room: int | None, budget: int | None, streams_single_passes: bool
    ) -> None:
        self._stages = stages
        self._room = room
        self._budget = budget
        self._limits = [_limit(stage, room, budget) for stage in stages]
        self._streams_single_passes = streams_single_passes
        self._users = {
            item.key: [n for n, s in enumerate(stages) if any(use.key == item.key for use in s.uses)] for item in items
        }
        used = [item for item in items if self._users[item.key]]
        self._items = sorted(used, key=lambda item: self._interval(item)[0])

    def refusal(self) -> Refusal | None:
        """The stage that falls shortest when each item is as small as it can be."""
        choices = [self._smallest(item) for item in self._items]
        misfits = []
        for number, limit in enumerate(self._limits):
            need = self._least(number, choices)
            if limit is not None and (limit <= 0 or need > limit):
                misfits.append((need - limit, number, need))
        if not misfits:
            return None
        _, number, need = max(misfits)
        return self._refused(number, need, choices)

    def kept(self, policy: Policy) -> list[Choice]:
        """Choices with as much kept for the next prompt as the policy wants and the room allows, dearest reload first.

        What is kept saves one reload. So nothing is kept that would make others pass through memory once more.
        """
        chosen = self._fitted(frozenset())
        if policy == "free":
            return chosen
        for item in sorted(self._items, key=lambda item: -item.whole.resident):
            keys = {choice.item.key for choice in chosen if choice.is_kept} | {item.key}
            trial = self._fitted(frozenset(keys))
            pairs = zip(trial, chosen, strict=True)
            if self._fits(trial) and all(new.is_kept or new.read_bytes <= old.read_bytes for new, old in pairs):
                chosen = trial
        return chosen

    def peak(self, choices: Sequence[Choice]) -> tuple[int, str | None]:
        """The most that is resident at any stage, with what a fill takes on top."""
        return self._highest([self._total(number, choices) for number in range(len(self._stages))])

    def growth(self, choices: Sequence[Choice]) -> tuple[int, str | None]:
        """The same, with activations and results."""
        return self._highest([self._total(n, choices) + stage.bytes_beside_weights for n, stage in enumerate(self._stages)])

    def _highest(self, totals: Sequence[int]) -> tuple[int, str | None]:
        if not totals:
            return 0, None
        highest = max(range(len(totals)), key=totals.__getitem__)
        return totals[highest], self._stages[highest].node

    def prefetched(self, choices: Sequence[Choice]) -> list[Choice]:
        """The choices with the stage at which each may be read ahead: only the next to be used, and only what is held whole.

        It must fit at every stage that it waits through, and raises no peak: neither of weights nor with activations.
        """
        result = [*choices]
        ceilings = self._ceilings(choices)
        for place, choice in enumerate(choices):
            if choice.mode == "streamed" or choice.item.is_resident or choice.item.leaves:
                continue
            earliest = max((other.first for other in choices if other.first < choice.first), default=choice.first)
            for begin in range(choice.first - 1, earliest - 1, -1):
                trial = [*result[:place], replace(choice, prefetch_at=begin), *result[place + 1 :]]
                if any(self._total(number, trial) > ceilings[number] for number in range(begin, choice.first + 1)):
                    break
                result = trial
        return result

    def _ceilings(self, choices: Sequence[Choice]) -> list[int]:
        """For each stage, the weights that break no limit and raise no peak."""
        totals = [self._total(number, choices) for number in range(len(self._stages))]
        beside = [stage.bytes_beside_weights for stage in self._stages]
        weights, growth = max(totals, default=0), max(map(sum, zip(totals, beside, strict=True)), default=0)
        limits = (weights if limit is None else limit for limit in self._limits)
        return [min(weights, growth - own, limit) for own, limit in zip(beside, limits, strict=True)]

    def _fitted(self, keep: frozenset[Key]) -> list[Choice]:
        """A mode for every item: all as small as can be at first, then grown where there is room, what runs most often first."""
        choices = {i.key: self._whole(i, is_kept=True) if i.key in keep else self._smallest(i) for i in self._items}
        for item in sorted(self._items, key=lambda item: -self._passes(item)):
            if item.key not in keep:
                choices[item.key] = self._grown(item, choices)
        return list(choices.values())

    def _grown(self, item: Item, choices: Mapping[Key, Choice]) -> Choice:
        """The item as it is held best in the room that the others leave it at every stage."""
        least, whole = choices[item.key], self._whole(item)
        passes = self._passes(item)
        if least.mode == "whole" or (passes == 1 and self._streams_single_passes):
            return least
        if self._fits(list({**choices, item.key: whole}.values())):
            return whole
        if passes == 1:
            return self._streamed(item, 0, "it does not fit whole")
        cost = item.costs["streamed"]
        held = cost.num_held(self._spare(least, list(choices.values())))
        return self._streamed(item, held, f"it does not fit whole; {held} of {cost.num_blocks} blocks are held")

    def _smallest(self, item: Item) -> Choice:
        streamed = item.costs.get("streamed")
        if streamed is None or not self._may_stream(item) or streamed.resident >= item.whole.resident:
            return self._whole(item)
        return self._streamed(item, 0, "it runs once, and one pass is one read either way")

    def _whole(self, item: Item, is_kept: bool = False) -> Choice:
        reason = "it fits whole" + (" and stays for the next prompt" if is_kept else "")
        return self._chosen(item, "whole", item.whole, reason=reason, is_kept=is_kept)

    def _streamed(self, item: Item, num_held: int, reason: str) -> Choice:
        return self._chosen(item, "streamed", item.costs["streamed"].holding(num_held), num_held, reason)

    def _chosen(self, item: Item, mode: Mode, cost: Cost, num_held: int = 0, reason: str = "", is_kept: bool = False) -> Choice:
        first, last = self._interval(item)
        read = cost.read_bytes(self._passes(item)) * (1 if is_kept else self._num_stays(item))
        return Choice(item, mode, cost.resident, cost.transient, first, last, read, num_held, is_kept, reason)

    def _fits(self, choices: Sequence[Choice]) -> bool:
        return all(limit is None or self._total(number, choices) <= limit for number, limit in enumerate(self._limits))

    def _spare(self, choice: Choice, choices: Sequence[Choice]) -> int:
        """Bytes that are free at every stage of one of the choices."""
        stages = range(choice.first, choice.last + 1)
        return min((limit - self._total(n, choices) for n in stages if (limit := self._limits[n]) is not None), default=0)

    def _least(self, number: int, choices: Sequence[Choice]) -> int:
        """Weights that a stage cannot do without: what leaves may be in memory one by one, if the stage uses it at all."""
        leaving = [choice for choice in choices if choice.item.leaves and self._is_live(choice, number)]
        largest = sorted(leaving, key=lambda choice: choice.resident_bytes)[-1:]
        return self._total(number, [*(choice for choice in choices if not choice.item.leaves), *largest])

    def _total(self, number: int, choices: Sequence[Choice]) -> int:
        """Weights at a stage, with what fills take on top: one after the other, but for those that are read ahead."""
        live = [choice for choice in choices if self._is_live(choice, number)]
        filling = [choice for choice in live if choice.begin <= number <= choice.first]
        in_turn = [choice.transient_bytes for choice in filling if choice.prefetch_at is None]
        beside = [choice.transient_bytes for choice in filling if choice.prefetch_at is not None]
        return sum(choice.resident_bytes for choice in live) + max(in_turn, default=0) + sum(beside)

    def _uses(self, item: Item) -> list[Use]:
        return [use for stage in self._stages for use in stage.uses if use.key == item.key]

    def _may_stream(self, item: Item) -> bool:
        return all(use.may_stream for use in self._uses(item))

    def _passes(self, item: Item) -> int:
        return sum(use.passes for use in self._uses(item))

    def _interval(self, item: Item) -> tuple[int, int]:
        users = self._users[item.key]
        return users[0], users[-1]

    def _num_stays(self, item: Item) -> int:
        """How often it comes into memory."""
        users = self._users[item.key]
        return sum(number - 1 not in users for number in users) if item.leaves else 1

    def _is_live(self, choice: Choice, number: int) -> bool:
        """Whether it is in memory at a stage."""
        is_between = choice.item.leaves and number not in self._users[choice.item.key]
        return choice.is_kept or (choice.begin <= number <= choice.last and not is_between)

    def _refused(self, number: int, need: int, choices: Sequence[Choice]) -> Refusal:
        stage, limit = self._stages[number], self._limits[number] or 0
        live = sorted((c for c in choices if c.first <= number <= c.last), key=lambda choice: -choice.resident_bytes)
        if not live or limit <= 0:
            name = live[0].item.name if live else "activations"
            return Refusal(name, stage.node, need, max(0, limit), self._nothing_left(stage, name, need))
        item, *others = [choice.item for choice in live]
        beside = f" together with {', '.join(other.name for other in others)}" if others else ""
        smallest = ", ".join(f"{choice.item.name} {shown_bytes(choice.resident_bytes)}" for choice in choices)
        message = (
            f"{item.name} needs at least {shown_bytes(need)}{beside} and {shown_bytes(limit)} are available for weights; "
            f"give it {shown_bytes(need)} or use a smaller file (smallest possible: {smallest})."
        )
        return Refusal(item.name, stage.node, need, limit, message)

    def _nothing_left(self, stage: Stage, name: str, need: int) -> str:
        """Why there is no byte for weights."""
        if self._budget == 0:
            return f"The budget is 0, which is too small for any weights; {name} needs at least {shown_bytes(need)}: raise it."
        if self._room == 0:
            return (
                f"{name} needs at least {shown_bytes(need)}, and no memory is free beyond what must be left for the rest of the "
                "machine; close other programs."
            )
        return (
            f"The activations of node {stage.node} take {shown_bytes(stage.bytes_beside_weights)}, which leaves no room for "
            "weights; choose a smaller picture or a shorter clip."
        )
