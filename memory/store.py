"""The process-wide store of resources: fills what is used, reads ahead, and decides who must go.

States: absent -> filling -> resident -> dropping -> absent, per resource, under one lock; reading happens outside it. A resource
in use (pinned) is never dropped: releasing it then means "when the last pin is gone".
"""

from __future__ import annotations

import contextvars
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, NoReturn

from . import device as devices
from .frames import forget_locals
from .ledger import Ledger
from .resource import Cost, FillRequest, Foldable, Hints, Identity, Mode, Parts, Resource
from .table import Entry, Owner, Table
from .units import shown_bytes

log = logging.getLogger("lazy_h3")

OnFill = Callable[[Resource, int, int], None]  # (resource, bytes done, bytes in all); may raise to cancel
NO_HINTS = Hints()
WAIT_SECONDS = 0.1


class Decision(NamedTuple):
    """How to hold a resource, and why: the bytes it may take in streamed mode, the points its sub-modules are folded for."""

    mode: Mode
    grant: int | None = None
    points: tuple[float, ...] = ()
    reason: str = ""


class Unwanted(Exception):
    """Ends a read that was begun ahead of its user; says for what."""


class _Step(NamedTuple):
    """One thing to do until a resource is as its user needs it; ``cost``: what it adds."""

    cost: Cost
    what: str
    run: Callable[[], None]
    is_last: bool = True


