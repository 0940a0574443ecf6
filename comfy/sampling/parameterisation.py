"""What a network predicts, and how its output becomes a clean estimate.

Every network is trained on a noised latent ``x = alpha(sigma) * x0 + sigma * noise``. A prediction
type says how ``x`` is scaled for the network (`calculate_input`), how the clean estimate follows
from the network's output (`calculate_denoised`), and how noise and a latent are mixed at the start
(`noise_scaling`) and unmixed at the end (`inverse_noise_scaling`). The classes are mixins: a
model's sampling object joins one of them with one class of ``noise_levels``, which provides
`sigma_data`.

The two mixing rules in use are the two `NoisePath` objects below. Solvers ask the path for
``alpha`` and the signal-to-noise ratio, so no solver knows a prediction type.

Shapes: latents [B, C, ...]; sigma [B] or a single number, in standard deviations of the latent.
"""
# ruff: noqa: ARG002

from __future__ import annotations

import math

import torch
from torch import Tensor


def reshape_sigma(sigma: Tensor, noise_dim: int) -> Tensor:
    """Shape sigma so that it broadcasts over the batch axis of a tensor with `noise_dim` axes."""
    if sigma.nelement() == 1:
        return sigma.reshape(())
    return sigma.reshape(sigma.shape[:1] + (1,) * (noise_dim - 1))


class NoisePath:
    """How much signal is left at noise level sigma; the base class is variance exploding.

    Variance exploding: ``x = x0 + sigma * noise`` with alpha = 1 and half-log-SNR = -log(sigma).
    """

    def alpha(self, sigma: float) -> float:
        """Weight of the clean latent at noise level sigma."""
        return 1.0

    def half_log_snr(self, sigma: float) -> float:
        """lambda = log(alpha / sigma); infinite at sigma = 0."""
        return -math.log(sigma) if sigma > 0 else math.inf

    def sigma_at(self, half_log_snr: float) -> float:
        """Noise level of a half-log-SNR: the inverse of `half_log_snr`."""
        return math.exp(-half_log_snr)

    def ancestral_step(
        self, sigma: float, sigma_next: float, eta: float
    ) -> tuple[float, float, float]:
        """Split the step to sigma_next into a deterministic part and fresh noise.

        Returns:
            (sigma_down, scale, sigma_up): go down to sigma_down, multiply by scale, add
            sigma_up * noise.
        """
        sigma_down, sigma_up = split_ancestral(sigma, sigma_next, eta)
        return sigma_down, 1.0, sigma_up


class FlowPath(NoisePath):
    """Straight line between latent and noise: ``x = (1 - sigma) * x0 + sigma * noise``."""

    def alpha(self, sigma: float) -> float:
        return 1.0 - sigma

    def half_log_snr(self, sigma: float) -> float:
        if sigma <= 0:
            return math.inf
        return math.log1p(-sigma) - math.log(sigma) if sigma < 1 else -math.inf

    def sigma_at(self, half_log_snr: float) -> float:
        if half_log_snr > 0:
            noise = math.exp(-half_log_snr)
            return noise / (1.0 + noise)
        return 1.0 / (1.0 + math.exp(half_log_snr))

    def ancestral_step(
        self, sigma: float, sigma_next: float, eta: float
    ) -> tuple[float, float, float]:
        if not eta:
            return sigma_next, 1.0, 0.0
        # In single precision, as pictures were made: in short steps sigma_up is a small difference.
        before, after = torch.tensor([sigma, sigma_next], dtype=torch.float32)
        down = after * (1 + (after / before - 1) * eta)
        if down >= 1:  # pure noise stays
            return down.item(), 1.0, 0.0
        alpha, alpha_down = 1 - after, 1 - down
        kept = down**2 * alpha**2 / alpha_down**2
        sigma_up = (after**2 - kept).clamp(min=0).sqrt()
        return down.item(), (alpha / alpha_down).item(), sigma_up.item()


EXPLODING = NoisePath()
FLOW = FlowPath()


