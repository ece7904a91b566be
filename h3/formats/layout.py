"""What a checkpoint is: the answer of every reader in this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from .recipe import Recipe


class TensorInfo(Protocol):
    """A stored tensor as its header describes it; ``dtype`` is safetensors' name (``"BF16"``, ``"F32"``, ...)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


Tensors = Mapping[str, TensorInfo]
MAX_SHOWN = 80


class FormatError(ValueError):
    """The tensors are not a model that we can build. One sentence: what, where, what to do."""


def shown(value: Any) -> str:
    """A value of a file for a message: printable, on one line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def shown_name(name: str) -> str:
    """The same for a tensor's name, without quotes."""
    return shown(name).strip("'\"")


@dataclass(frozen=True)
class Layout:
    """A recognised checkpoint: which component it is, how to build its skeleton and where each parameter comes from.

    ``recipes`` has an entry for every parameter and buffer of ``build()``; ``ignored`` names stored tensors that are left unread
    on purpose, with the reason. Every stored tensor is in exactly one of the two.
    """

    kind: str  # "text_encoder" | "dit" | "video_vae" | "audio_vae" | "tiny_vae"
    layout: str  # "comfy" (single file) | "huggingface" (folder)
    variant: str  # "base" | "rank" | "curve" | "gated" ... "full" where there is only one
    config: Any
    build: Callable[[], nn.Module]
    recipes: Mapping[str, Recipe]
    ignored: Mapping[str, str]
