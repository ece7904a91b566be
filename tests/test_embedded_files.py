"""The core nodes that read and write files, checked with PyAV and Pillow."""

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from embedded_nodes import node, node_class
from lazy_h3.host.embedded import EmbeddedHost, VideoComponents, VideoFromComponents, folder_paths
from lazy_h3.host.embedded.core_nodes import CORE_NODE_CLASSES
from lazy_h3.host.embedded.errors import PathError
from PIL import Image

RATE = 32000
AAC_FRAME = 1024


def pictures(frames, height, width):
    """A colour ramp that moves, [frames, height, width, 3]."""
    ramp = torch.linspace(0.1, 0.9, width).expand(frames, height, width)
    time = torch.linspace(0.2, 0.8, frames).reshape(-1, 1, 1).expand(frames, height, width)
    return torch.stack([ramp, time, 1 - ramp], dim=-1)


def tone(seconds, channels=2, rate=RATE):
    time = torch.arange(round(seconds * rate)) / rate
    return {"waveform": torch.stack([torch.sin(time * 2000 * (1 + c)) * 0.5 for c in range(channels)])[None], "sample_rate": rate}


@pytest.fixture
def host(tmp_path):
    give = {
        "Pictures": node_class(
            lambda self, n, h, w: (pictures(n, h, w),), {"n": ("INT",), "h": ("INT",), "w": ("INT",)}, ("IMAGE",)
        ),
        "Tone": node_class(lambda self, seconds: (tone(seconds),), {"seconds": ("FLOAT",)}, ("AUDIO",)),
    }
    looked_at = []
    look = {"image": ("IMAGE",), "mask": ("MASK",)}
    give["Look"] = node_class(lambda self, image, mask: looked_at.append((image, mask)) or (), look, (), OUTPUT_NODE=True)
    folders = {"output_directory": tmp_path / "out", "input_directory": tmp_path / "in", "models": tmp_path / "models"}
    folders["input_directory"].mkdir()
    with EmbeddedHost(give, **folders) as host:
        host.looked_at = looked_at
        yield host


def files_of(result):
    assert result.status == "success", result.error
    return [file.path for file in result.files]


@pytest.mark.parametrize(("height", "width", "frames"), [(64, 96, 22), (65, 97, 5)])
def test_video_has_the_frames_and_as_much_sound_as_it_was_given(host, height, width, frames):
    seconds = frames / 24
    prompt = {
        "1": node("Pictures", n=frames, h=height, w=width),
        "2": node("Tone", seconds=seconds),
        "3": node("CreateVideo", images=["1", 0], audio=["2", 0], fps=24),
        "4": node("SaveVideo", video=["3", 0], filename_prefix="clips/test", format="auto", codec="auto"),
    }
    result = host.run(prompt, extra_data={"extra_pnginfo": {"workflow": {"id": 7}}})
    (path,) = files_of(result)
    assert path == Path(host.folders.get_output_directory(), "clips", "test_00001_.mp4")
    assert (result.files[0].kind, result.files[0].node) == ("video", "4")
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.codec.name, video.frames, video.average_rate) == ("h264", frames, 24)
        assert (video.width, video.height) == (width + width % 2, height + height % 2)
        assert (audio.codec.canonical_name, audio.rate, audio.layout.name) == ("aac", RATE, "stereo")
        assert abs(float(audio.duration * audio.time_base) - seconds) <= AAC_FRAME / RATE
        assert json.loads(container.metadata["prompt"])["1"]["class_type"] == "Pictures"
        assert json.loads(container.metadata["workflow"]) == {"id": 7}
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video)])
    assert decoded.shape[0] == frames
    difference = decoded[:, :height, :width] / 255 - pictures(frames, height, width).numpy()
    assert abs(difference).mean() < 0.02


def test_sound_of_a_video_is_the_sound_that_was_given(tmp_path):
    path = tmp_path / "a.mp4"
    given = tone(1.0)
    VideoFromComponents(VideoComponents(pictures(24, 32, 32), Fraction(24), given)).save_to(path)
    with av.open(str(path)) as container:
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    heard = heard[:, :RATE]
    assert np.corrcoef(heard[0, 2000:-2000], given["waveform"][0, 0, 2000:-2000])[0, 1] > 0.99


@pytest.mark.parametrize(("channels", "rate", "written"), [(1, 44100, 44100), (2, 40000, 48000)])
def test_other_channels_and_rates_are_written(tmp_path, channels, rate, written):
    path = tmp_path / "a.mkv"
    VideoFromComponents(VideoComponents(pictures(12, 32, 32), Fraction(24), tone(0.5, channels, rate))).save_to(path, "mkv")
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        assert (stream.rate, stream.channels) == (written, channels)


