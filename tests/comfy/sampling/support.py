"""Models without weights whose clean estimate is known in closed form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from comfy import conds
from comfy.latent_formats import LatentFormat
from comfy.patching.patcher import ModelPatcher
from comfy.sampling import noise_levels
from comfy.sampling.parameterisation import CONST

SPREAD, OFFSET = 0.35, 0.8
POSITIVE = [0.5, -0.25, 0.1, 0.0]
NEGATIVE = [-0.1, 0.2, 0.0, 0.3]

CPU = torch.device("cpu")

SMALL = (1, 4, 8, 8)
"""Shape of the recorded latents."""

EDM = ("EDM", {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5})
ZERO_SNR = ("V_PREDICTION", {"zsnr": True})
SD1, SD3, FLUX = ("EPS", {}), ("FLOW", {"shift": 3.0}), ("FLUX", {"shift": 1.15})


def two_gaussians(x: Tensor, sigma: Tensor, centre: Tensor, flow: bool) -> Tensor:
    """Exact estimate for data centre +- OFFSET with deviation SPREAD, per element.

    In the order of the recorded runs, so that they come back bit for bit.
    """
    alpha = 1 - sigma if flow else torch.ones_like(sigma)
    y = x - alpha * centre
    variance = alpha**2 * SPREAD**2 + sigma**2
    pull = alpha * SPREAD * SPREAD if flow else SPREAD**2
    mean = pull * y + sigma**2 * OFFSET * torch.tanh(alpha * OFFSET * y / variance)
    return centre + mean / variance


class Guided:
    """The closed-form estimate with guidance, which amplifies near clean levels."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        config = SimpleNamespace(sampling_settings=settings)
        self.sampling = noise_levels.build_model_sampling(kind, config)
        self.inner_model = SimpleNamespace(
            inner_model=SimpleNamespace(model_sampling=self.sampling)
        )
        self.flow = isinstance(self.sampling, CONST)

    def __call__(
        self, x: Tensor, sigma: Tensor, model_options: Any = None, **kwargs: Any
    ) -> Tensor:
        level = sigma.reshape(-1, 1, 1, 1)
        wanted, avoided = (
            two_gaussians(x, level, torch.tensor(centre).reshape(1, 4, 1, 1), self.flow)
            for centre in (POSITIVE, NEGATIVE)
        )
        estimate = avoided + (wanted - avoided) * 3.0
        for hook in (model_options or {}).get("sampler_post_cfg_function", ()):
            hook({"denoised": estimate, "uncond_denoised": estimate})
        return estimate

    def at(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self(x, sigma.expand(len(x)))

    def half_log_snr(self, sigma: Tensor) -> Tensor:
        return -(sigma.logit() if self.flow else sigma.log())


class TestModel(nn.Module):
    """A base model with everything the sampling code asks for and no network.

    Args:
        kind: Name in `noise_levels.SAMPLING_KINDS`.
        settings: Settings of its sampling object.
    """

    __test__ = False

    def __init__(
        self, kind: str = "EPS", settings: dict[str, Any] | None = None, latent_format: Any = None
    ) -> None:
        super().__init__()
        config = SimpleNamespace(sampling_settings=settings or {})
        self.model_sampling = noise_levels.build_model_sampling(kind, config)
        self.latent_format = latent_format or LatentFormat()
        self.current_patcher = None
        self.calls: list[dict[str, Any]] = []

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return {"c_crossattn": conds.CONDCrossAttn(kwargs["cross_attn"])}

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, Any]:
        return {}

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        return 0.0

    def get_dtype(self) -> torch.dtype:
        return torch.float32

    def process_latent_in(self, latent: Tensor) -> Tensor:
        return self.latent_format.process_in(latent)

    def process_latent_out(self, latent: Tensor) -> Tensor:
        return self.latent_format.process_out(latent)

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        shape = [sigma.shape[0]] + [1] * (noise.ndim - 1)
        made: Tensor = self.model_sampling.noise_scaling(sigma.reshape(shape), noise, latent_image)
        return made

    def note_call(
        self, x: Tensor, t: Tensor, context: Tensor | None, options: dict[str, Any]
    ) -> None:
        self.calls.append(
            {
                "x": list(x.shape),
                "context": None if context is None else list(context.shape),
                "sigma": t.tolist(),
                "cond_or_uncond": options.get("cond_or_uncond"),
            }
        )


class ClosedFormModel(TestModel):
    """Two Gaussians per element around a centre given as the context [B, 1, C]."""

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, transformer_options: Any = None, **kw: Any
    ) -> Tensor:
        self.note_call(x, t, c_crossattn, transformer_options)
        spatial = [1] * (x.ndim - 2)
        centre = c_crossattn[:, 0].reshape(c_crossattn.shape[0], -1, *spatial)
        flow = isinstance(self.model_sampling, CONST)
        return two_gaussians(x, t.reshape(-1, 1, *spatial), centre, flow)


def context(centre: list[float]) -> Tensor:
    return torch.tensor(centre).reshape(1, 1, -1)


def conditioning(centre: list[float], **options: Any) -> list[Any]:
    return [[context(centre), options]]


def patcher(model: nn.Module) -> ModelPatcher:
    return ModelPatcher(model, load_device=CPU, offload_device=CPU)


def assert_same_but_rounding(made: Tensor, expected: Tensor, share: float = 1e-6) -> None:
    """Refuse a difference above a share of the largest value expected."""
    bound = share * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(made.double(), expected.double(), rtol=0, atol=bound)
