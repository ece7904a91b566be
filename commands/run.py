"""``run``: a workflow in the embedded host, with a report."""

from __future__ import annotations

import json
import logging
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..host.embedded.declarations import Declarations, InputDeclaration
from ..host.embedded.host import EmbeddedHost, RunResult
from ..host.embedded.port import EmbeddedPort
from ..host.embedded.progress import NodeState
from ..memory.store import Store
from ..nodes import NODE_CLASS_MAPPINGS
from ..nodes.runtime import Policy, Runtime, installed
from .canvas import api_prompt
from .interruption import Interruption, SignalWatch
from .process_memory import sampled_memory
from .report import Report, RunRecord

log = logging.getLogger("lazy_h3")

KINDS = {"INT": "a whole number", "FLOAT": "a number", "BOOLEAN": "true or false"}


@dataclass(frozen=True)
class RunOptions:
    """How to run a workflow."""

    out: Path = Path("output")
    models: Sequence[Path] = ()
    budget: int | None = None
    policy: Policy = "auto"
    repeat: int = 1
    cache: str = "ram"
    settings: Mapping[str, str] = field(default_factory=dict)  # "NODE.INPUT" -> value
    memory: int | None = None  # pretended size of the pool
    may_stream: bool = True
    may_fold: bool = True


def load_workflow(path: Path) -> dict[str, Any]:
    """A workflow file: an API-format prompt, or a canvas. Raises ValueError, which says why it is neither."""
    try:
        workflow = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the name of the workflow.") from error
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON; save the workflow again.") from error
    if not isinstance(workflow, dict):
        raise ValueError(f"{path}: is not a workflow; save it from ComfyUI, or export it in API format.")
    if not _is_canvas(workflow):
        _check_prompt(path, workflow)
    return workflow


def changed(prompt: Mapping[str, Any], settings: Mapping[str, str], declarations: Declarations) -> dict[str, Any]:
    """The prompt with widget values replaced. Raises ValueError for an unknown node or input, and for a value of another kind.

    ``settings``: "NODE.INPUT" -> text as it is where the input takes text or a choice, JSON elsewhere.
    """
    prompt = {node: {**spec, "inputs": dict(spec.get("inputs", {}))} for node, spec in prompt.items()}
    for target, text in settings.items():
        node, _, name = target.rpartition(".")
        if node not in prompt:
            raise ValueError(f"--set {target}: the workflow has no node {node!r}; its nodes are {', '.join(prompt)}.")
        if prompt[node]["class_type"] in declarations:  # the host has its own words for a class that is not there
            declared = {n: d for n, d in declarations.inputs(prompt[node]["class_type"]).items() if d.category != "hidden"}
            if name not in declared:
                raise ValueError(f"--set {target}: node {node} has no input {name!r}; its inputs are {', '.join(declared)}.")
            prompt[node]["inputs"][name] = _value(target, text, declared[name])
    return prompt


def as_prompt(workflow: Mapping[str, Any], host: EmbeddedHost, settings: Mapping[str, str]) -> dict[str, Any]:
    """The workflow in API format, with settings applied. Raises ValueError where either cannot be."""
    prompt = api_prompt(workflow, host.node_classes) if _is_canvas(workflow) else workflow
    _check_stand_ins(prompt, host.node_classes)
    return changed(prompt, settings, Declarations(host.node_classes))


def run_workflow(workflow: Mapping[str, Any], options: RunOptions) -> Report:
    """Run a workflow ``repeat`` times in a host of its own; writes outputs and ``report.json`` into ``options.out``.

    SIGTERM and Ctrl-C end the run: the report is written at once, and again when everything is freed. Raises ValueError for a
    canvas that cannot be converted, for settings that do not fit, and for an output folder that cannot be written to.
    """
    started = time.monotonic()
    with hosted(options) as (host, shared), sampled_memory() as memory:
        prompt = as_prompt(workflow, host, options.settings)
        _check_writable(options.out)
        report = Report(shared.store.ledger, shared.catalogue.kinds, budget=options.budget, memory=memory)

        def note(number: signal.Signals) -> None:
            report.interruption = _interruption(number, host, shared)
            report.seconds = time.monotonic() - started
            _write(report, options.out)

        with SignalWatch().watched(note, host.interrupt):
            for number in range(options.repeat):
                report.runs.append(_run_once(host, shared, prompt, number))
                if report.status != "ok":
                    break
        report.refusal = shared.store.last_refusal
        plan = shared.plan()
        if plan is not None and plan.refusal is None:
            report.predicted_peak, report.predicted_growth = plan.peak_bytes, plan.peak_growth_bytes
    report.seconds = time.monotonic() - started
    _write(report, options.out)
    return report


