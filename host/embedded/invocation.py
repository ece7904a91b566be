"""Calling a node's function: mapped over lists, in the context of its node, and what it returns."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .context import executing

Inputs = Mapping[str, Sequence[Any]]  # each input is a list; a plain value is a list of one


class ExecutionBlocker:
    """An output whose consumers are not to run. ``message`` None blocks silently."""

    def __init__(self, message: str | None):
        self.message = message


@dataclass
class Call:
    """One function of one node: ``target`` is an instance, or the class for a class method."""

    prompt_id: str
    node_id: str
    target: Any
    function: str
    before: Callable[[], None] = lambda: None
    on_block: Callable[[ExecutionBlocker], ExecutionBlocker] = lambda blocker: blocker

    async def over_lists(self, inputs: Inputs) -> list[Any]:
        """One result per call, in order; a Task where an async function has not returned yet.

        The lists are walked together, shorter ones repeat their last value. With INPUT_IS_LIST one call receives the lists.
        """
        return [await self._once(index, arguments) for index, arguments in self._arguments(inputs)]

    def _arguments(self, inputs: Inputs) -> Iterator[tuple[int | None, dict[str, Any]]]:
        if getattr(self.target, "INPUT_IS_LIST", False):
            yield 0, dict(inputs)
            return
        if not inputs:
            yield None, {}
            return
        for name, values in inputs.items():
            if not values:
                raise ValueError(f"Input '{name}' of node {self.node_id} received an empty list: give it at least one value.")
        for index in range(max(map(len, inputs.values()))):
            yield index, {name: values[min(index, len(values) - 1)] for name, values in inputs.items()}

    async def _once(self, index: int | None, arguments: dict[str, Any]) -> Any:
        self.before()
        blocker = self._blocker(arguments)
        if blocker is not None:
            return self.on_block(blocker)
        function = getattr(self.target, self.function)
        if inspect.iscoroutinefunction(function):
            return await self._launch(function, index, arguments)
        with executing(self.prompt_id, self.node_id, index):
            return function(**arguments)

    async def _launch(self, function: Callable[..., Any], index: int | None, arguments: dict[str, Any]) -> Any:
        async def in_context() -> Any:
            with executing(self.prompt_id, self.node_id, index):
                return await function(**arguments)

        task = asyncio.create_task(in_context())
        await asyncio.sleep(0)  # as far as it gets without waiting
        return task.result() if task.done() else task

    def _blocker(self, arguments: Mapping[str, Any]) -> ExecutionBlocker | None:
        is_list = getattr(self.target, "INPUT_IS_LIST", False)
        values = (value for argument in arguments.values() for value in (argument if is_list else (argument,)))
        return next((value for value in values if isinstance(value, ExecutionBlocker)), None)


def finished(result: Any) -> Any:
    """The value of a result, be it a task that is done or the value itself."""
    if not isinstance(result, asyncio.Task):
        return result
    if result.cancelled():
        raise RuntimeError("The node's task was cancelled before it returned.")
    return result.result()


async def settled(results: Sequence[Any]) -> list[Any]:
    """The values of all results, waiting for tasks; the first error is raised."""
    tasks = [result for result in results if isinstance(result, asyncio.Task)]
    if tasks:
        await asyncio.wait(tasks)
    return [finished(result) for result in results]


@dataclass
class Returned:
    """What one call of a node gave: values or links per slot, things to show, nodes to add."""

    result: tuple[Any, ...] | None
    ui: Mapping[str, Sequence[Any]] | None = None
    expand: dict[str, Any] | None = None

    @classmethod
    def parse(cls, value: Any, node_id: str, node_class: Any) -> Returned:
        """A tuple, a list, a blocker for all slots, or a dict of ``result``, ``ui`` and ``expand``."""
        if isinstance(value, dict):
            result = value.get("result")
            parsed = None if result is None else cls.parse(result, node_id, node_class).result
            return cls(parsed, value.get("ui"), value.get("expand"))
        if isinstance(value, ExecutionBlocker):
            return cls((value,) * len(node_class.RETURN_TYPES))
        if isinstance(value, (tuple, list)):
            return cls(tuple(value))
        name = f"Node {node_id} ({node_class.__name__})"
        raise TypeError(f"{name} returned {type(value).__name__}; a node returns a tuple, or a dict of result, ui and expand.")


def merged_outputs(results: Sequence[tuple[Any, ...]], node_class: Any) -> list[list[Any]]:
    """One list per slot over all calls; a slot of OUTPUT_IS_LIST is flattened."""
    if not results:
        return []
    is_list = getattr(node_class, "OUTPUT_IS_LIST", [False] * len(results[0]))
    return [
        _merged_slot([result[slot] for result in results], flat)
        for slot, flat in zip(range(len(results[0])), is_list, strict=False)
    ]


def _merged_slot(values: list[Any], flat: bool) -> list[Any]:
    if not flat:
        return values
    return [item for value in values for item in ([value] if isinstance(value, ExecutionBlocker) else value)]


def merged_ui(returned: Sequence[Returned]) -> dict[str, list[Any]]:
    """What all calls show, list by list."""
    shown = [each.ui for each in returned if each.ui]
    return {name: [item for ui in shown for item in ui[name]] for name in (shown[0] if shown else ())}
