"""Whether a prompt can run, and if not, what is wrong where. Reports have the shape that ComfyUI's front end shows."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from .declarations import Declarations, InputDeclaration
from .graph import Node, is_link
from .invocation import Call, ExecutionBlocker, settled
from .signatures import constant_inputs

Problem = dict[str, Any]  # {"type", "message", "details", "extra_info"}


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("it is not finite")
    return number


CASTS = {"INT": int, "FLOAT": _finite, "STRING": str, "BOOLEAN": bool}
MAX_LISTED_CHOICES = 20


@dataclass
class Validation:
    """``outputs`` can run. ``error`` is set when none can; ``node_errors`` says per node why not."""

    outputs: list[str] = field(default_factory=list)
    error: Problem | None = None
    node_errors: dict[str, dict[str, Any]] = field(default_factory=dict)


def problem(kind: str, message: str, details: str = "", **extra_info: Any) -> Problem:
    return {"type": kind, "message": message, "details": details, "extra_info": extra_info}


def types_fit(received: Any, wanted: Any) -> bool:
    """Whether a link may join the two: equal, "*", or one name in common ("INT,FLOAT" is two names)."""
    if not (received != wanted):  # noqa: SIM202  (old packs make their "any" type by overriding !=)
        return True
    if isinstance(received, (list, tuple)) and wanted == "COMBO":
        return True
    if not (isinstance(received, str) and isinstance(wanted, str)):
        return "*" in (received, wanted)
    names = [{name.strip() for name in each.split(",")} for each in (received, wanted)]
    return "*" in names[0] | names[1] or bool(names[0] & names[1])


async def validate_prompt(
    prompt_id: str, prompt: dict[str, Node], declarations: Declarations, targets: Collection[str] | None = None
) -> Validation:
    """Check every output node (of ``targets``, if given) with all it depends on. Constants are cast to their types in place."""
    unusable = next((found for node_id, node in prompt.items() if (found := _unusable(node_id, node, declarations))), None)
    if unusable:
        return Validation(error=unusable)
    wanted = [node_id for node_id in prompt if declarations.is_output(prompt[node_id]["class_type"])]
    wanted = [node_id for node_id in wanted if targets is None or node_id in targets]
    if not wanted:
        return Validation(error=problem("prompt_no_outputs", "Prompt has no outputs"))
    return await _Validator(prompt_id, prompt, declarations).check(wanted)


def _unusable(node_id: str, node: Any, declarations: Declarations) -> Problem | None:
    class_type = node.get("class_type") if isinstance(node, dict) else None
    if not isinstance(node, dict) or not isinstance(node.get("inputs", {}), dict) or not isinstance(class_type, (str, NoneType)):
        return problem(
            "invalid_prompt", f"Node {node_id} is no object with class_type and inputs: save the workflow in API format."
        )
    if class_type in declarations:
        node.setdefault("inputs", {})
        return None
    meta = node.get("_meta")
    title = (meta.get("title") if isinstance(meta, dict) else None) or class_type or f"#{node_id}"
    reason = (
        "has no class_type: save the workflow in API format" if class_type is None else "not found: is its node pack installed?"
    )
    return problem(
        "missing_node_type",
        f"Node '{title}' {reason}",
        f"Node ID '#{node_id}'",
        node_id=node_id,
        class_type=class_type,
        node_title=title,
    )


class _Validator:
    def __init__(self, prompt_id: str, prompt: dict[str, Node], declarations: Declarations):
        self._prompt_id = prompt_id
        self._prompt = prompt
        self._declarations = declarations
        self._problems: dict[str, list[Problem]] = {}
        self._is_good: dict[str, bool] = {}

    async def check(self, wanted: list[str]) -> Validation:
        result = Validation()
        for output in wanted:
            upstream = self._in_dependency_order(output)
            for node_id in upstream:
                if node_id not in self._is_good:
                    await self._check_node(node_id)
            if self._is_good[output]:
                result.outputs.append(output)
            else:
                self._report(output, upstream, result.node_errors)
        if not result.outputs:
            lines = [f"{each['message']}: {each['details']}" for node in result.node_errors.values() for each in node["errors"]]
            result.error = problem("prompt_outputs_failed_validation", "Prompt outputs failed validation", "\n".join(lines))
        return result

    def _report(self, output: str, upstream: list[str], node_errors: dict[str, dict[str, Any]]) -> None:
        for node_id in upstream:
            if self._problems[node_id]:
                empty = {
                    "errors": self._problems[node_id],
                    "dependent_outputs": [],
                    "class_type": self._prompt[node_id]["class_type"],
                }
                node_errors.setdefault(node_id, empty)["dependent_outputs"].append(output)

    def _in_dependency_order(self, output: str) -> list[str]:
        """The output and all nodes behind it, producers first; a link that closes a cycle is a problem of its node."""
        order: dict[str, None] = {}
        stack, path = [(output, False)], dict[str, None]()
        while stack:
            node_id, is_left = stack.pop()
            if is_left:
                path.pop(node_id)
                order[node_id] = None
            elif node_id not in path and node_id not in order:
                path[node_id] = None
                stack.append((node_id, True))
                for producer in self._producers(node_id):
                    if producer in path:
                        self._blame_cycle([*path][[*path].index(producer) :])
                    else:
                        stack.append((producer, False))
        return list(order)

    def _producers(self, node_id: str) -> Iterator[str]:
        for value in self._prompt[node_id]["inputs"].values():
            if is_link(value) and value[0] in self._prompt:
                yield value[0]

    def _blame_cycle(self, cycle: list[str]) -> None:
        names = " -> ".join(f"{node_id} ({self._prompt[node_id]['class_type']})" for node_id in [*cycle, cycle[0]])
        for node_id in cycle:
            self._problems[node_id] = [
                problem("dependency_cycle", "Dependency cycle detected", names, node_id=node_id, cycle_nodes=cycle)
            ]
            self._is_good[node_id] = False

    async def _check_node(self, node_id: str) -> None:
        node_class = self._declarations.node_class(self._prompt[node_id]["class_type"])
        try:
            own_check = _OwnCheck(node_class)
            received: dict[str, Any] = {}
            problems = list(self._input_problems(node_id, own_check, received))
            if not problems and own_check.is_wanted:
                problems = await self._ask(node_id, node_class, own_check, received)
        except Exception as error:
            details = {"exception_type": type(error).__qualname__, "traceback": traceback.format_tb(error.__traceback__)}
            problems = [problem("exception_during_validation", "Exception when validating node", str(error), **details)]
        self._problems[node_id] = problems
        self._is_good[node_id] = not problems and all(self._is_good[producer] for producer in self._producers(node_id))

    def _input_problems(self, node_id: str, own_check: _OwnCheck, received: dict[str, Any]) -> Iterator[Problem]:
        """What is wrong with the inputs one by one; the types that links bring are put into ``received``."""
        node = self._prompt[node_id]
        for name, declared in self._declarations.inputs(node["class_type"]).items():
            found = None
            if declared.category == "hidden":
                continue
            if name not in node["inputs"]:
                if declared.category == "required":
                    found = problem("required_input_missing", "Required input is missing", name, input_name=name)
            elif isinstance(node["inputs"][name], list):
                found, received[name] = self._link_problem(name, node["inputs"][name], declared, own_check.takes_types)
            else:
                found = _constant_problem(name, node["inputs"], declared, own_check.replaces(name))
            if found:
                yield found

    def _link_problem(
        self, name: str, value: list[Any], declared: InputDeclaration, any_type: bool
    ) -> tuple[Problem | None, Any]:
        """The problem of a linked input, if any, and the type that the link brings."""
        info: dict[str, Any] = {"input_name": name, "received_value": value}
        if not is_link(value):
            message = "Bad linked input, must be a length-2 list of [node_id, slot_index]"
            return problem("bad_linked_input", message, name, **info), None
        producer, slot = value[0], int(value[1])
        if producer not in self._prompt:
            return problem("bad_linked_input", f"Bad linked input, the prompt has no node {producer}", name, **info), None
        types = self._declarations.node_class(self._prompt[producer]["class_type"]).RETURN_TYPES
        if not 0 <= slot < len(types):
            message = f"Bad linked input, node {producer} has {len(types)} outputs and no slot {slot}"
            return problem("bad_linked_input", message, name, **info), None
        if any_type or types_fit(types[slot], declared.type):
            return None, types[slot]
        details = f"{name}, received_type({types[slot]}) mismatch input_type({declared.type})"
        info = {"input_name": name, "received_type": types[slot], "linked_node": value}
        return problem("return_type_mismatch", "Return type mismatch between linked nodes", details, **info), types[slot]

    async def _ask(self, node_id: str, node_class: Any, own_check: _OwnCheck, received: Mapping[str, Any]) -> list[Problem]:
        """VALIDATE_INPUTS of the node: True, False, or what is wrong."""
        inputs = constant_inputs(node_id, self._prompt[node_id], self._declarations)
        inputs = {name: values for name, values in inputs.items() if own_check.replaces(name)}
        if own_check.takes_types:
            inputs["input_types"] = [received]
        answers = await settled(await Call(self._prompt_id, node_id, node_class, "VALIDATE_INPUTS").over_lists(inputs))
        wrong = [answer for answer in answers if answer is not True and not isinstance(answer, ExecutionBlocker)]
        names = ", ".join(name for name in inputs if name != "input_types")
        details = [names if answer is False else f"{names} - {answer}" for answer in wrong]
        return [problem("custom_validation_failed", "Custom validation failed for node", text) for text in details]


class _OwnCheck:
    """VALIDATE_INPUTS of a class; the standard checks leave alone what it takes as parameters."""

    def __init__(self, node_class: Any):
        function = getattr(node_class, "VALIDATE_INPUTS", None)
        parameters = inspect.signature(function).parameters.values() if function else ()
        self._names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self.is_wanted = bool(self._names) or self._takes_all
        self.takes_types = "input_types" in self._names

    def replaces(self, name: str) -> bool:
        return self._takes_all or name in self._names


def _constant_problem(name: str, inputs: dict[str, Any], declared: InputDeclaration, is_replaced: bool) -> Problem | None:
    """Cast the value in place, then check range and choices."""
    value = inputs[name]
    if isinstance(value, dict) and "__value__" in value:  # how a list is told from a link
        value = inputs[name] = value["__value__"]
        if is_link(value):
            message = "Bad input value, a list of a name and a number would be taken for a link"
            return problem("bad_linked_input", message, name, input_name=name, received_value=value)
    try:
        if isinstance(declared.type, str) and declared.type in CASTS:
            value = inputs[name] = CASTS[declared.type](value)
    except (TypeError, ValueError, OverflowError) as error:
        details = f"{name}, {value}, {error}"
        message = f"Failed to convert an input value to a {declared.type} value"
        return problem("invalid_input_type", message, details, input_name=name, received_value=value)
    return None if is_replaced else _range_problem(name, value, declared) or _choice_problem(name, value, declared)


def _range_problem(name: str, value: Any, declared: InputDeclaration) -> Problem | None:
    low, high = declared.options.get("min"), declared.options.get("max")
    info = {"input_name": name, "received_value": value, "input_config": [declared.type, dict(declared.options)]}
    if low is not None and value < low:
        return problem("value_smaller_than_min", f"Value {value} smaller than min of {low}", name, **info)
    if high is not None and value > high:
        return problem("value_bigger_than_max", f"Value {value} bigger than max of {high}", name, **info)
    return None


def _choice_problem(name: str, value: Any, declared: InputDeclaration) -> Problem | None:
    choices = declared.choices
    if choices is None:
        return None
    chosen = value if isinstance(value, list) and declared.options.get("multiselect") else [value]
    wrong = [each for each in chosen if each not in choices]
    if not wrong:
        return None
    listed = str(choices) if len(choices) <= MAX_LISTED_CHOICES else f"(list of length {len(choices)})"
    details = f"{name}: {', '.join(map(repr, wrong))} not in {listed}"
    return problem("value_not_in_list", "Value not in list", details, input_name=name, received_value=value)
