"""The policy of one prompt, as its policy nodes say. Read from the graph, because a cached node does not run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, get_args

from ..memory.graph import Node
from ..memory.plan import Policy
from ..memory.session import Prompt

log = logging.getLogger("lazy_h3")

POLICIES: tuple[Policy, ...] = get_args(Policy)
STRICTEST_FIRST: tuple[Policy, ...] = ("free", "auto", "keep")
POLICY_NODE = "LazyH3Policy"


class PromptPolicy:
    """Reads the running prompt anew when it changes; says once a prompt if its policy nodes disagree."""

    def __init__(self) -> None:
        self._prompt_id: str | None = None
        self._version: Any = None
        self._policy: Policy | None = None

    def of(self, prompt: Prompt) -> Policy | None:
        """What the nodes ask for: the strictest of all; None where there is no such node."""
        is_new, version = prompt.prompt_id != self._prompt_id, prompt.version()
        if is_new or version != self._version:
            asked = asked_for(prompt.view().nodes)
            self._policy = asked[0] if asked else None
            self._prompt_id, self._version = prompt.prompt_id, version
            if is_new and len(asked) > 1:
                log.warning("Lazy H3: policy nodes of one prompt ask for %s; %s holds.", " and ".join(asked), asked[0])
        return self._policy


def asked_for(nodes: Mapping[str, Node]) -> list[Policy]:
    """The policies that policy nodes have as constants, strictest first; wired or not, they count."""
    values = {str(node.inputs.get("policy")) for node in nodes.values() if node.class_type == POLICY_NODE}
    return [policy for policy in STRICTEST_FIRST if policy in values]
