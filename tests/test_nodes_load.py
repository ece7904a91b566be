"""Loader nodes: files to handles, from headers alone, and anew when a file changes."""

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from lazy_h3.commands.make_checkpoint import FOLDER, FOLDER_FILES, SINGLE_FILES
from lazy_h3.commands.presets import tiny
from lazy_h3.memory.checkpoint import CheckpointError
from lazy_h3.nodes import (
    LazyH3AudioVAELoader,
    LazyH3DecodeAudio,
    LazyH3DecodeVideo,
    LazyH3DiTLoader,
    LazyH3EncodePrompt,
    LazyH3FolderLoader,
    LazyH3Sampler,
    LazyH3TextEncoderLoader,
    LazyH3VideoVAELoader,
    catalogue,
)
from lazy_h3.nodes.catalogue import AS_STORED, LOADERS, Catalogue
from lazy_h3.nodes.demand import GraphSizes
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import (
    AUDIO_VAE,
    CPU,
    DECODE_VIDEO,
    DIT,
    SAMPLER,
    TEXT_ENCODER,
    USERS,
    VIDEO_VAE,
    copied_models,
    folder_prompt,
    stage,
    text_to_video,
    tiny_folder_models,
    tiny_models,
)

FILE_LOADERS = {
    "text_encoder": (LazyH3TextEncoderLoader, TEXT_ENCODER),
    "dit": (LazyH3DiTLoader, DIT),
    "video_vae": (LazyH3VideoVAELoader, VIDEO_VAE),
    "audio_vae": (LazyH3AudioVAELoader, AUDIO_VAE),
}
LOADER_NODES = {"text_encoder": "1", "dit": "2", "video_vae": "3", "audio_vae": "4"}
PAIRS = [(actual, wanted) for actual in FILE_LOADERS for wanted in FILE_LOADERS if actual != wanted]


@pytest.fixture
def running(tmp_path):
    with stage(tmp_path / "out") as found:
        yield found


def graph_of_questions() -> tuple[dict, type, list]:
    """Every handle and the latent meet a node that asks for what geometry needs."""
    answers: list = []

    class Ask:
        RETURN_TYPES = ()
        FUNCTION = "ask"
        OUTPUT_NODE = True

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"handle": ("*",), "latent": ("LATENT",)}}

        def ask(self, handle, latent):
            answers.append((handle.kind, handle.config, repr(handle), latent["samples"].unbind()[0].shape))
            return ()

    prompt = {node: spec for node, spec in text_to_video().items() if node in ("1", "2", "3", "4", "6")}
    asked = {f"ask{node}": {"class_type": "Ask", "inputs": {"handle": [node, 0], "latent": ["6", 0]}} for node in "1234"}
    return {**prompt, **asked}, Ask, answers


def test_reading_geometry_reads_no_weights(tmp_path):
    prompt, ask, answers = graph_of_questions()
    with stage(tmp_path, classes={"Ask": ask}) as running:
        running.succeed(prompt)
        assert running.reads == []
        assert not running.ledger.events
        configs = {kind: config for kind, config, _, _ in answers}
        assert configs.keys() == FILE_LOADERS.keys()
        assert (configs["dit"].patch_size, configs["dit"].in_channels) == ((1, 2, 2), 24)
        assert configs["text_encoder"].hidden_size == tiny().text_encoder.hidden_size
        assert (configs["video_vae"].spatial_ratio, configs["audio_vae"].sampling_rate) == (16, 32000)
        running.succeed(text_to_video())
        assert sum(running.reads) > 0  # so the count would have noticed


def test_only_the_parts_that_the_graph_needs_are_read(running):
    """No picture: no vision tower. Text to video: no VAE encoder."""
    running.succeed(text_to_video())
    catalogue = running.runtime.catalogue
    for kind, part in (("text_encoder", "language"), ("video_vae", "decoder"), ("audio_vae", "decoder")):
        loader, file = FILE_LOADERS[kind]
        (handle,) = loader().load(file=file)
        (loaded,) = (e.bytes for e in running.ledger.events if e.event == "load_end" and catalogue.kinds[e.component] == kind)
        assert loaded == handle.component.nbytes(frozenset({part})) < handle.component.nbytes()


