"""The ``lazy-h3`` command: demo, run, plan, convert, inspect, make-checkpoint, bench.

Exit codes: 0 done, 1 a run that failed, 2 bad usage or bad input (one line on stderr; ``--debug`` for the traceback), 130 ended
by Ctrl-C and 143 by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
LEAST_SIZE = 1 << 10  # bytes: who writes less means another unit
BENCH_REPEATS = {"load": 3, "release": 3, "run": 2, "stream": 5, "graph": 3, "activations": 1}
BENCH_SCALES = {"run": 32.0, "stream": 50.0, "activations": 50.0}  # run: at least 3 GB


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        return options.command(options)
    except (ValueError, OSError) as error:
        if options.debug:
            raise
        if getattr(options, "json", False):
            print(json.dumps(_error_document(error)))
        print(f"lazy-h3: {_sentence(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("lazy-h3: interrupted.", file=sys.stderr)
        return INTERRUPTED


class _Help(argparse.HelpFormatter):
    """Ends the help of an option with its default, where it has one that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = isinstance(action.default, (str, int, float, Path)) and not isinstance(action.default, bool)
        is_plain = action.default != argparse.SUPPRESS and "default" not in (action.help or "")
        return f"{action.help or ''} (default: %(default)s)".lstrip() if is_told and is_plain else action.help


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, in the words of the command that they were given to."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **more})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("lazy-h3", description="MiniMax-H3 with no more memory than it needs.")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_run(commands)
    _add_plan(commands)
    _add_convert(commands)
    _add_inspect(commands)
    _add_make_checkpoint(commands)
    _add_bench(commands)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="make a tiny random model and run text to video with it")
    demo.set_defaults(command=_demo)
    _add_run_options(demo, policy="free")


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="run a workflow without ComfyUI")
    run.set_defaults(command=_run)
    _add_workflow_options(run)
    run.add_argument("--repeat", type=_positive, default=1, metavar="N", help="run the workflow N times")
    run.add_argument("--cache", choices=["ram", "classic", "lru", "none"], default="ram", help="how long node outputs are kept")
    _add_run_options(run, policy="auto")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="say what a workflow would hold when, from headers alone")
    plan.set_defaults(command=_plan)
    _add_workflow_options(plan)
    plan.add_argument("--sizes", metavar="NAME", help="plan for a published model without its files, such as minimax-h3-r16")
    _add_plan_options(plan, policy="auto")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")


def _add_workflow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workflow", type=Path, help="API-format or canvas JSON")
    parser.add_argument("--set", action="append", default=[], metavar="NODE.INPUT=VALUE", help="change a widget value")
    parser.add_argument(
        "--models", action="append", default=[], type=Path, metavar="DIR", help="folder with text_encoders, vae, ..."
    )


def _add_plan_options(parser: argparse.ArgumentParser, policy: str) -> None:
    parser.add_argument("--budget", type=_size, metavar="SIZE", help="cap on weights: bytes, or with a unit as in 24GiB")
    parser.add_argument(
        "--policy", choices=["auto", "free", "keep"], default=policy, help="what happens to weights after their last use"
    )
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="behave as on a machine with this much memory")
    parser.add_argument("--no-stream", action="store_true", help="hold every component whole")
    parser.add_argument("--no-fold", action="store_true", help="hold projections of timesteps rather than their values")


def _add_run_options(parser: argparse.ArgumentParser, policy: str) -> None:
    parser.add_argument("--out", type=Path, default=Path("output"), metavar="DIR", help="where results and report.json go")
    _add_plan_options(parser, policy)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser("convert", help="write a workflow with lazy loaders in the place of ComfyUI's own")
    convert.set_defaults(command=_convert)
    convert.add_argument("workflow", type=Path, help="API-format or canvas JSON")
    convert.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write, over what is there (default: beside it, NAME_lazy.json; with --stock NAME_stock.json)",
    )
    convert.add_argument("--stock", action="store_true", help="the other way round: ComfyUI's own loaders again")


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="say what a file or folder is, from its headers")
    inspect.set_defaults(command=_inspect)
    inspect.add_argument("path", type=Path, help="a file, the folder of a component or model, or a folder with models")
    inspect.add_argument("--json", action="store_true", help="print what was found as JSON")


