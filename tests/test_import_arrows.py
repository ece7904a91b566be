"""Which room may import which, read from the sources; and the pack is loaded as ComfyUI loads it, from any folder."""

from __future__ import annotations

import ast
import importlib.util
import logging
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
EVERYTHING = {"memory", "h3", "host", "nodes", "commands", ""}
ARROWS = {  # "" is the root: the package itself and the command line
    "memory": set(),
    "h3": set(),
    "host": {"memory"},
    "nodes": {"memory", "h3", "host"},
    "commands": EVERYTHING,
    "": EVERYTHING,
}
NOT_ROOMS = {"tests", "benchmarks", "docs", "build", "dist"}
RUNTIME = {"torch", "safetensors", "tokenizers", "numpy", "PIL", "av", "aiohttp", "psutil"}
OPTIONAL = {"triton", "comfy_kitchen", "comfy_aimdo"}
COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "folder_paths",
    "server",
    "execution",
    "nodes",
    "latent_preview",
}


def sources() -> list[Path]:
    """Python files of the pack, relative to its root."""
    folders = [p.parent for p in ROOT.glob("*/__init__.py") if p.parent.name not in NOT_ROOMS]
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    return [file.relative_to(ROOT) for file in files]


def room_of(file: Path) -> str:
    return file.parts[0] if len(file.parts) > 1 else ""


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """(number of leading dots, dotted name) of every import in the file, wherever it stands."""
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.level, name) for name in names)


def rooms_imported_by(file: Path) -> set[str]:
    """Rooms of the pack that the file's relative imports lead to."""
    package = file.parent.parts
    found = set()
    for dots, name in imports_of(file):
        if dots:
            target = (*package[: len(package) - dots + 1], *name.split("."))
            found.add(target[0])
    return {name for name in found if name in ARROWS} | ({""} if found - ARROWS.keys() else set())


@pytest.mark.parametrize("file", sources(), ids=str)
def test_arrows_point_one_way(file):
    room = room_of(file)
    assert room in ARROWS, f"{room} is a new room: say in ARROWS what it may import"
    assert rooms_imported_by(file) - {room} <= ARROWS[room]


@pytest.mark.parametrize("file", sources(), ids=str)
def test_every_import_inside_the_pack_is_relative(file):
    absolute = {name.split(".")[0] for dots, name in imports_of(file) if not dots}
    ours = {"lazy_h3", *(source.parts[0].removesuffix(".py") for source in sources())}
    comfyui = COMFYUI if file.is_relative_to("host/comfy") else set()
    assert not absolute & (ours - comfyui)


@pytest.mark.parametrize("file", sources(), ids=str)
def test_only_the_bridge_knows_comfyui_and_nobody_needs_more_than_comfyui_installs(file):
    absolute = {name.split(".")[0] for dots, name in imports_of(file) if not dots}
    allowed = sys.stdlib_module_names | RUNTIME | OPTIONAL
    if file.is_relative_to("host/comfy"):
        allowed = allowed | COMFYUI
    assert absolute <= allowed


def test_a_relative_import_is_traced_to_its_room(tmp_path, monkeypatch):
    """The check of the check."""
    lines = "from ..memory.store import Store\nfrom .. import h3\nfrom . import interface\nfrom ...nodes import x\nimport torch\n"
    (tmp_path / "host" / "comfy").mkdir(parents=True)
    (tmp_path / "host" / "comfy" / "bridge.py").write_text(lines)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert rooms_imported_by(Path("host/comfy/bridge.py")) == {"host", "nodes"}
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "wrong.py").write_text(lines)
    assert rooms_imported_by(Path("memory/wrong.py")) >= {"memory", "h3"}
    (tmp_path / "h3").mkdir()
    (tmp_path / "h3" / "wrong.py").write_text("from .. import cli\nfrom ..cli import main\n")
    assert rooms_imported_by(Path("h3/wrong.py")) == {""}


def test_the_sources_are_found():
    assert {room_of(file) for file in sources()} >= {"memory", "h3", "host", "nodes", ""}
    assert Path("memory/store.py") in sources()


@pytest.fixture(params=["my pack-1.2 (x)", "päck", "2 nodes"])
def folder(request, tmp_path) -> Path:
    """A copy of what is published, in a folder that could not be imported by its name."""
    copy = tmp_path / "custom_nodes" / request.param
    for file in sources():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, copy / file)
    shutil.copytree(ROOT / "web", copy / "web")
    return copy


@pytest.fixture
def pack(folder) -> Iterator[ModuleType]:
    """The pack as ComfyUI loads it; forgotten afterwards."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for loaded in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
            del sys.modules[loaded]


@pytest.fixture
def surroundings() -> tuple[object, ...]:
    return world()


def world() -> tuple[object, ...]:
    """What an import must leave alone."""
    return (
        list(logging.getLogger().handlers),
        logging.getLogger().level,
        set(threading.enumerate()),
        COMFYUI & sys.modules.keys(),
        list(sys.path),
    )


def test_the_pack_loads_from_a_folder_of_any_name(surroundings, pack, folder):
    assert pack.NODE_CLASS_MAPPINGS
    assert pack.NODE_CLASS_MAPPINGS.keys() == pack.NODE_DISPLAY_NAME_MAPPINGS.keys()
    assert all(cls.__module__.startswith(pack.__name__) for cls in pack.NODE_CLASS_MAPPINGS.values())
    assert (folder / pack.WEB_DIRECTORY).is_dir()
    assert world() == surroundings


def test_importing_writes_nothing(folder, pack):
    written = {file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    shipped = {
        *sources(),
        *(Path("web") / file.relative_to(ROOT / "web") for file in (ROOT / "web").rglob("*") if file.is_file()),
    }
    assert written == shipped
