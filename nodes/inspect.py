"""Looking at memory, and stepping in: report, release, policy."""

from __future__ import annotations

import json
from typing import Any

from ..host.snapshot import prompt_report, prompt_table
from ..memory.handle import Handle
from .load import CATEGORY
from .policy import POLICIES
from .runtime import runtime
from .timeline import timeline

THIS, ALL = "this component", "all components"


class AnyType(str):
    """A type name that differs from none: older hosts compare the types of a link with ``!=``."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False


ANY = AnyType("*")


class _PassThrough:
    """First input to first output, unchanged, so that a handle can be followed through."""

    CATEGORY = CATEGORY
    CARRIES = (0,)


class LazyH3MemoryReport(_PassThrough):
    """What was in memory when, in this prompt up to here."""

    DESCRIPTION = "Shows what was read, how large it was and when it was freed in this run. Runs every time, and loads nothing."
    FUNCTION = "report"
    OUTPUT_NODE = True
    RETURN_TYPES = (ANY, "STRING", "IMAGE", "STRING")
    RETURN_NAMES = ("anything", "text", "timeline", "json")
    OUTPUT_TOOLTIPS = (
        "The input, unchanged.",
        "A table: components, sizes, loads, releases; the peak beside the sum.",
        "Resident weights over time, one colour a component.",
        "The same with all events, for scripts.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {},
            "optional": {"anything": (ANY, {"tooltip": "The report is made after this. Wire in what is made last."})},
        }

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> str:
        """Another value for each prompt."""
        shared = runtime()
        session = shared.attachment.touch()
        return session.prompt_id if session is not None else str(len(shared.store.ledger.events))

    def report(self, anything: Any = None) -> dict[str, Any]:
        """The input, the table, the picture [1, H, W, 3], and the JSON document."""
        shared = runtime()
        shared.attachment.touch()
        page = shared.store.ledger.page()
        text = prompt_table(page)
        return {"ui": {"text": [text]}, "result": (anything, text, timeline(page), json.dumps(prompt_report(page)))}


class LazyH3ReleaseNow(_PassThrough):
    """Frees weights at this point of the graph."""

    DESCRIPTION = "Frees a component, or all of them, when the run arrives here. Whoever needs one later reads it again."
    FUNCTION = "release"
    RETURN_TYPES = (ANY,)
    RETURN_NAMES = ("anything",)
    OUTPUT_TOOLTIPS = ("The input, unchanged.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "anything": (ANY, {"tooltip": "A handle, or any value: the release happens when it arrives."}),
                "what": ([THIS, ALL], {"default": THIS, "tooltip": "this component: the one whose handle is wired in."}),
            }
        }

    def release(self, anything: Any, what: str) -> tuple[Any]:
        """The input. Raises ValueError if "this component" is chosen and the input is no handle."""
        shared = runtime()
        shared.attachment.touch()
        executing = shared.host.executing()
        reason = f"node {executing[1]} asked for it" if executing else "asked for by a node"
        if what == ALL:
            shared.store.release_all(reason)
        elif isinstance(anything, Handle):
            anything.release(reason)
        else:
            kind = type(anything).__name__
            raise ValueError(f'Release now: the input is a {kind}, not the handle of a loader; wire in one, or choose "{ALL}".')
        return (anything,)


class LazyH3Policy(_PassThrough):
    """What happens to weights after their last use, in every prompt that contains this node."""

    DESCRIPTION = "Sets what happens to weights after their last use, for the runs of this workflow only."
    FUNCTION = "set_policy"
    RETURN_TYPES = (ANY,)
    RETURN_NAMES = ("anything",)
    OUTPUT_TOOLTIPS = ("The input, unchanged.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tooltip = "free: at once. keep: stays for the next run until something needs the room. auto: the pack decides."
        return {
            "required": {"policy": (list(POLICIES), {"default": "auto", "tooltip": tooltip, "socketless": True})},
            "optional": {"anything": (ANY, {"tooltip": "Passed on unchanged. The node also works with nothing wired to it."})},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, policy: str | None = None) -> bool | str:
        """In place of the host's own check, which lets through a linked policy: it would not be known when the prompt begins."""
        return policy in POLICIES or f"the policy must be chosen in the node itself, as one of {', '.join(POLICIES)}"

    def set_policy(self, policy: str, anything: Any = None) -> tuple[Any]:
        """The input; the policy is read from the graph, also when this node is cached."""
        runtime().attachment.touch()
        return (anything,)
