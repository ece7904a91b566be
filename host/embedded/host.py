"""The embedded host: runs prompts in this process as ComfyUI would (host contract, sections 2, 3 and 9)."""

from __future__ import annotations

import asyncio
import copy
import gc
import random
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .caching import RamLimits, cache_maker
from .context import make_current
from .core_nodes import CORE_NODE_CLASSES
from .declarations import Declarations
from .errors import InterruptProcessingException
from .events import RunEvents
from .executor import Job, NodeError, Outcome, PromptExecutor, run_job
from .folder_paths import Folders
from .graph import Node
from .model_management import ModelManagement
from .progress import ProgressRegistry
from .validation import Validation, validate_prompt

MAX_HISTORY = 100
KINDS = {"images": "image", "audio": "audio", "video": "video"}
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov")

Observer = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class OutputFile:
    """A file that a node wrote to the output folder; kind is "video", "image" or "audio"."""

    node: str
    path: Path
    kind: str


@dataclass
class RunResult:
    """What became of a prompt."""

    prompt_id: str
    status: str  # "success", "error" or "interrupted"
    prompt: dict[str, Node]  # as it ran, with the fingerprints that the host writes into it
    error: NodeError | None = None
    node_errors: dict[str, dict[str, Any]] = field(default_factory=dict)  # what validation found, by node
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # what nodes gave to look at, by node
    files: list[OutputFile] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)  # in order of finishing, children of expansions included
    cached: list[str] = field(default_factory=list)  # nodes of the prompt whose outputs were known when it began
    seconds: dict[str, float] = field(default_factory=dict)  # per node that ran, from its last start to its finish


