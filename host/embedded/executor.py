"""The life of one prompt (host contract, section 2, steps a to i)."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .caching import CacheEntry, ClassicCache, NoCache, NodeCache
from .declarations import Declarations
from .errors import DependencyCycleError, InterruptProcessingException, NodeStopped
from .execution_list import ExecutionList
from .graph import DynamicPrompt, Node
from .model_management import ModelManagement, is_out_of_memory
from .node_runner import NodeRunner
from .progress import ProgressHandler, ProgressRegistry
from .signatures import Fingerprints, Identities, Signatures


class CacheProvider(Protocol):
    """Somebody outside who caches outputs; only told when prompts begin and end."""

    def on_prompt_start(self, prompt_id: str) -> None: ...

    def on_prompt_end(self, prompt_id: str) -> None: ...


@dataclass
class Job:
    """A validated prompt: what the queue hands to the executor."""

    prompt_id: str
    prompt: dict[str, Node]
    outputs: list[str]
    extra_data: dict[str, Any]
    declarations: Declarations
    handler: ProgressHandler


@dataclass
class NodeError:
    """Why a run did not succeed, as text: an error object would keep the frames that it passed, and what they hold, alive."""

    type: str
    message: str
    node_id: str | None = None
    class_type: str | None = None
    traceback: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of a job."""

    status: str = "success"
    error: NodeError | None = None
    executed: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)


class PromptExecutor:
    """Runs jobs one after the other and keeps outputs between them."""

    def __init__(
        self,
        new_cache: Callable[[], NodeCache],
        model_management: ModelManagement,
        emit: Callable[[str, dict[str, Any]], None],
        check_interrupt: Callable[[], None],
    ):
        self._new_cache = new_cache
        self._model_management = model_management
        self._emit = emit
        self._check_interrupt = check_interrupt
        self.cache_providers: list[CacheProvider] = []
        self.progress = ProgressRegistry("", DynamicPrompt({}))
        self.reset()

    def reset(self) -> None:
        """Forget all outputs and node objects."""
        self.outputs = self._new_cache()
        self.objects: NodeCache = NoCache() if isinstance(self.outputs, NoCache) else ClassicCache()
        self.status_messages: list[tuple[str, dict[str, Any]]] = []

    async def execute(self, job: Job, expose_probe: bool = True) -> Outcome:
        """Run a job to its end, however that comes. Only a raising finish or reset handler gets out of here."""
        self.status_messages = []
        self._tell("execution_start", {"prompt_id": job.prompt_id})
        for provider in self.cache_providers:
            provider.on_prompt_start(job.prompt_id)
        try:
            return await (self.execute_async(job) if expose_probe else self._execute_unprobed(job))
        finally:
            for provider in self.cache_providers:
                provider.on_prompt_end(job.prompt_id)

    async def execute_async(self, job: Job) -> Outcome:
        """The frame that packs look for: by this name, with the locals ``self`` and ``execution_list``."""
        with torch.inference_mode():
            runner, outcome = await self._prepare(job)
            execution_list = runner.execution_list
            await self._run(job, runner, execution_list, outcome)
        return outcome

    async def _execute_unprobed(self, job: Job) -> Outcome:
        """The same for hosts in which nobody finds that frame."""
        with torch.inference_mode():
            runner, outcome = await self._prepare(job)
            await self._run(job, runner, runner.execution_list, outcome)
        return outcome

    async def _prepare(self, job: Job) -> tuple[NodeRunner, Outcome]:
        """New registry, fingerprints and keys, old outputs dropped, cached ones found, list built (steps b to e)."""
        dynprompt = DynamicPrompt(job.prompt)
        self.progress.reset_handlers()
        self.progress = ProgressRegistry(job.prompt_id, dynprompt)
        job.handler.set_registry(self.progress)
        self.progress.register_handler(job.handler)

        fingerprints = Fingerprints(job.prompt_id, dynprompt, job.declarations)
        await self.outputs.set_prompt(dynprompt, Signatures(dynprompt, job.declarations, fingerprints))
        await self.objects.set_prompt(dynprompt, Identities(dynprompt))
        outcome = Outcome(cached=[node_id for node_id in job.prompt if self.outputs.get(node_id) is not None])
        self._tell("execution_cached", {"nodes": outcome.cached, "prompt_id": job.prompt_id})

        execution_list = ExecutionList(dynprompt, job.declarations, self.outputs)
        for node_id in job.outputs:
            execution_list.add_node(node_id)
        runner = NodeRunner(
            job.prompt_id,
            job.extra_data,
            dynprompt,
            job.declarations,
            self.outputs,
            self.objects,
            execution_list,
            self.progress,
            self._emit,
            self._check_interrupt,
        )
        return runner, outcome

    async def _run(self, job: Job, runner: NodeRunner, execution_list: ExecutionList, outcome: Outcome) -> None:
        """Node after node until the list is empty or one fails (steps f and g)."""
        outcome.shown = runner.shown
        try:
            while execution_list.pendingNodes:
                await self._step(runner, await execution_list.next_node(), outcome)
                self.outputs.step_done()
        except DependencyCycleError as error:
            self._failed(job, outcome, error.node_id, error)
        except NodeStopped as stopped:
            self._failed(job, outcome, runner.dynprompt.get_real_node_id(stopped.node_id), stopped.__cause__)
        else:
            self._tell("execution_success", {"prompt_id": job.prompt_id})

    async def _step(self, runner: NodeRunner, node_id: str, outcome: Outcome) -> None:
        entry = self.outputs.get(node_id)
        if entry is None:
            entry = await self._advance(runner, node_id)
            if entry is None:
                return
            outcome.executed.append(node_id)
        else:
            runner.reuse(node_id, entry)
        runner.registry.finish_progress(node_id)
        runner.execution_list.complete(node_id)

    async def _advance(self, runner: NodeRunner, node_id: str) -> CacheEntry | None:
        try:
            return await runner.advance(node_id)
        except (Exception, InterruptProcessingException) as error:
            raise NodeStopped(node_id) from error

    def _failed(self, job: Job, outcome: Outcome, node_id: str, error: BaseException | None) -> None:
        class_type = job.prompt[node_id]["class_type"]
        about = {"prompt_id": job.prompt_id, "node_id": node_id, "node_type": class_type, "executed": outcome.executed}
        if isinstance(error, InterruptProcessingException):
            outcome.status = "interrupted"
            outcome.error = NodeError("InterruptProcessingException", "The run was interrupted.", node_id, class_type)
            self._tell("execution_interrupted", about)
            return
        if is_out_of_memory(error):
            self._model_management.unload_all_models()
        outcome.status = "error"
        lines = traceback.format_exception(error) if error else []
        outcome.error = NodeError(type(error).__qualname__, str(error), node_id, class_type, lines)
        details = {"exception_type": outcome.error.type, "exception_message": outcome.error.message, "traceback": lines}
        self._tell("execution_error", about | details)

    def _tell(self, name: str, data: dict[str, Any]) -> None:
        message = data | {"timestamp": int(time.time() * 1000)}
        self.status_messages.append((name, message))
        self._emit(name, message)


def run_job(executor: PromptExecutor, job: Job, expose_probe: bool = True) -> Outcome:
    """Run a job in an event loop of its own; tasks that are left when it ends are cancelled, without inference mode (step i)."""
    return asyncio.run(executor.execute(job, expose_probe))
