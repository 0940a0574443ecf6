"""Directories, file lists, annotated names and the names of saved files."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import folder_paths
from utils.extra_config import load_extra_path_config

REPOSITORY = Path(__file__).resolve().parent.parent
DAY = time.strftime("%Y-%m-%d")


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    """An empty installation root; everything is put back afterwards."""
    rows = folder_paths.folder_names_and_paths.items()
    table = {name: (list(row[0]), row[1]) for name, row in rows}
    old_base, old_models = folder_paths.base_path, folder_paths.models_dir
    folder_paths.set_base_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_base_directory(old_base)
    assert folder_paths.models_dir == old_models
    folder_paths.folder_names_and_paths.clear()
    folder_paths.folder_names_and_paths.update(table)
    folder_paths.filename_list_cache.clear()


def touch(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_importing_creates_no_folder(tmp_path: Path) -> None:
    code = "import os, folder_paths; print(os.path.exists(folder_paths.output_directory))"
    modules = ("day_folder", "file_listing", "user_scope")
    for name in ("folder_paths.py", *(f"utils/{module}.py" for module in modules)):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((REPOSITORY / name).read_text())
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert answer.stdout.strip() == "False", answer.stderr


def test_base_directory_moves_every_folder_and_keeps_added_ones(base: Path, tmp_path: Path) -> None:
    folder_paths.add_model_folder_path("loras", "/elsewhere/loras")
    folder_paths.set_base_directory(str(base / "moved"))
    assert folder_paths.get_folder_paths("loras") == [
        str(base / "moved/models/loras"),
        "/elsewhere/loras",
    ]
    assert folder_paths.get_input_directory() == str(base / "moved/input")
    assert folder_paths.get_folder_paths("custom_nodes") == [str(base / "moved/custom_nodes")]


def test_categories_and_folders_are_the_recorded_ones(spec_folder: Path, base: Path) -> None:
    trace = json.loads((spec_folder / "traces/01_page_load_and_first_run.json").read_text())
    recorded = next(e["res"] for e in trace["events"] if e.get("path") == "/internal/folder_paths")
    ours = {name: list(row[0]) for name, row in folder_paths.folder_names_and_paths.items()}
    expected = {
        name: [p.replace("<BASE>", str(base)) for p in paths if "/output/" not in p]
        for name, paths in recorded.items()
    }
    assert {name: ours[name] for name in expected} == expected


def test_file_list_is_sorted_filtered_and_follows_changes(base: Path) -> None:
    assert folder_paths.get_filename_list("loras") == []
    touch(base / "models/loras/b.safetensors")
    touch(base / "models/loras/style/a.PT")
    touch(base / "models/loras/notes.txt")
    styled = os.path.join("style", "a.PT")
    assert folder_paths.get_filename_list("loras") == ["b.safetensors", styled]
    (base / "models/loras/b.safetensors").unlink()
    assert folder_paths.get_filename_list("loras") == [os.path.join("style", "a.PT")]


def test_listed_names_are_a_fresh_list(base: Path) -> None:
    touch(base / "models/vae/one.safetensors")
    folder_paths.get_filename_list("vae").append("spoiled")
    assert folder_paths.get_filename_list("vae") == ["one.safetensors"]


def test_inside_a_listing_scope_a_category_is_checked_once(base: Path) -> None:
    touch(base / "models/vae/one.safetensors")
    with folder_paths.cached_filename_lists():
        assert folder_paths.get_filename_list("vae") == ["one.safetensors"]
        touch(base / "models/vae/two.safetensors")
        assert folder_paths.get_filename_list("vae") == ["one.safetensors"]
    assert folder_paths.get_filename_list("vae") == ["one.safetensors", "two.safetensors"]


def test_a_circle_of_links_ends(base: Path) -> None:
    touch(base / "models/loras/deep/a.safetensors")
    (base / "models/loras/deep/again").symlink_to(base / "models/loras")
    assert folder_paths.get_filename_list("loras") == [os.path.join("deep", "a.safetensors")]


@pytest.mark.parametrize("entry", [(["D"], {".gguf"}), [["D"], [".gguf"]]])
def test_packs_may_replace_entries_with_tuples_or_lists(base: Path, entry: list[list[str]]) -> None:
    touch(base / "own/x.gguf")
    folder_paths.folder_names_and_paths["unet_gguf"] = type(entry)([[str(base / "own")], entry[1]])
    assert folder_paths.get_filename_list("unet_gguf") == ["x.gguf"]


@pytest.mark.parametrize(
    ("view", "of"), [("unet_gguf", "diffusion_models"), ("clip_gguf", "text_encoders")]
)
def test_gguf_files_are_those_of_the_usual_folders_wherever_these_are(
    base: Path, view: str, of: str
) -> None:
    touch(base / "models" / of / "a.gguf")
    touch(base / "models" / of / "b.safetensors")
    assert folder_paths.get_filename_list(view) == ["a.gguf"]
    touch(base / "more" / "c.gguf")
    folder_paths.add_model_folder_path(of, str(base / "more"))
    assert folder_paths.get_filename_list(view) == ["a.gguf", "c.gguf"]
    assert folder_paths.get_filename_list(of) == ["a.gguf", "b.safetensors", "c.gguf"]
    folder_paths.add_model_folder_path(view, str(base / "third"))
    touch(base / "third" / "d.gguf")
    assert folder_paths.get_full_path(of, "d.gguf") is not None


def test_old_category_names_reach_the_new_ones(base: Path) -> None:
    path = touch(base / "models/diffusion_models/net.safetensors")
    assert folder_paths.get_full_path("unet", "net.safetensors") == str(path)
    folder_paths.add_model_folder_path("clip", str(base / "more"), is_default=True)
    assert folder_paths.get_folder_paths("text_encoders")[0] == str(base / "more")


def test_an_unknown_category_is_a_key_error_that_lists_the_known() -> None:
    with pytest.raises(KeyError, match="checkpoints"):
        folder_paths.get_filename_list("nonsense")
    assert folder_paths.get_full_path("nonsense", "a") is None


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/../../secret.safetensors", "a\0b"])
def test_model_names_cannot_climb_out(base: Path, name: str) -> None:
    touch(base / "secret.safetensors")
    touch(base / "models/loras/x.safetensors")
    assert folder_paths.get_full_path("loras", name) is None
    with pytest.raises(FileNotFoundError, match="loras"):
        folder_paths.get_full_path_or_raise("loras", name)


def test_annotated_names_select_their_directory(base: Path) -> None:
    touch(base / "output/a.png")
    assert folder_paths.get_annotated_filepath("a.png [output]") == str(base / "output/a.png")
    assert folder_paths.exists_annotated_filepath("a.png [output]")
    assert not folder_paths.exists_annotated_filepath("a.png")
    assert not any(map(folder_paths.exists_annotated_filepath, ["", " [output]", 5, None]))
    assert folder_paths.annotated_filepath("a [b].png") == ("a [b].png", None)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/../../x", "link/x", "a\0"])
def test_annotated_names_cannot_leave_their_directory(base: Path, name: str) -> None:
    touch(base / "input/in.png")
    touch(base / "private/x")
    touch(base / "x")
    (base / "input/link").symlink_to(base / "private")
    with pytest.raises(ValueError, match=r"outside|NUL"):
        folder_paths.get_annotated_filepath(name)
    assert not folder_paths.exists_annotated_filepath(name)


def test_saved_names_count_on_from_the_highest(base: Path) -> None:
    out = str(base / "output")
    assert folder_paths.get_save_image_path("run/pic", out) == (
        os.path.join(out, "run"),
        "pic",
        1,
        "run",
        "run/pic",
    )
    touch(base / "output/run/pic_00007_.png")
    touch(base / "output/run/pic_99999x_.png")
    touch(base / "output/run/picture_00050_.png")
    assert folder_paths.get_save_image_path("run/pic", out)[2] == 8


def test_names_with_the_number_in_the_batch_count_on_too(base: Path) -> None:
    out = str(base / "output")
    for name in ("a0_b_00003_.png", "a17_b_00009_.png", "ax_b_00050_.png", "a_b_00060_.png"):
        touch(base / "output" / name)
    assert folder_paths.get_save_image_path("a%batch_num%_b", out)[2] == 10


def test_saved_names_fill_tokens_and_stay_inside(base: Path) -> None:
    filled = folder_paths.get_save_image_path("%width%x%height%_%year%", str(base), 64, 32)[1]
    assert filled.startswith("64x32_2")
    with pytest.raises(ValueError, match="outside"):
        folder_paths.get_save_image_path("../up/pic", str(base / "output"))


@pytest.mark.parametrize("prefix", ["run\\pic", "run/pic", "run\\\\pic", ".\\run\\pic"])
def test_prefixes_of_windows_name_the_same_folder(base: Path, prefix: str) -> None:
    found = folder_paths.get_save_image_path(prefix, str(base / "output"))
    assert found[:4] == (str(base / "output/run"), "pic", 1, "run")
    assert (base / "output/run").is_dir()


@pytest.mark.parametrize(
    "prefix", ["..\\up\\pic", "a\\..\\..\\pic", "\\up\\pic", "a\0b", "a\\..\\../x"]
)
def test_prefixes_that_leave_the_folder_are_refused_in_either_spelling(
    base: Path, prefix: str
) -> None:
    with pytest.raises(ValueError, match=r"outside|NUL"):
        folder_paths.get_save_image_path(prefix, str(base / "output"))


def test_a_user_scope_narrows_the_directories_only_inside(base: Path) -> None:
    with folder_paths.user_scope("alice"), folder_paths.user_scope(None):
        assert folder_paths.get_output_directory() == str(base / "output/alice")
        assert folder_paths.get_directory_by_type("input") == str(base / "input/alice")
        assert folder_paths.get_directory_by_type("models") is None
    assert folder_paths.get_output_directory() == str(base / "output")


def test_reserved_users_are_not_public(base: Path) -> None:
    assert folder_paths.get_public_user_directory("__system") is None
    assert folder_paths.get_system_user_directory() == str(base / "user/__system")
    with pytest.raises(ValueError, match="letters"):
        folder_paths.get_system_user_directory("../x")


def test_content_types_are_told_from_suffixes() -> None:
    files = ["a.png", "b.webp", "c.mp4", "d.flac", "e.fbx", "f"]
    assert folder_paths.filter_files_content_types(files, ["image"]) == ["a.png", "b.webp"]
    assert folder_paths.filter_files_content_types(files, ["video", "audio", "model"]) == files[2:5]


def test_extra_model_paths_are_added_and_relative_ones_start_at_the_file(base: Path) -> None:
    config = touch(
        base / "conf/extra.yaml",
        (
            "other:\n  base_path: ../store\n  is_default: true\n  loras: |\n    L1\n    L2\n"
            "  unet: U\nplain:\n  my_kind: sub\n"
        ),
    )
    load_extra_path_config(str(config))
    store = str(base / "store")
    assert folder_paths.get_folder_paths("loras")[:2] == [f"{store}/L1", f"{store}/L2"]
    assert folder_paths.get_folder_paths("diffusion_models")[0] == f"{store}/U"
    assert folder_paths.get_folder_paths("my_kind") == [str(base / "conf/sub")]


@pytest.mark.parametrize("text", ["- a\n- b\n", "s: [1]\n", "s: {a: 'x\n"])
def test_extra_model_paths_of_a_wrong_shape_name_the_file(base: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"bad\.yaml"):
        load_extra_path_config(str(touch(base / "bad.yaml", text)))


@pytest.fixture
def dated(base: Path) -> Iterator[Path]:
    folder_paths.set_date_format("%Y-%m-%d")
    yield base
    folder_paths.set_date_format(None)


@pytest.mark.parametrize(
    ("prefix", "subfolder", "name"),
    [("pic", "", "pic"), ("run/pic", "/run", "pic"), ("a/b/pic", "/a/b", "pic")],
)
def test_results_go_below_the_folder_of_the_day(
    dated: Path, prefix: str, subfolder: str, name: str
) -> None:
    touch(dated / f"output{subfolder}/{name}_00009_.png")
    for number in (1, 2):
        found = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
        folder, expected = dated / f"output/{DAY}{subfolder}", f"{DAY}{subfolder}"
        assert found == (str(folder), name, number, expected, f"{DAY}/{prefix}")
        touch(folder / f"{name}_{number:05}_.png")
    with folder_paths.user_scope("ann"):
        own = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    assert own[0] == str(dated / f"output/ann/{DAY}{subfolder}")
    assert own[3] == expected


def test_models_previews_and_absolute_prefixes_get_no_day(dated: Path) -> None:
    out, temp = folder_paths.get_output_directory(), folder_paths.get_temp_directory()
    folder_paths.add_model_folder_path("checkpoints", os.path.join(out, "checkpoints"))
    assert folder_paths.get_save_image_path("checkpoints/m", out)[3] == "checkpoints"
    assert folder_paths.get_save_image_path("checkpoints/sub/m", out)[3] == "checkpoints/sub"
    assert folder_paths.get_save_image_path("checkpoints_of_mine/m", out)[3].startswith(DAY)
    assert folder_paths.get_save_image_path("pic", temp)[3] == ""
    assert folder_paths.get_save_image_path(os.path.join(out, "x/pic"), out)[0] == f"{out}/x"
    for prefix in ("../pic", "run/../../pic", f"../{DAY}x/pic"):
        with pytest.raises(ValueError, match="outside"):
            folder_paths.get_save_image_path(prefix, out)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("%Y/%m/%d", r"\d{4}/\d\d/\d\d"), ("YYYY-MM-DD", r"\d{4}-\d\d-\d\d"), ("day", "day"),
     ("yyyy/MM/dd/", r"\d{4}/\d\d/\d\d"), ("made %d. %m.", r"made \d\d\. \d\d\.")],
)  # fmt: skip
def test_the_format_of_the_day_is_free(base: Path, text: str, pattern: str) -> None:
    try:
        folder_paths.set_date_format(text)
        found = folder_paths.get_save_image_path("pic", str(base / "output"))[3]
    finally:
        folder_paths.set_date_format(None)
    assert re.fullmatch(pattern, found)


@pytest.mark.parametrize("text", ["", ".", "..", "../%Y", "/%Y", "%Y/../..", "a\0b", "\\%Y"])
def test_a_format_that_is_no_folder_below_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="date format"):
        folder_paths.set_date_format(text)
    assert folder_paths.date_format is None


@pytest.mark.parametrize(
    ("names", "highest"),
    [
        ([], 0),
        (["a_00001_.png", "a_00012_.png", "a_3.png", "a_7"], 12),
        (["a_00012x_.png", "a__5_.png", "a_.png", "ba_00009_.png", "xa_8_.png"], 0),
        (["a_5_.png", "a_b_00031_.png", "A_00040_.png"], 5),
        (["a_99999_.png", "a_100000_.png", "a_00007_\n.png"], 100_000),
        ([f"a_{number:05}_.png" for number in range(1, 3000)], 2999),
    ],
)
def test_the_next_counter_is_behind_the_highest(
    tmp_path: Path, names: list[str], highest: int
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert folder_paths.get_save_image_path("a", str(tmp_path))[2] == highest + 1


def test_a_prefix_that_looks_like_a_pattern_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("a+(b)_00004_.png", "aab_00009_.png"):
        (tmp_path / name).touch()
    assert folder_paths.get_save_image_path("a+(b)", str(tmp_path))[2] == 5


def test_a_named_model_folder_that_is_not_there_is_told(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    touch(base / "mine/here/a.safetensors")
    text = "sd:\n  base_path: mine\n  loras: here\n  vae: nowhere\n"
    with caplog.at_level(logging.INFO):
        load_extra_path_config(str(touch(base / "paths.yaml", text)))
    here, nowhere = caplog.messages
    assert here.endswith("here")
    assert nowhere.endswith("nowhere (there is no such folder)")
