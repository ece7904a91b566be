"""Sound: AUDIO is a dict of waveform [B, C, T] and sample_rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import folder_paths
from ..audio import Audio, load_audio, save_flac
from .files import PREFIX, WORKFLOW, InputFile, as_text, workflow_metadata


class LoadAudio(InputFile):
    FILE_INPUT = "audio"
    RETURN_TYPES = ("AUDIO",)
    FUNCTION = "load"
    CATEGORY = "audio"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"audio": (folder_paths.input_files(["audio", "video"]), {"audio_upload": True})}}

    def load(self, audio: str) -> tuple[Audio]:
        return (load_audio(Path(folder_paths.get_annotated_filepath(audio))),)


class SaveAudio:
    RETURN_TYPES = ("AUDIO",)
    RETURN_NAMES = ("audio",)
    FUNCTION = "save_flac"
    OUTPUT_NODE = True
    CATEGORY = "audio"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        prefix = (PREFIX[0], PREFIX[1] | {"default": "audio/ComfyUI"})
        return {"required": {"audio": ("AUDIO",), "filename_prefix": prefix}, "hidden": WORKFLOW}

    def save_flac(
        self, audio: Audio, filename_prefix: str = "ComfyUI", prompt: Any = None, extra_pnginfo: Any = None
    ) -> dict[str, Any]:
        where = folder_paths.get_save_image_path(filename_prefix, folder_paths.get_output_directory())
        names = [where.file("flac", index) for index in range(len(audio["waveform"]))]
        for index, name in enumerate(names):
            save_flac(audio, index, Path(where.folder, name), as_text(workflow_metadata(prompt, extra_pnginfo)))
        shown = [{"filename": name, "subfolder": where.subfolder, "type": "output"} for name in names]
        return {"ui": {"audio": shown}, "result": (audio,)}
