"""What the documents say is so: pages, links, commands, sizes, messages and the file tree are held against the code."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lazy_h3.cli import _parser
from lazy_h3.h3.audio_vae import AudioVAE
from lazy_h3.h3.config import AudioVAEConfig, DiTConfig, TextEncoderConfig, VideoVAEConfig
from lazy_h3.h3.dit import dit_class
from lazy_h3.h3.text_encoder import TextEncoder
from lazy_h3.h3.video_vae import VideoVAE
from lazy_h3.host.embedded.host import EmbeddedHost
from lazy_h3.host.embedded.port import EmbeddedPort
from lazy_h3.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from lazy_h3.nodes.runtime import Runtime, installed
from torch import nn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = {path.stem: path for path in (ROOT / "web" / "docs").glob("*.md")}
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")), *PAGES.values()]
PICTURE = ROOT / "docs" / "images" / "memory.svg"
WORKFLOWS = sorted((ROOT / "example_workflows").glob("*.json"))
ROOMS = ("nodes", "memory", "h3", "host", "commands")
GIB = 1 << 30

MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(home|root|Users|tmp|work|mnt|opt|var)/|[A-Z]:\\\\?Users")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
NUMBER = re.compile(r"\b\d+\.\d+\b")

DIT = DiTConfig()
AUDIO_VAE = AudioVAEConfig(latents_mean=(0.0,) * 32, latents_std=(1.0,) * 32)
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "text encoder": lambda: TextEncoder(TextEncoderConfig()),
    "diffusion transformer, base": lambda: dit_class(DIT)(DIT),
    "diffusion transformer, r16": lambda: dit_class(ranked := replace(DIT, adaln_rank=16))(ranked),
    "diffusion transformer, pruned": lambda: dit_class(curved := replace(DIT, adaln_curve=(1025, 8)))(curved),
    "video VAE": lambda: VideoVAE(VideoVAEConfig()),
    "audio VAE": lambda: AudioVAE(AUDIO_VAE),
}
USED_PARTS = {"text encoder": "language", "video VAE": "decoder", "audio VAE": "decoder"}  # for text to video; else all
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GATE_BYTES = 50 * 7168 * 5376 * 2  # what FastH3 has beside the base model: a gate a block, in bf16


@pytest.fixture(scope="module", autouse=True)
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The loaders ask a host for the files that they list."""
    output = tmp_path_factory.mktemp("output")
    with (
        EmbeddedHost(NODE_CLASS_MAPPINGS, output_directory=output) as host,
        installed(Runtime(EmbeddedPort(host, torch.device("cpu")))),
    ):
        yield


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def section(title: str) -> str:
    """The README's text under a heading."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of all tables, without their heads."""
    tables = re.findall(r"^\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


def fenced_lines(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def resident_bytes(component: str, precision: str) -> tuple[int, int]:
    """Of the parts that text to video uses, and of all parts."""
    with torch.device("meta"):
        module = BUILDERS[component]()
    sizes = {n: t.numel() * module.storage_dtype(n, DTYPES[precision]).itemsize for n, t in module.state_dict().items()}
    used = module.PARTS[USED_PARTS[component]] if component in USED_PARTS else ("",)
    return sum(size for name, size in sizes.items() if name.startswith(used)), sum(sizes.values())


def test_every_node_has_a_page_and_every_page_a_node() -> None:
    assert PAGES.keys() == NODE_CLASS_MAPPINGS.keys()


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_the_page_of_a_node_has_a_row_for_each_input_and_output_in_their_order(name: str) -> None:
    cls = NODE_CLASS_MAPPINGS[name]
    declared = cls.INPUT_TYPES()
    inputs = [*declared["required"], *declared.get("optional", {})]
    page = PAGES[name].read_text("utf-8")
    assert page.startswith(f"# {NODE_DISPLAY_NAME_MAPPINGS[name].removesuffix(' (Lazy H3)')}\n")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*inputs, *cls.RETURN_NAMES]


def test_the_readme_links_the_page_of_every_node() -> None:
    assert re.findall(r"\(web/docs/(\w+)\.md\)", section("Nodes")) == list(NODE_CLASS_MAPPINGS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_and_pictures_exist(path: Path) -> None:
    missing = [link for link in LINK.findall(path.read_text("utf-8")) if not (path.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("path", [*DOCUMENTS, *WORKFLOWS, PICTURE], ids=name_of)
def test_no_document_names_a_place_on_somebodys_machine(path: Path) -> None:
    assert MACHINE_PATH.search(path.read_text("utf-8")) is None


def test_commands_of_the_readme_are_understood() -> None:
    commands = [shlex.split(line, comments=True) for line in fenced_lines(README) if line.startswith("lazy-h3 ")]
    understood = {_parser().parse_args(words[1:]).command.__name__ for words in commands}
    assert understood == {"_demo", "_run", "_plan", "_convert", "_inspect", "_make_checkpoint", "_bench"}


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {line.split()[1] for line in fenced_lines(README) if line.startswith("make ")} | set(
        re.findall(r"`make (\w+)`", README)
    )
    assert named
    assert named <= targets


def test_the_memory_table_says_what_the_shapes_say() -> None:
    table = rows(section("Memory"))
    assert {cells[0].partition(" (")[0] for cells in table} == BUILDERS.keys()
    for label, precision, used, whole in table:
        found = resident_bytes(label.partition(" (")[0], precision)
        assert (used, whole) == tuple(f"{nbytes / GIB:.2f}" for nbytes in found), label


def test_the_picture_shows_sizes_from_the_shapes() -> None:
    encoder, video, audio = (
        resident_bytes("text encoder", "bf16"),
        resident_bytes("video VAE", "fp32"),
        resident_bytes("audio VAE", "fp32"),
    )
    base, r16 = resident_bytes("diffusion transformer, base", "bf16")[1], resident_bytes("diffusion transformer, r16", "bf16")[1]
    transformers = (r16, base, base + GATE_BYTES)
    steps = {f"{nbytes / GIB:.2f}" for nbytes in (encoder[0], video[0], audio[0], *transformers)}
    sums = {f"{(encoder[1] + dit + video[1] + audio[1]) / GIB:.1f}" for dit in transformers}
    peaks = {f"{max(encoder[0], dit) / GIB:.1f}" for dit in transformers}
    shown = re.findall(r">([^<>]+)</text>", PICTURE.read_text("utf-8"))
    assert set(NUMBER.findall(" ".join(shown))) == steps | sums | peaks


def test_messages_of_the_troubleshooting_table_are_ones_that_the_code_can_say() -> None:
    templates = [text for room in ROOMS for path in (ROOT / room).rglob("*.py") for text in templates_in(path)]
    quoted = [message for cells in rows(section("Troubleshooting")) for message in re.findall(r"`([^`]+)`", cells[0])]
    assert len(quoted) > 20
    patterns = {message: re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL) for message in quoted}
    assert [message for message, pattern in patterns.items() if not any(map(pattern.search, templates))] == []


def templates_in(path: Path) -> Iterator[str]:
    """All string literals of a module, values in braces as dots."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_file_tree_of_the_readme_exists() -> None:
    folder = ""
    paths = []
    for line in fenced_lines(section("Files")):
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            paths.append(name)
        else:
            paths.append(folder + name)
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_file_tree_of_the_readme_names_every_module_of_a_room(room: str) -> None:
    lines = "\n".join(fenced_lines(section("Files")))
    described = re.split(rf"^{room}/", lines, flags=re.MULTILINE)[1]
    described = re.split(r"^\S", described, flags=re.MULTILINE)[0]
    modules = {path.name for path in (ROOT / room).glob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"\w+\.py", described)) == modules
