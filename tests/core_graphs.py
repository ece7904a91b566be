"""Stock graphs of core's own H3 nodes, in API format, and the same graphs with lazy loaders."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

Prompt = dict[str, dict[str, Any]]
LAZY = "LazyH3"
LOADER_NODES = ("1", "2", "3", "4")
LOADERS = ("UNETLoader", "CLIPLoader", "DualCLIPLoader", "VAELoader", "LoraLoaderModelOnly")


def text_to_video(prompt: str = "A cat.", seed: int = 1, steps: int = 2, size: int = 64, length: int = 5) -> Prompt:
    """The stock text-to-video graph, with digests in place of a saved file."""
    return {
        "1": _node("UNETLoader", unet_name="small_dit.safetensors", weight_dtype="default"),
        "2": _node("CLIPLoader", clip_name="small_te.safetensors", type="minimax", device="default"),
        "3": _node("VAELoader", vae_name="small_video_vae.safetensors"),
        "4": _node("VAELoader", vae_name="small_audio_vae.safetensors"),
        "5": _node("MiniMaxH3SigmaShift", model=["1", 0], shift_video=12.0, shift_audio=3.0),
        "6": _node("MiniMaxH3ImageToVideo", clip=["2", 0], vae=["3", 0], prompt=prompt, width=size, height=size, length=length),
        "7": _node("BasicGuider", model=["5", 0], conditioning=["6", 0]),
        "8": _node("BasicScheduler", model=["5", 0], scheduler="simple", steps=steps, denoise=1.0),
        "9": _node("RandomNoise", noise_seed=seed),
        "10": _node("KSamplerSelect", sampler_name="euler"),
        "11": _node(
            "SamplerCustomAdvanced", noise=["9", 0], guider=["7", 0], sampler=["10", 0], sigmas=["8", 0], latent_image=["6", 1]
        ),
        "12": _node("LTXVSeparateAVLatent", av_latent=["11", 0]),
        "13": _node("VAEDecode", samples=["12", 0], vae=["3", 0]),
        "14": _node("VAEDecodeAudio", samples=["12", 1], vae=["4", 0]),
        "15": _node("TestHash", images=["13", 0], audio=["14", 0]),
    }


def keyframe(prompt: Prompt) -> Prompt:
    """From a first frame, which is as large as the video: the video VAE is used early and late."""
    size = prompt["6"]["inputs"]["width"]
    prompt["16"] = _node("TestImage", seed=3, size=size)
    prompt["6"]["inputs"]["first_frame"] = ["16", 0]
    return prompt


def with_file(prompt: Prompt, name: str) -> Prompt:
    """With another transformer."""
    prompt["1"]["inputs"]["unet_name"] = name
    return prompt


def with_lora(prompt: Prompt, strength: float = 0.7) -> Prompt:
    prompt["20"] = _node("LoraLoaderModelOnly", model=["1", 0], lora_name="small_lora.safetensors", strength_model=strength)
    prompt["5"]["inputs"]["model"] = ["20", 0]
    return prompt


def with_bypass_lora(prompt: Prompt) -> Prompt:
    """A LoRA beside the layers, in their forward."""
    prompt["20"] = _node("LoraLoaderBypassModelOnly", model=["1", 0], lora_name="small_lora.safetensors", strength_model=0.7)
    prompt["5"]["inputs"]["model"] = ["20", 0]
    return prompt


def with_hooks(prompt: Prompt) -> Prompt:
    """A LoRA that comes and goes with the condition."""
    prompt["21"] = _node("CreateHookLora", lora_name="small_lora.safetensors", strength_model=0.4, strength_clip=0.4)
    prompt["22"] = _node("SetClipHooks", clip=["2", 0], apply_to_conds=True, schedule_clip=False, hooks=["21", 0])
    prompt["6"]["inputs"]["clip"] = ["22", 0]
    return prompt


def two_samplers(prompt: Prompt) -> Prompt:
    """A second sampler, without the LoRA or the sigma shift of the first, whose video is taken."""
    for node in ("7", "9", "11", "12"):
        prompt[f"1{node.zfill(2)}"] = copy.deepcopy(prompt[node])
    prompt["107"]["inputs"]["model"] = ["1", 0]
    prompt["109"]["inputs"]["noise_seed"] = 77
    prompt["111"]["inputs"] |= {"noise": ["109", 0], "guider": ["107", 0]}
    prompt["112"]["inputs"]["av_latent"] = ["111", 0]
    prompt["13"]["inputs"]["samples"] = ["112", 0]
    return prompt


def switched(prompt: Prompt, to_first: bool) -> Prompt:
    """Between two transformers, of which only one is read."""
    prompt["23"] = _node("UNETLoader", unet_name="small_dit_float8_e4m3fn.safetensors", weight_dtype="default")
    prompt["24"] = _node("ComfySwitchNode", switch=to_first, on_true=["1", 0], on_false=["23", 0])
    prompt["5"]["inputs"]["model"] = ["24", 0]
    return prompt


def merged(prompt: Prompt) -> Prompt:
    """A transformer mixed with itself under a LoRA."""
    prompt = with_lora(prompt)
    prompt["25"] = _node("UNETLoader", unet_name="small_dit.safetensors", weight_dtype="default")
    prompt["26"] = _node("ModelMergeSimple", model1=["25", 0], model2=["20", 0], ratio=0.4)
    prompt["5"]["inputs"]["model"] = ["26", 0]
    return prompt


def saved(prompt: Prompt, name: str) -> Prompt:
    """The transformer under its LoRA is written to ``diffusion_models/NAME`` of the output folder, too."""
    prompt = with_lora(prompt)
    prompt["27"] = _node("ModelSave", model=["20", 0], filename_prefix=f"diffusion_models/{name}")
    return prompt


def failing(prompt: Prompt) -> Prompt:
    """The second step of sampling raises."""
    prompt["28"] = _node("TestFailWhileSampling", model=["5", 0])
    prompt["7"]["inputs"]["model"] = ["28", 0]
    return prompt


def pixel_space() -> Prompt:
    """A VAE without a file."""
    return {
        "1": _node("VAELoader", vae_name="pixel_space"),
        "2": _node("EmptyChromaRadianceLatentImage", width=64, height=64, batch_size=1),
        "3": _node("VAEDecode", samples=["2", 0], vae=["1", 0]),
        "4": _node("PreviewImage", images=["3", 0]),
    }


def lazily(prompt: Mapping[str, Mapping[str, Any]]) -> Prompt:
    """The same graph with lazy loaders in the place of core's."""
    changed = copy.deepcopy(dict(prompt))
    for spec in changed.values():
        if spec["class_type"] in LOADERS:
            spec["class_type"] = LAZY + spec["class_type"]
    return changed


def released(prompt: Mapping[str, Mapping[str, Any]], nodes: Sequence[str] = LOADER_NODES, name: str = "r") -> Prompt:
    """The same graph with a release node behind each of these loaders; who was wired to one is wired to that node."""
    changed = copy.deepcopy(dict(prompt))
    for node in nodes:
        for spec in changed.values():
            spec["inputs"] = {key: [name + node, 0] if value == [node, 0] else value for key, value in spec["inputs"].items()}
        changed[name + node] = _node("LazyH3ReleaseAfterLastUse", anything=[node, 0])
    return changed


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}
