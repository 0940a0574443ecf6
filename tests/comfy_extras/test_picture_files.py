"""Pictures in deep and wide forms: what a reader of each form finds in the file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import OpenEXR
import pytest
import torch
from PIL import Image
from torch import Tensor

import folder_paths
from comfy_extras.images import advanced_saving, picture_files
from comfy_extras.images.advanced_saving import SaveImageAdvanced

TEXTS = {"prompt": '{"a": "é"}', "workflow": '{"x": "日本"}'}
SRGB_PNG_8 = {"format": "png", "bit_depth": "8-bit", "input_color_space": "sRGB"}
AUTO_AVIF = {"format": "avif", "bit_depth": "auto", "input_color_space": "sRGB", "crf": 8}
STILL, MOVING = (
    {"save_mode": "still images"},
    {"save_mode": "animated", "fps": 5.0, "loop_count": 2},
)


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_output_directory(before)


def ramp(channels: int = 3, rows: int = 33, columns: int = 47) -> Tensor:
    """A smooth picture of odd size [H, W, C]."""
    down, right = torch.linspace(0, 1, rows)[:, None], torch.linspace(0, 1, columns)[None]
    both = [
        down.expand(rows, columns),
        right.expand(rows, columns),
        (down + right) / 2,
        1 - down * right,
    ]
    return torch.stack(both[:channels], -1)


def save(images: Tensor, more: dict[str, Any] | None = None, **format: Any) -> Any:
    SaveImageAdvanced.hidden = SimpleNamespace(  # type: ignore[assignment]
        prompt={"1": "é"}, extra_pnginfo={"workflow": {"n": 1}, **(more or {})}
    )
    return SaveImageAdvanced.execute(images, "deep", format)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_deep_png_keeps_65536_levels_and_its_texts(channels: int, tmp_path: Path) -> None:
    import av

    picture = ramp(channels)
    path = tmp_path / "deep.png"
    path.write_bytes(picture_files.png_16(picture, TEXTS))
    layout = {1: "gray16le", 3: "rgb48le", 4: "rgba64le"}[channels]
    with av.open(str(path)) as file:
        levels = next(file.decode(video=0)).to_ndarray(format=layout).reshape(picture.shape)
    assert np.abs(levels / 65535 - picture.numpy()).max() < 0.51 / 65535
    with Image.open(path) as read:
        assert {key: read.info[key] for key in TEXTS} == TEXTS


@pytest.mark.parametrize(
    ("space", "value", "light", "red_x"),
    [
        ("sRGB", [0.0, 0.04, 0.5, 1.0, -0.5], [0, 0.0030960, 0.2140411, 1, -0.2140411], 0.64),
        ("HDR", [0.0, 0.5, 0.75, 1.0, -0.5], [0, 1 / 12, 0.2649625, 1, -1 / 12], 0.708),
        ("linear", [0.0, 0.5, 2.0, 900.0, -1.0], [0, 0.5, 2, 900, -1], 0.64),
        ("linear ACEScg", [0.0, 0.5, 2.0, 7e4, -1.0], [0, 0.5, 2, 65504, -1], 0.713),
    ],
)
def test_an_exr_holds_scene_light(
    space: str, value: list[float], light: list[float], red_x: float, output: Path
) -> None:
    picture = torch.tensor(value)[None, None, :, None].repeat(1, 1, 1, 4)
    picture[..., 3] = 0.5
    save(picture, format="exr", bit_depth="16-bit float", input_color_space=space)
    with OpenEXR.File(str(output / "deep_00001_.exr")) as file:
        header, pixels = dict(file.header()), file.channels()["RGBA"].pixels
    assert pixels.dtype == np.float16
    np.testing.assert_allclose(pixels[0, :, 1], light, rtol=1e-3, atol=1e-6)
    assert (pixels[..., 3] == 0.5).all()
    assert header["chromaticities"][0] == pytest.approx(red_x)
    assert json.loads(header["prompt"]) == {"1": "é"}


def test_a_grey_exr_of_32_bits_is_exact(output: Path) -> None:
    picture = torch.rand(2, 5, 7, 1, generator=torch.Generator().manual_seed(1)) * 1e6
    save(picture, format="exr", bit_depth="32-bit float", input_color_space="linear")
    for number in (1, 2):
        with OpenEXR.File(str(output / f"deep_{number:05}_.exr")) as file:
            pixels = file.channels()["Y"].pixels
        assert np.array_equal(pixels, picture[number - 1, ..., 0].numpy())


@pytest.mark.parametrize(
    ("space", "depth", "tags", "is_deep"),
    [
        ("sRGB", "auto", (1, 13, 1), False),
        ("sRGB", "10-bit YUV420", (1, 13, 1), True),
        ("HDR", "auto", (9, 18, 9), True),
        ("HDR PQ", "8-bit YUV420", (9, 16, 9), False),
    ],
)
def test_an_avif_names_its_colours(
    space: str, depth: str, tags: tuple[int, ...], is_deep: bool, output: Path
) -> None:
    form = {"format": "avif", "bit_depth": depth, "input_color_space": space, "crf": 8}
    save(ramp()[None], **form, save_mode=STILL)
    path = output / "deep_00001_.avif"
    data = path.read_bytes()
    found = data.index(b"nclx") + 4
    assert tuple(np.frombuffer(data[found : found + 6], ">u2")) == tags
    assert data[found + 6] == 0x80  # all levels are used
    assert bool(data[data.index(b"av1C") + 6] & 0x40) == is_deep
    with Image.open(path) as read:
        assert np.abs(np.asarray(read) / 255 - ramp().numpy()).mean() < 0.01


def test_pictures_that_move_are_one_file(output: Path) -> None:
    frames = torch.stack([ramp(), ramp().flip(0), ramp().flip(1)])
    shown = save(frames, **AUTO_AVIF, save_mode=MOVING).ui.as_dict()
    assert shown["animated"] == [True]
    assert [image["filename"] for image in shown["images"]] == ["deep_00001_.avif"]
    with Image.open(output / "deep_00001_.avif") as read:
        assert read.n_frames == 3
        for number, frame in enumerate(frames):
            read.seek(number)
            assert np.abs(np.asarray(read.convert("RGB")) / 255 - frame.numpy()).mean() < 0.02
    save(frames, **AUTO_AVIF, save_mode=STILL)
    assert len(list(output.iterdir())) == 4


@pytest.mark.parametrize("rate", [0.01, 23.976, 1000.0])
def test_moving_pictures_take_the_time_that_is_asked(rate: float) -> None:
    frames = torch.stack([ramp(), ramp().flip(0), ramp()])  # the encoder chooses how long the last
    with Image.open(io.BytesIO(picture_files.avif(frames, "sRGB", 8, 30, rate))) as read:
        read.seek(1)
        read.load()
        assert read.info["duration"] == pytest.approx(1000 / rate, abs=0.51)


@pytest.mark.parametrize("size", [(1, 1), (3, 8), (8, 3), (8705, 4), (4, 16385)])
def test_sizes_that_an_avif_cannot_have_are_named(size: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=f"4 x 4 to 16384 x 8704 pixels, found {size[1]} x {size[0]}"
    ):
        picture_files.avif(torch.zeros(1, *size, 3), "sRGB", 8, 30)
    assert picture_files.avif(torch.zeros(1, 4, 4, 3), "sRGB", 8, 30)


DEEP_PNG = {"format": "png", "bit_depth": "16-bit", "input_color_space": "sRGB"}
HALF_EXR = {"format": "exr", "bit_depth": "16-bit float", "input_color_space": "sRGB"}


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        (DEEP_PNG, ["", "日本", "a\0b", "k" * 80]),
        (HALF_EXR, ["", "a\0b", "k" * 256, *sorted(picture_files.EXR_OWN_KEYS)]),
    ],
)
def test_a_picture_is_saved_without_texts_whose_names_the_form_cannot_hold(
    form: dict[str, Any], keys: list[str], output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, key in enumerate(keys, start=1):
        save(ramp()[None], more={key: 1}, **form)
        path = output / f"deep_{number:05}_.{form['format']}"
        if form is HALF_EXR:
            with OpenEXR.File(str(path)) as file:
                texts = {name: file.header()[name] for name in ("prompt", "workflow")}
        else:
            with Image.open(path) as read:
                texts = {name: text for name, text in read.info.items() if isinstance(text, str)}
        assert {name: json.loads(text) for name, text in texts.items()} == {
            "prompt": {"1": "é"},
            "workflow": {"n": 1},
        }
        assert f"without the texts {key!r:.60} of extra_pnginfo" in caplog.messages[-1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_values_of_any_type_and_what_is_no_number_are_levels(kind: torch.dtype) -> None:
    values = torch.tensor([0.0, 0.5, 1.0, -1.0, 7.0, torch.inf, torch.nan], dtype=kind)
    assert picture_files.levels_16(values).tolist() == [0, 32768, 65535, 0, 65535, 65535, 0]


@pytest.mark.parametrize(
    "form", [DEEP_PNG, HALF_EXR, {**AUTO_AVIF, "save_mode": STILL}], ids=lambda form: form["format"]
)
def test_saving_stops_between_pictures_and_keeps_the_whole_ones(
    form: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_at_the_second() -> None:
        if any(output.iterdir()):
            raise InterruptedError

    monkeypatch.setattr(advanced_saving, "check_interrupt", stop_at_the_second)
    with pytest.raises(InterruptedError):
        save(ramp().expand(3, -1, -1, -1), **form)
    assert [path.name for path in output.iterdir()] == [f"deep_00001_.{form['format']}"]


def test_a_usual_png_is_that_of_the_usual_node(output: Path) -> None:
    made = save(ramp()[None], **SRGB_PNG_8)
    assert torch.equal(made.args[0], ramp()[None])
    with Image.open(output / "deep_00001_.png") as read:
        assert np.array_equal(np.asarray(read), (ramp() * 255).byte().numpy())
        assert json.loads(read.info["workflow"]) == {"n": 1}


@pytest.mark.parametrize(
    "form",
    [
        {**AUTO_AVIF, "save_mode": STILL},
        {"format": "png", "bit_depth": "16-bit", "input_color_space": "sRGB"},
        {"format": "exr", "bit_depth": "16-bit float", "input_color_space": "sRGB"},
    ],
)  # fmt: skip
def test_channels_that_a_form_cannot_hold_are_named(form: dict[str, Any], output: Path) -> None:
    with pytest.raises(ValueError, match=r"images: .* holds pictures of .* channels, found 2"):
        save(torch.zeros(1, 8, 8, 2), **form)
    assert list(output.iterdir()) == []
