"""Previews while sampling: a cheap picture of the current clean estimate, handed to the progress
bar.

Two ways exist. A linear map from latent channels to colours needs no files and costs next to
nothing; a small decoder (TAESD, for video TAEHV) gives a sharper picture if its file is in
models/vae_approx. Where nobody has measured the colours of a latent space, the map is made from the
latent itself: it shows what is where, in colours that mean nothing. Sound and sets of shape tokens
have no picture.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import folder_paths
from comfy import progress
from comfy.cli_args import LatentPreviewMethod, args
from comfy.taesd.taesd import TAESD
from comfy.vae.frame_decoder import FrameDecoder
from comfy.vae.taehv_kinds import TRAINED
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError
from comfy.weights.state_dict import load_torch_file

logger = logging.getLogger(__name__)

PREVIEW_FORMAT = "JPEG"
PREVIEW_INTERVAL_S = 0.1
"""Shortest time between two previews of a run; the last step is shown in any case."""
PREVIEW_SHARE = 0.02
"""Largest share of a run's time that previews take: after a slow one the next waits longer, be it
the last."""
SENDING_S = 0.003
"""What a server takes to enlarge, encode and send a picture, beside the network on other cores."""
CORNER = 8
"""Side of the part of a latent, in cells, by which a decoder is timed before it is used."""

STRIP_FRAMES = 4
"""Frames of a video that its preview shows."""

PreviewImage = tuple[str, Image.Image, int | None]
StepCallback = Callable[[int, Tensor, Tensor, int], None]

_set_aside: LatentPreviewMethod | None = None
"""The command line's method while a prompt's own one is in force."""


def preview_to_image(latent_image: Tensor, do_scale: bool = True) -> Image.Image:
    """Colours [H, W, 3] as a picture.

    Args:
        latent_image: Values in -1..1, or 0..1 with `do_scale` off.
    """
    unit = (latent_image + 1.0) / 2.0 if do_scale else latent_image
    pixels = (unit.clamp(0, 1) * 255).to(device="cpu", dtype=torch.uint8)
    return Image.fromarray(np.asarray(pixels))


class LatentPreviewer:
    """Makes pictures of latents. Sub-classes give `decode_latent_to_preview`."""

    def decode_latent_to_preview(self, x0: Tensor) -> Image.Image:  # noqa: ARG002 - hook
        """Picture of the first latent of a batch [B, C, H, W]."""
        raise TypeError(f"{type(self).__name__} does not say how it decodes a latent")

    def decode_latent_to_preview_image(self, preview_format: str, x0: Tensor) -> PreviewImage:
        """The picture with its format and the largest side it is sent with."""
        return (preview_format, self.decode_latent_to_preview(x0), args.preview_size)


class TAESDPreviewerImpl(LatentPreviewer):
    """Decodes with a small decoder.

    Args:
        taesd: The decoder, with `decode(latent) -> [B, 3, H, W]` in -1..1; of a video's latent the
            first frame.
    """

    def __init__(self, taesd: Any) -> None:
        self.taesd = taesd
        self._cell_s: float | None = None

    def decode_latent_to_preview(self, x0: Tensor) -> Image.Image:
        start_s = time.monotonic()
        picture = preview_to_image(self.taesd.decode(x0[:1])[0].movedim(0, 2))
        self._cell_s = (time.monotonic() - start_s) / (x0.shape[-2] * x0.shape[-1])
        return picture

    def expected_s(self, x0: Tensor) -> float:
        """Seconds that the pictures of x0 will take, by the last one, or by a corner of x0."""
        if self._cell_s is None:
            for _ in range(2):  # the first time a device also prepares its kernels
                self.decode_latent_to_preview(x0[..., :CORNER, :CORNER])
        return (self._cell_s or 0.0) * x0.shape[-2] * x0.shape[-1] * len(shown_frames(x0))


class Latent2RGBPreviewer(LatentPreviewer):
    """Maps latent channels to colours by one matrix.

    Args:
        latent_rgb_factors: One row (red, green, blue) per channel.
        latent_rgb_factors_bias: Colour of a latent of zeros.
        latent_rgb_factors_reshape: Change of the latent before the map.
    """

    def __init__(
        self,
        latent_rgb_factors: list[list[float]],
        latent_rgb_factors_bias: list[float] | None = None,
        latent_rgb_factors_reshape: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.latent_rgb_factors = torch.tensor(latent_rgb_factors).transpose(0, 1)
        bias = latent_rgb_factors_bias
        self.latent_rgb_factors_bias = None if bias is None else torch.tensor(bias)
        self.latent_rgb_factors_reshape = latent_rgb_factors_reshape

    def decode_latent_to_preview(self, x0: Tensor) -> Image.Image:
        if self.latent_rgb_factors_reshape is not None:
            x0 = self.latent_rgb_factors_reshape(x0)
        latent = x0[0, :, 0] if x0.ndim == 5 else x0[0]
        factors, bias = self.latent_rgb_factors.to(latent), self.latent_rgb_factors_bias
        # Channels stay first: with 128 of them that is many times as fast as moving them.
        colours = (factors @ latent.flatten(1)).reshape(3, *latent.shape[1:]).movedim(0, -1)
        return preview_to_image(colours if bias is None else colours + bias.to(latent))


PRINCIPAL_COLOURS = ((1.0, 1.0, 1.0), (0.4, -0.4, 0.0), (0.2, 0.2, -0.4))
"""Colours of the three directions in which a latent varies most: light, red-green, yellow-blue."""
MEMORY = 0.5
"""Weight of what a previewer saw before beside the latent at hand, so that colours do not jump."""


class PrincipalPreviewer(LatentPreviewer):
    """Shows the three directions in which channels vary most; for latents of unknown colours."""

    def __init__(self) -> None:
        self._mean: Tensor | None = None
        self._covariance: Tensor | None = None
        self._axes: Tensor | None = None

    def decode_latent_to_preview(self, x0: Tensor) -> Image.Image:
        latent = (x0[0, :, 0] if x0.ndim == 5 else x0[0]).float()
        self._learn(latent.flatten(1))
        assert self._mean is not None
        assert self._axes is not None
        values = self._axes.T @ (latent.flatten(1) - self._mean)
        colours = values.new_tensor(PRINCIPAL_COLOURS)[: len(values)]
        return preview_to_image((colours.T @ values).reshape(3, *latent.shape[1:]).movedim(0, -1))

    def _learn(self, cells: Tensor) -> None:
        """Find the axes [C, up to 3], scaled to deviations of one half, of cells [C, N]."""
        cells = cells.nan_to_num(0.0, 0.0, 0.0)
        mean = cells.mean(dim=1, keepdim=True)
        covariance = (cells - mean) @ (cells - mean).T / cells.shape[1]
        if self._mean is not None and self._covariance is not None:
            mean = torch.lerp(mean, self._mean, MEMORY)
            covariance = torch.lerp(covariance, self._covariance, MEMORY)
        spreads, axes = torch.linalg.eigh(covariance)
        axes = (axes / (2 * spreads.clamp(min=1e-8).sqrt()))[:, -3:].flip(1)
        before = axes.new_ones(()) if self._axes is None else self._axes
        turn = (axes * before).sum(dim=0, keepdim=True) < 0  # an axis has no sign of its own
        self._mean, self._covariance = mean, covariance
        self._axes = torch.where(turn, -axes, axes)


def get_previewer(device: torch.device, latent_format: Any) -> LatentPreviewer | None:
    """The previewer that the current method asks for; None for no previews.

    "auto" is the linear map. A method that cannot be used for the latent format falls back to the
    linear map; that is made from the latent where its colours are not known.

    Args:
        device: Where a decoder runs.
        latent_format: Latent space of the model.
    """
    method = args.preview_method
    if method == LatentPreviewMethod.NoPreviews:
        return None
    if method == LatentPreviewMethod.TAESD:
        previewer = _taesd_previewer(device, latent_format)
        if previewer is not None:
            return previewer
    return _linear_previewer(latent_format)


def _linear_previewer(latent_format: Any) -> LatentPreviewer | None:
    if latent_format.latent_rgb_factors is None:
        return PrincipalPreviewer() if latent_format.latent_dimensions >= 2 else None
    return Latent2RGBPreviewer(
        latent_format.latent_rgb_factors,
        latent_format.latent_rgb_factors_bias,
        latent_format.latent_rgb_factors_reshape,
    )


def _taesd_previewer(device: torch.device, latent_format: Any) -> TAESDPreviewerImpl | None:
    names = _decoder_names(latent_format)
    files = folder_paths.get_filename_list("vae_approx")
    file = next((file for name in names for file in files if file.startswith(f"{name}.")), None)
    if file is None:
        wanted = f"{names[0]}.safetensors" if names else "decoder for this latent space"
        logger.warning("no %s in models/vae_approx: previews use latent2rgb", wanted)
        return None
    path = folder_paths.get_full_path_or_raise("vae_approx", file)
    try:
        if latent_format.latent_dimensions == 2:
            return _decoder(path, latent_format.latent_channels, device)
        return _video_decoder(path, latent_format.__class__, device)
    except (WeightFileError, IncompleteWeightsError, OSError, RuntimeError) as error:
        logger.warning(
            "previews use latent2rgb: %s is no decoder that can be read: %s", file, error
        )
        return None


def _decoder_names(latent_format: Any) -> list[str]:
    """Names of files that decode a latent space, the preferred one first."""
    preferred = latent_format.taesd_decoder_name
    others = [
        name for name, training in TRAINED.items() if training.latent_format is type(latent_format)
    ]
    return list(dict.fromkeys([preferred, *others] if preferred else others))


@functools.lru_cache(maxsize=1)
def _decoder(path: str, channels: int, device: torch.device) -> TAESDPreviewerImpl:
    """The decoder of a file; the last one is kept, since each run asks again."""
    taesd = TAESD(latent_channels=channels)
    taesd.taesd_decoder.load_state_dict(load_torch_file(path))
    return TAESDPreviewerImpl(taesd.eval().to(device))


@functools.lru_cache(maxsize=1)
def _video_decoder(
    path: str, latent_format: Callable[[], Any], device: torch.device
) -> TAESDPreviewerImpl:
    """The same of single frames of a video."""
    return TAESDPreviewerImpl(FrameDecoder(path, latent_format, device))


def shown_frames(x0: Tensor) -> list[int]:
    """Places of the frames that the preview of a latent shows, from its start to its end."""
    count = min(x0.shape[2], STRIP_FRAMES) if x0.ndim == 5 else 1
    if count < 2:
        return [0]
    return [round(number * (x0.shape[2] - 1) / (count - 1)) for number in range(count)]


def preview_of(previewer: LatentPreviewer, x0: Any) -> PreviewImage:
    """The preview of a clean estimate.

    Of latents sampled together the first is shown; of a video, frames from its start to its end
    side by side.

    Args:
        x0: [B, C, H, W], [B, C, T, H, W] or a nested latent.
    """
    if getattr(x0, "is_nested", False):
        x0 = x0.unbind()[0]
    makes_images = type(previewer).decode_latent_to_preview_image
    if makes_images is not LatentPreviewer.decode_latent_to_preview_image:  # knows better
        return previewer.decode_latent_to_preview_image(PREVIEW_FORMAT, x0)
    places = shown_frames(x0)
    if len(places) < 2:
        return previewer.decode_latent_to_preview_image(PREVIEW_FORMAT, x0)
    frames = [previewer.decode_latent_to_preview(x0[:1, :, place : place + 1]) for place in places]
    strip = Image.new("RGB", (sum(frame.width for frame in frames), frames[0].height))
    for number, frame in enumerate(frames):
        strip.paste(frame, (number * frame.width, 0))
    return (PREVIEW_FORMAT, strip, args.preview_size)


class Pace:
    """When a run shows previews, and by which previewer.

    A decoder shows its first picture when a share of the time so far pays for it; until then the
    linear map stands in.

    Args:
        previewer: The one that was asked for.
        stand_in: The linear map, or None.
    """

    def __init__(self, previewer: LatentPreviewer | None, stand_in: LatentPreviewer | None) -> None:
        self.previewer, self.stand_in = previewer, stand_in
        self._start_s = time.monotonic()
        self._next_s = self._last_s = self._spent_s = 0.0
        self._has_decoded = False

    def preview(self, x0: Any, is_last: bool) -> PreviewImage | None:
        """A preview of a step's clean estimate, if it is time for one."""
        if self.previewer is None:
            return None
        now_s = time.monotonic()
        if now_s < self._next_s and not (is_last and self._last_s < PREVIEW_INTERVAL_S):
            return None
        previewer = self._affordable(x0, now_s)
        if previewer is None:
            return None
        preview = preview_of(previewer, x0)
        self._last_s = time.monotonic() - now_s
        self._spent_s += self._last_s
        wait_s = (self._last_s + SENDING_S) / PREVIEW_SHARE
        self._next_s = now_s + max(PREVIEW_INTERVAL_S, wait_s)
        return preview

    def _affordable(self, x0: Any, now_s: float) -> LatentPreviewer | None:
        if not isinstance(self.previewer, TAESDPreviewerImpl):
            return self.previewer
        shown = x0.unbind()[0] if getattr(x0, "is_nested", False) else x0
        cost_s = self._spent_s + self.previewer.expected_s(shown)
        if cost_s <= PREVIEW_SHARE * (now_s - self._start_s):
            self._has_decoded = True
            return self.previewer
        return None if self._has_decoded else self.stand_in


