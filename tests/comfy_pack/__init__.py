"""A custom node pack for tests on a real server: core in small, and nodes and routes that look at results and at memory."""

import os

if os.environ.get("LAZY_H3_CORE_SCALE"):
    from . import probe, small_core
    from .nodes import NODE_CLASS_MAPPINGS

    small_core.shrink_core(os.environ["LAZY_H3_CORE_SCALE"])
    probe.install()
    __all__ = ["NODE_CLASS_MAPPINGS"]
