"""What heavy nodes will ask for, from the graph alone: parts, passes, points and an estimate of their activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..h3 import geometry
from ..h3.geometry import LatentSize
from ..memory.graph import Node, link_of

DEFAULT_SIZE = LatentSize.of_clip(124, 768, 1344)
TOKENS_WITHOUT_PROMPT = 1024
BYTES_PER_TOKEN = 3  # of UTF-8 text, on the low side
CORE_EMPTY_LATENT = "EmptyMiniMaxH3LatentAV"
FP32 = 4  # bytes of a number in what travels on wires
LATENT_INPUTS = ("latent", "samples", "latent_image", "av_latent")


@dataclass(frozen=True)
class Demand:
    """One heavy node's use of one component. ``may_stream``: whether reading blocks again for each pass can pay.

    ``points``: what foldable sub-modules will be asked for, None if only the run can tell. ``activation_bytes``: what the work
    takes beside the weights; ``output_bytes``: the results, which the host keeps in RAM.
    """

    parts: frozenset[str]
    num_passes: int = 1
    points: tuple[float, ...] | None = ()
    activation_bytes: int = 0
    output_bytes: int = 0
    may_stream: bool = True


class GraphSizes:
    """Sizes of what travels on the wires of a prompt, as far as constants tell; ``guesses`` says what they do not."""

    def __init__(self, nodes: Mapping[str, Node], classes: Mapping[str, type]) -> None:
        self._nodes = nodes
        self._classes = classes
        self._latents: dict[str, LatentSize | None] = {}  # behind the nodes that were asked for; plans ask for ancestors first
        self.guesses: list[str] = []

    def latent(self, value: Any) -> LatentSize:
        """Size of the latent that an input receives."""
        link = link_of(value)
        if link is not None and link[0] not in self._latents:
            self._latents[link[0]] = self._latent(value)
        size = self._latents[link[0]] if link else None
        if size is None:
            self.guesses.append("a latent of unknown size is taken for 1344 x 768 with 124 frames")
        return size or DEFAULT_SIZE

    def tokens(self, value: Any) -> int:
        """Rows of the condition that an input receives, or of a prompt that is given itself."""
        if isinstance(value, str):
            return len(value.encode(errors="replace")) // BYTES_PER_TOKEN + 1
        link = link_of(value)
        node = self._nodes.get(link[0]) if link else None
        prompt = node.inputs.get("prompt") if node else None
        return self.tokens(prompt) if isinstance(prompt, str) else TOKENS_WITHOUT_PROMPT

    def _latent(self, value: Any) -> LatentSize | None:
        """The first size that is known behind an input, up the wires of latents."""
        pending, seen = [value], set[str]()
        while pending:
            link = link_of(pending.pop())
            node = self._nodes.get(link[0]) if link else None
            if link is None or node is None or link[0] in seen:
                continue
            seen.add(link[0])
            size = self._latents.get(link[0]) or self._made_by(node)
            if size is not None:
                return size
            if link[0] not in self._latents:
                pending += [node.inputs[name] for name in reversed(LATENT_INPUTS) if name in node.inputs]
        return None

    def _made_by(self, node: Node) -> LatentSize | None:
        """Size of the latent that a node makes from constants alone."""
        size_of = getattr(self._classes.get(node.class_type), "latent_size", None)
        if size_of is not None and not any(link_of(v) for v in node.inputs.values()):
            return size_of(**node.inputs)
        if node.class_type == CORE_EMPTY_LATENT and all(isinstance(v, int) for v in node.inputs.values()):
            frames = geometry.aligned_frames(max(5, node.inputs["length"]))
            return LatentSize.of_clip(frames, node.inputs["height"], node.inputs["width"])
        return None