def _add_make_checkpoint(commands: Any) -> None:
    make = commands.add_parser("make-checkpoint", help="write a model with random weights under real names")
    make.set_defaults(command=_make_checkpoint)
    make.add_argument("folder", type=Path, metavar="DIR", help="where to write; a folder for --models afterwards")
    make.add_argument(
        "--preset", choices=["tiny", "replica"], required=True, help="as small as can be, or a published model on a scale"
    )
    make.add_argument("--scale", type=_scale, default=50.0, metavar="N", help="replica: total bytes are the real model's over N")
    make.add_argument("--model", default="minimax-h3", metavar="NAME", help="replica: of which published model")
    make.add_argument(
        "--layout", choices=["single-file", "folder"], default="single-file", help="a file a component, or as at Hugging Face"
    )
    make.add_argument("--seed", type=int, default=0, help="of the random weights")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure loading, freeing, streaming, activations and the analysis of graphs")
    bench.set_defaults(command=_bench)
    bench.add_argument("what", choices=[*BENCH_REPEATS, "all"], help="which benchmark")
    bench.add_argument("--size", type=_size, default=2 << 30, metavar="SIZE", help="of the test file (default 2GiB)")
    scales = ", ".join(f"{name} {scale:g}" for name, scale in BENCH_SCALES.items())
    bench.add_argument("--scale", type=_scale, metavar="N", help=f"of the replica (default: {scales})")
    repeats = ", ".join(f"{name} {count}" for name, count in BENCH_REPEATS.items())
    bench.add_argument("--repeat", type=_positive, metavar="N", help=f"default: {repeats}")
    bench.add_argument("--dir", type=Path, metavar="DIR", help="where test files and replicas go (default: the cache folder)")
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")


def _demo(options: argparse.Namespace) -> int:
    from .commands.demo import run_demo

    code = _reported(run_demo(_run_options(options, out=options.out)), options)
    if code == OK and not options.json:
        report = options.out / "report.json"
        print(f"The weights are random, so picture and sound are noise; {report} says what was in memory when.")
    return code


def _run(options: argparse.Namespace) -> int:
    from .commands.run import load_workflow, run_workflow

    workflow = load_workflow(options.workflow)
    settings = _settings(options.set, workflow)
    chosen = _run_options(
        options, out=options.out, models=options.models, repeat=options.repeat, cache=options.cache, settings=settings
    )
    return _reported(run_workflow(workflow, chosen), options)


def _run_options(options: argparse.Namespace, **more: Any) -> Any:
    from .commands.run import RunOptions

    return RunOptions(
        budget=options.budget,
        policy=options.policy,
        memory=options.memory,
        may_stream=not options.no_stream,
        may_fold=not options.no_fold,
        **more,
    )


def _plan(options: argparse.Namespace) -> int:
    from .commands.plan import PlanRequest, plan_workflow, shown
    from .commands.run import load_workflow
    from .host.snapshot import plan_document

    if options.sizes is not None and options.models:
        raise ValueError("--sizes plans without files, and --models names files; leave one of the two out.")
    workflow = load_workflow(options.workflow)
    run = _run_options(options, models=options.models, settings=_settings(options.set, workflow))
    plan = plan_workflow(workflow, PlanRequest(run, options.sizes))
    _print(plan_document(plan), shown(plan), options.json)
    if plan.refusal is None:
        return OK
    _complain(plan.refusal.message + _size_hint(options))
    return BAD_INPUT


def _convert(options: argparse.Namespace) -> int:
    from .commands.convert import convert_file, shown

    target = "stock" if options.stock else "lazy"
    place, done = convert_file(options.workflow, options.out, target)
    print(*shown(place, done, target), sep="\n")
    return OK


def _inspect(options: argparse.Namespace) -> int:
    from .commands.inspect_path import inspect_path, shown

    found = inspect_path(options.path)
    _print(found, shown(found), options.json)
    refused = [entry["refused"] for entry in found["checkpoints"] if entry["refused"]]
    if refused:
        several = f"{len(refused)} of {len(found['checkpoints'])} are refused, for the reasons above."
        _complain(refused[0] if len(refused) == 1 or options.json else f"{options.path}: {several}")
    return BAD_INPUT if refused else OK