@pytest.mark.parametrize("name", [None, 5, ["a"], {"a": 1}], ids=str)
@pytest.mark.parametrize("loader", [LazyH3DiTLoader, LazyH3FolderLoader])
def test_what_is_no_name_is_refused_in_one_sentence(running, loader, name):
    (slot,) = loader.INPUT_TYPES()["required"]
    with pytest.raises(ValueError, match="in place of a name; choose one from its list") as caught:
        loader().load(**{slot: name})
    assert "\n" not in str(caught.value)
    assert loader.lazy_h3_resources(**{slot: name}) == {}
    assert name is None or "in place of a name" in loader.VALIDATE_INPUTS(**{slot: name})


USES = {
    "text_encoder": lambda handle: LazyH3EncodePrompt().encode(handle, "a cat"),
    "dit": lambda handle: LazyH3Sampler().sample(handle, [], {}, 1, 1),
    "video_vae": lambda handle: LazyH3DecodeVideo().decode(handle, {}),
    "audio_vae": lambda handle: LazyH3DecodeAudio().decode(handle, {}),
}


@pytest.mark.parametrize("kind", USES)
def test_what_is_no_handle_of_the_right_kind_is_refused_in_one_sentence(running, kind):
    title, node = LOADERS[kind]
    for wrong in (None, "1"):
        with pytest.raises(ValueError, match="is no handle; wire in the node") as caught:
            asyncio.run(USES[kind](wrong))
        assert (
            str(caught.value)
            == f"This node needs the {title} and was given {wrong!r}, which is no handle; wire in the node {node}."
        )
    for other in FILE_LOADERS.keys() - {kind}:
        loader, file = FILE_LOADERS[other]
        with pytest.raises(ValueError, match=f"was given the handle of the {LOADERS[other][0]}"):
            asyncio.run(USES[kind](*loader().load(file=file)))


def test_text_that_no_encoding_has_is_refused_in_one_sentence(running):
    (handle,) = LazyH3TextEncoderLoader().load(file=TEXT_ENCODER)
    with pytest.raises(ValueError, match="The prompt's character 3 is half of a pair"):
        asyncio.run(LazyH3EncodePrompt().encode(handle, "ab\ud800"))
    assert GraphSizes({}, {}).tokens("ab\ud800") == 2


def test_threads_share_one_catalogue(tmp_path, monkeypatch):
    """With more files than it remembers, each question is still answered with its own file."""
    monkeypatch.setattr(catalogue, "MAX_COMPONENTS", 2)
    files = [Path(shutil.copy(tiny_models() / SINGLE_FILES["dit"], tmp_path / f"{i}.safetensors")) for i in range(4)]
    shared = Catalogue()

    def ask(number: int) -> tuple[Path, str]:
        path = files[number % len(files)]
        component = shared.component(path, "dit", AS_STORED, CPU)
        shared.find(component.identity)
        return path, component.checkpoint.path

    with ThreadPoolExecutor(4) as threads:
        assert all(str(path) == str(found) for path, found in threads.map(ask, range(80)))


def test_threads_that_ask_at_once_get_the_same_component(monkeypatch):
    shared, path = Catalogue(), tiny_models() / SINGLE_FILES["dit"]
    barrier = threading.Barrier(4)
    monkeypatch.setattr(catalogue, "files_of", lambda path, known=catalogue.files_of: (barrier.wait(), known(path))[1])
    with ThreadPoolExecutor(4) as threads:
        found = set(map(id, threads.map(lambda _: shared.component(path, "dit", AS_STORED, CPU), range(4))))
    assert len(found) == 1


