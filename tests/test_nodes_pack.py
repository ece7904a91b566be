"""The pack as ComfyUI meets it: complete, explained on the canvas, and silent until somebody uses it."""

import importlib
import importlib.util
import inspect
import io
import logging
import pkgutil
import sys
import threading
from pathlib import Path

import lazy_h3.nodes
import pytest
from lazy_h3.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from small_models import stage

ROOT = Path(lazy_h3.nodes.__file__).resolve().parent.parent
ODD_NAME = "/srv/ComfyUI/custom_nodes/lazy-h3 (copy)_x_2"


@pytest.fixture
def declared(tmp_path):
    """Name of a node -> its declared inputs: name -> (type, options)."""

    def inputs_of(cls: type) -> dict[str, tuple]:
        kinds = cls.INPUT_TYPES()
        assert kinds.keys() <= {"required", "optional", "hidden"}
        entries = {**kinds.get("required", {}), **kinds.get("optional", {})}
        return {name: (entry[0], entry[1] if len(entry) > 1 else {}) for name, entry in entries.items()}

    with stage(tmp_path):
        yield {name: inputs_of(cls) for name, cls in NODE_CLASS_MAPPINGS.items()}


def test_every_node_class_of_the_pack_is_mapped_under_its_name():
    names = (f"lazy_h3.nodes.{module.name}" for module in pkgutil.iter_modules(lazy_h3.nodes.__path__))
    members = (member for name in names for member in vars(importlib.import_module(name)).values())
    classes = {member for member in members if inspect.isclass(member) and hasattr(member, "RETURN_NAMES")}
    assert {cls.__name__: cls for cls in classes} == NODE_CLASS_MAPPINGS


def test_every_node_has_a_title_of_its_own():
    assert NODE_DISPLAY_NAME_MAPPINGS.keys() == NODE_CLASS_MAPPINGS.keys()
    titles = list(NODE_DISPLAY_NAME_MAPPINGS.values())
    assert len(set(titles)) == len(titles)
    assert all(title.endswith(" (Lazy H3)") for title in titles)


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_a_node_explains_itself_and_each_of_its_sockets(declared, name):
    cls = NODE_CLASS_MAPPINGS[name]
    assert cls.DESCRIPTION.endswith(".")
    assert cls.CATEGORY.split("/")[0] == "Lazy H3"
    assert len(cls.RETURN_TYPES) == len(cls.RETURN_NAMES) == len(cls.OUTPUT_TOOLTIPS) > 0
    assert all(cls.OUTPUT_TOOLTIPS)
    assert [socket for socket, (_, options) in declared[name].items() if not options.get("tooltip")] == []


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_a_node_takes_exactly_the_inputs_that_it_declares(declared, name):
    cls = NODE_CLASS_MAPPINGS[name]
    parameters = inspect.signature(getattr(cls, cls.FUNCTION)).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # loaders hand their inputs to ``paths``, which the tests of loading call
    assert {parameter.name for parameter in parameters} - {"self"} == declared[name].keys()


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_the_default_of_a_widget_is_one_of_its_values(declared, name):
    for socket, (kind, options) in declared[name].items():
        default = options.get("default")
        if isinstance(kind, list) and default is not None:
            assert default in kind, socket
        if kind in ("INT", "FLOAT"):
            assert options["min"] <= default <= options["max"], socket


@pytest.fixture
def opened(monkeypatch):
    """Names of the files that are opened from Python."""
    names: list[str] = []
    plain = io.open

    def noted(file, *args, **kwargs):
        names.append(str(file))
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", noted)
    monkeypatch.setattr("builtins.open", noted)
    return names


def test_importing_the_pack_starts_no_thread_reads_no_model_and_logs_nothing(opened, caplog):
    """As ComfyUI does it: by the path of a folder that is no identifier, without knowing our name."""
    before = set(threading.enumerate())
    with caplog.at_level(logging.DEBUG):
        pack = loaded_as(ODD_NAME)
    try:
        assert pack.NODE_CLASS_MAPPINGS.keys() == NODE_CLASS_MAPPINGS.keys()
        assert pack.NODE_DISPLAY_NAME_MAPPINGS == NODE_DISPLAY_NAME_MAPPINGS
        assert not set(pack.NODE_CLASS_MAPPINGS.values()) & set(NODE_CLASS_MAPPINGS.values())  # it was imported anew
        assert set(threading.enumerate()) == before
        assert [name for name in opened if name.endswith((".safetensors", ".json", ".pt", ".ckpt"))] == []
        assert caplog.records == []
        with pytest.raises(RuntimeError, match="run inside ComfyUI or through the lazy-h3 command"):
            pack.NODE_CLASS_MAPPINGS["LazyH3DiTLoader"].INPUT_TYPES()
    finally:
        for name in [name for name in sys.modules if name.startswith(ODD_NAME)]:
            del sys.modules[name]


def loaded_as(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
