"""Previews: which way is used, what they look like, and how the method is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import latent_preview
from comfy import latent_formats, progress
from comfy.cli_args import LatentPreviewMethod, args
from comfy.ldm.taesd.video import TAEHV
from comfy.taesd.taesd import TAESD
from comfy.vae.frame_decoder import FrameDecoder
from comfy.vae.taehv_kinds import NAME_HINT
from comfy.vae.vae import VAE
from tests.support.formula_weights import fill_by_formula

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


FORMATS = [
    kind
    for kind in vars(latent_formats).values()
    if isinstance(kind, type)
    and issubclass(kind, latent_formats.LatentFormat)
    and kind is not latent_formats.NormalisedFormat
]


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.__name__)
def test_every_latent_of_pictures_has_a_preview(kind: Any) -> None:
    latent_format = kind()
    previewer = latent_preview.get_previewer(CPU, latent_format)
    axes = latent_format.latent_dimensions
    if axes == 1:  # sound, shape tokens
        assert previewer is None
        return
    assert previewer is not None
    x0 = torch.randn(1, latent_format.latent_channels, *(5, 6, 8)[-axes:])
    _, picture, _ = latent_preview.preview_of(previewer, x0)
    frames = 4 if axes == 3 else 1
    scale = 2 if latent_format.latent_rgb_factors_reshape else 1  # patches lie in the channels
    assert picture.size == (8 * frames * scale, 6 * scale)


def spot(channels: int, seed: int = 1) -> Tensor:
    """A bright square in a corner of a latent of channels that nobody knows."""
    generator = torch.Generator().manual_seed(seed)
    x0 = 0.1 * torch.randn(1, channels, 12, 12, generator=generator)
    x0[:, :, :4, :4] += torch.randn(
        channels, 1, 1, generator=torch.Generator().manual_seed(9)
    ).sign()
    return x0


@pytest.mark.parametrize("channels", [1, 2, 3, 64])
def test_a_latent_of_unknown_colours_shows_what_is_where_and_keeps_its_colours(
    channels: int,
) -> None:
    previewer = latent_preview.PrincipalPreviewer()
    shown = []
    for seed in range(4):
        pixels = np.asarray(previewer.decode_latent_to_preview(spot(channels, seed))).astype(int)
        shown.append(pixels[:4, :4].mean() - pixels[4:, 4:].mean())
        assert abs(shown[-1]) > 60
    assert len(set(np.sign(shown))) == 1


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_a_broken_or_even_latent_of_unknown_colours_is_shown_as_grey(fill: float) -> None:
    previewer = latent_preview.PrincipalPreviewer()
    picture = previewer.decode_latent_to_preview(torch.full((1, 5, 4, 4), fill))
    assert picture.size == (4, 4)


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time previews go by, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(latent_preview, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(("cost_s", "step_s", "shown"), [(0.001, 0.05, 26), (0.5, 0.9, 4)])
def test_previews_are_rare_enough_to_cost_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], cost_s: float, step_s: float, shown: int
) -> None:
    previews = []

    def slow(previewer: Any, x0: Tensor) -> None:
        previews.append(clock[0])
        clock[0] += cost_s

    monkeypatch.setattr(latent_preview, "preview_of", slow)
    callback = latent_preview.prepare_callback(Patcher(), 101)
    for step in range(101):
        clock[0] += step_s
        callback(step, torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2), 101)
    assert len(previews) == shown
    spent_s = (len(previews) - 2) * (cost_s + latent_preview.SENDING_S)
    assert spent_s <= latent_preview.PREVIEW_SHARE * clock[0]  # the first knows no cost yet


def put_decoder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "taesd_decoder.safetensors"
) -> Path:
    """A decoder without training where previews look for it."""
    path = tmp_path / name
    weights = {key: value.clone() for key, value in TAESD().taesd_decoder.state_dict().items()}
    (torch.save if path.suffix == ".pth" else save_file)(weights, path)
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.TAESD)
    monkeypatch.setattr("folder_paths.get_filename_list", lambda kind: [name])
    monkeypatch.setattr("folder_paths.get_full_path_or_raise", lambda kind, file: str(path))
    latent_preview._decoder.cache_clear()
    return path


@pytest.mark.parametrize("name", ["taesd_decoder.safetensors", "taesd_decoder.pth"])
def test_a_decoder_makes_pictures_of_eight_times_the_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    put_decoder(monkeypatch, tmp_path, name)
    previewer = latent_preview.get_previewer(CPU, latent_formats.SD15())
    assert isinstance(previewer, latent_preview.TAESDPreviewerImpl)
    assert previewer.decode_latent_to_preview(torch.zeros(2, 4, 3, 2)).size == (16, 24)


def test_a_broken_decoder_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = put_decoder(monkeypatch, tmp_path)
    for broken in (b"<html>not found</html>", path.read_bytes()[:1000]):
        path.write_bytes(broken)
        previewer = latent_preview.get_previewer(CPU, latent_formats.SD15())
        assert isinstance(previewer, latent_preview.Latent2RGBPreviewer)
    save_file({"0.weight": torch.zeros(2)}, path)
    previewer = latent_preview.get_previewer(CPU, latent_formats.SD15())
    assert isinstance(previewer, latent_preview.Latent2RGBPreviewer)
    assert caplog.text.count("taesd_decoder.safetensors is no decoder that can be read") == 3


VIDEO_DECODERS = {
    "taehv": latent_formats.HunyuanVideo,
    "lighttaew2_1": latent_formats.Wan21,
    "taew2_1": latent_formats.Wan21,
    "taew2_2": latent_formats.Wan22,
    "lighttaew2_2": latent_formats.Wan22,
    "lighttaehy1_5": latent_formats.HunyuanVideo15,
}


def put_video_decoder(
    monkeypatch: pytest.MonkeyPatch, path: Path, latent_format: Any
) -> dict[str, Tensor]:
    """The same for videos; its weights."""
    space = latent_format()
    patch = space.spacial_downscale_ratio // 8
    network = TAEHV(space.latent_channels, patch_size=patch, widths=(16, 8, 8, 8), encoder_width=8)
    fill_by_formula(network.state_dict())
    save_file(network.state_dict(), path)
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.TAESD)
    monkeypatch.setattr("folder_paths.get_filename_list", lambda kind: [path.name])
    monkeypatch.setattr("folder_paths.get_full_path_or_raise", lambda kind, file: str(path))
    latent_preview._video_decoder.cache_clear()
    return network.state_dict()


@pytest.mark.parametrize("name", VIDEO_DECODERS)
def test_a_small_video_decoder_shows_frames_of_the_video(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each as the autoencoder of the same file decodes it alone."""
    space = VIDEO_DECODERS[name]()
    weights = put_video_decoder(monkeypatch, tmp_path / f"{name}.safetensors", type(space))
    previewer = latent_preview.get_previewer(CPU, space)
    assert isinstance(previewer, latent_preview.TAESDPreviewerImpl)
    x0 = torch.randn(2, space.latent_channels, 9, 4, 6, generator=torch.Generator().manual_seed(1))
    _, strip, _ = latent_preview.preview_of(previewer, x0)
    height, width = 4 * space.spacial_downscale_ratio, 6 * space.spacial_downscale_ratio
    assert strip.size == (4 * width, height)
    vae = VAE(sd=weights, metadata={NAME_HINT: name})
    frame = space.process_out(x0[:1, :, 5:6])
    expected = np.asarray(latent_preview.preview_to_image(vae.decode(frame)[0, 0], do_scale=False))
    part = np.asarray(strip.crop((2 * width, 0, 3 * width, height)))
    assert expected.std() > 1
    assert np.abs(part.astype(int) - expected.astype(int)).max() <= 2


