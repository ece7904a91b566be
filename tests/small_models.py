"""The tiny model, made once a session, and a stage on which our nodes run with it."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from lazy_h3.commands.demo import WORKFLOW
from lazy_h3.commands.make_checkpoint import DTYPE_NAMES, SINGLE_FILES, make_checkpoint
from lazy_h3.commands.presets import tiny
from lazy_h3.host.embedded.host import EmbeddedHost, RunResult
from lazy_h3.host.embedded.port import EmbeddedPort
from lazy_h3.memory.ledger import Ledger
from lazy_h3.memory.reader import Reader
from lazy_h3.memory.store import Store
from lazy_h3.nodes import NODE_CLASS_MAPPINGS
from lazy_h3.nodes.catalogue import Catalogue
from lazy_h3.nodes.runtime import Policy, Runtime, installed

CPU = torch.device("cpu")
TEXT_ENCODER, DIT, VIDEO_VAE, AUDIO_VAE = (Path(name).name for name in SINGLE_FILES.values())
ENCODE, SAMPLER, DECODE_VIDEO, DECODE_AUDIO = "5", "7", "8", "9"  # nodes of the small workflow
USERS = {"text_encoder": ENCODE, "dit": SAMPLER, "video_vae": DECODE_VIDEO, "audio_vae": DECODE_AUDIO}  # the only user of each
KEPT = {"latent": [SAMPLER, 0], "images": [DECODE_VIDEO, 0], "audio": [DECODE_AUDIO, 0]}
SMALLEST = {"6.width": 32, "6.height": 32, "7.steps": 2}


@functools.cache
def tiny_models() -> Path:
    """A models folder with the tiny model as single files. Shared: copy it before changing a file."""
    return _made("single-file")


@functools.cache
def tiny_folder_models() -> Path:
    """A models folder with the tiny model in the Hugging Face layout, as ``diffusers/minimax_h3``."""
    return _made("folder")


class Reads(list[int]):
    """Bytes of every read of weights. ``before_each`` comes first, on the reader's thread."""

    before_each: Callable[[int], object] = staticmethod(int)

    def note(self, nbytes: int) -> None:
        self.before_each(nbytes)
        self.append(nbytes)


@functools.cache
def shared_catalogue() -> tuple[Catalogue, Reads]:
    """One for all hosts, which come one after the other, and the bytes of what its reader reads: skeletons take time."""
    reads = Reads()
    return Catalogue(Reader(before_chunk=reads.note)), reads


def copied_models(target: Path, source: Path | None = None) -> Path:
    """A copy of the tiny model that a test may damage."""
    shutil.copytree(source or tiny_models(), target)
    return target


def _made(layout: Any) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lazy-h3-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_checkpoint(folder, tiny(), layout)
    return folder


def changed(prompt: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with input values replaced: "NODE.INPUT" -> value."""
    prompt = copy.deepcopy(dict(prompt))
    for target, value in changes.items():
        node, name = target.split(".")
        prompt[node]["inputs"][name] = value
    return prompt


def text_to_video(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The shipped small workflow at the smallest size, with its results kept instead of saved."""
    prompt = {node: spec for node, spec in json.loads(WORKFLOW.read_text()).items() if node not in ("10", "11")}
    keepers = {name: {"class_type": "Keep", "inputs": {"value": link}} for name, link in KEPT.items()}
    return changed({**prompt, **keepers}, {**SMALLEST, **(changes or {})})


def folder_prompt(folder: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same with all components from one folder loader, "1"."""
    prompt = text_to_video()
    loader = {"class_type": "LazyH3FolderLoader", "inputs": {"folder": folder, "dtype": "as stored"}}
    users = {"5.text_encoder": ["1", 0], "7.dit": ["1", 1], "8.video_vae": ["1", 2], "9.audio_vae": ["1", 3]}
    rest = {node: spec for node, spec in prompt.items() if node not in ("1", "2", "3", "4")}
    return changed({"1": loader, **rest}, {**users, **(changes or {})})


@dataclass
class Stage:
    """A host with our nodes and the tiny model."""

    host: EmbeddedHost
    runtime: Runtime
    reads: Reads
    kept: dict[str, Any] = field(default_factory=dict)  # what the nodes "Keep" were given, by node

    @property
    def store(self) -> Store:
        return self.runtime.store

    @property
    def ledger(self) -> Ledger:
        return self.store.ledger

    def run(self, prompt: Mapping[str, Any]) -> RunResult:
        """Events of each run have a number of their own."""
        self.ledger.begin_run(self.ledger.run + 1)
        return self.host.run(prompt)

    def succeed(self, prompt: Mapping[str, Any]) -> RunResult:
        result = self.run(prompt)
        assert result.status == "success", result.error
        return result

    def happened(self, event: str, run: int | None = None) -> list[tuple[str, str | None]]:
        """(kind of component, node) of the events of a run (default: the last)."""
        events = self.ledger.of_run(self.ledger.run if run is None else run)
        return [(self.runtime.catalogue.kinds[e.component], e.node) for e in events if e.event == event]

    def loaded(self, run: int | None = None) -> list[str]:
        return [kind for kind, _ in self.happened("load_end", run)]


@contextmanager
def stage(
    out: Path,
    *models: Path,
    policy: Policy = "free",
    budget: int | None = None,
    may_plan: bool = False,
    may_prefetch: bool | None = None,
    classes: Mapping[str, type] | None = None,
    **options: Any,
) -> Iterator[Stage]:
    """A stage with these model folders (default: the tiny model's); ``options`` are those of the embedded host.

    Components are held whole and as they are stored, and read when they are needed, unless plans may choose (``may_plan``).
    """
    folders = {"output_directory": out, "input_directory": out / "input", "models": models or [tiny_models()]}
    catalogue, reads = shared_catalogue()
    reads.clear()
    catalogue.kinds.clear()
    kept: dict[str, Any] = {}
    classes = {**NODE_CLASS_MAPPINGS, "Keep": keeper(kept), **(classes or {})}
    with EmbeddedHost(classes, **{"seed": 0, **folders, **options}) as host, ExitStack() as closing:
        store = Store(budget=budget)
        plans = {"may_stream": may_plan, "may_fold": may_plan, "may_prefetch": may_plan if may_prefetch is None else may_prefetch}
        runtime = Runtime(EmbeddedPort(host, CPU), store, catalogue, policy, **plans)
        closing.enter_context(installed(runtime))
        yield Stage(host, runtime, reads, kept)


def keeper(kept: dict[str, Any]) -> type:
    """An output node that puts its input into ``kept``, under its id."""

    class Keep:
        RETURN_TYPES = ()
        FUNCTION = "keep"
        OUTPUT_NODE = True

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"value": ("*",)}, "hidden": {"node": "UNIQUE_ID"}}

        def keep(self, value: Any, node: str) -> tuple[()]:
            kept[node] = value
            return ()

    return Keep


def write_header(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> None:
    """A safetensors file of the right size in which only the header is written; the weights are a hole."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