class EmbeddedHost:
    """ComfyUI's executor in a few hundred lines: one worker thread, one prompt at a time.

    Args:
        node_classes: name -> class, beside (or instead of) the core nodes that are always there.
        cache: when outputs are forgotten: "ram", "classic", "lru" or "none".
        seed: order in which the outputs of a prompt are visited; None draws one, as every ComfyUI process does.
        expose_probe: whether packs find the frame ``execute_async``; False hides it.
        expose_queue: whether ``running`` shows the prompt that runs.
        models: folders with a sub-folder per kind of model.
    """

    def __init__(
        self,
        node_classes: Mapping[str, type] | None = None,
        *,
        cache: str = "ram",
        lru_size: int = 10,
        ram_limits: RamLimits | None = None,
        seed: int | None = None,
        expose_probe: bool = True,
        expose_queue: bool = True,
        output_directory: Path | str = "output",
        input_directory: Path | str = "input",
        temp_directory: Path | str | None = None,
        models: Path | str | Sequence[Path | str] = (),
    ):
        self.node_classes: dict[str, type] = {**CORE_NODE_CLASSES, **(node_classes or {})}
        models = [models] if isinstance(models, (Path, str)) else models
        temp = None if temp_directory is None else Path(temp_directory)
        self.folders = Folders(Path(output_directory), Path(input_directory), temp, [Path(folder) for folder in models])
        self.model_management = ModelManagement()
        new_cache = cache_maker(cache, lru_size, ram_limits or RamLimits.of_this_machine())
        self.executor = PromptExecutor(new_cache, self.model_management, self._emit, self.throw_if_interrupted)
        self.expose_probe = expose_probe
        self.expose_queue = expose_queue
        self.history: dict[str, RunResult] = {}
        self._seed = random.randrange(2**32) if seed is None else seed
        self._observers: list[Observer] = []
        self._running: tuple[Any, ...] | None = None
        self._interrupted = threading.Event()
        self._flags = {"unload_models": False, "free_memory": False}
        self._flags_lock = threading.Lock()
        self._number = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="embedded-host")
        self._worker_thread = self._worker.submit(threading.current_thread).result()
        make_current(self)

    @property
    def progress(self) -> ProgressRegistry:
        return self.executor.progress

    @property
    def running(self) -> tuple[Any, ...] | None:
        """The running queue item: (number, prompt_id, prompt, extra_data, outputs to execute)."""
        return self._running if self.expose_queue else None

    def on_event(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer(name, data)`` on the worker thread for every message; returns the undo.

        Messages are those of ComfyUI's websocket (execution_start, execution_cached, executing, executed, execution_success,
        execution_error, execution_interrupted), execution_blocked, and those of RunEvents.
        """
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def run(
        self,
        prompt: Mapping[str, Any],
        *,
        prompt_id: str | None = None,
        outputs: Collection[str] | None = None,
        extra_data: Mapping[str, Any] | None = None,
    ) -> RunResult:
        """Validate and run a prompt in API format, and wait for its end. The given prompt is not changed.

        ``outputs`` limits the run to these output nodes. Ctrl-C interrupts the prompt. A prompt that fails is a result, not an
        exception; only what would kill ComfyUI's worker is raised: an error in a handler's finish_handler or reset.
        """
        self._refuse_on_worker()
        arguments = (copy.deepcopy(dict(prompt)), prompt_id or uuid.uuid4().hex, outputs, dict(extra_data or {}))
        try:
            return _result_of(self._submit(self._run, *arguments))
        except KeyboardInterrupt:
            self._interrupt_until_idle()
            raise

    def validate(self, prompt: Mapping[str, Any], outputs: Collection[str] | None = None) -> Validation:
        """What is wrong with a prompt, without running it."""
        self._refuse_on_worker()
        declarations = Declarations(self.node_classes)
        return self._submit(lambda: asyncio.run(validate_prompt("", copy.deepcopy(dict(prompt)), declarations, outputs))).result()

    def interrupt(self) -> None:
        """Ask the running prompt to stop at its next check."""
        self._interrupted.set()

    def throw_if_interrupted(self) -> None:
        if self._interrupted.is_set():
            self._interrupted.clear()
            raise InterruptProcessingException

    def free(self, unload_models: bool = False, free_memory: bool = False) -> None:
        """Unload all models, or also forget all outputs: now if nothing runs, else when the running prompt has ended."""
        with self._flags_lock:
            self._flags["unload_models"] |= unload_models or free_memory
            self._flags["free_memory"] |= free_memory
        if self._running is None and threading.current_thread() is not self._worker_thread:
            self._submit(self._handle_flags).result()

    def close(self) -> None:
        """End the worker thread and remove temporary files."""
        self._worker.shutdown()
        self.folders.close()

    def __enter__(self) -> EmbeddedHost:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _refuse_on_worker(self) -> None:
        if threading.current_thread() is self._worker_thread:
            raise RuntimeError("A node cannot run a prompt in the host that runs the node: return an expansion instead.")

    def _interrupt_until_idle(self) -> None:
        """Again and again, because a prompt that is about to begin forgets earlier interrupts."""
        idle = self._submit(lambda: None)
        while not idle.done():
            self.interrupt()
            wait([idle], timeout=0.1)

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._worker.submit(function, *args)

    def _emit(self, name: str, data: dict[str, Any]) -> None:
        for observer in self._observers:
            observer(name, data)

    def _run(
        self, prompt: dict[str, Node], prompt_id: str, targets: Collection[str] | None, extra_data: dict[str, Any]
    ) -> RunResult:
        make_current(self)
        declarations = Declarations(self.node_classes)
        validation = asyncio.run(validate_prompt(prompt_id, prompt, declarations, targets))
        if validation.error is None:
            order = self._visiting_order(validation.outputs)
            events = RunEvents(self._emit)
            outcome = self._execute(Job(prompt_id, prompt, order, extra_data, declarations, events))
            result = self._result(prompt_id, prompt, outcome, validation, events)
        else:
            result = _refused(prompt_id, prompt, validation)
        self.history[prompt_id] = result
        for oldest in list(self.history)[:-MAX_HISTORY]:
            del self.history[oldest]
        self._handle_flags()
        return result

    def _visiting_order(self, outputs: Sequence[str]) -> list[str]:
        order = list(outputs)
        random.Random(self._seed).shuffle(order)
        return order

    def _execute(self, job: Job) -> Outcome:
        self._interrupted.clear()
        self._number += 1
        self._running = (self._number, job.prompt_id, job.prompt, job.extra_data, job.outputs)
        try:
            outcome = run_job(self.executor, job, self.expose_probe)
        finally:
            self._running = None
        if outcome.status != "success":
            gc.collect()  # a failed node's frames refer to themselves and to what the node held
        return outcome

    def _result(
        self, prompt_id: str, prompt: dict[str, Node], outcome: Outcome, validation: Validation, events: RunEvents
    ) -> RunResult:
        return RunResult(
            prompt_id,
            outcome.status,
            prompt,
            outcome.error,
            validation.node_errors,
            outcome.shown,
            list(self._files(outcome)),
            outcome.executed,
            outcome.cached,
            events.seconds,
        )

    def _files(self, outcome: Outcome) -> Iterator[OutputFile]:
        for node_id, shown in outcome.shown.items():
            for name, items in shown.items():
                for item in items:
                    if name in KINDS and isinstance(item, dict) and item.get("type") == "output":
                        path = Path(self.folders.get_output_directory(), item.get("subfolder", ""), item["filename"])
                        kind = "video" if path.suffix in VIDEO_SUFFIXES else KINDS[name]
                        yield OutputFile(node_id, path, kind)

    def _handle_flags(self) -> None:
        """What /free asks for (contract, section 2j)."""
        with self._flags_lock:
            flags, self._flags = self._flags, {"unload_models": False, "free_memory": False}
        if flags["unload_models"]:
            self.model_management.unload_all_models()
        if flags["free_memory"]:
            self.executor.reset()
        if any(flags.values()):
            gc.collect()
            self.model_management.soft_empty_cache()


def _result_of(job: Future[RunResult]) -> RunResult:
    """Waits in slices, because a wait without end may not let Ctrl-C through."""
    while not job.done():
        wait([job], timeout=0.2)
    return job.result()


def _refused(prompt_id: str, prompt: dict[str, Node], validation: Validation) -> RunResult:
    """The result of a prompt that was not run."""
    found = validation.error or {}
    message = f"{found['message']}: {found['details']}" if found["details"] else found["message"]
    return RunResult(prompt_id, "error", prompt, NodeError(found["type"], message), validation.node_errors)