@pytest.mark.parametrize(("actual", "wanted"), PAIRS)
def test_a_file_in_the_wrong_loader_is_refused_with_the_name_of_the_right_one(actual, wanted):
    path = tiny_models() / SINGLE_FILES[actual]
    with pytest.raises(CheckpointError) as caught:
        Catalogue().component(path, wanted, AS_STORED, CPU)
    (found, node), (other, _) = LOADERS[actual], LOADERS[wanted]
    assert str(caught.value) == f"{path}: is a checkpoint of the {found}, not a checkpoint of the {other}; use the node {node}."


@pytest.mark.parametrize("kind", FILE_LOADERS)
def test_the_same_file_gives_the_same_component(running, kind):
    loader, file = FILE_LOADERS[kind]
    (first,), (second,) = loader().load(file=file), loader().load(file=file)
    assert first.component is second.component
    assert first.kind == kind


def test_the_folder_loader_gives_all_four_components(tmp_path):
    with stage(tmp_path, tiny_folder_models()) as running:
        handles = LazyH3FolderLoader().load(folder="minimax_h3")
        assert [handle.kind for handle in handles] == ["text_encoder", "dit", "video_vae", "audio_vae"]
        assert [f"LAZYH3_{handle.kind.upper()}" for handle in handles] == list(LazyH3FolderLoader.RETURN_TYPES)
        assert LazyH3FolderLoader.INPUT_TYPES()["required"]["folder"][0] == ["minimax_h3"]
        running.succeed(folder_prompt("minimax_h3"))
        assert dict(running.happened("load_end")) == USERS


@pytest.mark.parametrize("kind", ["text_encoder", "dit"])
def test_a_chosen_precision_decides_the_resident_bytes(running, kind):
    loader, file = FILE_LOADERS[kind]
    stored, bf16, fp32 = (loader().load(file=file, dtype=dtype)[0].component for dtype in (AS_STORED, "bf16", "fp32"))
    assert stored is bf16  # these files are stored so
    assert bf16.nbytes() < fp32.nbytes() <= 2 * bf16.nbytes()
    assert bf16.name != fp32.name  # reports tell them apart


def test_the_audio_vae_is_held_in_fp32_whatever_is_chosen(running):
    stored, bf16 = (LazyH3AudioVAELoader().load(file=AUDIO_VAE, dtype=d)[0].component for d in (AS_STORED, "bf16"))
    assert stored.nbytes() == bf16.nbytes()


def test_a_file_in_fp16_computes_in_fp32_on_a_cpu(tmp_path):
    path = tmp_path / "models" / SINGLE_FILES["video_vae"]
    path.parent.mkdir(parents=True)
    tensors, metadata = contents(tiny_models() / SINGLE_FILES["video_vae"])
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path, metadata)
    with stage(tmp_path / "out", tmp_path / "models", tiny_models()) as running:
        (handle,) = LazyH3VideoVAELoader().load(file=VIDEO_VAE)
        with handle.use("decoder") as model:
            assert {parameter.dtype for parameter in model.decoder.parameters()} == {torch.float32}
        running.succeed(text_to_video())
        assert running.kept["images"].isfinite().all()


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118  (not a dict)


def test_files_in_sub_folders_and_behind_links_are_listed_and_found(tmp_path):
    elsewhere = tmp_path / "other disk"
    elsewhere.mkdir()
    shutil.copy(tiny_models() / SINGLE_FILES["video_vae"], elsewhere / "video.safetensors")
    (tmp_path / "models" / "vae").mkdir(parents=True)
    (tmp_path / "models" / "vae" / "linked").symlink_to(elsewhere, target_is_directory=True)
    with stage(tmp_path / "out", tmp_path / "models", tiny_models()) as running:
        listed = LazyH3VideoVAELoader.INPUT_TYPES()["required"]["file"][0]
        assert listed == ["linked/video.safetensors", AUDIO_VAE, VIDEO_VAE]
        running.succeed(text_to_video({"3.file": "linked/video.safetensors"}))


