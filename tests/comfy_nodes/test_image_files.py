"""Pictures come in upright and go out with their workflow inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import folder_paths
import nodes
from comfy.cli_args import args
from comfy_nodes import image_files


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> Iterator[Path]:
    """Input, output and temp folders of the test's own."""
    before = (
        folder_paths.get_input_directory(),
        folder_paths.get_output_directory(),
        folder_paths.get_temp_directory(),
    )
    for name in ("input", "output", "temp"):
        (tmp_path / name).mkdir()
    folder_paths.set_input_directory(str(tmp_path / "input"))
    folder_paths.set_output_directory(str(tmp_path / "output"))
    folder_paths.set_temp_directory(str(tmp_path / "temp"))
    yield tmp_path
    folder_paths.set_input_directory(before[0])
    folder_paths.set_output_directory(before[1])
    folder_paths.set_temp_directory(before[2])


def gradient(count: int = 1) -> torch.Tensor:
    ramp = torch.linspace(0, 1, 16).expand(count, 8, 16)
    return torch.stack([ramp, ramp.flip(2), torch.full_like(ramp, 0.5)], dim=-1)


def test_saved_pictures_carry_prompt_and_workflow_in_text_chunks(folders: Path) -> None:
    prompt, workflow = {"1": {"class_type": "Ä"}}, {"nodes": []}
    result = nodes.SaveImage().save_images(gradient(2), "a/b", prompt, {"workflow": workflow})
    assert result["ui"]["images"] == [
        {"filename": "b_00001_.png", "subfolder": "a", "type": "output"},
        {"filename": "b_00002_.png", "subfolder": "a", "type": "output"},
    ]
    path = folders / "output" / "a" / "b_00001_.png"
    opened = Image.open(path)
    assert json.loads(opened.text["prompt"]) == prompt
    assert json.loads(opened.text["workflow"]) == workflow
    raw = path.read_bytes()
    assert raw.index(b"tEXtprompt") < raw.index(b"tEXtworkflow") < raw.index(b"IDAT")
    assert b"\\u00c4" in raw


def test_a_text_whose_name_png_cannot_hold_costs_no_picture(folders: Path) -> None:
    nodes.SaveImage().save_images(gradient(), "x", {"1": {}}, {"日本": 1, "workflow": {}})
    texts = Image.open(folders / "output" / "x_00001_.png").text
    assert {"prompt", "workflow", "environment"} == set(texts)


def test_metadata_can_be_switched_off(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(args, "disable_metadata", True)
    nodes.SaveImage().save_images(gradient(), "x", {"1": {}}, {"workflow": {}})
    assert Image.open(folders / "output" / "x_00001_.png").text == {}


def test_saving_and_loading_gives_the_picture_in_eight_bits(folders: Path) -> None:
    nodes.SaveImage().save_images(gradient(), "round")
    image, mask = nodes.LoadImage().load_image("round_00001_.png [output]")
    torch.testing.assert_close(image, gradient(), rtol=0, atol=1 / 255)
    assert mask.shape == (1, 64, 64)
    assert mask.sum() == 0


def test_names_hold_the_number_in_the_batch(folders: Path) -> None:
    result = nodes.SaveImage().save_images(gradient(2), "p_%batch_num%")
    names = [image["filename"] for image in result["ui"]["images"]]
    assert names == ["p_0_00001_.png", "p_1_00002_.png"]


def test_previews_go_to_temp_under_names_of_their_own(folders: Path) -> None:
    first = nodes.PreviewImage().save_images(gradient())["ui"]["images"][0]
    second = nodes.PreviewImage().save_images(gradient())["ui"]["images"][0]
    assert first["type"] == "temp"
    assert first["filename"].startswith("ComfyUI_temp_")
    assert first["filename"] != second["filename"]
    assert (folders / "temp" / first["filename"]).is_file()


def test_a_prefix_that_leaves_the_output_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        nodes.SaveImage().save_images(gradient(), "../escape")


def test_transparency_becomes_the_mask(folders: Path) -> None:
    pixels = np.zeros((4, 5, 4), dtype=np.uint8)
    pixels[..., 0], pixels[1, 2, 3] = 200, 255
    Image.fromarray(pixels, "RGBA").save(folders / "input" / "alpha.png")
    image, mask = nodes.LoadImage().load_image("alpha.png")
    assert image.shape == (1, 4, 5, 3)
    assert image[0, 0, 0, 0] == pytest.approx(200 / 255)
    assert mask.shape == (1, 4, 5)
    assert mask[0, 1, 2] == 0
    assert mask[0, 0, 0] == 1


def test_a_palette_with_a_transparent_colour_has_a_mask(folders: Path) -> None:
    picture = Image.new("P", (3, 2))
    picture.putpalette([0, 0, 0, 255, 0, 0])
    picture.putpixel((1, 0), 1)
    picture.save(folders / "input" / "palette.png", transparency=0)
    _, mask = nodes.LoadImage().load_image("palette.png")
    assert mask[0].tolist() == [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]


def test_the_orientation_a_camera_noted_is_applied(folders: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (6, 3)).save(folders / "input" / "photo.jpg", exif=exif)
    image, _ = nodes.LoadImage().load_image("photo.jpg")
    assert image.shape == (1, 6, 3, 3)


def test_frames_of_an_animation_become_a_batch(folders: Path) -> None:
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (0, 100, 200)]
    frames[0].save(
        folders / "input" / "move.png", save_all=True, append_images=frames[1:], duration=100
    )
    image, mask = nodes.LoadImage().load_image("move.png")
    assert image.shape[0] == 3
    assert mask.shape[0] == 3


