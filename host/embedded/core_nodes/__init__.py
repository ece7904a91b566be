"""The few nodes of ComfyUI itself that workflows need, with the same ids, inputs and outputs."""

from .audio import LoadAudio, SaveAudio
from .image import LoadImage, PreviewImage, SaveImage
from .logic import PRIMITIVES, ComfySwitchNode
from .video import CreateVideo, SaveVideo

CORE_NODE_CLASSES: dict[str, type] = {
    node_class.__name__: node_class
    for node_class in (LoadImage, SaveImage, PreviewImage, CreateVideo, SaveVideo, SaveAudio, LoadAudio, ComfySwitchNode)
} | PRIMITIVES
