"""Decodes single frames of sampled videos with a small autoencoder, for previews."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comfy.devices import precision
from comfy.latent_formats import LatentFormat
from comfy.vae import taehv_kinds
from comfy.vae.kinds import detect_autoencoder
from comfy.vae.spec import from_unit_range
from comfy.weights.contents import contents_in_words
from comfy.weights.fill import IncompleteWeightsError, fill
from comfy.weights.state_dict import load_torch_file


class FrameDecoder:
    """The decoder of a file, for the latents of a model."""

    def __init__(
        self, path: str, latent_format: Callable[[], LatentFormat], device: torch.device
    ) -> None:
        """Read a file.

        Args:
            path: A file whose name or weights say what it was trained for.
            latent_format: Latent space of the model.
            device: Where it runs.
        Raises:
            WeightFileError: The file cannot be read.
            IncompleteWeightsError: It holds something else, not all of it, or is for other latents.
        """
        weights, metadata = load_torch_file(path, return_metadata=True)
        told = {**taehv_kinds.name_hint(path), **(metadata or {})}
        spec = detect_autoencoder(weights, told)
        if spec is None or taehv_kinds.MARK not in weights:
            raise IncompleteWeightsError(f"it holds {contents_in_words(list(weights))}")
        self.latent_format = latent_format()
        channels = self.latent_format.latent_channels
        if spec.latent_channels != channels:
            raise IncompleteWeightsError(
                f"it decodes {spec.latent_channels} channels, the latent has {channels}"
            )
        dtype = precision.vae_dtype(device, spec.working_dtypes)
        self.network: Any = spec.build(dtype=dtype, device="meta")
        fill(self.network, weights, f"autoencoder ({spec.name})")
        self.network.eval().to(device)
        self.process_output = spec.process_output

    def decode(self, x0: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in about -1..1 of the first frame of latents [B, C, T, h, w], as
        the model sees them.
        """
        latent = self.latent_format.process_out(x0[:, :, :1])
        pixels = self.network.decode(latent.to(next(self.network.parameters())))[:, :, 0]
        return from_unit_range(self.process_output(pixels.float()))
