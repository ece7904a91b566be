"""Names of model files: found where they are, never outside the model folders."""

import pytest
from lazy_h3.host.embedded.folder_paths import Folders
from lazy_h3.host.files import diffusers_folders, inside, model_files


@pytest.fixture
def folders(tmp_path):
    """Two model folders; the second holds what the first lacks."""
    for name in ("first/a.safetensors", "first/deep/er/b.sft", "first/c.ckpt", "second/a.safetensors", "second/d.safetensors"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return [tmp_path / "first", tmp_path / "second"]


def test_the_first_folder_that_has_a_name_wins(folders):
    assert inside(folders, "a.safetensors") == folders[0] / "a.safetensors"
    assert inside(folders, "d.safetensors") == folders[1] / "d.safetensors"
    assert inside(folders, "deep/er/b.sft") == folders[0] / "deep/er/b.sft"


def test_backslashes_of_another_system_are_steps_too(folders):
    assert inside(folders, "deep\\er\\b.sft") == folders[0] / "deep/er/b.sft"


OUTSIDE = ["../second/a.safetensors", "deep/../../second/a.safetensors", "..", "/etc/passwd", "\\etc\\passwd", "", "."]
DRIVES = ["C:/x", "C:x", "deep/C:/x"]


@pytest.mark.parametrize("name", OUTSIDE + DRIVES)
def test_a_name_that_leads_out_is_refused(folders, name):
    with pytest.raises(ValueError, match="leads out of the model folders; choose a name from the loader's list"):
        inside(folders, name)


def test_a_name_with_a_colon_is_no_drive(folders):
    (folders[0] / "model:7.safetensors").write_text("x")
    assert inside(folders, "model:7.safetensors").read_text() == "x"


def test_a_name_that_is_nowhere_is_refused_with_the_places(folders):
    with pytest.raises(ValueError, match=r"nothing\.sft is not in .*first, .*second; put the file there"):
        inside(folders, "nothing.sft")
    with pytest.raises(ValueError, match="for want of a folder with models; name it with --models"):
        inside([], "nothing.sft")


def test_links_to_other_disks_are_followed(folders, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "e.safetensors").write_text("e")
    (folders[0] / "linked").symlink_to(disk, target_is_directory=True)
    (folders[0] / "f.safetensors").symlink_to(disk / "e.safetensors")
    assert inside(folders, "linked/e.safetensors").read_text() == "e"
    assert set(model_files(folders)) >= {"linked/e.safetensors", "f.safetensors"}


def test_only_safetensors_are_listed_once_each_in_order(folders):
    assert model_files(folders) == ["a.safetensors", "d.safetensors", "deep/er/b.sft"]
    assert model_files([folders[0] / "no such folder"]) == []


def test_model_folders_are_found_by_their_transformer_two_levels_deep(tmp_path):
    for name in ("one", "by/two", "too/deep/three"):
        (tmp_path / name / "transformer").mkdir(parents=True)
        (tmp_path / name / "transformer" / "config.json").write_text("{}")
    (tmp_path / "not a model" / "vae").mkdir(parents=True)
    assert diffusers_folders([tmp_path, tmp_path / "no such folder"]) == ["by/two", "one"]


def test_circles_of_links_end_and_hide_no_name(tmp_path):
    """Every folder of the circle links to all: without an end, each step would multiply the paths."""
    names = [f"vae/{letter}" for letter in "abcdef"]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "m.safetensors").write_text(name)
        for other in "abcdef":
            (tmp_path / name / f"0{other}").symlink_to(f"../{other}", target_is_directory=True)
        (tmp_path / name / "up").symlink_to("../..", target_is_directory=True)
    expected = [f"{letter}/m.safetensors" for letter in "abcdef"]
    assert model_files([tmp_path / "vae"]) == expected
    assert Folders(tmp_path, tmp_path, None, [tmp_path]).get_filename_list("vae") == expected
