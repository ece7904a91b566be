"""Every prompt made lazy as it is queued, by ComfyUI's own hook for that, which is in use only while the setting is on."""

from __future__ import annotations

import logging
import sys
from typing import Any

from ..convert import convert_prompt
from ..settings import Settings

log = logging.getLogger("lazy_h3")


class EveryPrompt:
    """Enters a handler with ComfyUI's server, and takes it out again, as ``settings`` says."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._told: set[tuple[str, str]] = set()
        settings.on_change.append(self.follow)
        self.follow()

    def follow(self) -> None:
        """Without a server, as in the command line, does nothing."""
        server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
        if server is None:
            return
        is_entered = self.converted in server.on_prompt_handlers
        if self._settings.is_on("every_prompt") and not is_entered:
            server.add_on_prompt_handler(self.converted)
        elif is_entered and not self._settings.is_on("every_prompt"):
            server.on_prompt_handlers.remove(self.converted)

    def converted(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request to queue a prompt, with lazy loaders; ids and inputs stay, and so does a request without a prompt."""
        prompt = request.get("prompt")
        if not isinstance(prompt, dict):
            return request
        conversion = convert_prompt(prompt, "lazy")
        for found in conversion.left_alone:
            if (found.kind, found.remark) not in self._told:
                self._told.add((found.kind, found.remark))
                log.info("%s is left as it is in queued prompts: %s", found.kind, found.remark)
        return {**request, "prompt": conversion.workflow}
