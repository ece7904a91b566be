"""A real ComfyUI server for tests: started in a base folder of its own, driven over HTTP and its websocket.

The server's folder is named by LAZY_H3_COMFYUI, its interpreter by LAZY_H3_COMFYUI_PYTHON (default: this one).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

FOLDER = os.environ.get("LAZY_H3_COMFYUI")
PYTHON = os.environ.get("LAZY_H3_COMFYUI_PYTHON", sys.executable)
PACK = Path(__file__).parent.parent
CORE_PROCESS = Path(__file__).parent / "core_process.py"
CACHE_OPTIONS = {"ram": [], "classic": ["--cache-classic"], "lru": ["--cache-lru", "50"], "none": ["--cache-none"]}
START_SECONDS = 180
RUN_SECONDS = 120
QUIET_SECONDS = 0.5
FREE_SECONDS = 0.5


@dataclass
class Run:
    """What the websocket told about one prompt, in order: (message type, data)."""

    prompt_id: str
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The last word on the prompt: execution_success, execution_error or execution_interrupted."""
        ends = ("execution_success", "execution_error", "execution_interrupted")
        return next((name for name, _ in reversed(self.messages) if name in ends), "none")

    def memory(self, event: str) -> list[dict[str, Any]]:
        """Our memory events of one kind."""
        return [data for name, data in self.messages if name == "lazy_h3.memory" and data["event"] == event]

    def loads(self) -> list[str]:
        """Components in the order in which their weights were read, without their file names."""
        return [short(data["component"]) for data in self.memory("load_end") if data["bytes"]]

    def releases(self) -> dict[str, list[str | None]]:
        """Component -> nodes after which it was released; None for the end of the prompt."""
        released: dict[str, list[str | None]] = {}
        for data in self.memory("release"):
            released.setdefault(short(data["component"]), []).append(data["node"])
        return released

    def resident_at_starts(self) -> dict[str, int]:
        """Node -> bytes of weights alive when it began to run."""
        resident, found = 0, {}
        for name, data in self.messages:
            if name == "lazy_h3.memory":
                resident = data["resident_bytes"]
            elif name == "executing" and data.get("node"):
                found[data["node"]] = resident
        return found

    def error(self) -> str:
        return next((data["exception_message"] for name, data in self.messages if name == "execution_error"), "")


def short(component: str) -> str:
    return component.partition(" (")[0]


class Server:
    """One running server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return json.load(answer)

    def post(self, path: str, document: Mapping[str, Any]) -> Any:
        body = json.dumps(document).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def free(self, **wanted: bool) -> None:
        """POST /free, and time for the server's worker to do it: a prompt that is queued at once would run before."""
        self.post("/free", wanted)
        time.sleep(FREE_SECONDS)

    def live_bytes(self) -> int:
        """Bytes of our weights alive in the server."""
        return sum(component["bytes"] for component in self.get("/lazy_h3/memory")["components"])

    def run(self, prompt: Mapping[str, Any], during: Callable[[str, Mapping[str, Any]], Any] | None = None, **more: Any) -> Run:
        """Queue a prompt and follow it to its end. ``during(message, data)`` sees every message as it comes."""
        return asyncio.run(asyncio.wait_for(self._run(prompt, during, more), RUN_SECONDS))

    async def _run(self, prompt: Mapping[str, Any], during: Any, more: Mapping[str, Any]) -> Run:
        client = f"test-{time.monotonic_ns()}"
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{self.url}/ws?clientId={client}") as socket_:
            queued = await self._queue(http, {"prompt": prompt, "client_id": client, **more})
            run = Run(queued["prompt_id"])
            is_over = False
            while True:
                try:
                    message = await asyncio.wait_for(socket_.receive(), QUIET_SECONDS if is_over else RUN_SECONDS)
                except asyncio.TimeoutError:
                    return run
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                content = json.loads(message.data)
                run.messages.append((content["type"], content.get("data") or {}))
                if during is not None:
                    await asyncio.to_thread(during, *run.messages[-1])
                is_over = is_over or run.status != "none"

    async def _queue(self, http: aiohttp.ClientSession, document: Mapping[str, Any]) -> dict[str, Any]:
        async with http.post(f"{self.url}/prompt", json=document) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return json.loads(text)


@contextmanager
def started(
    base: Path,
    models: Path,
    cache: str = "ram",
    options: tuple[str, ...] = (),
    policy: str = "free",
    packs: tuple[Path, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    device: tuple[str, ...] = ("--cpu",),
) -> Iterator[Server]:
    """A server with the pack, and others, in ``custom_nodes`` and the models of ``models``; ended by its process id."""
    for name in ("custom_nodes", "output", "input", "temp", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    for pack in (PACK, *packs):
        link(base / "custom_nodes" / (pack.name if pack is not PACK else "lazy-h3"), pack)
    link(base / "models", models)
    port = _free_port()
    command = [PYTHON, "main.py", *device, "--port", str(port), "--disable-auto-launch", "--base-directory", str(base)]
    with (base / "server.log").open("w") as log:
        command += [*CACHE_OPTIONS[cache], *options]
        own = {**os.environ, "LAZY_H3_POLICY": policy, **environment}
        process = subprocess.Popen(command, cwd=FOLDER, stdout=log, stderr=subprocess.STDOUT, env=own)
        try:
            server = Server(port)
            _wait_until_up(server, process, base / "server.log")
            yield server
        finally:
            process.terminate()
            process.wait(30)


def core_process(scale: str, scenario: str, *arguments: Any) -> Any:
    """What a process with core, and without a server, says at its end (see core_process.py)."""
    command = [PYTHON, str(CORE_PROCESS), scale, scenario, *map(str, arguments)]
    done = subprocess.run(command, check=False, cwd=FOLDER, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def link(place: Path, target: Path) -> None:
    if not place.exists():
        place.symlink_to(target, target_is_directory=True)


def _wait_until_up(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            server.get("/object_info/LazyH3Sampler")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"ComfyUI did not start:\n{log.read_text()[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
