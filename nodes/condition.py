"""Prompts to CONDITIONING, in the format of core's H3 nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..h3 import activations
from ..h3.conditioning import present, text_to_video
from ..memory.component import Component
from ..memory.handle import Handle
from .catalogue import tokenizer_of
from .demand import Demand, GraphSizes
from .load import CATEGORY, of_kind
from .runtime import runtime


class LazyH3EncodePrompt:
    """Text to hidden states; the text encoder is needed only here."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Encodes the prompt. The text encoder's weights are read now and freed after the last node that encodes."
    USES = "text_encoder"
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

    @classmethod
    def demand(cls, inputs: Mapping[str, Any], sizes: GraphSizes, component: Component) -> Demand:
        """One pass of the language model."""
        config, rows, itemsize = component.module.config, sizes.tokens(inputs.get("prompt")), component.compute.itemsize
        return Demand(
            frozenset({"language"}),
            activation_bytes=activations.text_encoding(config, rows, itemsize),
            output_bytes=rows * config.hidden_size * itemsize,
        )

    async def encode(self, text_encoder: Handle, prompt: str) -> tuple[list[Any]]:
        """[[states [1, L, width], {"minimax_token_tags": [L]}]] on the CPU. Raises ValueError for what is no text."""
        shared = runtime()
        of_kind(text_encoder, "text_encoder")
        _check_text(prompt)
        await shared.attachment.turn()
        tokenizer = tokenizer_of(text_encoder.component, shared.host.tokenizer_folders())
        request = present(text_to_video(prompt), tokenizer, text_encoder.config)
        with text_encoder.use("language", node=shared.host.executing(), num_passes=1) as model, torch.inference_mode():
            device = text_encoder.component.device
            report = shared.progress(text_encoder.config.num_hidden_layers)
            states = model(request.token_ids.to(device), request.position_ids.to(device), on_layer=report)
        return ([[states[None].cpu(), {"minimax_token_tags": request.tags}]],)


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The prompt's character {error.start + 1} is half of a pair of surrogates; type it again.") from error
