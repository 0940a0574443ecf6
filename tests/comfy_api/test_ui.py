"""What nodes show and save: files with their texts, dictionaries for the editor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import folder_paths
from comfy_api.internal import policy
from comfy_api.latest import io, ui

PROMPT = {"1": {"class_type": "N", "inputs": {"text": "ü"}}}
WORKFLOW = {"nodes": []}


class Node(io.ComfyNode):
    pass


@pytest.fixture
def cls() -> type[io.ComfyNode]:
    return Node.PREPARE_CLASS_CLONE(
        {"prompt": PROMPT, "extra_pnginfo": {"workflow": WORKFLOW, "more": 1}}
    )


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> Iterator[Path]:
    before = (folder_paths.get_output_directory(), folder_paths.get_temp_directory())
    folder_paths.set_output_directory(str(tmp_path / "output"))
    folder_paths.set_temp_directory(str(tmp_path / "temp"))
    yield tmp_path
    folder_paths.set_output_directory(before[0])
    folder_paths.set_temp_directory(before[1])


def pictures(count: int = 2) -> torch.Tensor:
    ramp = torch.linspace(-0.5, 1.5, 6 * 4 * 3).reshape(1, 6, 4, 3)
    return ramp.repeat(count, 1, 1, 1)


def test_saved_pictures_are_counted_and_carry_prompt_and_workflow(
    folders: Path, cls: type[io.ComfyNode]
) -> None:
    first = ui.ImageSaveHelper.get_save_images_ui(pictures(), "sub/b%batch_num%", cls)
    again = ui.ImageSaveHelper.get_save_images_ui(pictures(1), "sub/b0", cls)
    assert first.as_dict() == {
        "images": [
            {"filename": "b0_00001_.png", "subfolder": "sub", "type": "output"},
            {"filename": "b1_00002_.png", "subfolder": "sub", "type": "output"},
        ]
    }
    assert again.results[0].filename == "b0_00002_.png"
    with Image.open(folders / "output" / "sub" / "b0_00001_.png") as image:
        assert list(image.info) == ["prompt", "workflow", "more"]
        assert json.loads(image.info["prompt"]) == PROMPT
        assert "\\u00fc" in image.info["prompt"]
        expected = (pictures(1)[0].clamp(0, 1).numpy() * 255).astype(np.uint8)
        assert np.array_equal(np.asarray(image), expected)


def test_files_carry_no_texts_where_the_policy_says_so(
    folders: Path, cls: type[io.ComfyNode]
) -> None:
    policy.install_save_policy(policy.SavePolicy(metadata=False))
    try:
        [saved] = ui.ImageSaveHelper.save_images(pictures(1), "x", io.FolderType.output, cls)
    finally:
        policy.install_save_policy(policy.SavePolicy())
    with Image.open(folders / "output" / saved.filename) as image:
        assert image.info == {}


def test_no_pictures_save_nothing(cls: type[io.ComfyNode]) -> None:
    assert ui.ImageSaveHelper.save_images(pictures()[:0], "x", io.FolderType.output, cls) == []
    with pytest.raises(ValueError, match="0 frames"):
        ui.ImageSaveHelper.save_animated_png(pictures()[:0], "x", io.FolderType.output, cls, 6.0, 4)


def test_a_moving_png_has_its_texts_in_private_chunks(
    folders: Path, cls: type[io.ComfyNode]
) -> None:
    different = torch.stack([pictures(1)[0], 1 - pictures(1)[0]])
    shown = ui.ImageSaveHelper.get_save_animated_png_ui(different, "m", cls, 8.0, 4)
    assert shown.as_dict()["animated"] == [True]
    path = folders / "output" / "m_00001_.png"
    data = path.read_bytes()
    assert b"comfprompt\0" + json.dumps(PROMPT).encode() in data
    assert data.index(b"comfprompt") > data.index(b"IDAT")
    with Image.open(path) as image:
        assert image.n_frames == 2
        assert image.info["duration"] == 125.0


def test_a_moving_webp_has_its_texts_in_exif(folders: Path, cls: type[io.ComfyNode]) -> None:
    different = torch.stack([pictures(1)[0], 1 - pictures(1)[0]])
    ui.ImageSaveHelper.get_save_animated_webp_ui(different, "m", cls, 8.0, True, 80, "fastest")
    with Image.open(folders / "output" / "m_00001_.webp") as image:
        exif = image.getexif()
        assert exif[0x0110] == "prompt:" + json.dumps(PROMPT)
        assert exif[0x010F] == "workflow:" + json.dumps(WORKFLOW)
        assert exif[0x010E] == "more:1"
        assert image.n_frames == 2


@pytest.mark.parametrize("kind", ["png", "moving png", "moving webp"])
def test_a_text_whose_name_a_file_cannot_hold_costs_no_picture(
    kind: str, folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = Node.PREPARE_CLASS_CLONE(
        {"prompt": PROMPT, "extra_pnginfo": {"日本": 1, "workflow": WORKFLOW}}
    )
    save = ui.ImageSaveHelper
    if kind == "png":
        save.get_save_images_ui(pictures(1), "m", odd)
    elif kind == "moving png":
        save.get_save_animated_png_ui(pictures(), "m", odd, 8.0, 4)
    else:
        save.get_save_animated_webp_ui(pictures(), "m", odd, 8.0, True, 80, "fastest")
    [file] = (folders / "output").iterdir()
    assert json.dumps(WORKFLOW).encode() in file.read_bytes()
    assert "日本" in caplog.text


def test_previews_go_to_the_temporary_folder(folders: Path, cls: type[io.ComfyNode]) -> None:
    shown = ui.PreviewImage(pictures(1), cls=cls).as_dict()
    assert shown["animated"] == [False]
    [record] = shown["images"]
    assert record["type"] == "temp"
    assert record["filename"].startswith("ComfyUI_temp_")
    assert (folders / "temp" / record["filename"]).is_file()


def test_a_mask_is_shown_in_grey(folders: Path) -> None:
    [record] = ui.PreviewMask(torch.full((5, 7), 0.5)).as_dict()["images"]
    with Image.open(folders / "temp" / record["filename"]) as image:
        assert image.size == (7, 5)
        assert image.getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize(
    ("format", "quality", "rate"),
    [("flac", "", 44100), ("mp3", "V0", 44100), ("mp3", "128k", 22050), ("opus", "96k", 44100)],
)
def test_saved_sounds_can_be_read_back(
    folders: Path, cls: type[io.ComfyNode], format: str, quality: str, rate: int
) -> None:
    import av

    time = torch.arange(rate) / rate
    audio: Any = {"waveform": torch.sin(time * 440 * 6.283).repeat(1, 2, 1), "sample_rate": rate}
    [saved] = ui.AudioSaveHelper.save_audio(audio, "a", io.FolderType.output, cls, format, quality)
    assert saved.filename == f"a_00001_.{format}"
    with av.open(str(folders / "output" / saved.filename)) as container:
        stream = container.streams.audio[0]
        texts = {**container.metadata, **stream.metadata}
        assert json.loads(texts.get("prompt") or texts["PROMPT"]) == PROMPT
        read = sum(frame.samples for frame in container.decode(audio=0))
        assert stream.sample_rate == (48000 if format == "opus" else rate)
        assert read == pytest.approx(stream.sample_rate, rel=0.06)


def test_unknown_sound_formats_and_qualities_are_named(cls: type[io.ComfyNode]) -> None:
    audio: Any = {"waveform": torch.zeros(1, 1, 8000), "sample_rate": 8000}
    with pytest.raises(ValueError, match="unknown audio format 'wav'; known: flac, mp3, opus"):
        ui.AudioSaveHelper.save_audio(audio, "a", io.FolderType.output, cls, "wav")
    with pytest.raises(ValueError, match="unknown opus quality '1k'"):
        ui.AudioSaveHelper.save_audio(audio, "a", io.FolderType.output, cls, "opus", "1k")


def test_other_results_have_the_keys_the_editor_knows() -> None:
    video = ui.SavedResult("v.mp4", "", io.FolderType.output)
    assert ui.PreviewText("hello").as_dict() == {"text": ["hello"]}
    assert ui.PreviewVideo([video]).as_dict() == {"images": [video], "animated": [True]}
    assert ui.PreviewUI3D("m.glb", {"zoom": 1}).as_dict() == {
        "result": ["m.glb", {"zoom": 1}, None]
    }
    assert json.dumps(video) == '{"filename": "v.mp4", "subfolder": "", "type": "output"}'
