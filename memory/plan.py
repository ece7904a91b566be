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
from .resource import Cost, Mode
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
    """One heavy node: what it uses, and the bytes of its activations."""

    node: str
    uses: tuple[Use, ...]
    activation_bytes: int = 0


@dataclass(frozen=True)
class Item:
    """A resource as a plan sees it. ``total_bytes``: all of its parts, whole."""

    key: Key
    name: str
    costs: Mapping[Mode, Cost]
    total_bytes: int = 0

    @property
    def whole(self) -> Cost:
        return self.costs["whole"]

    @property
    def smallest_bytes(self) -> int:
        """The least that can be resident in any mode."""
        return min(cost.resident for cost in self.costs.values())


@dataclass(frozen=True)
class Choice:
    """The decision about one item. ``first`` and ``last`` are stages; ``read_bytes`` is all that the prompt reads of it."""

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
    """Decisions in the order of first use, the predicted peak of weight bytes and the stage where it is reached."""

    stages: tuple[Stage, ...]
    choices: tuple[Choice, ...]
    peak_bytes: int
    peak_node: str | None
    refusal: Refusal | None = None
    warnings: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()

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
    draft = _Draft(stages, items, _limits(stages, room, budget), streams_single_passes)
    refusal = draft.refusal()
    if refusal is not None:
        return Plan(tuple(stages), (), 0, None, refusal, items=tuple(items))
    choices = draft.kept(policy)
    peak, node = draft.peak(choices)
    warnings = () if policy != "keep" or all(c.is_kept for c in choices) else ("Not everything that should be kept fits.",)
    return Plan(tuple(stages), tuple(choices), peak, node, warnings=warnings, items=tuple(items))


def _limits(stages: Sequence[Stage], room: int | None, budget: int | None) -> list[int | None]:
    """Bytes for weights at each stage."""
    caps = [None if room is None else room - stage.activation_bytes for stage in stages]
    return [budget if cap is None else cap if budget is None else min(cap, budget) for cap in caps]


