"""Networks that enlarge or refine latents of videos: from a file to larger latents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy.devices import placement, residency
from comfy.ldm.hunyuan_video import upsampler as hunyuan
from comfy.ldm.lightricks import latent_upsampler as lightricks
from comfy.patching.patcher import ModelPatcher
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError, fill
from comfy.weights.state_dict import load_torch_file

WRAPPED_SHORTCUT = ".nin_shortcut.conv."  # some files have these wrapped as other convolutions are
FLOAT_BYTES, HELD = 4, 6  # activations, and how many of the largest are held at once
StateDict = Mapping[str, Tensor]
Metadata = Mapping[str, str] | None
CHOICE = "choose a latent upscaler of LTX video or of HunyuanVideo 1.5"


class LatentUpscaleModel:
    """A network that enlarges or refines latents.

    Attributes:
        model: The network.
        patcher: The patcher around it.
        title: Of what videos the latents are.
        channels: Of the latents.
        load_device: Where it runs.
    """

    def __init__(self, model: nn.Module, title: str, channels: int, cell_bytes: int) -> None:
        self.model = model.eval()
        self.title = title
        self.channels = channels
        self._cell_bytes = cell_bytes  # activations for each cell of a latent
        self.load_device = placement.vae_device()
        self.patcher: Any = ModelPatcher(
            self.model,
            load_device=self.load_device,
            offload_device=placement.vae_offload_device(),
        )

    def get_sd(self) -> dict[str, Tensor]:
        """Weights by key."""
        return self.model.state_dict()

    def resample_latent(self, latent: Tensor) -> Tensor:
        """Latents [B, C, T, H, W] as the network makes them, float32 on the load device.

        Raises:
            ValueError: They are latents of something else.
        """
        if latent.ndim != 5 or latent.shape[1] != self.channels:
            raise ValueError(
                f"samples: expected the latent of a video with {self.channels} channels, as "
                f"{self.title} has them, found shape {list(latent.shape)}"
            )
        cells = latent.numel() // self.channels
        residency.load_models_gpu([self.patcher], memory_required=cells * self._cell_bytes)

        def run() -> Tensor:
            with torch.no_grad():
                return self.model(latent.to(self.load_device, torch.float32))

        return residency.run_or_make_room(self.patcher, run)


def _ltx(sd: StateDict, metadata: Metadata) -> LatentUpscaleModel:
    weights = {key: value for key, value in sd.items() if key != lightricks.BLUR_KEY}
    config = lightricks.config_of(weights, _spatial_scale(metadata))
    model = lightricks.LatentUpsampler(config, device="meta")
    fill(model, weights, "latent upscaler of LTX video")
    times = config.spatial.numerator**2 * (2 if config.temporal else 1)
    cell_bytes = times * config.width * FLOAT_BYTES * HELD
    return LatentUpscaleModel(model, "LTX video", config.channels, cell_bytes)


def _spatial_scale(metadata: Metadata) -> float | None:
    """What the header says of the scale; None if nothing."""
    try:
        config = json.loads((metadata or {}).get("config", "{}"))
    except ValueError as error:
        raise ValueError(f"the header's config is not JSON: {error}") from error
    scale = config.get("spatial_scale") if isinstance(config, dict) else None
    return float(scale) if isinstance(scale, int | float) else None


def _hunyuan_720p(sd: StateDict, _: Metadata) -> LatentUpscaleModel:
    config = hunyuan.residual_config(sd)
    model = hunyuan.SRModel3DV2(config, device="meta")
    fill(model, dict(sd), "latent upscaler of HunyuanVideo 1.5 for 720p")
    cell_bytes = config.width * FLOAT_BYTES * HELD
    return LatentUpscaleModel(model, "HunyuanVideo 1.5", config.channels, cell_bytes)


def _hunyuan_1080p(sd: StateDict, _: Metadata) -> LatentUpscaleModel:
    config = hunyuan.staged_config(sd)
    model = hunyuan.Upsampler(config, device="meta")
    weights = {key.replace(WRAPPED_SHORTCUT, ".nin_shortcut."): sd[key] for key in sd}
    fill(model, weights, "latent upscaler of HunyuanVideo 1.5 for 1080p")
    cell_bytes = max(config.widths) * FLOAT_BYTES * HELD
    return LatentUpscaleModel(model, "HunyuanVideo 1.5", config.channels, cell_bytes)


@dataclass(frozen=True)
class Kind:
    """A key that only weights of a kind have, and what loads them."""

    mark: str
    load: Callable[[StateDict, Metadata], LatentUpscaleModel]


KINDS = (
    Kind("blocks.0.block.0.conv.weight", _hunyuan_720p),
    Kind("up.0.block.0.conv1.conv.weight", _hunyuan_1080p),
    Kind("post_upsample_res_blocks.0.conv2.bias", _ltx),
)


def load(path: str) -> LatentUpscaleModel:
    """A latent upscaler from a file.

    Raises:
        WeightFileError: The file cannot be read or holds no such network.
    """
    sd, metadata = load_torch_file(path, safe_load=True, return_metadata=True)
    kind = next((one for one in KINDS if one.mark in sd), None)
    if kind is None:
        found = contents_in_words(sorted(sd))
        raise WeightFileError(path, f"no known latent upscaler: {found}", CHOICE)
    try:
        return kind.load(sd, metadata)
    except KeyError as error:
        cause = f"the latent upscaler lacks {error}"
        raise WeightFileError(path, cause) from error
    except (IncompleteWeightsError, ValueError) as error:
        raise WeightFileError(path, str(error), CHOICE) from error
