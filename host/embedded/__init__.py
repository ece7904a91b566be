"""ComfyUI's executor in this process, small: for ``lazy-h3 run`` and as a double in tests (host contract, section 9)."""

from .context import ExecutionContext, current_host, get_executing_context, interrupt, throw_exception_if_processing_interrupted
from .errors import InterruptProcessingException
from .executor import NodeError
from .host import EmbeddedHost, OutputFile, RunResult
from .invocation import ExecutionBlocker
from .progress import ProgressBar, ProgressHandler, ProgressRegistry, add_progress_handler, get_progress_state
from .video import VideoComponents, VideoFromComponents

__all__ = [
    "EmbeddedHost",
    "ExecutionBlocker",
    "ExecutionContext",
    "InterruptProcessingException",
    "NodeError",
    "OutputFile",
    "ProgressBar",
    "ProgressHandler",
    "ProgressRegistry",
    "RunResult",
    "VideoComponents",
    "VideoFromComponents",
    "add_progress_handler",
    "current_host",
    "get_executing_context",
    "get_progress_state",
    "interrupt",
    "throw_exception_if_processing_interrupted",
]
