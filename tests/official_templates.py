"""ComfyUI's official H3 templates in small: as its front end queues them, with tiny files, sizes and steps."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from comfy_server import Server
from core_graphs import LAZY, Prompt
from front_end import opened
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Page

PACKAGE = "comfyui_workflow_templates_json"
TEMPLATES = ("video_minimax_h3_t2v", "video_minimax_h3_i2v", "video_minimax_h3_r2v")
SIZE = 64
STEPS = 2
SECONDS = 0.2  # five frames, the fewest
FORMATS = {  # of the transformer's file and the text encoder's
    "plain": ("small_dit", "small_te"),
    "fp8": ("small_dit_float8_e4m3fn", "small_te"),
    "int8": ("small_dit_int8_tensorwise", "small_te"),
    "as named": ("small_dit_int8_convrot", "small_te_nvfp4_awq"),
}
HASH = "hash"  # id of the node that looks at frames and sound

COUNT_TYPE = """([type, count]) => [app.rootGraph, ...app.rootGraph.subgraphs.values()]
    .flatMap((graph) => graph.nodes).filter((node) => node.type === type).length === count"""


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def template(name: str) -> dict[str, Any]:
    """The canvas file in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    loaded: dict[str, Any] = json.loads((Path(spec.origin).parent / f"templates/{name}.json").read_text("utf-8"))
    return loaded


def queued_prompts(server: Server) -> dict[str, tuple[Prompt, Prompt]]:
    """Template -> the prompts that the front end would queue: as the template is, and after the command that makes it lazy."""
    with opened(server, vue_nodes=False) as page:
        return {name: (_loaded(page, name), _made_lazy(page)) for name in TEMPLATES}


def _loaded(page: Page, name: str) -> Prompt:
    workflow = template(name)
    page.evaluate("(workflow) => app.loadGraphData(workflow)", workflow)
    page.wait_for_function("(count) => app.rootGraph.nodes.length === count", arg=len(workflow["nodes"]))
    return _queued(page)


def _made_lazy(page: Page) -> Prompt:
    page.evaluate("() => app.extensionManager.command.execute('LazyH3.MakeLazy')")
    page.wait_for_function(COUNT_TYPE, arg=["LazyH3VAELoader", 2])
    return _queued(page)


def _queued(page: Page) -> Prompt:
    prompt: Prompt = page.evaluate("() => app.graphToPrompt().then(({ output }) => output)")
    return prompt


def small(prompt: Prompt, form: str, is_turbo: bool = False) -> Prompt:
    """With tiny files, few pixels, frames and steps, and a digest of frames and sound.

    ``form``: of FORMATS; ``is_turbo``: take the branch with the LoRA.
    """
    transformer, encoder = FORMATS[form]
    values: dict[str, dict[str, Any]] = {
        "UNETLoader": {"unet_name": f"{transformer}.safetensors"},
        "CLIPLoader": {"clip_name": f"{encoder}.safetensors"},
        "LoraLoaderModelOnly": {"lora_name": "small_lora.safetensors"},
        "MiniMaxH3ImageToVideo": {"width": SIZE, "height": SIZE},
        "MiniMaxH3ReferenceToVideo": {"width": SIZE, "height": SIZE},
        "PrimitiveInt": {"value": STEPS},
        "PrimitiveFloat": {"value": SECONDS},
        "PrimitiveBoolean": {"value": is_turbo},
    }
    changed = copy.deepcopy(prompt)
    for spec in changed.values():
        spec["inputs"] |= values.get(spec["class_type"].removeprefix(LAZY), {})
        if "vae_name" in spec["inputs"]:
            kind = "audio" if "audio" in spec["inputs"]["vae_name"] else "video"
            spec["inputs"]["vae_name"] = f"small_{kind}_vae.safetensors"
    (video,) = (changed[node]["inputs"] for node in _of_class(changed, "CreateVideo"))
    changed[HASH] = {"class_type": "TestHash", "inputs": {"images": video["images"], "audio": video["audio"]}}
    return changed


def write_pictures(folder: Path, prompt: Prompt) -> None:
    """Coloured noise for all pictures that the prompt loads."""
    for number, node in enumerate(_of_class(prompt, "LoadImage")):
        noise = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / prompt[node]["inputs"]["image"])


def _of_class(prompt: Prompt, kind: str) -> Iterator[str]:
    return (node for node, spec in prompt.items() if spec["class_type"] == kind)
