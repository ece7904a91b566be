"""What the store manages, and what it asks of it. Components of ours are one kind; hosts may add their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from .checkpoint import FileIdentity

Mode = Literal["whole", "streamed"]
Parts = frozenset[str]


@dataclass(frozen=True)
class Identity:
    """Two resources with equal identity are one. ``options``: device, dtype and every other transform's key."""

    kind: str
    files: tuple[FileIdentity, ...]
    options: tuple[Any, ...] = ()

    def is_sibling_of(self, other: Identity) -> bool:
        """Another way to hold the same files."""
        return bool(self.files) and self.files == other.files and self != other


@dataclass(frozen=True)
class Cost:
    """Bytes of one mode: what stays, what filling needs on top for a moment, what every pass reads again.

    ``read``: what filling reads, None for what stays.

    Streamed: ``resident`` is the least there can be. Each of ``num_blocks`` blocks that is held costs ``block_bytes`` more and is
    not read again; the last ``ring_blocks`` of them take the room of the ring, which nothing passes through then.
    """

    resident: int
    transient: int = 0
    reread_per_pass: int = 0
    block_bytes: int = 0
    num_blocks: int = 0
    ring_blocks: int = 0
    read: int | None = None

    @property
    def peak(self) -> int:
        """What filling takes at its highest."""
        return self.resident + self.transient

    def num_held(self, spare: int) -> int:
        """How many blocks can be held in this many bytes more."""
        beside_ring = max(0, spare) // self.block_bytes if self.block_bytes else 0
        return beside_ring if beside_ring < self.num_blocks - self.ring_blocks else self.num_blocks

    def holding(self, num_held: int) -> Cost:
        """The cost with so many blocks held."""
        beside_ring = min(num_held, self.num_blocks - self.ring_blocks)
        return replace(
            self,
            resident=self.resident + beside_ring * self.block_bytes,
            reread_per_pass=self.reread_per_pass - num_held * self.block_bytes,
            read=self._filling_reads + num_held * self.block_bytes,
        )

    def granted(self, grant: int | None) -> Cost:
        """The cost with as many blocks held as ``grant`` resident bytes allow."""
        return self if grant is None else self.holding(self.num_held(grant - self.resident))

    def read_bytes(self, num_passes: int) -> int:
        """What is read in all."""
        return self._filling_reads + num_passes * self.reread_per_pass

    @property
    def _filling_reads(self) -> int:
        return self.resident if self.read is None else self.read


def is_hosted(resource: Resource) -> bool:
    """Whether the host lists the resource among its own models, makes room for it, and says when it is to be filled."""
    return getattr(resource, "is_hosted", False)


def origins_of(resource: Resource) -> tuple[Hashable, ...]:
    """Keys under which the resource may enter the graph: its identity, unless it names others."""
    origins: tuple[Hashable, ...] = getattr(resource, "origins", (resource.identity,))
    return origins


def is_pinned_by_users(resource: Resource) -> bool:
    """Whether those who use it pin it; others are pinned by the session while a node runs that may use them."""
    return getattr(resource, "is_pinned_by_users", True)


@dataclass(frozen=True)
class Hints:
    """What a user knows beforehand: how often it will run through the blocks, and the inputs of foldable sub-modules."""

    num_passes: int | None = None
    points: tuple[float, ...] = ()


@dataclass(frozen=True)
class FillRequest:
    """``grant``: bytes that may stay, None for as few as possible (streamed) or all (whole).

    ``num_passes``: how often the blocks will be run through, None for unknown. ``prefetch=False`` reads each block only when it
    is needed. ``points``: all inputs that foldable sub-modules will be asked for. ``on_bytes(done, total)`` may raise to cancel.
    """

    parts: Parts
    mode: Mode = "whole"
    grant: int | None = None
    num_passes: int | None = None
    prefetch: bool = True
    points: tuple[float, ...] = ()
    on_bytes: Callable[[int, int], None] | None = None


@runtime_checkable
class Foldable(Protocol):
    """A resource of which parts may be held as their values for some points (see ``FillRequest``)."""

    def is_ready_for(self, points: tuple[float, ...]) -> bool:
        """Whether nothing is folded for other points alone."""

    def refold_cost(self, points: tuple[float, ...]) -> Cost | None:
        """What ``expect`` takes on top of what is resident; None where folding does not pay for these points."""

    def expect(self, points: tuple[float, ...]) -> None:
        """Be ready for these points: read again only the weights behind what is folded."""


@runtime_checkable
class Resource(Protocol):
    """Weights that can be brought into memory and dropped again.

    ``fill`` is atomic: it leaves the requested parts resident, or raises and leaves memory as it was. ``live_bytes`` is measured
    from living storages, also after ``drop`` (somebody else may hold one). ``dirty`` says in words what was changed by hand since
    the fill, or None. ``shrink(n)`` gives back about n bytes if the resource can stay usable, and returns how many.
    """

    @property
    def identity(self) -> Identity: ...
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def parts(self) -> Parts: ...
    def costs(self, parts: Parts, points: tuple[float, ...] = ()) -> Mapping[Mode, Cost]: ...
    def resident_parts(self) -> Parts: ...
    def fill(self, request: FillRequest) -> None: ...
    def drop(self) -> None: ...
    def shrink(self, nbytes: int) -> int: ...
    def live_bytes(self) -> int: ...
    def dirty(self) -> str | None: ...