def test_ten_bit_video_without_sound(tmp_path):
    path = tmp_path / "a.mp4"
    video = VideoFromComponents(VideoComponents(pictures(3, 32, 32), Fraction(23.976)), bit_depth=10)
    video.save_to(path)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.pix_fmt, stream.average_rate, len(container.streams.audio)) == ("yuv420p10le", Fraction(2997, 125), 0)
    assert (video.get_dimensions(), video.get_frame_count(), video.get_bit_depth()) == ((32, 32), 3, 10)
    assert video.get_duration() == pytest.approx(3 / 23.976)


def test_interrupted_video_leaves_no_file(host):
    prompt = {
        "1": node("Pictures", n=50, h=64, w=64),
        "2": node("CreateVideo", images=["1", 0], fps=24),
        "3": node("SaveVideo", video=["2", 0], filename_prefix="x", format="mp4"),
    }
    host.on_event(lambda name, data: host.interrupt() if name == "node_progress" and data["value"] == 10 else None)
    assert host.run(prompt).status == "interrupted"
    assert list(Path(host.folders.get_output_directory()).iterdir()) == []


def test_unknown_format_is_refused_with_the_choices(tmp_path):
    video = VideoFromComponents(VideoComponents(pictures(1, 32, 32), Fraction(24)))
    with pytest.raises(ValueError, match="as avi with auto: use one of auto, mp4, mkv with auto or h264"):
        video.save_to(tmp_path / "a.avi", "avi")


