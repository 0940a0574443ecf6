"""Larger and longer latents of LTX video, by networks made for it."""

from __future__ import annotations

from typing import Any

from comfy.devices import placement
from comfy_nodes.latent_basics import VIDEO, Latent, replaced, samples_of


class LTXVLatentUpsampler:
    """Enlarges a latent of LTX video."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples": ("LATENT",),
                "upscale_model": ("LATENT_UPSCALE_MODEL",),
                "vae": ("VAE",),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "upsample_latent"
    CATEGORY = "latent/video"
    EXPERIMENTAL = True

    def upsample_latent(self, samples: Latent, upscale_model: Any, vae: Any) -> tuple[Latent]:
        """The latent without its noise mask, whose size it no longer has.

        The network was taught with latents as the autoencoder makes them, before each channel is
        normalised: the autoencoder's statistics take that back, and do it again.

        Raises:
            ValueError: The autoencoder or the latent is of something else.
        """
        latent = samples_of(samples, "samples", VIDEO)
        network = getattr(vae, "first_stage_model", None)
        statistics = getattr(network, "per_channel_statistics", None)
        if statistics is None:
            raise ValueError(
                "vae: expected the autoencoder of LTX video, found another one "
                f"({type(network).__name__}), which has no statistics of its channels"
            )
        enlarged = upscale_model.resample_latent(statistics.un_normalize(latent))
        normal = statistics.normalize(enlarged)
        made = normal.to(device=placement.intermediate_device(), dtype=latent.dtype)
        without_mask = {key: value for key, value in samples.items() if key != "noise_mask"}
        return (replaced(without_mask, made),)


NODE_CLASS_MAPPINGS = {"LTXVLatentUpsampler": LTXVLatentUpsampler}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