def test_sixteen_bits_are_scaled_not_clipped(folders: Path) -> None:
    values = np.array([[0, 0x8000, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(values).save(folders / "input" / "deep.png")
    image, _ = nodes.LoadImage().load_image("deep.png")
    assert image[0, 0, :, 0].tolist() == pytest.approx([0.0, 0.5, 1.0], abs=0.01)


def test_a_truncated_picture_is_still_read_and_said_so(
    folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folders / "input" / "whole.jpg"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    raw = path.read_bytes()
    (folders / "input" / "cut.jpg").write_bytes(raw[: len(raw) // 2])
    image, _ = nodes.LoadImage().load_image("cut.jpg")
    assert image.shape == (1, 64, 64, 3)
    assert "ends early" in caplog.text


@pytest.mark.parametrize(
    "load",
    [
        lambda name: nodes.LoadImage().load_image(name),
        lambda name: nodes.LoadImageMask().load_image(name, "red"),
    ],
)
@pytest.mark.parametrize(
    ("content", "found"),
    [(b"<!DOCTYPE html>", "begins with b'<!DOCTYPE ht'"), (b"", "an empty file")],
)
def test_a_file_that_is_no_picture_is_told_what_it_is(
    folders: Path, load: Callable[[str], Any], content: bytes, found: str
) -> None:
    (folders / "input" / "x.png").write_bytes(content)
    with pytest.raises(ValueError, match="image: expected a picture") as refused:
        load("x.png")
    assert found in str(refused.value)


def test_a_file_that_is_no_latent_is_named(folders: Path) -> None:
    (folders / "input" / "y.latent").write_bytes(b"<html>" * 10)
    with pytest.raises(ValueError, match=r"latent: expected a file .* y\.latent"):
        nodes.LoadLatent().load("y.latent")


def test_a_channel_becomes_a_mask(folders: Path) -> None:
    Image.new("RGB", (2, 2), (255, 0, 51)).save(folders / "input" / "c.png")
    load = nodes.LoadImageMask().load_image
    assert load("c.png", "red")[0].unique().tolist() == [1.0]
    assert load("c.png", "blue")[0].unique().tolist() == pytest.approx([0.2])
    assert load("c.png", "alpha")[0].shape == (1, 64, 64)


def test_the_menu_lists_pictures_only(folders: Path) -> None:
    (folders / "input" / "notes.txt").write_text("no picture")
    Image.new("RGB", (1, 1)).save(folders / "input" / "b.png")
    Image.new("RGB", (1, 1)).save(folders / "input" / "a.webp")
    assert image_files.input_images() == ["a.webp", "b.png"]


def test_a_changed_file_runs_again_and_an_absent_one_is_refused(folders: Path) -> None:
    path = folders / "input" / "a.png"
    Image.new("RGB", (1, 1), "red").save(path)
    before = nodes.LoadImage.IS_CHANGED("a.png")
    Image.new("RGB", (1, 1), "blue").save(path)
    assert nodes.LoadImage.IS_CHANGED("a.png") != before
    assert nodes.LoadImage.VALIDATE_INPUTS("a.png") is True
    assert "gone.png" in str(nodes.LoadImage.VALIDATE_INPUTS("gone.png"))
    assert "passwd" in str(nodes.LoadImage.VALIDATE_INPUTS("../../etc/passwd"))


def test_latents_are_saved_and_loaded(folders: Path) -> None:
    samples = torch.randn(1, 4, 8, 8)
    result = nodes.SaveLatent().save({"samples": samples}, "l", {"1": {}}, {"workflow": {}})
    (saved,) = result["ui"]["latents"]
    assert saved["filename"] == "l_00001_.latent"
    loaded = nodes.LoadLatent().load("l_00001_.latent [output]")[0]["samples"]
    assert torch.equal(loaded, samples)


def test_a_file_that_is_no_latent_says_so(folders: Path) -> None:
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(1)}, folders / "input" / "x.latent")
    with pytest.raises(ValueError, match=r"x\.latent is not a latent file.*other"):
        nodes.LoadLatent().load("x.latent")
