"""Settings for prompts as they are queued, and for what other loaders load. All are off until somebody turns them on."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

log = logging.getLogger("lazy_h3")

VARIABLES = {
    "every_prompt": "LAZY_H3_EVERY_PROMPT",  # stock loaders of every prompt become lazy ones
    "drop_loaders": "LAZY_H3_DROP_LOADERS",  # cached outputs of other loaders are deleted after their last use
    "evict_dynamic": "LAZY_H3_EVICT_DYNAMIC",  # models that core pages in by itself are unloaded after their last use
}
NOTHING: Mapping[str, str] = MappingProxyType({})


class Settings:
    """What is on. What the environment says stays as it is; observers of ``on_change`` hear of the rest."""

    def __init__(self, environment: Mapping[str, str] = NOTHING) -> None:
        said = {name: environment[variable] for name, variable in VARIABLES.items() if variable in environment}
        for name, value in said.items():
            if value not in ("on", "off"):
                log.warning("%s is %r, which is neither on nor off; off holds.", VARIABLES[name], value)
        self._fixed = {name: value == "on" for name, value in said.items()}
        self._values = dict.fromkeys(VARIABLES, False)
        self.on_change: list[Callable[[], None]] = []

    def is_on(self, name: str) -> bool:
        return self._fixed.get(name, self._values[name])

    def change(self, values: Mapping[str, bool]) -> None:
        """Raises KeyError for a name that is no setting; then nothing changes."""
        unknown = values.keys() - self._values.keys()
        if unknown:
            raise KeyError(min(unknown))
        self._values.update(values)
        for observer in self.on_change:
            observer()

    def document(self) -> dict[str, Any]:
        """What is on, and what the environment has fixed."""
        return {"settings": {name: self.is_on(name) for name in VARIABLES}, "fixed": sorted(self._fixed)}


@functools.cache
def settings_of_process() -> Settings:
    """As the environment says, until the front end says more."""
    return Settings(os.environ)
