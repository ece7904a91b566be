"""Small models, the files they are read from, and resources that are no models at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from lazy_h3.h3.formats.recipe import Recipe, copied
from lazy_h3.memory.checkpoint import FileIdentity, open_checkpoint
from lazy_h3.memory.component import Component
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.resource import Cost, FillRequest, Identity, Parts
from lazy_h3.memory.store import Store
from lazy_h3.memory.transforms import Cast
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

CPU = torch.device("cpu")
PLENTY = 1 << 50  # bytes: no test depends on the machine it runs on


@dataclass(frozen=True)
class CodecConfig:
    width: int = 8
    num_blocks: int = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x.float()).to(self.linear.weight.dtype)).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.num_blocks))


class Codec(nn.Module):
    """Two halves that share a buffer; norms and the buffer are fp32 islands; ``stream`` is a generator."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"encoder": ("encoder.", "mean"), "decoder": ("decoder.", "mean")}
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "encode": ("encoder",),
        "forward": ("decoder",),
        "stream": ("decoder",),
    }
    REPEATED: ClassVar[tuple[str, ...]] = ("decoder.blocks",)

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = nn.Linear(config.width, config.width)
        self.decoder = Decoder(config)
        self.register_buffer("mean", torch.empty(config.width))

    @staticmethod
    def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
        return torch.float32 if name == "mean" or ".norm." in name else compute

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x - self.mean)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.decoder.blocks:
            x = block(x)
        return x + self.mean

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.decoder.blocks:
            x = block(x)
            yield x


class One(nn.Module):
    """One parameter, or one buffer, of any shape."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {"all": ("",)}
    ENTRY_POINTS: ClassVar[dict[str, tuple[str, ...]]] = {"forward": ("all",)}
    REPEATED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *shape: int, is_buffer: bool = False) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("weight", torch.empty(shape))
        else:
            self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def as_computed(name: str, compute: torch.dtype) -> torch.dtype:
    """A storage rule without fp32 islands."""
    return compute


def random_weights(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Values for every parameter and buffer of a model."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in build().state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def written(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file, made by the library that defines the format."""
    save_file(dict(tensors), path, metadata)
    return path


def written_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header (bytes, or what JSON can spell), any claimed header length and any data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(raw) if length is None else length
    path.write_bytes(claimed.to_bytes(8, "little") + raw + data)
    return path


def component_of(
    path: Path,
    build: Callable[[], nn.Module],
    *,
    recipes: Mapping[str, Recipe] | None = None,
    compute: torch.dtype = torch.float32,
    storage_dtype: Callable[[str, torch.dtype], torch.dtype] = as_computed,
    kind: str = "model",
    reader: Reader | None = None,
) -> Component:
    """The component that ``build`` makes; without ``recipes`` its weights stand in ``path`` under their own names."""
    if recipes is None:
        recipes = {name: copied(name) for name in random_weights(build)}
    return Component(
        kind=kind,
        checkpoint=open_checkpoint(path),
        build=build,
        recipes=recipes,
        cast=Cast(compute, storage_dtype),
        device=CPU,
        reader=reader,
    )


def codec(
    path: Path,
    *,
    stored: torch.dtype = torch.float32,
    compute: torch.dtype = torch.float32,
    width: int = 8,
    kind: str = "codec",
    reader: Reader | None = None,
) -> Component:
    """A Codec whose file is written first if it is not there."""

    def build() -> Codec:
        return Codec(CodecConfig(width))

    if not path.exists():
        written(path, random_weights(build, stored))
    return component_of(path, build, compute=compute, storage_dtype=Codec.storage_dtype, kind=kind, reader=reader)


class BytesRead:
    """Counts what a reader is about to read."""

    def __init__(self) -> None:
        self.total = 0
        self.reader = Reader(num_threads=1, before_chunk=self._count)

    def _count(self, nbytes: int) -> None:
        self.total += nbytes


class Foreign:
    """A resource of another kind: bytes that somebody else fills and drops as well as the store.

    As hosts do, it reports every drop, also one that the store has asked for.
    """

    parts: Parts = frozenset({"weights"})

    def __init__(self, store: Store, name: str, nbytes: int = 4096, device: torch.device = CPU) -> None:
        self.store = store
        self.name = name
        self.nbytes = nbytes
        self.device = device
        self.identity = Identity("foreign", (FileIdentity(name, nbytes, 0),), (str(device),))
        self.weights: Tensor | None = None
        self.edit: str | None = None
        self.num_fills = 0
        self._storage: StorageWeakRef | None = None
        store.add(self)

    def costs(self, parts: Parts, points: tuple[float, ...] = ()) -> dict[str, Cost]:
        return {"whole": Cost(self.nbytes)}

    def resident_parts(self) -> Parts:
        return frozenset() if self.weights is None else self.parts

    def fill(self, request: FillRequest) -> None:
        if request.on_bytes is not None:
            request.on_bytes(0, self.nbytes)
        self._allocate()

    def drop(self) -> None:
        self.weights = None
        self.store.dropped(self, "reported by its owner")

    def shrink(self, nbytes: int) -> int:
        return 0

    def live_bytes(self) -> int:
        return 0 if self._storage is None or self._storage.expired() else self.nbytes

    def dirty(self) -> str | None:
        return self.edit

    def loaded_by_owner(self) -> None:
        """Somebody else fills it, without a question from the store."""
        with self.store.filling(self, self.nbytes):
            self._allocate()

    def unloaded_by_owner(self) -> None:
        """Somebody else drops it, without a question from the store."""
        self.weights = None
        self.store.dropped(self, "its owner needed the room")

    def _allocate(self) -> None:
        self.num_fills += 1
        self.weights = torch.zeros(self.nbytes, dtype=torch.uint8)
        self._storage = StorageWeakRef(self.weights.untyped_storage())
