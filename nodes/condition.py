"""Prompts to CONDITIONING, in the format of core's H3 nodes."""

from __future__ import annotations

from typing import Any

import torch

from ..h3.conditioning import present, text_to_video
from ..memory.handle import Handle
from .catalogue import tokenizer_of
from .load import CATEGORY
from .runtime import runtime


class LazyH3EncodePrompt:
    """Text to hidden states; the text encoder is needed only here."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Encodes the prompt. The text encoder's weights are read now and freed after the last node that encodes."
    TAKES_TURNS = True
    FUNCTION = "encode"
    RETURN_TYPES = ("CONDITIONING",)
    RETURN_NAMES = ("positive",)
    OUTPUT_TOOLTIPS = ("Hidden states with modality tags; works with core's samplers, too.",)
    CARRIES = ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "text_encoder": ("LAZYH3_TEXT_ENCODER", {"tooltip": "From a text encoder loader."}),
                "prompt": (
                    "STRING",
                    {"multiline": True, "dynamicPrompts": True, "tooltip": "What is seen and heard. Speech: <d>[en] hello</d>."},
                ),
            }
        }

    async def encode(self, text_encoder: Handle, prompt: str) -> tuple[list[Any]]:
        """[[states [1, L, width], {"minimax_token_tags": [L]}]] on the CPU."""
        shared = runtime()
        await shared.attachment.turn()
        tokenizer = tokenizer_of(text_encoder.component, shared.host.tokenizer_folders())
        request = present(text_to_video(prompt), tokenizer, text_encoder.config)
        with text_encoder.use("language", node=shared.host.executing()) as model, torch.inference_mode():
            device = text_encoder.component.device
            report = shared.progress(text_encoder.config.num_hidden_layers)
            states = model(request.token_ids.to(device), request.position_ids.to(device), on_layer=report)
        return ([[states[None].cpu(), {"minimax_token_tags": request.tags}]],)