def split_ancestral(sigma: float, sigma_next: float, eta: float = 1.0) -> tuple[float, float]:
    """Levels (sigma_down, sigma_up) with sigma_down^2 + sigma_up^2 = sigma_next^2.

    eta = 1 gives the variance of the exact reverse transition, eta = 0 a deterministic step.
    In single precision, as pictures were made: where sigma_next is a thousandth of sigma or less,
    sigma_down loses its digits or becomes 0, and solvers with a level between the two depend on it.
    By torch: its roots are not those of numpy in every last digit.
    Source: Song et al. 2020, https://arxiv.org/abs/2010.02502, equation 16, in sigma.
    """
    if not eta:
        return sigma_next, 0.0
    start, end = torch.tensor([sigma, sigma_next], dtype=torch.float32)
    whole = end * end
    kept = (whole * (start * start - whole) / (start * start)).clamp(min=0) if start else whole
    up = torch.minimum(end, kept.sqrt() * eta)
    return (whole - up * up).clamp(min=0).sqrt().item(), up.item()


class EPS:
    """The network predicts the noise in a unit-variance input (Ho et al. 2020)."""

    path: NoisePath = EXPLODING
    sigma_data: float

    def calculate_input(self, sigma: Tensor, noise: Tensor) -> Tensor:
        """x / sqrt(sigma^2 + sigma_data^2)."""
        sigma = reshape_sigma(sigma, noise.ndim)
        return noise / (sigma**2 + self.sigma_data**2) ** 0.5

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        """x - sigma * output."""
        return model_input - model_output * reshape_sigma(sigma, model_output.ndim)

    def noise_scaling(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, max_denoise: bool = False
    ) -> Tensor:
        """sigma * noise + latent; the highest level adds the variance of an absent latent."""
        sigma = reshape_sigma(sigma, noise.ndim)
        level = torch.sqrt(1.0 + sigma**2) if max_denoise else sigma
        return noise * level + latent_image

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        """The latent itself: alpha is 1 at every level."""
        return latent


class V_PREDICTION(EPS):
    """The network predicts the velocity alpha * noise - sigma * x0 of a unit circle.

    Source: Salimans and Ho 2022, https://arxiv.org/abs/2202.00512, appendix D.
    """

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        skip, gain = self._weights(reshape_sigma(sigma, model_output.ndim))
        return model_input * skip - model_output * gain

    def _weights(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data / total**0.5


class EDM(V_PREDICTION):
    """Preconditioned prediction: skip * x + gain * output.

    Source: Karras et al. 2022, https://arxiv.org/abs/2206.00364, table 1.
    """

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        skip, gain = self._weights(reshape_sigma(sigma, model_output.ndim))
        return model_input * skip + model_output * gain


class CONST:
    """Flow matching: the network predicts the constant velocity noise - x0.

    Source: Lipman et al. 2022, https://arxiv.org/abs/2210.02747.
    """

    path: NoisePath = FLOW

    def calculate_input(self, sigma: Tensor, noise: Tensor) -> Tensor:
        """x, unscaled."""
        return noise

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        """x - sigma * output."""
        return model_input - model_output * reshape_sigma(sigma, model_output.ndim)

    def noise_scaling(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, max_denoise: bool = False
    ) -> Tensor:
        """sigma * noise + (1 - sigma) * latent."""
        sigma = reshape_sigma(sigma, noise.ndim)
        return sigma * noise + (1.0 - sigma) * latent_image

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        """latent / (1 - sigma): alpha is divided out; pure noise, where it is 0, stays."""
        alpha = 1.0 - reshape_sigma(sigma, latent.ndim)
        return latent / torch.where(alpha == 0, 1.0, alpha)


class X0(EPS):
    """The network predicts the clean latent."""

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        return model_output


class IMG_TO_IMG(X0):
    """The network maps an image to an image: its input is not scaled by the noise level."""

    def calculate_input(self, sigma: Tensor, noise: Tensor) -> Tensor:
        return noise


class IMG_TO_IMG_FLOW(CONST):
    """Image to image on a flow schedule: the output is the clean latent."""

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        return model_output


class COSMOS_RFLOW:
    """Flow prediction on variance-exploding levels: the flow time is sigma / (1 + sigma)."""

    path: NoisePath = EXPLODING

    def calculate_input(self, sigma: Tensor, noise: Tensor) -> Tensor:
        """x * (1 - t) with t = sigma / (1 + sigma)."""
        sigma = reshape_sigma(sigma, noise.ndim)
        return noise * (1.0 - sigma / (sigma + 1.0))

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        """x * (1 - t) - t * output."""
        time = reshape_sigma(sigma, model_output.ndim)
        time = time / (time + 1.0)
        return model_input * (1.0 - time) - model_output * time

    def noise_scaling(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, max_denoise: bool = False
    ) -> Tensor:
        """sigma * noise + latent."""
        return noise * reshape_sigma(sigma, noise.ndim) + latent_image

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        return latent
