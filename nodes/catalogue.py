"""Model files to components: header in, skeleton out, no weights."""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..h3.formats import FormatError, Layout, recognise
from ..h3.tokenizer import PromptTokenizer, find_tokenizer, load_tokenizer
from ..memory.checkpoint import Checkpoint, CheckpointError, FileIdentity, open_checkpoint, read_table
from ..memory.component import Component
from ..memory.reader import STORED_DTYPES, Reader
from ..memory.transforms import Cast

MAX_REASON = 120  # characters of an error of torch's
MAX_COMPONENTS = 64  # more than a prompt and those planned beside it use; skeletons are small, but files come and go
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AS_STORED = "as stored"
LOADERS = {
    "text_encoder": ("text encoder", "Load text encoder (Lazy H3)"),
    "dit": ("diffusion transformer", "Load DiT (Lazy H3)"),
    "video_vae": ("video VAE", "Load video VAE (Lazy H3)"),
    "audio_vae": ("audio VAE", "Load audio VAE (Lazy H3)"),
    "tiny_vae": ("tiny preview VAE", "no loader yet"),
}


class Catalogue:
    """Components by file and options; the same question gives the same component while its file is unchanged. On any thread."""

    def __init__(self, reader: Reader | None = None) -> None:
        self._reader = reader or Reader()
        self._lock = threading.Lock()
        self._components: OrderedDict[tuple[Any, ...], Component] = OrderedDict()
        self.kinds: dict[str, str] = {}  # names of all components so far, for reports

    def component(self, path: Path, kind: str, dtype: str, device: torch.device) -> Component:
        """The component in ``path`` (a file, or the sub-folder of a Hugging Face model), which must be of ``kind``.

        ``dtype``: "as stored", "bf16", "fp16" or "fp32". Raises CheckpointError or FormatError.
        """
        key = (files_of(path), kind, dtype, str(device))
        with self._lock:
            component = self._components.pop(key, None) or self._built(path, kind, dtype, device)
            self._components[key] = component  # the last to go
            self.kinds[component.name] = kind
            while len(self._components) > MAX_COMPONENTS:
                self._components.popitem(last=False)
        return component

    def find(self, identity: Any) -> Component | None:
        """The component of this identity, if it was asked for before."""
        with self._lock:
            return next((component for component in self._components.values() if component.identity == identity), None)

    def _built(self, path: Path, kind: str, dtype: str, device: torch.device) -> Component:
        checkpoint = open_checkpoint(path)
        layout = identified(path, checkpoint)
        if layout.kind != kind:
            (found, loader), (wanted, _) = LOADERS[layout.kind], LOADERS[kind]
            raise CheckpointError(
                f"{path}: is a checkpoint of the {found}, not a checkpoint of the {wanted}; use the node {loader}."
            )
        with torch.device("meta"):
            module = layout.build()
        cast = Cast(compute_dtype(dtype, checkpoint, layout, device), module.storage_dtype)
        return Component(
            kind=kind,
            name=f"{LOADERS[kind][0]} ({_short_name(path, dtype)})",
            checkpoint=checkpoint,
            build=lambda: module,
            recipes=layout.recipes,
            cast=cast,
            device=device,
            reader=self._reader,
            config=layout.config,
        )


def files_of(path: Path) -> tuple[FileIdentity, ...]:
    """What a loader depends on: the file, or every file of a component's folder. Raises CheckpointError if it is not there."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return tuple(map(FileIdentity.of, files))


def identified(path: Path, checkpoint: Checkpoint) -> Layout:
    """What the checkpoint is. Raises FormatError or CheckpointError, which name the file."""
    config = hugging_face_config(path)
    try:
        return recognise(checkpoint.tensors, checkpoint.metadata, config)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except Exception as error:  # a reader builds what the file describes, and torch refuses that in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0][:MAX_REASON]
        raise FormatError(
            f"{path}: is not described in a way that can be built ({reason}); download the file and its config.json again."
        ) from error


def hugging_face_config(path: Path) -> Mapping[str, Any] | None:
    """The ``config.json`` beside the weights of a Hugging Face folder; None for a single file."""
    file = path / "config.json"
    return read_table(file) if path.is_dir() and file.exists() else None


def compute_dtype(choice: str, checkpoint: Checkpoint, layout: Layout, device: torch.device) -> torch.dtype:
    """The dtype of a loader's choice. As stored: that of most bytes that are read, all of which are plain floating numbers.

    On CPUs fp32 stands in for fp16, which they compute poorly.
    """
    if choice != AS_STORED:
        if choice not in DTYPES:
            raise ValueError(f"{checkpoint.path}: cannot be held in {choice!r}; choose {AS_STORED}, {', '.join(DTYPES)}.")
        return DTYPES[choice]
    totals: Counter[str] = Counter()
    for source in {source for recipe in layout.recipes.values() for source in recipe.sources}:
        totals[checkpoint.tensors[source].dtype] += checkpoint.tensors[source].nbytes
    stored = STORED_DTYPES[max(sorted(totals), key=totals.__getitem__)]
    return torch.float32 if stored == torch.float16 and device.type == "cpu" else stored


def tokenizer_of(component: Component, extra_folders: Iterable[Path]) -> PromptTokenizer:
    """The tokenizer that belongs to a text encoder's files. Raises TokenizerError, which says where to get one."""
    encoder = Path(component.checkpoint.path)
    beside_folder = encoder.parent.with_name("tokenizer")  # in a Hugging Face model whose text encoder is one file
    path = find_tokenizer(encoder, (beside_folder, *extra_folders))
    return _tokenizer_at(path, files_of(path))


@functools.lru_cache(maxsize=4)
def _tokenizer_at(path: Path, files: tuple[FileIdentity, ...]) -> PromptTokenizer:
    return load_tokenizer(path)


def _short_name(path: Path, dtype: str) -> str:
    """Tells apart what one workflow may load: also the same file in two precisions."""
    name = f"{path.parent.name}/{path.name}" if path.is_dir() else path.stem
    return name if dtype == AS_STORED else f"{name}, {dtype}"
