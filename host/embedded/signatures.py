"""What makes two nodes the same: the fingerprints that nodes give, and keys made of them (host contract, section 2c)."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from .declarations import Declarations
from .graph import DynamicPrompt, is_link, links_of
from .invocation import Call, ExecutionBlocker, settled

log = logging.getLogger(__name__)


class Fingerprints:
    """IS_CHANGED (or fingerprint_inputs) of each node, asked once a prompt with constants only; linked inputs are None."""

    def __init__(self, prompt_id: str, dynprompt: DynamicPrompt, declarations: Declarations):
        self._prompt_id = prompt_id
        self._dynprompt = dynprompt
        self._declarations = declarations
        self._values: dict[str, Any] = {}

    async def get(self, node_id: str) -> Any:
        """The value, also written to ``is_changed`` of the node: a node that comes with one is not asked."""
        if node_id not in self._values:
            self._values[node_id] = await self._ask(node_id)
        return self._values[node_id]

    async def _ask(self, node_id: str) -> Any:
        node = self._dynprompt.get_node(node_id)
        node_class = self._declarations.node_class(node["class_type"])
        function = next((name for name in ("IS_CHANGED", "fingerprint_inputs") if hasattr(node_class, name)), None)
        if function is None:
            return False
        if "is_changed" not in node:
            node["is_changed"] = await self._call(node_id, node, node_class, function)
        return node["is_changed"]

    async def _call(self, node_id: str, node: Mapping[str, Any], node_class: Any, function: str) -> Any:
        inputs = constant_inputs(node_id, node, self._declarations)
        try:
            values = await settled(await Call(self._prompt_id, node_id, node_class, function).over_lists(inputs))
        except Exception as error:
            log.warning("%s of node %s raised %s: the node runs again.", function, node_id, error)
            return float("nan")
        return [None if isinstance(value, ExecutionBlocker) else value for value in values]


def constant_inputs(node_id: str, node: Mapping[str, Any], declarations: Declarations) -> dict[str, list[Any]]:
    """Declared constants, None for links, and the hidden inputs that are known before a run."""
    declared = declarations.inputs(node["class_type"])
    inputs = {name: [None] if is_link(value) else [value] for name, value in node["inputs"].items() if name in declared}
    known = {"PROMPT": {}, "UNIQUE_ID": node_id}
    return inputs | {name: [known.get(what)] for name, what in declarations.hidden(node["class_type"]).items()}


class Keys(Protocol):
    async def key(self, node_id: str) -> Hashable: ...


class Identities:
    """A node is the same as long as it has the same id and class: for instances of node classes."""

    def __init__(self, dynprompt: DynamicPrompt):
        self._dynprompt = dynprompt

    async def key(self, node_id: str) -> Hashable:
        return node_id, self._dynprompt.get_node(node_id)["class_type"]


class Signatures:
    """A node is the same if class, constants, fingerprint and everything it depends on are: for outputs."""

    def __init__(self, dynprompt: DynamicPrompt, declarations: Declarations, fingerprints: Fingerprints):
        self._dynprompt = dynprompt
        self._declarations = declarations
        self._fingerprints = fingerprints
        self._digests: dict[str, str] = {}

    async def key(self, node_id: str) -> str:
        """Digest of the node and its ancestors. Fingerprints are asked on the way: a node's before its ancestors'."""
        stack, entered = [(node_id, False)], set()
        while stack:
            current, is_left = stack.pop()
            if is_left:
                self._digests[current] = self._digest(current, await self._fingerprints.get(current))
            elif current not in entered and current not in self._digests and self._dynprompt.has_node(current):
                entered.add(current)
                await self._fingerprints.get(current)
                stack.append((current, True))
                stack.extend((producer, False) for producer in reversed(self._producers(current)))
        return self._digests[node_id]

    def _producers(self, node_id: str) -> list[str]:
        return [producer for _, producer, _ in sorted(links_of(self._dynprompt.get_node(node_id)))]

    def _digest(self, node_id: str, fingerprint: Any) -> str:
        node = self._dynprompt.get_node(node_id)
        parts = [node["class_type"], _canonical(fingerprint)]
        if self._declarations.is_tied_to_id(node["class_type"]):
            parts.append(node_id)
        for name, value in sorted(node["inputs"].items()):
            parts.append(f"{name}={self._canonical_link(*value) if is_link(value) else _canonical(value)}")
        return hashlib.blake2b("\n".join(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def _canonical_link(self, producer: str, slot: float) -> str:
        """A producer that does not exist, or is part of a cycle, is like no other."""
        return f"{self._digests.get(producer) or _unique()}[{int(slot)}]"


def _unique() -> str:
    return uuid.uuid4().hex


def _canonical(value: Any) -> str:
    """Equal text for equal values; not-a-number and objects of unknown kind equal nothing, not even themselves."""
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_canonical(key)}:{_canonical(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_canonical, value)) + "]"
    is_plain = value is None or isinstance(value, (bool, int, float, str, bytes))
    return f"{type(value).__name__} {value!r}" if is_plain and value == value else _unique()  # noqa: PLR0124