def prepare_callback(
    model: Any, steps: int, x0_output_dict: dict[str, Tensor] | None = None
) -> StepCallback:
    """What a sampler calls after each step: moves the progress bar and shows the picture.

    Args:
        model: Model patcher.
        steps: Total of the progress bar.
        x0_output_dict: Takes the last clean estimate under "x0".

    Returns:
        callback(step, x0, x, total).
    """
    latent_format = model.model.latent_format
    previewer = get_previewer(model.load_device, latent_format)
    pace = Pace(previewer, _linear_previewer(latent_format))
    bar = progress.ProgressBar(steps)

    def callback(
        step: int,
        x0: Tensor,
        x: Tensor,  # noqa: ARG001 - public signature
        total_steps: int,
    ) -> None:
        if x0_output_dict is not None:
            x0_output_dict["x0"] = x0
        preview = pace.preview(x0, is_last=step + 1 >= total_steps)
        bar.update_absolute(step + 1, total_steps, preview)

    return callback


def set_preview_method(override: str | None = None) -> None:
    """Chooses the method of the prompt that is about to run.

    Args:
        override: Name that the prompt carries (`none`, `auto`, `latent2rgb`, `taesd`); anything
            else means the one from the command line.
    """
    global _set_aside
    chosen = LatentPreviewMethod.from_string(override) if override else None
    if _set_aside is not None:
        args.preview_method, _set_aside = _set_aside, None
    if chosen is not None:
        _set_aside, args.preview_method = args.preview_method, chosen
