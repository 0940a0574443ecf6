"""Previews: which way is used, what they look like, and how the method is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import latent_preview
from comfy import latent_formats, progress
from comfy.cli_args import LatentPreviewMethod, args

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def method(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    monkeypatch.setattr(latent_preview, "_set_aside", None)
    return


def test_the_linear_map_gives_the_recorded_pictures(
    golden_tensors: Callable[[str], dict[str, Tensor]], golden_json: Callable[[str], Any]
) -> None:
    recorded = golden_tensors("latent_formats.safetensors")
    checked = 0
    for key, expected in recorded.items():
        name, _, kind = key.partition("/")
        latent_format = getattr(latent_formats, name, None)
        if kind != "preview_rgb_u8" or latent_format is None:
            continue
        previewer = latent_preview.get_previewer(CPU, latent_format())
        assert previewer is not None, name
        picture = np.asarray(previewer.decode_latent_to_preview(recorded[f"{name}/z"]))
        difference = np.abs(picture.astype(int) - expected.numpy().astype(int))
        assert difference.max() <= 1, name  # a value on the edge between two may fall either way
        checked += 1
    assert checked > 10


def test_no_previews_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.NoPreviews)
    assert latent_preview.get_previewer(CPU, latent_formats.SD15()) is None


def test_a_format_without_a_map_has_no_preview() -> None:
    class Unknown(latent_formats.LatentFormat):
        latent_rgb_factors = None
        taesd_decoder_name = None

    assert latent_preview.get_previewer(CPU, Unknown()) is None


def test_a_missing_decoder_falls_back_to_the_linear_map_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.TAESD)
    monkeypatch.setattr("folder_paths.get_filename_list", lambda name: [])
    previewer = latent_preview.get_previewer(CPU, latent_formats.SD15())
    assert isinstance(previewer, latent_preview.Latent2RGBPreviewer)
    assert "taesd_decoder" in caplog.text


def test_a_prompt_may_choose_its_method_and_the_next_has_the_usual_one_again() -> None:
    latent_preview.set_preview_method("none")
    assert args.preview_method == LatentPreviewMethod.NoPreviews
    latent_preview.set_preview_method("latent2rgb")
    assert args.preview_method == LatentPreviewMethod.Latent2RGB
    latent_preview.set_preview_method(None)
    assert args.preview_method == LatentPreviewMethod.Auto
    latent_preview.set_preview_method("no such method")
    assert args.preview_method == LatentPreviewMethod.Auto


class Patcher:
    """As much of a model patcher as previews need."""

    load_device = CPU

    class model:
        latent_format = latent_formats.SD15()


def test_the_callback_moves_the_bar_and_hands_over_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        progress, "PROGRESS_BAR_HOOK", lambda value, total, preview, **kw: seen.append(
            (value, total, preview)
        )
    )  # fmt: skip
    kept: dict[str, Tensor] = {}
    callback = latent_preview.prepare_callback(Patcher(), 2, kept)
    latent = torch.zeros(1, 4, 8, 6)
    callback(0, latent, latent, 2)
    callback(1, latent, latent, 2)
    assert [entry[:2] for entry in seen] == [(1, 2), (2, 2)]
    kind, picture, size = seen[0][2]
    assert (kind, picture.size, size) == ("JPEG", (6, 8), args.preview_size)
    assert kept["x0"] is latent
