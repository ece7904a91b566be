"""Another author's pack, for tests on a real server: a loader whose patcher is a sub-class of core's; and what a device holds."""

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import folder_paths
import torch
from aiohttp import web
from server import PromptServer


class ForeignPatcher(comfy.model_patcher.ModelPatcher):
    """Does as core's own; a patcher like it may hold weights in any form."""


class ForeignLoader:
    CATEGORY = "tests"
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"unet_name": (folder_paths.get_filename_list("diffusion_models"),)}}

    def load(self, unet_name):
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        model = comfy.sd.load_diffusion_model(path, disable_dynamic=True)
        model.__class__ = ForeignPatcher
        return (model,)


@PromptServer.instance.routes.get("/test/device")
async def device(request):
    """Bytes in use on the GPU by anybody, and of pinned memory; 0 where there is neither."""
    used = 0
    if torch.cuda.is_available() and comfy.model_management.get_torch_device().type == "cuda":
        free, total = torch.cuda.mem_get_info()
        used = total - free
    return web.json_response({"device": used, "pinned": getattr(comfy.model_management, "TOTAL_PINNED_MEMORY", 0)})


NODE_CLASS_MAPPINGS = {"ForeignLoader": ForeignLoader}