def test_a_preferred_video_decoder_is_taken_before_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_video_decoder(monkeypatch, tmp_path / "taew2_1.safetensors", latent_formats.Wan21)
    listed = ["taehv.safetensors", "taew2_1.safetensors", "lighttaew2_1.safetensors"]
    asked: list[str] = []
    monkeypatch.setattr("folder_paths.get_filename_list", lambda kind: listed)
    path = str(tmp_path / "taew2_1.safetensors")
    monkeypatch.setattr(
        "folder_paths.get_full_path_or_raise", lambda kind, file: asked.append(file) or path
    )
    latent_preview.get_previewer(CPU, latent_formats.Wan21())
    listed.pop()
    latent_preview.get_previewer(CPU, latent_formats.Wan21())
    assert asked == ["lighttaew2_1.safetensors", "taew2_1.safetensors"]


def test_a_broken_video_decoder_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "taew2_1.safetensors"
    put_video_decoder(monkeypatch, path, latent_formats.Wan21)
    whole = path.read_bytes()
    put_video_decoder(monkeypatch, path, latent_formats.Wan22)
    of_another = path.read_bytes()
    save_file({"1.weight": torch.zeros(2)}, path)
    told = ("cut off", "it decodes 48 channels, the latent has 16", "it holds 1 key")
    for broken, reason in zip((whole[: len(whole) // 2], of_another, path.read_bytes()), told):
        caplog.clear()
        path.write_bytes(broken)
        previewer = latent_preview.get_previewer(CPU, latent_formats.Wan21())
        assert isinstance(previewer, latent_preview.Latent2RGBPreviewer)
        assert "taew2_1.safetensors is no decoder that can be read" in caplog.text
        assert reason in caplog.text


def test_a_video_decoder_is_expected_to_take_the_time_of_all_its_frames(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: list[float]
) -> None:
    put_video_decoder(monkeypatch, tmp_path / "taew2_1.safetensors", latent_formats.Wan21)
    previewer: Any = latent_preview.get_previewer(CPU, latent_formats.Wan21())
    decode = previewer.taesd.decode

    def slow(x0: Tensor) -> Tensor:
        clock[0] += x0.shape[-2] * x0.shape[-1] / 1000
        return decode(x0)

    monkeypatch.setattr(previewer.taesd, "decode", slow)
    for frames, shown in ((1, 1), (3, 3), (21, 4)):
        x0 = torch.zeros(1, 16, frames, 10, 20)
        expected_s = previewer.expected_s(x0)
        start_s = clock[0]
        latent_preview.preview_of(previewer, x0)
        assert expected_s == pytest.approx(shown * 0.2) == pytest.approx(clock[0] - start_s)


def test_what_a_device_prepares_once_is_not_taken_for_the_cost_of_a_picture(
    clock: list[float],
) -> None:
    class Slow:
        seconds = 5.0

        def decode(self, x0: Tensor) -> Tensor:
            clock[0] += self.seconds
            self.seconds = 0.01
            return torch.zeros(1, 3, 8 * x0.shape[-2], 8 * x0.shape[-1])

    previewer = latent_preview.TAESDPreviewerImpl(Slow())
    assert previewer.expected_s(torch.zeros(1, 4, 16, 16)) == pytest.approx(4 * 0.01)


def test_a_run_shows_decoded_frames_once_its_time_pays_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: list[float]
) -> None:
    put_video_decoder(monkeypatch, tmp_path / "taew2_1.safetensors", latent_formats.Wan21)
    decode = FrameDecoder.decode

    def slow(self: FrameDecoder, x0: Tensor) -> Tensor:
        clock[0] += 0.25 * x0.shape[-2] * x0.shape[-1] / 24  # a second for the four below
        return decode(self, x0)

    monkeypatch.setattr(FrameDecoder, "decode", slow)
    sizes: list[Any] = []
    monkeypatch.setattr(
        progress, "PROGRESS_BAR_HOOK", lambda value, total, preview, **kw: sizes.append(
            preview and preview[1].size
        )
    )  # fmt: skip

    class OfVideo(Patcher):
        class model:
            latent_format = latent_formats.Wan21()

    x0 = torch.zeros(1, 16, 9, 4, 6)
    callback = latent_preview.prepare_callback(OfVideo(), 20)
    start_s = clock[0]
    for step in range(20):
        clock[0] += 10.0
        callback(step, x0, x0, 20)
    linear, decoded = (4 * 6, 4), (4 * 6 * 8, 4 * 8)
    first = sizes.index(decoded)
    assert sizes[0] == linear
    assert set(sizes[:first]) <= {linear, None}
    assert set(sizes[first:]) <= {decoded, None}
    assert sizes.count(decoded) == 3
    assert clock[0] - start_s <= 200 * (1 + latent_preview.PREVIEW_SHARE)


def test_a_decoder_waits_until_the_run_can_pay_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: list[float]
) -> None:
    put_decoder(monkeypatch, tmp_path)
    cells_s, shown = 0.5 / 64**2, []  # half a second for a picture of 512 pixels

    def decode(self: Any, x: Tensor, **_: Any) -> Tensor:
        clock[0] += cells_s * x.shape[-2] * x.shape[-1]
        return torch.zeros(1, 3, 8 * x.shape[-2], 8 * x.shape[-1])

    monkeypatch.setattr(TAESD, "decode", decode)
    made: Any = latent_preview.preview_of

    def noted(previewer: Any, x0: Tensor) -> Any:
        shown.append((clock[0], type(previewer).__name__))
        return made(previewer, x0)

    monkeypatch.setattr(latent_preview, "preview_of", noted)
    for steps in (20, 60):  # the second run knows the cost from the first
        shown.clear()
        start_s = clock[0]
        callback = latent_preview.prepare_callback(Patcher(), steps)
        for step in range(steps):
            clock[0] += 1.0
            callback(step, torch.zeros(1, 4, 64, 64), torch.zeros(1, 4, 64, 64), steps)
        decoded = [time - start_s for time, name in shown if name == "TAESDPreviewerImpl"]
        stood_in = [time - start_s for time, name in shown if name != "TAESDPreviewerImpl"]
        assert len(decoded) * 0.5 <= latent_preview.PREVIEW_SHARE * (clock[0] - start_s)
        assert len(stood_in) >= 19
        assert not decoded or max(stood_in) < min(decoded)
    assert len(decoded) == 2


@pytest.mark.parametrize("named", [None, "default", "none", "pretty", 5])
def test_a_prompt_that_names_no_known_method_leaves_the_server_s_and_says_so(
    named: object, caplog: pytest.LogCaptureFixture
) -> None:
    from utils.execution import preview_method

    asked = preview_method(
        {"preview_method": named},
        SimpleNamespace(automatic_previews=True),
        SimpleNamespace(sockets_metadata={}),
    )
    assert asked == ("none" if named == "none" else None)
    assert ("known: default, none, auto" in caplog.text) == (named in ("pretty", 5))
