"""Whether what a decoder made holds numbers, and what is to blame where it does not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

USUAL_SIZE = 100.0
"""No trained autoencoder gives latents as large: most stay below 5, Stable Diffusion's below 50."""


class NotFiniteError(ValueError):
    """A latent or picture holds NaN or infinite values."""


def is_finite(x: Tensor) -> bool:
    """Whether there is no NaN and no infinity; the sum, which is fast, mostly tells."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def check_latent(latent: Tensor) -> None:
    """Refuse what cannot be decoded in any precision.

    Raises:
        NotFiniteError: The latent holds NaN or infinite values.
    """
    if not is_finite(latent):
        raise NotFiniteError(
            "the latent to decode holds NaN or infinite values: sampling went wrong before "
            "(too high a cfg or weight, a half-precision overflow, or a damaged model)"
        )


def cause_of(latent: Tensor, decode: Callable[[Tensor], Tensor]) -> NotFiniteError:
    """Why a finite latent gave NaN in float32: the decoder is tried on zeros, which any can decode.

    Args:
        latent: What gave NaN.
        decode: The decoder in float32.
    """
    largest = float(latent.abs().max())
    if not is_finite(decode(torch.zeros_like(latent))):
        return NotFiniteError(
            "decoding gave NaN in float32, and does for a latent of zeros too: the VAE file is "
            "damaged"
        )
    if largest > USUAL_SIZE:
        return NotFiniteError(
            f"the latent is too large to decode: its values reach {largest:.3g}, usual ones stay "
            f"below {USUAL_SIZE:g}, and the VAE decodes zeros well; a node before this one, too "
            "high a cfg or weight, or a damaged model made it so"
        )
    return NotFiniteError(
        f"decoding gave NaN in float32 for a latent of usual size (its values reach {largest:.3g}) "
        "but not for zeros: the VAE file is damaged in part, or belongs to another model"
    )
