"""Core of ComfyUI without its server, for tests: run by ComfyUI's own Python in its folder, says its findings as JSON.

python core_process.py SCALE SCENARIO ARGUMENT...   (SCALE: tiny or medium, or full for core as it is)
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PACK = TESTS.parent
DIT = "diffusion_models/small_dit.safetensors"
LORA = "loras/small_lora.safetensors"
VAE = "vae/small_video_vae.safetensors"


def prepare(scale: str) -> None:
    """Core on the CPU in this scale, and the pack as ``lazy_h3``."""
    sys.path[:0] = [os.getcwd(), str(TESTS)]
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    spec = importlib.util.spec_from_file_location("lazy_h3", PACK / "__init__.py", submodule_search_locations=[str(PACK)])
    assert spec is not None
    sys.modules["lazy_h3"] = importlib.util.module_from_spec(spec)
    import torch

    torch.set_num_threads(1)
    if scale != "full":
        from comfy_pack import small_core

        small_core.shrink_core(scale)


def write(folder: str, scale: str) -> None:
    """The small files."""
    from comfy_pack import small_core

    small_core.write_files(Path(folder), scale)


def write_template_files(folder: str) -> None:
    """The small files once more, in the formats that the official templates name."""
    from comfy_pack import template_files

    template_files.write_template_files(Path(folder))


def write_hollow(folder: str) -> None:
    """Files of the sizes that core has by itself, without data."""
    from comfy_pack import small_core

    small_core.write_hollow_files(Path(folder))


def build(folder: str) -> dict[str, dict[str, float]]:
    """Seconds of this process and bytes of growth that each file of a folder takes to become core's object."""
    loaders = _loaders()[1]
    found = {}
    for path in sorted(path for path in Path(folder).rglob("*.safetensors") if path.parent.name != "loras"):
        before, began = _anonymous(), time.process_time()
        made = _made(loaders, path)
        core = _patcher(made).model.lazy_h3
        found[path.name] = {
            "seconds": time.process_time() - began,
            "growth": _anonymous() - before,
            "file": path.stat().st_size,
            "weights": core.nbytes(),
            "live": core.live_bytes(),
        }
    return found


def partial_loads(folder: str) -> dict[str, bool]:
    """A model is loaded in part, moved out in part, loaded wholly and dropped: its weights are stock's at every station."""
    import comfy.model_management
    import comfy.sd

    store, loaders = _loaders()
    device = _other_cpu()
    stock = comfy.sd.load_diffusion_model(str(Path(folder, DIT)), {"load_device": device}, disable_dynamic=True)
    lazy = loaders.model(Path(folder, DIT), {"load_device": device})
    with_lora, stock_with_lora = loaders.with_lora(lazy, Path(folder, LORA), 0.7), _stock_lora(stock, Path(folder, LORA))
    half, quarter = lazy.model_size() // 2, lazy.model_size() // 4
    found = {}

    def visit(name: str, move: Callable[[Any], Any]) -> None:
        with comfy_inference():
            found[name] = move(with_lora) == move(stock_with_lora) and _same(_effective(with_lora), _effective(stock_with_lora))

    visit("half", lambda patcher: patcher.partially_load(device, half))
    visit("a quarter out", lambda patcher: patcher.partially_unload(torch_device("cpu"), quarter))
    visit("all", lambda patcher: patcher.partially_load(device, 1e32))
    visit("out", lambda patcher: patcher.partially_unload(torch_device("cpu"), 1e32))
    store.release(lazy.model.lazy_h3, "test")
    found["dropped"] = lazy.model.lazy_h3.live_bytes() == 0 and not store.resident()
    visit("detached", lambda patcher: patcher.detach() is None)
    visit("half again", lambda patcher: patcher.partially_load(device, half))
    visit("unloaded", lambda patcher: patcher.detach() is None)
    found["gone"] = lazy.model.lazy_h3.live_bytes() == 0
    visit("all again", lambda patcher: patcher.partially_load(device, 1e32))
    return found


