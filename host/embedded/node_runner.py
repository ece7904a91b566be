"""One step of one node: start it, or go on with what it has waited for (host contract, sections 2f and 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .caching import CacheEntry, NodeCache
from .declarations import Declarations
from .execution_list import ExecutionList
from .graph import DynamicPrompt, is_link
from .invocation import Call, ExecutionBlocker, Returned, finished, merged_outputs, merged_ui, settled
from .progress import ProgressRegistry

Emit = Callable[[str, dict[str, Any]], None]


@dataclass
class NodeRunner:
    """Runs the nodes of one prompt, as often each as it takes."""

    prompt_id: str
    extra_data: dict[str, Any]
    dynprompt: DynamicPrompt
    declarations: Declarations
    outputs: NodeCache
    objects: NodeCache
    execution_list: ExecutionList
    registry: ProgressRegistry
    emit: Emit
    check_interrupt: Callable[[], None]
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)  # node -> what it gave to look at
    _tasks: dict[str, list[Any]] = field(default_factory=dict)  # node -> its results, some of them unfinished tasks
    _expansions: dict[str, list[Returned]] = field(default_factory=dict)  # node -> its results, some of them links to children
    _wakers: set[asyncio.Task[None]] = field(default_factory=set)

    async def advance(self, node_id: str) -> CacheEntry | None:
        """The node's outputs, published; None while it waits for a lazy input, for its tasks or for its children."""
        if node_id in self._expansions:
            return self._published(node_id, self._gathered_from_children(node_id))
        results = self._finished_tasks(node_id) if node_id in self._tasks else await self._start(node_id)
        if results is None:
            return None
        returned = [Returned.parse(result, node_id, self._node_class(node_id)) for result in results]
        self._show(node_id, merged_ui(returned))
        if any(each.expand is not None for each in returned):
            await self._expand(node_id, returned)
            return None
        return self._published(node_id, self._merged(node_id, returned))

    def reuse(self, node_id: str, entry: CacheEntry) -> None:
        """The node's outputs are known: show what it showed, hand out what it gave."""
        self._show(node_id, entry.ui or {})
        self.execution_list.deliver(node_id, entry)

    def _published(self, node_id: str, outputs: list[list[Any]]) -> CacheEntry:
        entry = CacheEntry(self.shown.get(node_id), outputs)
        self.execution_list.deliver(node_id, entry)
        self.outputs.set(node_id, entry)
        return entry

    async def _start(self, node_id: str) -> list[Any] | None:
        self.registry.start_progress(node_id)
        inputs, missing = self._inputs(node_id)
        self.emit("executing", self._about(node_id))
        node = self._instance(node_id)
        if await self._wants_lazy_inputs(node_id, node, inputs, missing):
            return None
        call = Call(self.prompt_id, node_id, node, node.FUNCTION, self.check_interrupt, self._reporting_block(node_id))
        results = await call.over_lists(inputs)
        if any(isinstance(result, asyncio.Task) for result in results):
            self._suspend(node_id, results)
            return None
        return results

    def _inputs(self, node_id: str) -> tuple[dict[str, list[Any]], set[str]]:
        """Lists of values by name, and the names of links that brought nothing (yet): None is passed for those."""
        node = self.dynprompt.get_node(node_id)
        declared = self.declarations.inputs(node["class_type"])
        inputs, missing = {}, set()
        for name, value in node["inputs"].items():
            is_raw = name in declared and declared[name].is_raw_link
            if not is_link(value) or is_raw:
                if name in declared:
                    inputs[name] = [value]
                continue
            received = self._received(node_id, *value)
            if received is None:
                missing.add(name)
            inputs[name] = [None] if received is None else received
        return inputs | self._hidden_inputs(node_id, node["class_type"]), missing

    def _received(self, node_id: str, producer: str, slot: float) -> list[Any] | None:
        entry = self.execution_list.received(producer, node_id)
        return entry.outputs[int(slot)] if entry is not None and slot < len(entry.outputs) else None

    def _hidden_inputs(self, node_id: str, class_type: str) -> dict[str, list[Any]]:
        sources = {
            "PROMPT": self.dynprompt.original_prompt,
            "DYNPROMPT": self.dynprompt,
            "EXTRA_PNGINFO": self.extra_data.get("extra_pnginfo"),
            "UNIQUE_ID": node_id,
            "EXECUTION_LIST": self.execution_list,
        }
        return {name: [sources.get(what)] for name, what in self.declarations.hidden(class_type).items()}

    def _instance(self, node_id: str) -> Any:
        node = self.objects.get(node_id)
        if node is None:
            node = self._node_class(node_id)()
            self.objects.set(node_id, node)
        return node

    async def _wants_lazy_inputs(self, node_id: str, node: Any, inputs: dict[str, list[Any]], missing: set[str]) -> bool:
        if not hasattr(node, "check_lazy_status"):
            return False
        call = Call(self.prompt_id, node_id, node, "check_lazy_status", self.check_interrupt)
        answers = await settled(await call.over_lists(inputs))
        names = {name for answer in answers if isinstance(answer, list) for name in answer}
        wanted = sorted(name for name in names if name in missing or name not in inputs)
        for name in wanted:
            self.execution_list.require_input(node_id, name)
        return bool(wanted)

    def _reporting_block(self, node_id: str) -> Callable[[ExecutionBlocker], ExecutionBlocker]:
        """A blocker with a message is told once, at the first node that it blocks."""

        def report(blocker: ExecutionBlocker) -> ExecutionBlocker:
            if blocker.message is None:
                return blocker
            self.emit("execution_blocked", self._about(node_id) | {"message": blocker.message})
            return ExecutionBlocker(None)

        return report

    def _suspend(self, node_id: str, results: list[Any]) -> None:
        """Let other nodes run until all tasks of this one are done."""
        self._tasks[node_id] = results
        unblock = self.execution_list.add_external_block(node_id)

        async def wake() -> None:
            await asyncio.gather(*(each for each in results if isinstance(each, asyncio.Task)), return_exceptions=True)
            unblock()

        waker = asyncio.create_task(wake())
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    def _finished_tasks(self, node_id: str) -> list[Any]:
        return [finished(result) for result in self._tasks.pop(node_id)]

    def _show(self, node_id: str, ui: dict[str, list[Any]]) -> None:
        if ui:
            self.shown[node_id] = ui
            self.emit("executed", self._about(node_id) | {"output": ui})

    async def _expand(self, node_id: str, returned: list[Returned]) -> None:
        """Add the children to the graph; the node waits for those that its results link to."""
        self._expansions[node_id] = returned
        children = {child: info for each in returned for child, info in (each.expand or {}).items()}
        for child, info in children.items():
            info.setdefault("inputs", {})
            self.dynprompt.add_ephemeral_node(child, info, node_id, info.get("override_display_id", node_id))
        for cache in (self.outputs, self.objects):
            await cache.expanded(node_id, children)
        for child, info in children.items():
            if self.declarations.is_output(info["class_type"]):
                self.execution_list.add_node(child)
                self.execution_list.subscribe(child, node_id)
        for value in (value for each in returned if each.expand is not None for value in each.result or ()):
            if is_link(value):
                self.execution_list.add_link(value[0], node_id)

    def _gathered_from_children(self, node_id: str) -> list[list[Any]]:
        returned = self._expansions.pop(node_id)
        for each in returned:
            if each.expand is not None:
                each.result = tuple(value for part in each.result or () for value in self._resolved(node_id, part))
        return self._merged(node_id, returned)

    def _resolved(self, node_id: str, value: Any) -> list[Any]:
        if not is_link(value):
            return [value]
        received = self._received(node_id, *value)
        if received is None:
            raise RuntimeError(f"Node {node_id} links to slot {value[1]} of node {value[0]}, which gave no such output.")
        return received

    def _merged(self, node_id: str, returned: list[Returned]) -> list[list[Any]]:
        return merged_outputs([each.result for each in returned if each.result is not None], self._node_class(node_id))

    def _node_class(self, node_id: str) -> Any:
        return self.declarations.node_class(self.dynprompt.get_node(node_id)["class_type"])

    def _about(self, node_id: str) -> dict[str, Any]:
        return {"node": node_id, "display_node": self.dynprompt.get_display_node_id(node_id), "prompt_id": self.prompt_id}
