"""Lazy H3: MiniMax-H3 for ComfyUI, weights read at first use and gone after the last."""

if __package__:  # a test collector imports this file without a package, and finds nothing to do
    from .host.comfy.queue import EveryPrompt
    from .host.comfy.routes import register
    from .host.settings import settings_of_process
    from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
    from .nodes.runtime import runtime

    WEB_DIRECTORY = "./web"
    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
    register(runtime)
    EveryPrompt(settings_of_process())