def test_flac_comes_back_as_it_was(host):
    prompt = {"1": node("Tone", seconds=0.5), "2": node("SaveAudio", audio=["1", 0], filename_prefix="sound")}
    (path,) = files_of(host.run(prompt))
    assert path.name == "sound_00001_.flac"
    path.rename(Path(host.folders.get_input_directory(), "sound.flac"))
    heard = []
    host.node_classes["Hear"] = node_class(
        lambda self, audio: heard.append(audio) or (), {"audio": ("AUDIO",)}, (), OUTPUT_NODE=True
    )
    assert host.run({"1": node("LoadAudio", audio="sound.flac"), "2": node("Hear", audio=["1", 0])}).status == "success"
    assert heard[0]["sample_rate"] == RATE
    assert heard[0]["waveform"].shape == (1, 2, RATE // 2)
    torch.testing.assert_close(heard[0]["waveform"], tone(0.5)["waveform"], atol=1e-4, rtol=0)


def test_images_are_saved_counted_and_carry_their_workflow(host):
    prompt = {
        "1": node("Pictures", n=2, h=20, w=30),
        "2": node("SaveImage", images=["1", 0], filename_prefix="p/%width%x%height%"),
    }
    paths = files_of(host.run(prompt, extra_data={"extra_pnginfo": {"workflow": 1}}))
    assert [path.name for path in paths] == ["30x20_00001_.png", "30x20_00002_.png"]
    with Image.open(paths[1]) as file:
        assert file.size == (30, 20)
        assert json.loads(file.text["prompt"])["2"]["class_type"] == "SaveImage"
        saved = np.asarray(file) / 255
    assert abs(saved - pictures(2, 20, 30)[1].numpy()).max() <= 1 / 255
    host.free(free_memory=True)
    assert [path.name for path in files_of(host.run(prompt))] == ["30x20_00003_.png", "30x20_00004_.png"]


def test_previews_are_temporary_and_no_result(host):
    result = host.run({"1": node("Pictures", n=1, h=8, w=8), "2": node("PreviewImage", images=["1", 0])})
    (shown,) = result.outputs["2"]["images"]
    path = Path(host.folders.get_temp_directory(), shown["filename"])
    assert (shown["type"], result.files, path.is_file()) == ("temp", [], True)
    host.close()
    assert not path.exists()


def loaded(host, name):
    result = host.run({"1": node("LoadImage", image=name), "2": node("Look", image=["1", 0], mask=["1", 1])})
    assert result.status == "success", result
    return host.looked_at.pop()


def test_image_is_loaded_upright_with_its_alpha_as_mask(host):
    pixels = np.zeros((4, 6, 4), np.uint8)
    pixels[..., 0], pixels[0, :, 3], pixels[1:, :, 3] = 255, 255, 51
    folder = Path(host.folders.get_input_directory())
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    Image.fromarray(pixels).save(folder / "a.png", exif=exif)
    image, mask = loaded(host, "a.png")
    assert image.shape == (1, 6, 4, 3)
    assert image[0, 0, 0].tolist() == [1, 0, 0]
    assert mask.shape == (1, 6, 4)
    assert sorted({round(value, 3) for value in mask.flatten().tolist()}) == [0, 0.8]


def test_deep_and_animated_images_are_loaded(host):
    folder = Path(host.folders.get_input_directory())
    Image.fromarray(np.full((3, 5), 32896, np.uint16)).save(folder / "deep.png")
    frames = [Image.new("RGB", (5, 3), color) for color in ("red", "blue")]
    frames[0].save(folder / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)
    image, mask = loaded(host, "deep.png")
    assert image.mean().item() == pytest.approx(0.5, abs=0.01)
    assert mask.shape == (1, 64, 64)
    assert loaded(host, "moving.webp")[0].shape == (2, 3, 5, 3)


def test_changed_input_file_is_loaded_again(host):
    path = Path(host.folders.get_input_directory(), "a.png")
    for color in ("red", "blue"):
        Image.new("RGB", (2, 2), color).save(path)
        image, _ = loaded(host, "a.png")
        assert image[0, 0, 0].tolist() == ([1, 0, 0] if color == "red" else [0, 0, 1])


@pytest.mark.parametrize("class_type", ["LoadImage", "LoadAudio"])
@pytest.mark.parametrize("name", ["missing.png", "../secret.png", "/etc/passwd", "..\\secret.png", "../out/a.png [output]"])
def test_files_that_are_missing_or_outside_are_refused(host, class_type, name):
    kind = "image" if class_type == "LoadImage" else "audio"
    Path(host.folders.get_input_directory(), "..", "secret.png").write_bytes(b"secret")
    shower = (
        node("SaveImage", images=["1", 0], filename_prefix="x")
        if kind == "image"
        else node("SaveAudio", audio=["1", 0], filename_prefix="x")
    )
    result = host.run({"1": node(class_type, **{kind: name}), "2": shower})
    assert result.status == "error"
    assert f"Invalid {kind} file: {name}" in result.node_errors["1"]["errors"][0]["details"]


@pytest.mark.parametrize("prefix", ["../x", "/tmp/x", "a/../../x", "..\\x", "", "."])
def test_prefix_that_leads_out_of_the_output_folder_fails_the_node(host, prefix):
    result = host.run({"1": node("Pictures", n=1, h=8, w=8), "2": node("SaveImage", images=["1", 0], filename_prefix=prefix)})
    assert (result.status, result.error.type) == ("error", "PathError")


def test_annotated_names_choose_the_folder(host):
    host.run({"1": node("Pictures", n=1, h=8, w=8), "2": node("SaveImage", images=["1", 0], filename_prefix="mine")})
    assert loaded(host, "mine_00001_.png [output]")[0].shape == (1, 8, 8, 3)


def test_models_are_found_by_kind_also_under_the_old_name(host, tmp_path):
    for name in ("vae/a.safetensors", "vae/sub/b.safetensors", "vae/readme.txt", "unet/c.safetensors"):
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert folder_paths.get_filename_list("vae") == ["a.safetensors", "sub/b.safetensors"]
    assert folder_paths.get_filename_list("diffusion_models") == ["c.safetensors"]
    assert folder_paths.get_full_path("vae", "sub/b.safetensors") == str(tmp_path / "models/vae/sub/b.safetensors")
    assert folder_paths.get_full_path("vae", "z.safetensors") is None
    with pytest.raises(FileNotFoundError, match=r"no model 'z\.safetensors' in .*vae: put the file there"):
        folder_paths.get_full_path_or_raise("vae", "z.safetensors")
    with pytest.raises(PathError, match="leads out of the folder"):
        folder_paths.get_full_path("vae", "../unet/c.safetensors")


def test_core_nodes_have_cores_ids_and_outputs():
    declared = {name: (cls.RETURN_TYPES, getattr(cls, "OUTPUT_NODE", False)) for name, cls in CORE_NODE_CLASSES.items()}
    assert declared == {
        "LoadImage": (("IMAGE", "MASK"), False),
        "SaveImage": (("IMAGE",), True),
        "PreviewImage": (("IMAGE",), True),
        "CreateVideo": (("VIDEO",), False),
        "SaveVideo": (("VIDEO",), True),
        "SaveAudio": (("AUDIO",), True),
        "LoadAudio": (("AUDIO",), False),
        "ComfySwitchNode": (("*",), False),
        "PrimitiveInt": (("INT",), False),
        "PrimitiveFloat": (("FLOAT",), False),
        "PrimitiveString": (("STRING",), False),
        "PrimitiveStringMultiline": (("STRING",), False),
        "PrimitiveBoolean": (("BOOLEAN",), False),
    }


@pytest.mark.parametrize(
    ("kind", "value"),
    [("Int", 3), ("Float", 2.5), ("String", "a"), ("StringMultiline", "a\nb"), ("Boolean", True)],
)
def test_primitives_hand_on_their_value(host, kind, value):
    got = []
    host.node_classes["Look"] = node_class(lambda self, value: got.append(value) or (), {"value": ("*",)}, (), OUTPUT_NODE=True)
    host.run({"1": node(f"Primitive{kind}", value=value), "2": node("Look", value=["1", 0])})
    assert got == [value]
