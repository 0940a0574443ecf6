"""Previews: which way is used, what they look like, and how the method is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
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


@pytest.mark.parametrize(("frames", "shown"), [(1, [0]), (2, [0, 1]), (9, [0, 3, 5, 8])])
def test_a_video_is_shown_as_a_strip_of_frames(frames: int, shown: list[int]) -> None:
    previewer = latent_preview.get_previewer(CPU, latent_formats.Wan21())
    assert previewer is not None
    x0 = torch.randn(1, 16, frames, 4, 6, generator=torch.Generator().manual_seed(1))
    _, strip, _ = latent_preview.preview_of(previewer, x0)
    assert strip.size == (6 * len(shown), 4)
    for number, place in enumerate(shown):
        alone = previewer.decode_latent_to_preview(x0[:, :, place : place + 1])
        part = strip.crop((number * 6, 0, number * 6 + 6, 4))
        assert part.tobytes() == alone.tobytes()


def test_a_previewer_that_makes_its_own_images_is_asked_for_them() -> None:
    class Own(latent_preview.Latent2RGBPreviewer):
        def decode_latent_to_preview_image(self, preview_format: str, x0: Tensor) -> Any:
            return (preview_format, "own", x0.ndim)

    x0 = torch.zeros(1, 16, 9, 4, 6)
    factors = latent_formats.Wan21().latent_rgb_factors
    assert latent_preview.preview_of(Own(factors), x0) == ("JPEG", "own", 5)


def test_of_latents_sampled_together_the_first_is_shown() -> None:
    from comfy.nested_tensor import NestedTensor

    previewer = latent_preview.get_previewer(CPU, latent_formats.Wan21())
    assert previewer is not None
    nested = NestedTensor([torch.zeros(1, 16, 1, 4, 6), torch.zeros(1, 8, 5)])
    assert latent_preview.preview_of(previewer, nested)[1].size == (6, 4)


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


@pytest.mark.parametrize(("cost_s", "step_s", "shown"), [(0.001, 0.05, 51), (0.5, 0.9, 4)])
def test_previews_are_rare_enough_to_cost_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch, cost_s: float, step_s: float, shown: int
) -> None:
    clock, previews = [0.0], []

    def slow(previewer: Any, x0: Tensor) -> None:
        previews.append(clock[0])
        clock[0] += cost_s

    monkeypatch.setattr(latent_preview, "preview_of", slow)
    monkeypatch.setattr(latent_preview, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    callback = latent_preview.prepare_callback(Patcher(), 101)
    for step in range(101):
        clock[0] += step_s
        callback(step, torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2), 101)
    assert len(previews) == shown
    assert (len(previews) - 2) * cost_s <= latent_preview.PREVIEW_SHARE * clock[
        0
    ]  # the first knows no cost yet
