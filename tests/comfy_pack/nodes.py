"""Nodes for tests on a real server."""

import hashlib
import json

import torch


class TestHash:
    """Digests of frames and sound, as the node's output in the history."""

    CATEGORY = "tests"
    OUTPUT_NODE = True
    FUNCTION = "digest"
    RETURN_TYPES = ()

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"images": ("IMAGE",), "audio": ("AUDIO",)}}

    def digest(self, images, audio):
        values = {"images": images, "waveform": audio["waveform"]}
        digests = {name: hashlib.sha256(t.contiguous().float().cpu().numpy().tobytes()).hexdigest() for name, t in values.items()}
        return {"ui": {"digests": [json.dumps(digests)]}}


class TestImage:
    """A frame of coloured noise."""

    CATEGORY = "tests"
    FUNCTION = "image"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0}), "size": ("INT", {"default": 64})}}

    def image(self, seed, size):
        return (torch.rand(1, size, size, 3, generator=torch.Generator().manual_seed(seed)),)


class TestFailWhileSampling:
    """The model, which raises in its second step."""

    CATEGORY = "tests"
    FUNCTION = "patched"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def patched(self, model):
        calls = []

        def fail(apply_model, args):
            calls.append(1)
            if len(calls) > 1:
                raise ValueError("This model fails on purpose.")
            return apply_model(args["input"], args["timestep"], **args["c"])

        clone = model.clone()
        clone.set_model_unet_function_wrapper(fail)
        return (clone,)


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (TestHash, TestImage, TestFailWhileSampling)}