def moved_away(folder: str) -> dict[str, bool]:
    """With meta as the device, so that weights really leave: part of them, then all; after a drop each is back."""
    import torch

    store, loaders = _loaders()
    device = torch.device("meta")
    lazy = loaders.model(Path(folder, DIT), {"load_device": device, "offload_device": torch.device("cpu")})
    before = _digest(lazy)
    constants = [tensors for m in lazy.model.modules() for tensors in (m._buffers, m._parameters)]
    constants = [(tensors, dict(tensors)) for tensors in constants if any(t is not None for t in tensors.values())]
    found = {}
    for name, nbytes in (("part", lazy.model_size() * 9 // 10), ("all", 1e32)):
        lazy.partially_load(device, nbytes)
        moved = [slot.tensor.is_meta for slot in lazy.model.lazy_h3._slots]
        for tensors, before_move in constants:  # nothing comes back from meta
            tensors.update({n: t for n, t in before_move.items() if n in tensors and _is_constant(t, lazy)})
        found[f"{name} moved"] = any(moved) and all(moved) == (name == "all")
        store.release(lazy.model.lazy_h3, "test")
        found[f"{name} back"] = _digest(lazy) == before and not store.resident()
    return found


def pressure(folder: str) -> dict[str, bool]:
    """On a device without room core unloads what is idle: the weights are gone, not moved; a later load has them again."""
    import comfy.model_management as management

    store, loaders = _loaders()
    device = _other_cpu()
    model, other = (loaders.model(Path(folder, DIT), {"load_device": device, "which": which}) for which in (1, 2))
    expected = _digest_loaded(model, store)
    room = {"free": 1 << 40}
    management.get_free_memory = lambda dev=None, torch_free_too=False: (room["free"],) * 2 if torch_free_too else room["free"]
    management.load_models_gpu([model])
    found = {"loaded": model.model.lazy_h3.live_bytes() > 0}
    clone = model.clone()
    management.load_models_gpu([clone])
    found["a clone shares it"] = len(management.current_loaded_models) == 1 and len(store.resident()) == 1
    room["free"] = 0
    management.free_memory(1 << 40, device)
    found["freed"] = model.model.lazy_h3.live_bytes() == 0 and not store.resident() and not management.current_loaded_models
    room["free"] = 1 << 40
    management.load_models_gpu([clone])
    found["loaded again"] = _digest(clone) == expected
    room["free"] = 0
    management.load_models_gpu([other])
    found["room for another"] = model.model.lazy_h3.live_bytes() == 0 and other.model.lazy_h3.live_bytes() > 0
    room["free"] = 0
    management.free_memory(1e30, device)
    found["all unloaded"] = store.live_bytes() == 0 and not store.resident()
    return found


def peak(folder: str) -> dict[str, float]:
    """Anonymous bytes beyond the start: at most while everything is loaded one after the other, and at the end."""
    import comfy.model_management as management

    store, loaders = _loaders()
    paths = [path for kind in ("text_encoders", "vae") for path in sorted(Path(folder, kind).iterdir())]
    made = [_made(loaders, path) for path in (*paths, Path(folder, DIT))]
    patchers = [_patcher(one) for one in made]
    for patcher in patchers:  # once, so that libraries and pools are warm
        management.load_models_gpu([patcher])
        store.release_all("test")
    start = _anonymous()
    with _sampled() as highest:
        for patcher in patchers:
            management.load_models_gpu([patcher])
            store.release_all("test")
    largest = max(patcher.model.lazy_h3.nbytes() for patcher in patchers)
    return {"largest": largest, "peak": highest[0] - start, "end": _anonymous() - start}


def lives(folder: str) -> dict[str, bool]:
    """Who holds what: objects go without the garbage collector, clones stay right, equal loaders share."""
    import comfy.model_management as management

    store, loaders = _loaders()
    gc.disable()
    found = {}
    model = _made(loaders, Path(folder, DIT))
    found["an equal loader gives the same"] = _made(loaders, Path(folder, DIT)) is model
    module = weakref.ref(model.model)
    del model
    found["goes with its last holder"] = module() is None
    model = _made(loaders, Path(folder, DIT))
    management.load_models_gpu([model])
    module = weakref.ref(model.model)
    del model
    store.release_all("test")
    found["goes after it was loaded, too"] = module() is None and not management.current_loaded_models
    model = _made(loaders, Path(folder, DIT))
    expected = _digest_loaded(model, store)
    clone = model.clone()
    del model
    management.load_models_gpu([clone])
    found["a clone outlives its loader"] = _digest(clone) == expected
    again = _made(loaders, Path(folder, DIT))
    management.load_models_gpu([again])
    found["beside a new loader"] = _digest(again) == expected
    store.release_all("test")
    found["both are dropped"] = store.live_bytes() == 0
    deep = again.clone(force_deepcopy=True)
    management.load_models_gpu([deep])
    found["a deep clone has weights of its own"] = deep.model is not again.model and _digest(deep) == expected
    store.release_all("test")
    found["which are dropped as well"] = store.live_bytes() == 0
    return found


def dtypes(folder: str) -> dict[str, bool]:
    """One file in two dtypes: each as stock has it, loaded and merged."""
    import comfy.model_management as management
    import comfy.sd
    import torch

    store, loaders = _loaders()
    found = {}
    for name, options in (("default", {}), ("fp8", {"dtype": torch.float8_e4m3fn}), ("fp16", {"dtype": torch.float16})):
        stock = comfy.sd.load_diffusion_model(str(Path(folder, DIT)), dict(options), disable_dynamic=True)
        lazy = loaders.model(Path(folder, DIT), options)
        found[f"{name}: patches of an idle model"] = _same(_bases(lazy), _bases(stock))
        management.load_models_gpu([lazy, stock])
        found[f"{name}: loaded"] = _same(dict(lazy.model.state_dict()), dict(stock.model.state_dict()))
        found[f"{name}: size"] = lazy.model_size() == stock.model_size() and lazy.model_dtype() == stock.model_dtype()
        store.release_all("test")
        management.unload_all_models()
        found[f"{name}: dropped"] = store.live_bytes() == 0
    return found


def idle_on_the_device(folder: str) -> dict[str, bool]:
    """Where core keeps idle models on the device (high VRAM, GPU only), ours are idle as views all the same."""
    import comfy.model_management as management
    import torch

    store, loaders = _loaders()
    for name in ("unet_offload_device", "text_encoder_offload_device", "vae_offload_device"):
        setattr(management, name, lambda: torch.device("meta"))
    found = {}
    for path in (DIT, "text_encoders/small_te.safetensors", VAE):
        patcher = _patcher(_made(loaders, Path(folder, path)))
        tensors = [*patcher.model.parameters(), *patcher.model.buffers()]
        found[f"{path} is not moved"] = not any(tensor.is_meta for tensor in tensors)
        management.load_models_gpu([patcher])
        store.release_all("test")
        found[f"{path} comes back"] = not any(t.is_meta for t in patcher.model.parameters()) and store.live_bytes() == 0
    return found


def read_only(folder: str) -> dict[str, bool]:
    """Where maps are read-only, as on Windows, nothing that is in use lies in one; values are the same."""
    import comfy.model_management as management
    from lazy_h3.host.comfy.core import mapped

    found = {}
    for name in (DIT, DIT.replace(".", "_float8_e4m3fn."), DIT.replace(".", "_int8_tensorwise.")):
        mapped.IS_READ_ONLY = False
        store, loaders = _loaders()
        usual = loaders.model(Path(folder, name), {})
        management.load_models_gpu([usual])
        mapped.IS_READ_ONLY = True
        store, loaders = _loaders()
        model = loaders.model(Path(folder, name), {})
        core = model.model.lazy_h3
        management.load_models_gpu([model])
        found[f"{name}: same"] = _same(dict(model.model.state_dict()), dict(usual.model.state_dict()))
        found[f"{name}: nothing mapped"] = not any(
            mapped.place_of(part, core._files) for slot in core._slots for part in _parts(slot.tensor)
        )
        found[f"{name}: counted"] = core.live_bytes() >= core.nbytes()
        store.release_all("test")
        found[f"{name}: dropped"] = core.live_bytes() == 0
    return found


def _parts(tensor: Any) -> list[Any]:
    from lazy_h3.host.comfy.core.skeleton import plain

    return plain(tensor)


def damage(folder: str, scratch: str) -> dict[str, Any]:
    """What is said of files that change, or are none."""
    import comfy.model_management as management

    store, loaders = _loaders()
    path = Path(scratch, "dit.safetensors")
    shutil.copy(Path(folder, DIT), path)
    model = loaders.model(path, {})
    found: dict[str, Any] = {"replaced": ""}
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    try:
        management.load_models_gpu([model])
    except Exception as error:
        found["replaced"] = f"{type(error).__name__}: {error}"
    found["nothing is left"] = store.live_bytes() == 0 and not store.resident() and not management.current_loaded_models
    again = loaders.model(path, {})
    management.load_models_gpu([again])
    found["loaded anew"] = again is not model and again.model.lazy_h3.live_bytes() > 0
    for name, content in (("cut", path.read_bytes()[: path.stat().st_size // 2]), ("empty", b""), ("noise", bytes(range(256)))):
        damaged = Path(scratch, f"{name}.safetensors")
        damaged.write_bytes(content)
        try:
            found[name] = str(loaders.model(damaged, {}))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _loaders() -> tuple[Any, Any]:
    """A store and the loaders that fill it, outside any prompt."""
    import comfy.sd
    from lazy_h3.host.comfy.core.loaders import CoreLoaders
    from lazy_h3.memory.store import Store

    assert comfy.sd
    store = Store()
    return store, CoreLoaders(store, lambda: None)


def _made(loaders: Any, path: Path) -> Any:
    """By the folder that the file is in."""
    if path.parent.name == "text_encoders":
        return loaders.clip([path], {"type": "minimax", "device": "default"})
    return loaders.vae(path) if path.parent.name == "vae" else loaders.model(path, {})


def _patcher(made: Any) -> Any:
    return getattr(made, "patcher", made)


def _stock_lora(model: Any, path: Path) -> Any:
    import comfy.sd
    import comfy.utils

    return comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(path)), 0.7, 0)[0]


def _other_cpu() -> Any:
    """The CPU, by a name that core takes for another device: what is moved there stays where it is."""
    return torch_device("cpu:1")


def torch_device(name: str) -> Any:
    import torch

    return torch.device(name)


@contextmanager
def comfy_inference() -> Iterator[None]:
    import torch

    with torch.inference_mode():
        yield


def _effective(patcher: Any) -> dict[str, Any]:
    """Weights as layers compute with them: patches that are applied on the way included."""
    import comfy.ops
    import torch

    found = {}
    for name, module in patcher.model.named_modules():
        if hasattr(module, "comfy_cast_weights"):
            weight, bias, _stream = comfy.ops.cast_bias_weight(
                module, dtype=torch.float32, device=torch.device("cpu"), bias_dtype=torch.float32, offloadable=True
            )
            found |= {f"{name}.weight": weight, f"{name}.bias": bias}
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}


def _bases(patcher: Any) -> dict[str, Any]:
    """What a merge takes from the model."""
    return {key: patches[0][0] for key, patches in patcher.get_key_patches("diffusion_model.").items()}


def _same(ours: dict[str, Any], stock: dict[str, Any]) -> bool:
    """The same names and values; views of an idle model may be narrower than what core makes of them."""
    import torch

    return ours.keys() == stock.keys() and all(
        torch.equal(ours[name].to(t.dtype).float(), t.float()) for name, t in stock.items()
    )


def _is_constant(tensor: Any, patcher: Any) -> bool:
    return tensor is not None and all(slot.view.data_ptr() != tensor.data_ptr() for slot in patcher.model.lazy_h3._slots)


def _digest(patcher: Any) -> list[float]:
    return [float(tensor.double().sum()) for tensor in patcher.model.state_dict().values()]


def _digest_loaded(patcher: Any, store: Any) -> list[float]:
    import comfy.model_management as management

    management.load_models_gpu([patcher])
    digest = _digest(patcher)
    store.release_all("test")
    return digest


def _anonymous() -> int:
    """Bytes of this process that are in no file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@contextmanager
def _sampled() -> Iterator[list[int]]:
    """The most of ``_anonymous`` inside the block, in a list of one."""
    highest, is_over = [_anonymous()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            highest[0] = max(highest[0], _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield highest
    finally:
        is_over.set()
        thread.join()


SCENARIOS: dict[str, Callable[..., Any]] = {
    scenario.__name__: scenario
    for scenario in (
        write,
        write_template_files,
        write_hollow,
        build,
        partial_loads,
        moved_away,
        pressure,
        peak,
        lives,
        dtypes,
        idle_on_the_device,
        read_only,
        damage,
    )
}


if __name__ == "__main__":
    scale, name, *arguments = sys.argv[1:]
    prepare(scale)
    print(json.dumps(SCENARIOS[name](*arguments)))