@pytest.mark.parametrize("name", ["../vae/x", "/etc/passwd", "C:\\x", "..\\x", "", "nothing.safetensors"])
def test_a_name_that_is_not_there_or_leads_out_is_refused_before_the_run(running, name):
    answer = LazyH3DiTLoader.VALIDATE_INPUTS(file=name)
    assert isinstance(answer, str)
    assert repr(name) in answer or name in answer
    result = running.run(text_to_video({"2.file": name}))
    assert result.error.node_id is None  # nothing ran
    assert answer in result.error.message


def test_names_that_are_there_or_not_known_yet_are_accepted(running):
    assert LazyH3DiTLoader.VALIDATE_INPUTS(file=DIT) is True
    assert LazyH3DiTLoader.VALIDATE_INPUTS() is True
    assert LazyH3FolderLoader.VALIDATE_INPUTS() is True
    assert LazyH3FolderLoader.VALIDATE_INPUTS(folder="minimax_h3") != True  # noqa: E712  (a sentence is true, too)


@pytest.mark.parametrize("kind", FILE_LOADERS)
def test_a_fingerprint_holds_as_long_as_the_file_does(tmp_path, kind):
    models = copied_models(tmp_path / "models")
    loader, file = FILE_LOADERS[kind]
    with stage(tmp_path / "out", models):
        first = loader.IS_CHANGED(file=file)
        assert loader.IS_CHANGED(file=file) == first
        assert loader.IS_CHANGED(file=file, dtype="fp32") != first
        path = models / SINGLE_FILES[kind]
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        assert loader.IS_CHANGED(file=file) != first


def test_a_fingerprint_never_raises(running):
    assert "nothing" in LazyH3DiTLoader.IS_CHANGED(file="nothing.safetensors")
    assert isinstance(LazyH3DiTLoader.IS_CHANGED(file=None), str)  # linked: not known yet
    assert isinstance(LazyH3FolderLoader.IS_CHANGED(folder=".."), str)


def test_a_file_that_was_replaced_is_read_anew_by_the_next_prompt(tmp_path):
    models = copied_models(tmp_path / "models")
    with stage(tmp_path / "out", models) as running:
        running.succeed(text_to_video())
        for kind, file in SINGLE_FILES.items():
            assert_read_anew(running, kind, models / file, text_to_video())


def test_a_file_in_a_folder_that_was_overwritten_in_place_is_read_anew(tmp_path):
    """Overwriting a file leaves the time stamp of its folder alone."""
    models = copied_models(tmp_path / "models", tiny_folder_models())
    with stage(tmp_path / "out", models) as running:
        running.succeed(folder_prompt("minimax_h3"))
        for kind, file in FOLDER_FILES.items():
            path = models / FOLDER / file
            stamp = path.parent.stat().st_mtime_ns
            assert_read_anew(running, kind, path, folder_prompt("minimax_h3"))
            assert path.parent.stat().st_mtime_ns == stamp


def assert_read_anew(running, kind: str, path: Path, prompt: dict) -> None:
    before = result_of(running.kept)
    replace_with_other_weights(path)
    running.succeed(prompt)
    assert kind in running.loaded()
    assert result_of(running.kept) != before, kind


def replace_with_other_weights(path: Path) -> None:
    tensors, metadata = contents(path)
    other = {name: (-tensor if tensor.dim() > 1 else tensor) for name, tensor in tensors.items()}
    fresh = path.parent.parent / "fresh.safetensors"
    save_file(other, fresh, metadata)
    with path.open("r+b") as file:
        file.write(fresh.read_bytes())
        file.truncate()
    fresh.unlink()
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def result_of(kept: dict) -> tuple[bytes, bytes]:
    return kept["images"].numpy().tobytes(), kept["audio"]["waveform"].numpy().tobytes()


def test_what_a_loader_will_load_is_known_before_it_runs(running):
    for loader, file in FILE_LOADERS.values():
        (handle,) = loader().load(file=file)
        assert loader.lazy_h3_resources(file=file) == {0: handle.component.identity}
    assert running.reads == []


