"""Objects of other loaders, released after their last use."""

from __future__ import annotations

from typing import Any

from .adapt import CATEGORY
from .inspect import ANY
from .runtime import runtime


class LazyH3ReleaseAfterLastUse:
    """Passes an object on, and has its weights released when no node can use it any more."""

    DESCRIPTION = (
        "Frees a model of another loader after the last node that uses it, and reads it again when one does. For loaders that "
        "have no lazy counterpart."
    )
    CATEGORY = CATEGORY
    CARRIES = (0,)
    RELEASES = "anything"  # also for nodes that are wired to the same loader
    FUNCTION = "follow"
    RETURN_TYPES = (ANY,)
    RETURN_NAMES = ("anything",)
    OUTPUT_TOOLTIPS = ("The input, unchanged.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tooltip = "A MODEL, CLIP, VAE, CONTROL_NET or the like, best wired in directly from its loader."
        return {"required": {cls.RELEASES: (ANY, {"tooltip": tooltip})}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> str:
        """Never, so that what comes after stays cached; but the prompt is followed from here on."""
        runtime().attachment.touch()
        return ""

    def follow(self, anything: Any) -> tuple[Any]:
        """The input."""
        shared = runtime()
        shared.attachment.touch()
        shared.releases.after_last_use(anything, shared.attachment.origins(self.RELEASES))
        return (anything,)