class MemoryRefused(RuntimeError):
    """A resource does not fit. Raised before a byte of it is read."""

    def __init__(self, component: str, need_bytes: int, have_bytes: int, message: str) -> None:
        super().__init__(message)
        self.component = component
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class Store(Table):
    """The table of all resources, and everything that changes it.

    ``on_use(resource)`` observers run when a resource is about to be used, ``on_ready`` when it is filled for that; ``on_fill``
    observers see progress and may raise to cancel; ``on_change(resource, is_resident)`` follow fills and drops;
    ``before_fill(resource, bytes)`` may ask others to make room; ``on_settle`` may look at what others have filled or dropped.
    """

    def __init__(self, ledger: Ledger | None = None, budget: int | None = None, pretended_total: int | None = None) -> None:
        super().__init__(budget, pretended_total)
        self.ledger = ledger or Ledger()
        self.ledger.measure = self.live_bytes
        self.decide: Callable[[Resource, Parts, Hints], Decision | None] = lambda *_: None  # the plan's word on mode and grant
        self.on_use: list[Callable[[Resource], None]] = []
        self.on_ready: list[Callable[[Resource], None]] = []
        self.on_fill: list[OnFill] = []
        self.on_change: list[Callable[[Resource, bool], None]] = []
        self.before_fill: list[Callable[[Resource, int], None]] = []
        self.on_settle: list[Callable[[], None]] = []
        self.last_refusal: MemoryRefused | None = None
        self._departed: dict[Identity, Entry] = {}  # gone on a thread that must not tell
        self._changed = threading.Condition(self._lock)

    def add(self, resource: Resource) -> Resource:
        """The resource of this identity: the known one if there is one, else this."""
        with self._lock:
            known = self._known.setdefault(resource.identity, resource)
        if known is resource and hasattr(resource, "acquire"):
            resource.acquire = partial(_use_weakly, weakref.ref(self), weakref.ref(resource))
        return known

    @contextmanager
    def use(
        self, resource: Resource, parts: Parts | None = None, owner: Owner | None = None, hints: Hints = NO_HINTS
    ) -> Iterator[Resource]:
        """Pin the resource, fill the parts that are missing, and unpin at the end. Re-entrant, on any thread.

        Raises MemoryRefused before reading if it does not fit, and whatever the fill raises; the pin is gone then.
        """
        resource = self.add(resource)
        parts = resource.parts if parts is None else parts
        owner = owner or ("use", threading.get_ident())
        for observer in self.on_use:
            observer(resource)
        entry = self._pin(resource, owner)
        try:
            self._ensure_filled(entry, parts, hints)
            for observer in self.on_ready:
                observer(resource)
            yield resource
        except BaseException as error:
            forget_locals(error)
            raise
        finally:
            self._unpin(entry, owner)

    def prefetch(
        self, resource: Resource, parts: Parts, points: tuple[float, ...] = (), beside: int = 0
    ) -> threading.Thread | None:
        """Begin to fill an absent resource whole, on a thread of its own, for a user who is still to come; None without room.

        It takes only room that is free, ``beside`` bytes of the pool left over, and gives it back to whoever needs it before that
        user comes. Observers of changes hear of it here, and of its end on the next thread that uses it or calls ``settle``. A
        read that fails leaves nothing: the user reads it again, and says what is wrong with it.
        """
        resource = self.add(resource)
        cost = resource.costs(parts, points)["whole"]
        entry = Entry(resource, "filling", reserved=cost.peak, progress=(0, cost.resident))
        request = FillRequest(parts, points=points, on_bytes=partial(self._note_prefetch, entry))
        context = contextvars.copy_context()  # so that the ledger knows the node
        work = partial(context.run, self._read_ahead, entry, request, cost.resident)
        entry.reader = threading.Thread(target=work, name="lazy-h3-prefetch", daemon=True)
        if not self._reserve_ahead(entry, beside):
            return None
        try:
            self._tell(entry, True)
            entry.reader.start()
        except BaseException:
            self._end_fill(entry)
            raise
        return entry.reader

    def stop_prefetches(self, reason: str) -> None:
        """Cancel what is being read ahead, and wait until it has gone."""
        readers = set()
        with self._changed:
            while running := [entry for entry in self._entries.values() if entry.is_being_prefetched]:
                for entry in running:
                    entry.ask_for_release(reason, force=True)
                    readers.add(entry.reader)
                self._changed.wait(WAIT_SECONDS)
        for reader in readers:
            if reader is not None and reader.is_alive():  # it has its last words to write, or somebody came for what it reads
                reader.join(WAIT_SECONDS)

    def release(self, resource: Resource, reason: str, *, force: bool = False) -> None:
        """Drop the resource's weights, now or when it is no longer filling or pinned. Does nothing if it is absent.

        A resource that was changed by hand stays, with a warning that names the weight; ``force`` (memory pressure, /free) warns
        again and drops it.
        """
        with self._lock:
            entry = self._entries.get(resource.identity)
            if entry is None:
                return
            if entry.pins or entry.state == "filling":
                entry.ask_for_release(reason, force)
            elif entry.state == "resident":
                self._drop(entry, reason, force)

    def release_later(self, resource: Resource, reason: str, *, force: bool = False) -> None:
        """As ``release``, but whoever calls ``settle`` next drops it: for threads that must not touch the host's models."""
        with self._lock:
            entry = self._entries.get(resource.identity)
            if entry is not None:
                entry.ask_for_release(reason, force)

    def settle(self) -> None:
        """Drop what was to be released later and is in use by nobody; tell of what was to be read ahead and was not."""
        for look in self.on_settle:
            look()
        with self._lock:
            for entry in list(self._entries.values()):
                if entry.is_unwanted:
                    self._release_as_asked(entry)
            for identity, entry in list(self._departed.items()):
                state = self._entry(entry.resource).state
                if state == "filling":
                    continue  # by its user, who may yet fail
                del self._departed[identity]
                if state == "absent":
                    self._tell(entry, False)

    def release_all(self, reason: str, *, force: bool = False) -> None:
        """Release every resource."""
        for resource in self.resident():
            self.release(resource, reason, force=force)

    def unpin_node(self, prompt: str, node: str | None = None) -> None:
        """Drop pins that a node (or every node of a prompt) left behind: it failed and cannot continue."""
        with self._lock:
            for entry in list(self._entries.values()):
                for owner in [o for o in entry.pins if o[:2] == ("node", prompt) and node in (None, o[2])]:
                    entry.pins[owner] = 1
                    self._unpin(entry, owner)

    def hold(self, resource: Resource, owner: Owner) -> None:
        """Pin the resource and fill it; it stays pinned until ``unpin_node``. For hosts that say when they begin with a resource,
        but not when they are done with it. Raises as ``use`` does.
        """
        resource = self.add(resource)
        for observer in self.on_use:
            observer(resource)
        entry = self._pin(resource, owner)
        try:
            self._ensure_filled(entry, resource.parts, NO_HINTS)
        except BaseException as error:
            forget_locals(error)
            self._unpin(entry, owner)
            raise

    def pin(self, resource: Resource, owner: Owner) -> None:
        """Keep the resource, if somebody else fills it, until ``unpin_node``."""
        self._pin(self.add(resource), owner)

    @contextmanager
    def filling(self, resource: Resource, nbytes: int) -> Iterator[None]:
        """Somebody else fills the resource inside this block; reserves ``nbytes`` first (MemoryRefused if they do not fit)."""
        resource = self.add(resource)
        with self._changed:
            while self._must_clear_the_way(resource, nbytes):
                self._changed.wait(WAIT_SECONDS)
            entry = self._begin_fill(resource, Cost(nbytes))
        with self._fill_recorded(entry, nbytes):
            yield

    def filled(self, resource: Resource, reason: str) -> None:
        """Somebody else has filled the resource, unasked."""
        with self._lock:
            entry = self._entries.setdefault(resource.identity, Entry(self.add(resource)))
            if entry.state != "absent":
                return
            entry.state, entry.last_use = "resident", self.ledger.now()
            self._tell(entry, True)
            self.ledger.record("load_end", resource.name, resource.live_bytes(), reason)

    def dropped(self, resource: Resource, reason: str) -> None:
        """Somebody else has dropped the resource."""
        with self._lock:
            entry = self._entries.get(resource.identity)
            if entry is None or entry.state != "resident":
                return  # not ours to know, or it was we who asked for it
            self._forget(entry)
            self.ledger.record("release", resource.name, 0, reason)

    def _pin(self, resource: Resource, owner: Owner) -> Entry:
        with self._lock:
            entry = self._entries.setdefault(resource.identity, Entry(resource))
            entry.pins[owner] += 1
            entry.last_use = self.ledger.now()
            if entry.pins.total() == 1:
                self.ledger.record("pin", resource.name, resource.live_bytes())
            return entry

    def _unpin(self, entry: Entry, owner: Owner) -> None:
        with self._lock:
            if owner not in entry.pins:
                return  # unpin_node was here before
            entry.pins[owner] -= 1
            entry.pins += Counter()  # forget owners without a pin
            if entry.pins:
                return
            self.ledger.record("unpin", entry.resource.name, entry.resource.live_bytes())
            if entry.state == "absent":
                self._entries.pop(entry.resource.identity, None)
            else:
                self._release_as_asked(entry)

    def _ensure_filled(self, entry: Entry, parts: Parts, hints: Hints) -> None:
        while True:
            self._await(entry)
            with self._changed:
                entry = self._entries.get(entry.resource.identity, entry)  # another one, if the pin was taken away meanwhile
                if entry.is_busy:
                    continue
                self._arrive(entry)
                step = self._next_step(entry, parts, hints)
                if step is None:
                    return
                if self._must_clear_the_way(entry.resource, step.cost.peak):
                    self._changed.wait(WAIT_SECONDS)
                    continue
                entry = self._begin_fill(entry.resource, step.cost)
            with self._fill_recorded(entry, step.cost.resident, step.what):
                step.run()
            if step.is_last:
                return

    def _await(self, entry: Entry) -> None:
        """Until nobody fills or drops the resource; shows how far it is where it is being read ahead. Without the lock."""
        while entry.is_busy:
            if entry.is_ahead:
                self._report_progress(entry.resource, *entry.progress)
            with self._changed:
                if entry.is_busy:
                    self._changed.wait(WAIT_SECONDS)

    def _arrive(self, entry: Entry) -> None:
        """The user has come: what was read ahead for it is like everything else from here on."""
        if entry.is_ahead:
            entry.reader = None
            if entry.state == "resident":
                self._tell(entry, True)  # again: whoever heard of it first may have let it go meanwhile

    def _next_step(self, entry: Entry, parts: Parts, hints: Hints) -> _Step | None:
        """What has to be done for these parts; None if they are there."""
        resource = entry.resource
        refold = self._refold_cost(entry, hints.points)
        if refold is not None:
            assert isinstance(resource, Foldable)
            return _Step(refold, "another schedule", partial(resource.expect, hints.points), is_last=False)
        missing = parts - resource.resident_parts()
        if not missing:
            return None
        mode, grant, points, reason = self._decided(resource, missing, hints)
        cost = resource.costs(missing, points)[mode].granted(grant)
        report = partial(self._report_progress, resource)
        request = FillRequest(missing, mode, grant, hints.num_passes, points=points, on_bytes=report)
        what = f"{', '.join(sorted(missing))} {mode}" if missing != resource.parts else mode
        return _Step(cost, f"{what}: {reason}" if reason else what, partial(resource.fill, request))

    def _reserve_ahead(self, entry: Entry, beside: int) -> bool:
        """Enter the resource into the table if there is room for it, and neither it nor a sibling is there."""
        identity = entry.resource.identity
        with self._lock:
            is_there = any(other == identity or other.is_sibling_of(identity) for other in self._entries)
            if is_there or entry.reserved > self._room(entry.resource.device, beside):
                return False
            self._entries[identity] = entry
            return True

    def _read_ahead(self, entry: Entry, request: FillRequest, nbytes: int) -> None:
        name = entry.resource.name
        try:
            with self._fill_recorded(entry, nbytes, "ahead of its first user"):
                entry.resource.fill(request)
        except Unwanted as unwanted:
            log.info("%s: no longer read ahead (%s)", name, unwanted)
        except Exception as error:
            log.info("%s: reading it ahead failed (%s); it is read when it is needed.", name, error)

    def _note_prefetch(self, entry: Entry, done: int, total: int) -> None:
        entry.progress = done, total
        self.ledger.sample()
        if entry.is_unwanted:
            raise Unwanted(entry.release_reason)

    def _must_clear_the_way(self, resource: Resource, need: int) -> bool:
        """Ask what is being read ahead to go where a fill needs its room or its files; whether there is such a thing."""
        running = self._being_prefetched(resource)
        if need <= self._room(resource.device):
            running = [entry for entry in running if entry.resource.identity.is_sibling_of(resource.identity)]
        for entry in running:
            entry.ask_for_release(f"room for {resource.name}", force=True)
        return bool(running)

    def _refold_cost(self, entry: Entry, points: tuple[float, ...]) -> Cost | None:
        """What it takes to fold a resident resource for other points; None if there is nothing to do.

        Where folding does not pay for them, the resource is dropped, to be filled as they need it; if somebody else is using
        it, it stays as it is, and reads projections again when it is asked.
        """
        resource = entry.resource
        if not points or not isinstance(resource, Foldable) or resource.is_ready_for(points) or entry.pins.total() > 1:
            return None
        cost = resource.refold_cost(points)
        if cost is None:
            self._drop(entry, "another schedule, for which folding does not pay", force=True)
        return cost

    def _decided(self, resource: Resource, parts: Parts, hints: Hints) -> Decision:
        """As the plan says; without one whole if that fits, else streamed in the room there is."""
        try:
            planned = self.decide(resource, parts, hints)
        except MemoryRefused as refused:
            self._remember(refused)
            raise
        if planned is not None and planned.mode in resource.costs(parts, planned.points):
            return planned
        costs = resource.costs(parts, hints.points)
        able_to_go = [*self._rivals(resource), *self._being_prefetched(resource)]
        room = self._room(resource.device) + sum(entry.held_bytes for entry in able_to_go)
        whole, streamed = costs["whole"], costs.get("streamed")
        if streamed is None or whole.peak <= room:
            return Decision("whole", points=hints.points)
        return Decision("streamed", room - streamed.transient, hints.points, "it does not fit whole")

    def _report_progress(self, resource: Resource, done: int, total: int) -> None:
        self.ledger.sample()
        for observer in self.on_fill:
            observer(resource, done, total)

    def _begin_fill(self, resource: Resource, cost: Cost) -> Entry:
        """Make room, reserve, and enter the state "filling"."""
        need = cost.peak
        for ask in self.before_fill:
            ask(resource, need)
        with self._lock:
            self._release_siblings(resource)
            self._make_room(resource, need)
            entry = self._entries.setdefault(resource.identity, Entry(resource))
            entry.before_fill, entry.reserved = resource.live_bytes(), need
            entry.state, entry.reader = "filling", None
        return entry

    @contextmanager
    def _fill_recorded(self, entry: Entry, nbytes: int, what: str = "") -> Iterator[None]:
        began = self.ledger.now()
        try:
            self.ledger.record("load_begin", entry.resource.name, nbytes, what)
            yield
        except BaseException as error:
            forget_locals(error)
            devices.trim()
            self._end_fill(entry)
            reason = f"given up: {error}" if isinstance(error, Unwanted) else f"failed: {type(error).__name__}"
            self.ledger.record("load_end", entry.resource.name, 0, reason)
            raise
        devices.trim()  # staging buffers
        self._end_fill(entry)
        self.ledger.record("load_end", entry.resource.name, nbytes)
        log.info("%s: loaded %s in %.1f s", entry.resource.name, shown_bytes(nbytes), self.ledger.now() - began)

    def _end_fill(self, entry: Entry) -> None:
        with self._changed:
            entry.before_fill = entry.reserved = 0
            entry.state = "resident"
            self._changed.notify_all()
            is_empty = not entry.resource.resident_parts()
            if is_empty:
                self._forget(entry)
            if is_empty is entry.is_ahead:  # of what is read ahead, all were told when it began
                self._tell(entry, not is_empty)
            if entry.is_unwanted:
                self._release_as_asked(entry)

    def _tell(self, entry: Entry, is_resident: bool) -> None:
        """Tell the observers of changes, who may touch the host's models: not on a thread that reads ahead."""
        with self._lock:
            if threading.current_thread() is entry.reader:
                self._departed[entry.resource.identity] = entry
                return
            for observer in self.on_change:
                observer(entry.resource, is_resident)

    def _forget(self, entry: Entry) -> None:
        """The resource is absent, so a release has nothing left to do; who has it pinned may fill it again."""
        entry.state = "absent"
        entry.release_reason = entry.known_edit = None
        entry.is_release_forced = False
        if not entry.pins:
            self._entries.pop(entry.resource.identity, None)
        self._changed.notify_all()

    def _release_as_asked(self, entry: Entry) -> None:
        """Do what ``release`` could not do yet."""
        if entry.release_reason is not None and entry.state == "resident":
            self._drop(entry, entry.release_reason, entry.is_release_forced)

    def _release_siblings(self, resource: Resource) -> None:
        for other in self._rivals(resource):
            if other.resource.identity.is_sibling_of(resource.identity):
                self._drop(other, f"{resource.name} is about to be filled from the same files", force=False)

    def _make_room(self, resource: Resource, need: int) -> None:
        """Drop what was read ahead or kept, least recently used first, until ``need`` fits; MemoryRefused if it does not."""
        victims = sorted(self._rivals(resource), key=lambda e: (not e.is_ahead, e.last_use))
        while need > self._room(resource.device):
            if not victims:
                self._refuse(resource, need)
            self._drop(victims.pop(0), f"room for {resource.name}", force=True)

    def _refuse(self, resource: Resource, need: int) -> NoReturn:
        limits = self._limits(resource.device)
        remedy = min(limits, key=limits.__getitem__)
        have = max(0, limits[remedy])
        message = f"{resource.name} needs {shown_bytes(need)} of memory and {shown_bytes(have)} are available; {remedy}"
        raise self._remember(MemoryRefused(resource.name, need, have, message))

    def _remember(self, refused: MemoryRefused) -> MemoryRefused:
        """The refusal itself, to be raised. What is kept of it is a copy: a raised one holds the frames it went through."""
        self.ledger.record("refuse", refused.component, refused.need_bytes, f"{refused.have_bytes} bytes available")
        self.last_refusal = MemoryRefused(refused.component, refused.need_bytes, refused.have_bytes, str(refused))
        return refused

    def _drop(self, entry: Entry, reason: str, force: bool) -> None:
        resource = entry.resource
        edit = resource.dirty()
        if edit is not None and not self._may_lose_edit(entry, edit, force):
            return
        nbytes = resource.live_bytes()
        entry.state = "dropping"
        try:
            resource.drop()
        except Exception:  # a release often stands in a ``finally``: it must not replace the error that led there
            entry.state = "resident"
            log.exception("%s: could not be dropped and stays resident.", resource.name)
            return
        left = _bytes_left(resource)
        self._forget(entry)
        self._tell(entry, False)
        self.ledger.record("release", resource.name, nbytes - left, reason)
        log.info("%s: released %s (%s)", resource.name, shown_bytes(nbytes - left), reason)
        if left:
            self._haunted.append(resource)
            log.warning(
                "%s: %s of its weights are still alive after release: somebody else holds a reference.",
                resource.name,
                shown_bytes(left),
            )

    def _may_lose_edit(self, entry: Entry, edit: str, force: bool) -> bool:
        """Weights that were changed by hand are kept rather than silently read anew; ``force`` loses them, loudly."""
        name = entry.resource.name
        entry.release_reason = None
        if force:
            log.warning("%s: dropped although %s since it was filled; the change is lost.", name, edit)
            return True
        if edit == entry.known_edit:
            return False
        entry.known_edit = edit
        log.warning(
            "%s: kept, because %s since it was filled; use a LoRA or another transform to have it survive a reload.", name, edit
        )
        self.ledger.record("keep", name, entry.resource.live_bytes(), f"changed by hand: {edit}")
        return False


def _bytes_left(resource: Resource) -> int:
    """What is alive after a drop, when cycles of references that held weights have gone, too."""
    devices.trim()
    if resource.live_bytes():
        devices.collect_and_trim()
    return resource.live_bytes()


@contextmanager
def _use_weakly(store: weakref.ref[Store], resource: weakref.ref[Resource], parts: Parts) -> Iterator[None]:
    """``store.use`` for the entry points of a module: holds neither the store nor the resource while nobody computes."""
    table, component = store(), resource()
    if table is None or component is None:
        raise RuntimeError("The store of this component is gone; take a new handle from its loader.")
    with table.use(component, parts):
        yield