def test_a_damaged_file_stops_its_own_node_and_not_the_analysis(tmp_path):
    damaged = tmp_path / "models" / SINGLE_FILES["dit"]
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"version https://git-lfs")
    with stage(tmp_path / "out", tmp_path / "models", tiny_models()) as running:
        assert LazyH3DiTLoader.lazy_h3_resources(file=DIT) == {}
        result = running.run(text_to_video())
        assert (result.status, result.error.node_id) == ("error", LOADER_NODES["dit"])
        assert "Git LFS pointer" in result.error.message
        assert running.store.resident() == []


def cut_short(models: Path, kind: str) -> Path:
    """A models folder whose only file is a download that ended early."""
    file = models / SINGLE_FILES[kind]
    file.parent.mkdir(parents=True)
    file.write_bytes((tiny_models() / SINGLE_FILES[kind]).read_bytes()[:-1])
    return models


def test_a_damaged_file_of_the_last_node_stops_the_prompt_before_anything_is_computed(tmp_path):
    prompt = text_to_video()
    prompt["images"]["inputs"]["value"] = ["10", 0]  # a loader two nodes before an output comes late
    prompt["10"] = {"class_type": "LazyH3Policy", "inputs": {"policy": "free", "anything": [DECODE_VIDEO, 0]}}
    with stage(tmp_path / "out", cut_short(tmp_path / "models", "video_vae"), tiny_models()) as running:
        result = running.run(prompt)
        assert (result.status, VIDEO_VAE in result.error.message) == ("error", True)
        assert running.reads == []
        assert running.store.resident() == []


def test_a_damaged_file_stops_a_prompt_whose_other_models_are_resident_before_it_samples(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    with stage(tmp_path / "out", models, tiny_models(), policy="keep") as running:
        running.succeed(text_to_video())
        cut_short(models, "video_vae")
        result = running.run(text_to_video({"7.seed": 8}))
        assert VIDEO_VAE in result.error.message
        assert SAMPLER not in result.executed


def test_a_damaged_file_behind_a_lazy_link_that_is_not_taken_does_no_harm(tmp_path):
    spare = tmp_path / "models" / "vae" / "spare.safetensors"
    spare.parent.mkdir(parents=True)
    spare.write_bytes(b"version https://git-lfs")
    prompt = text_to_video()
    loader = {"class_type": "LazyH3VideoVAELoader", "inputs": {"file": spare.name, "dtype": "as stored"}}
    decoder = {"class_type": prompt[DECODE_VIDEO]["class_type"], "inputs": {"video_vae": ["20", 0], "latent": [SAMPLER, 0]}}
    switch = {"switch": True, "on_true": [DECODE_VIDEO, 0], "on_false": ["21", 0]}
    prompt |= {"20": loader, "21": decoder, "22": {"class_type": "ComfySwitchNode", "inputs": switch}}
    prompt["images"]["inputs"]["value"] = ["22", 0]
    with stage(tmp_path / "out", tmp_path / "models", tiny_models()) as running:
        running.succeed(prompt)
        prompt["22"]["inputs"]["switch"] = False
        assert "Git LFS pointer" in running.run(prompt).error.message


def test_inputs_that_no_loader_declares_do_no_harm(running, caplog):
    """The front end of another version may send more than we know; nodes never see it, and neither does the analysis."""
    running.succeed(text_to_video({"2.upload": "image", "1.colour": 3}))
    assert dict(running.happened("release")) == USERS
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_components_that_nobody_uses_are_named_and_never_read(tmp_path, caplog):
    prompt = folder_prompt("minimax_h3")
    keep = {"class_type": "Keep", "inputs": {"value": ["5", 0]}}
    with stage(tmp_path, tiny_folder_models()) as running:
        running.succeed({"1": prompt["1"], "5": prompt["5"], "keep": keep})
        assert running.loaded() == ["text_encoder"]
    warnings = [record.message for record in caplog.records if "used by none" in record.message]
    assert len(warnings) == 3
