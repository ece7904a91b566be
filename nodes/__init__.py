"""What people drag onto the canvas."""

from .adapt import (
    LazyH3CLIPLoader,
    LazyH3DualCLIPLoader,
    LazyH3LoraLoaderModelOnly,
    LazyH3UNETLoader,
    LazyH3VAELoader,
)
from .condition import LazyH3EncodePrompt
from .decode import LazyH3DecodeAudio, LazyH3DecodeVideo
from .inspect import LazyH3MemoryReport, LazyH3Policy, LazyH3ReleaseNow
from .load import LazyH3AudioVAELoader, LazyH3DiTLoader, LazyH3FolderLoader, LazyH3TextEncoderLoader, LazyH3VideoVAELoader
from .release import LazyH3ReleaseAfterLastUse
from .sample import LazyH3EmptyLatent, LazyH3Sampler

_TITLES = {
    LazyH3TextEncoderLoader: "Load text encoder (Lazy H3)",
    LazyH3DiTLoader: "Load DiT (Lazy H3)",
    LazyH3VideoVAELoader: "Load video VAE (Lazy H3)",
    LazyH3AudioVAELoader: "Load audio VAE (Lazy H3)",
    LazyH3FolderLoader: "Load model folder (Lazy H3)",
    LazyH3EncodePrompt: "Encode prompt (Lazy H3)",
    LazyH3EmptyLatent: "Empty audio-video latent (Lazy H3)",
    LazyH3Sampler: "Sample video and audio (Lazy H3)",
    LazyH3DecodeVideo: "Decode video (Lazy H3)",
    LazyH3DecodeAudio: "Decode audio (Lazy H3)",
    LazyH3MemoryReport: "Memory report (Lazy H3)",
    LazyH3ReleaseNow: "Release now (Lazy H3)",
    LazyH3Policy: "Memory policy (Lazy H3)",
    LazyH3UNETLoader: "Load diffusion model (Lazy H3)",
    LazyH3CLIPLoader: "Load CLIP (Lazy H3)",
    LazyH3DualCLIPLoader: "Load CLIP from two files (Lazy H3)",
    LazyH3VAELoader: "Load VAE (Lazy H3)",
    LazyH3LoraLoaderModelOnly: "Load LoRA for a model (Lazy H3)",
    LazyH3ReleaseAfterLastUse: "Release after last use (Lazy H3)",
}

NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in _TITLES}
NODE_DISPLAY_NAME_MAPPINGS = {cls.__name__: title for cls, title in _TITLES.items()}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