class _Draft:
    """Stages and items with the room of each stage."""

    def __init__(
        self, stages: Sequence[Stage], items: Sequence[Item], limits: Sequence[int | None], streams_single_passes: bool
    ) -> None:
        self._stages = stages
        self._limits = limits
        self._streams_single_passes = streams_single_passes
        used = [item for item in items if any(self._uses(item))]
        self._items = sorted(used, key=lambda item: self._interval(item)[0])

    def refusal(self) -> Refusal | None:
        """The stage and item that cannot fit even when each item is as small as it can be."""
        misfits: list[tuple[int, int, Item | None]] = []
        for number, limit in enumerate(self._limits):
            live = self._live(number)
            need = sum(self._smallest(item) for item in live) + max((self._transient(item) for item in live), default=0)
            if limit is not None and (limit <= 0 or need > limit):
                misfits.append((need, number, max(live, key=self._smallest, default=None)))
        if not misfits:
            return None
        need, number, item = max(misfits, key=lambda misfit: misfit[0])
        return self._refused(number, need, item)

    def kept(self, policy: Policy) -> list[Choice]:
        """Choices with as much kept for the next prompt as the policy wants and the room allows, dearest reload first."""
        chosen = self._fitted({})
        if policy == "free":
            return chosen
        keep: dict[Key, Item] = {}
        for item in sorted(self._items, key=lambda item: -item.whole.resident):
            if self._fits_kept({**keep, item.key: item}):
                keep[item.key] = item
        return self._fitted(keep)

    def peak(self, choices: Sequence[Choice]) -> tuple[int, str | None]:
        """The most that is resident at any stage, with what a fill takes on top."""
        totals = [self._total(number, choices) for number in range(len(self._stages))]
        if not totals:
            return 0, None
        highest = max(range(len(totals)), key=totals.__getitem__)
        return totals[highest], self._stages[highest].node

    def _fitted(self, keep: Mapping[Key, Item]) -> list[Choice]:
        """A mode for every item: the comfortable one, then the largest are streamed until every stage fits."""
        choices = [self._comfortable(item, item.key in keep) for item in self._items]
        for number, limit in enumerate(self._limits):
            while limit is not None and self._total(number, choices) > limit:
                position = self._largest_streamable(number, choices)
                if position is None:
                    break
                choices[position] = self._least(choices[position])
        return [self._grown(choice, choices) for choice in choices]

    def _comfortable(self, item: Item, is_kept: bool) -> Choice:
        runs_once = self._passes(item) == 1 and self._streams_single_passes
        if runs_once and not is_kept and "streamed" in item.costs and self._may_stream(item):
            return self._streamed(item, 0, "it runs once, and one pass is one read either way")
        reason = "it fits whole" + (" and stays for the next prompt" if is_kept else "")
        first, last = self._interval(item)
        whole = item.whole
        return Choice(item, "whole", whole.resident, whole.transient, first, last, whole.resident, is_kept=is_kept, reason=reason)

    def _streamed(self, item: Item, num_held: int, reason: str) -> Choice:
        cost = item.costs["streamed"]
        first, last = self._interval(item)
        passing = cost.reread_per_pass - num_held * cost.block_bytes
        read = cost.resident + num_held * cost.block_bytes + passing * self._passes(item)
        resident = cost.resident + num_held * cost.block_bytes
        return Choice(item, "streamed", resident, cost.transient, first, last, read, num_held, False, reason)

    def _least(self, choice: Choice) -> Choice:
        return self._streamed(choice.item, 0, "it does not fit whole")

    def _grown(self, choice: Choice, choices: Sequence[Choice]) -> Choice:
        """A streamed item that does not run just once holds as many blocks as there is room for, at every stage it is there."""
        cost = choice.item.costs.get("streamed")
        if choice.mode != "streamed" or cost is None or cost.block_bytes == 0 or self._passes(choice.item) == 1:
            return choice
        spare = [self._limits[n] for n in range(choice.first, choice.last + 1)]
        totals = [self._total(n, choices) for n in range(choice.first, choice.last + 1)]
        free = min((limit - total for limit, total in zip(spare, totals, strict=True) if limit is not None), default=0)
        held = min(free // cost.block_bytes, cost.num_blocks)
        return self._streamed(choice.item, held, f"it does not fit whole; {held} of {cost.num_blocks} blocks are held")

    def _largest_streamable(self, number: int, choices: Sequence[Choice]) -> int | None:
        able = [
            position
            for position, choice in enumerate(choices)
            if choice.mode == "whole" and "streamed" in choice.item.costs and self._may_stream(choice.item)
            if choice.is_kept or choice.first <= number <= choice.last
        ]
        return max(able, key=lambda position: choices[position].resident_bytes, default=None)

    def _fits_kept(self, keep: Mapping[Key, Item]) -> bool:
        """Whether these can stay through every stage, beside what each stage needs at least."""
        for number, limit in enumerate(self._limits):
            if limit is None:
                continue
            others = [item for item in self._live(number) if item.key not in keep]
            total = sum(item.whole.resident for item in keep.values()) + sum(self._smallest(item) for item in others)
            transient = max((self._transient(item) for item in [*keep.values(), *others]), default=0)
            if total + transient > limit:
                return False
        return True

    def _total(self, number: int, choices: Sequence[Choice]) -> int:
        live = [choice for choice in choices if choice.is_kept or choice.first <= number <= choice.last]
        filling = [choice.transient_bytes for choice in live if choice.first == number]
        return sum(choice.resident_bytes for choice in live) + max(filling, default=0)

    def _live(self, number: int) -> list[Item]:
        return [item for item in self._items if self._interval(item)[0] <= number <= self._interval(item)[1]]

    def _smallest(self, item: Item) -> int:
        return item.smallest_bytes if self._may_stream(item) else item.whole.resident

    def _transient(self, item: Item) -> int:
        return min(cost.transient for cost in item.costs.values())

    def _uses(self, item: Item) -> list[Use]:
        return [use for stage in self._stages for use in stage.uses if use.key == item.key]

    def _may_stream(self, item: Item) -> bool:
        return all(use.may_stream for use in self._uses(item))

    def _passes(self, item: Item) -> int:
        return sum(use.passes for use in self._uses(item))

    def _interval(self, item: Item) -> tuple[int, int]:
        stages = [n for n, stage in enumerate(self._stages) if any(use.key == item.key for use in stage.uses)]
        return stages[0], stages[-1]

    def _refused(self, number: int, need: int, item: Item | None) -> Refusal:
        stage, limit = self._stages[number], self._limits[number] or 0
        have = max(0, limit)
        if item is None or limit <= 0:
            activations = shown_bytes(stage.activation_bytes)
            message = (
                f"The activations of node {stage.node} take {activations}, which leaves no room for weights; "
                "choose a smaller picture or a shorter clip."
            )
            return Refusal(item.name if item else "activations", stage.node, need, have, message)
        smallest = ", ".join(f"{i.name} {shown_bytes(self._smallest(i))}" for i in self._items)
        message = (
            f"{item.name} needs at least {shown_bytes(need)} and {shown_bytes(have)} are available for weights; "
            f"give it {shown_bytes(need)} or use a smaller file (smallest possible: {smallest})."
        )
        return Refusal(item.name, stage.node, need, have, message)