@contextmanager
def hosted(options: RunOptions, device: torch.device | None = None) -> Iterator[tuple[EmbeddedHost, Runtime]]:
    """An embedded host with our nodes installed in it. ``device``: where models compute, None for the best there is.

    Raises ValueError for a folder with models that is none.
    """
    _check_folders(options.models)
    folders = {"output_directory": options.out, "input_directory": options.out / "input", "models": list(options.models)}
    with EmbeddedHost(NODE_CLASS_MAPPINGS, cache=options.cache, **folders) as host:
        store = Store(budget=options.budget, pretended_total=options.memory)
        shared = Runtime(
            EmbeddedPort(host, device),
            store,
            policy=options.policy,
            may_stream=options.may_stream,
            may_fold=options.may_fold,
        )
        shared.attachment.is_summed_up = False  # the commands print a table
        with installed(shared):
            yield host, shared


def _check_folders(models: Sequence[Path]) -> None:
    for folder in models:
        if not folder.is_dir():
            raise ValueError(
                f"--models {folder}: is not a folder; name the one that holds text_encoders, diffusion_models and vae."
            )


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder}: nothing can be written there ({error.strerror}); choose another folder by --out.") from error


def _write(report: Report, folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(report.as_dict(), indent=2), "utf-8")


def _interruption(number: signal.Signals, host: EmbeddedHost, shared: Runtime) -> Interruption:
    shared.store.ledger.sample()  # the peak so far
    running = [node for node, progress in host.progress.nodes.copy().items() if progress["state"] is NodeState.Running]
    used_by = [event.node for event in list(shared.store.ledger.events) if event.node in running]  # others wait for their turn
    resident = {resource.name: resource.live_bytes() for resource in shared.store.resident()}
    return Interruption(number, next(reversed(running + used_by), None), resident)


def _run_once(host: EmbeddedHost, shared: Runtime, prompt: Mapping[str, Any], number: int) -> RunRecord:
    ledger = shared.store.ledger
    ledger.begin_run(number)
    started = ledger.now()
    result = host.run(prompt)
    if result.error is None:
        _warn_of_invalid_nodes(result)
    return RunRecord(result, ledger.now() - started, ledger.peak_bytes)


def _warn_of_invalid_nodes(result: RunResult) -> None:
    """As in ComfyUI, outputs whose inputs are invalid are left out while the others run."""
    for node, found in result.node_errors.items():
        problems = "; ".join(f"{problem['message']}: {problem['details']}" for problem in found["errors"])
        log.warning("Node %s (%s) was left out: %s", node, found["class_type"], problems)


def _check_stand_ins(prompt: Mapping[str, Any], classes: Mapping[str, type]) -> None:
    """Raises ValueError for a node that stands in for one of ComfyUI's own."""
    for spec in prompt.values():
        core = getattr(classes.get(spec["class_type"]), "CORE", None)
        if core is not None and core not in classes:
            raise ValueError(
                f"The workflow uses the node {spec['class_type']}, which stands in for ComfyUI's {core}; run it there."
            )


def _is_canvas(workflow: Mapping[str, Any]) -> bool:
    return isinstance(workflow.get("nodes"), list)


def _check_prompt(path: Path, workflow: Mapping[str, Any]) -> None:
    if not workflow or not all(isinstance(node, dict) and "class_type" in node for node in workflow.values()):
        raise ValueError(f"{path}: is neither a canvas workflow nor an API-format prompt; export it from ComfyUI again.")
    for node, spec in workflow.items():
        if not isinstance(spec["class_type"], str) or not isinstance(spec.get("inputs", {}), dict):
            raise ValueError(
                f"{path}: node {node} has no text as class_type, or no object as inputs; export it from ComfyUI again."
            )


def _value(target: str, text: str, declared: InputDeclaration) -> Any:
    if declared.type == "STRING" or declared.choices is not None:
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        kind = KINDS.get(declared.type, f"a value for {declared.type}")
        raise ValueError(f"--set {target}={text}: is not {kind}; write a value such as 7, 2.5 or true.") from error
