"""As much of ComfyUI's core as objects of its loaders need: patchers, the list of loaded models, a loader that reads a file."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

CPU = torch.device("cpu")
WIDTH = 64


class Network(nn.Module):
    """Made uninitialised, as core's; a constant is made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Module()
        self.first.weight = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.register_buffer("sigmas", torch.linspace(0, 1, 5))


class ModelPatcher:
    """Moves nothing: loading means to be listed."""

    def __init__(self, model: nn.Module, load_device: torch.device = CPU, offload_device: torch.device = CPU) -> None:
        self.model = model
        self.load_device = load_device
        self.offload_device = offload_device
        self.cached_patcher_init: Any = None
        self.clone_base_uuid = uuid.uuid4()
        self.is_loaded = False

    def clone(self) -> Any:
        copy = type(self)(self.model)
        copy.__dict__ |= self.__dict__
        return copy

    def is_dynamic(self) -> bool:
        return False

    def loaded_size(self) -> int:
        return module_size(self.model) if self.is_loaded else 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        self.is_loaded = not unpatch_all
        return self.model


class DynamicPatcher(ModelPatcher):
    def is_dynamic(self) -> bool:
        return True


class Entry:
    """Of the list of loaded models."""

    def __init__(self, model: ModelPatcher) -> None:
        self.model = model

    def model_loaded_memory(self) -> int:
        return self.model.loaded_size()

    def model_unload(self) -> None:
        self.model.detach()


class Management:
    """``unload_model_and_clones`` is there only in versions that have it."""

    def __init__(self, has_call: bool = True) -> None:
        self.current_loaded_models: list[Entry] = []
        self.calls: list[dict[str, Any]] = []
        self.module_size = module_size
        self.device = CPU
        if has_call:
            self.unload_model_and_clones = self._unload

    def load(self, patcher: ModelPatcher) -> None:
        patcher.is_loaded = True
        self.current_loaded_models.insert(0, Entry(patcher))

    def _unload(self, model: ModelPatcher, unload_additional_models: bool = True, all_devices: bool = False) -> None:
        self.calls.append({"unload_additional_models": unload_additional_models, "all_devices": all_devices})
        for entry in list(self.current_loaded_models):
            if entry.model.clone_base_uuid == model.clone_base_uuid:
                entry.model_unload()
                self.current_loaded_models.remove(entry)

    def soft_empty_cache(self) -> None:
        """There is none."""

    def get_torch_device(self) -> torch.device:
        return self.device


def module_size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def load_diffusion_model_state_dict(
    tensors: dict[str, torch.Tensor], model_options: Any, metadata: Any = None, disable_dynamic: bool = False
) -> ModelPatcher:
    network = Network()
    network.load_state_dict(tensors, strict=False)
    return ModelPatcher(network)


def load_diffusion_model(unet_path: str, model_options: Any = None, disable_dynamic: bool = False) -> ModelPatcher:
    patcher = load_diffusion_model_state_dict(load_file(unet_path), model_options or {})
    patcher.cached_patcher_init = (load_diffusion_model, (unet_path, model_options or {}))
    return patcher


def write_network(path: Path) -> dict[str, torch.Tensor]:
    """A file for the loader."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Network().state_dict().items() if name != "sigmas"}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, path)
    return tensors


def install(monkeypatch: pytest.MonkeyPatch, management: Management, core_patcher: type = ModelPatcher) -> None:
    """Importable as ``comfy`` until the test ends."""
    contents = {
        "model_patcher": {"ModelPatcher": ModelPatcher, "CoreModelPatcher": core_patcher},
        "sd": {name: globals()[name] for name in ("load_diffusion_model", "load_diffusion_model_state_dict")},
    }
    package: Any = ModuleType("comfy")
    for name, members in contents.items():
        module = ModuleType(f"comfy.{name}")
        vars(module).update(members)
        setattr(package, name, module)
        monkeypatch.setitem(sys.modules, f"comfy.{name}", module)
    package.model_management = management
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    monkeypatch.setitem(sys.modules, "comfy", package)


def host(management: Management) -> Any:
    return SimpleNamespace(management=management)