def _make_checkpoint(options: argparse.Namespace) -> int:
    from .commands.make_checkpoint import make_checkpoint
    from .commands.presets import replica, tiny

    preset = tiny() if options.preset == "tiny" else replica(options.scale, options.model)
    for path in make_checkpoint(options.folder, preset, options.layout, options.seed):
        print(f"{path}  {path.stat().st_size} bytes")
    return OK


def _bench(options: argparse.Namespace) -> int:
    names = list(BENCH_REPEATS) if options.what == "all" else [options.what]
    measured = {}
    for name in names:
        measured[name], lines = _measured(name, options)
        if not options.json:
            print(*([f"bench {name}"] if len(names) > 1 else []), *lines, sep="\n", flush=True)
    if options.json:
        print(json.dumps(measured if options.what == "all" else measured[options.what]))
    return OK if all(found["ok"] for found in measured.values()) else FAILED


def _measured(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """What one benchmark found, and its lines for people."""
    from .commands import bench, bench_activations, bench_graph, bench_run, bench_stream
    from .commands.demo import cache_folder

    folder = options.dir or cache_folder()
    repeats = options.repeat or BENCH_REPEATS[name]
    scale = options.scale or BENCH_SCALES.get(name)
    if name == "run":
        found, shown = bench_run.bench_run(folder, scale, repeats), bench_run.shown
    elif name == "stream":
        found, shown = bench_stream.bench_stream(folder, scale, repeats), bench_stream.shown
    elif name == "activations":
        found, shown = bench_activations.bench_activations(folder, scale), bench_activations.shown
    elif name == "graph":
        found, shown = bench_graph.bench_graph(repeats), bench_graph.shown
    else:
        path = bench.make_file(folder / f"bench-{options.size}.safetensors", options.size)
        measure = bench.bench_load if name == "load" else bench.bench_release
        found, shown = measure(path, repeats), bench.shown
    return found, shown(found)


def _reported(report: Any, options: argparse.Namespace) -> int:
    from .commands.summary import summary

    _print(report.as_dict(), summary(report, options.out), options.json)
    if report.status == "ok":
        return OK
    _complain(report.message + (_size_hint(options) if report.status == "refused" else ""))
    if report.interruption is not None:
        return int(report.interruption.exit_code)
    return BAD_INPUT if report.is_bad_input else FAILED


def _complain(sentence: str) -> None:
    print(f"lazy-h3: {sentence}", file=sys.stderr)


def _size_hint(options: argparse.Namespace) -> str:
    """For who wrote a number and meant GiB."""
    for name, size in (("--budget", options.budget), ("--memory", options.memory)):
        if size and size < LEAST_SIZE:
            return f" A size without a unit is in bytes; {name} {size}GiB is another size than {name} {size}."
    return ""


def _error_document(error: Exception) -> dict[str, Any]:
    """An error before there is anything to report, in the shape that it has in a report."""
    details = dict.fromkeys(("node", "need_bytes", "have_bytes", "component"))
    return {"status": "error", "error": {"type": type(error).__name__, "message": _sentence(error), **details}}


def _sentence(error: Exception) -> str:
    """What is wrong, also where the system says it by number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}; check the path and who may use it."
    return str(error)


def _print(document: dict[str, Any], lines: Iterable[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document))
    else:
        for line in lines:
            print(line)


def _settings(pairs: Sequence[str], workflow: Mapping[str, Any]) -> dict[str, str]:
    settings = dict(pair.partition("=")[::2] for pair in pairs)
    for pair in pairs:
        target, equals, _ = pair.partition("=")
        if not equals or "." not in target:
            raise ValueError(f"--set {pair}: write it as NODE.INPUT=VALUE, such as {_example_setting(workflow)}.")
    return settings


def _example_setting(workflow: Mapping[str, Any]) -> str:
    """A number among the widgets of a prompt; a canvas does not name its widgets."""
    prompt = {node: spec for node, spec in workflow.items() if isinstance(spec, dict) and "class_type" in spec}
    known = ((f"{node}.{name}", value) for node, spec in prompt.items() for name, value in spec.get("inputs", {}).items())
    return next((f"{target}={value}" for target, value in known if type(value) is int), "7.seed=8")


def _size(text: str) -> int:
    from .memory.units import parsed_bytes

    try:
        return parsed_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 1 <= scale < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on.")
    return scale


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on.")
    return int(text)
