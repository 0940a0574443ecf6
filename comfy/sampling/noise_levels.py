"""The noise levels a model was trained on, and the timestep it is told for each.

Each class maps between sigma (standard deviation of the latent) and the network's timestep, holds
the ascending table `sigmas` that schedulers pick from, and answers at which sigma a given fraction
of the sampling is done (`percent_to_sigma`). They are joined with a prediction type of
``parameterisation`` by `compose`; the table `SAMPLING_KINDS` lists the joins that model families
name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from comfy.sampling import parameterisation as predictions

# Start of a variance-exploding range: above every real level, so that "from 0 %" always holds.
ABOVE_ALL_LEVELS = 999999999.9
# What alpha-bar of the last step becomes when rescaling to zero terminal SNR: a real zero would
# make sigma infinite (Lin et al. 2023 leave it to the sampler; this is the value in use for
# checkpoints).
ZERO_TERMINAL_ALPHA_BAR = 4.8973451890853435e-08


# e to this power is near the largest number of single precision.
LARGEST_EXPONENT = 80.0


def beta_schedule(kind: str, timesteps: int, start: float, end: float) -> Tensor:
    """Per-step noise variances of a discrete diffusion, float64 [timesteps]."""
    if kind == "linear":  # linear in the square root: the latent diffusion schedule
        return torch.linspace(start**0.5, end**0.5, timesteps, dtype=torch.float64) ** 2
    if kind == "sqrt_linear":  # linear in beta itself: the original DDPM schedule
        return torch.linspace(start, end, timesteps, dtype=torch.float64)
    if kind == "sqrt":
        return torch.linspace(start, end, timesteps, dtype=torch.float64) ** 0.5
    if kind == "cosine":  # Nichol and Dhariwal 2021, https://arxiv.org/abs/2102.09672
        time = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps + 8e-3
        alpha_bar = torch.cos(time / (1 + 8e-3) * math.pi / 2) ** 2
        return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(0, 0.999)
    raise ValueError(f"unknown beta schedule {kind!r}; known: linear, sqrt_linear, sqrt, cosine")


def rescale_zero_terminal_snr_sigmas(sigmas: Tensor) -> Tensor:
    """Stretch a table so that its last level carries (almost) no signal.

    Source: Lin et al. 2023, https://arxiv.org/abs/2305.08891, algorithm 1.
    """
    alpha = (1 / (sigmas * sigmas + 1)).sqrt()
    first, last = alpha[0].clone(), alpha[-1].clone()
    alpha_bar = ((alpha - last) * (first / (first - last))) ** 2
    alpha_bar[-1] = ZERO_TERMINAL_ALPHA_BAR
    return ((1 - alpha_bar) / alpha_bar) ** 0.5


def time_snr_shift(alpha: float, t: Any) -> Any:
    """Shift a flow time so that its signal-to-noise ratio falls by alpha: a t / (1 + (a - 1) t).

    Source: Esser et al. 2024, https://arxiv.org/abs/2403.03206, equation 23.
    """
    if alpha == 1.0:
        return t
    return alpha * t / (1 + (alpha - 1) * t)


def flux_time_shift(mu: float, sigma: float, t: Any) -> Any:
    """Shift a flow time by the exponent mu: e^mu / (e^mu + (1/t - 1)^sigma)."""
    if mu > LARGEST_EXPONENT:
        return 1 / (1 + math.exp(-mu) * (1 / t - 1) ** sigma)
    return math.exp(mu) / (math.exp(mu) + (1 / t - 1) ** sigma)


def _settings(model_config: Any) -> dict[str, Any]:
    settings = getattr(model_config, "sampling_settings", None)
    return dict(settings) if settings else {}


class NoiseLevels(nn.Module):
    """Base: a table of levels as a non-persistent buffer and its two ends."""

    sigmas: Tensor

    def _set_table(self, sigmas: Tensor) -> None:
        self.register_buffer("sigmas", sigmas, persistent=False)

    @property
    def sigma_min(self) -> Tensor:
        return self.sigmas[0]

    @property
    def sigma_max(self) -> Tensor:
        return self.sigmas[-1]


class ModelSamplingDiscrete(NoiseLevels):
    """A table of trained steps; levels between them are interpolated in log sigma."""

    log_sigmas: Tensor

    def __init__(self, model_config: Any = None, zsnr: bool | None = None) -> None:
        super().__init__()
        settings = _settings(model_config)
        if zsnr is None:
            zsnr = settings.get("zsnr", False)
        self._register_schedule(
            given_betas=None,
            beta_schedule=settings.get("beta_schedule", "linear"),
            timesteps=settings.get("timesteps", 1000),
            linear_start=settings.get("linear_start", 0.00085),
            linear_end=settings.get("linear_end", 0.012),
            zsnr=zsnr,
        )
        self.sigma_data = 1.0

    def _register_schedule(
        self,
        given_betas: Tensor | None = None,
        beta_schedule: str = "linear",
        timesteps: int = 1000,
        linear_start: float = 1e-4,
        linear_end: float = 2e-2,
        zsnr: bool = False,
    ) -> None:
        betas = given_betas
        if betas is None:
            betas = _beta_schedule(beta_schedule, timesteps, linear_start, linear_end)
        alpha_bar = torch.cumprod(1.0 - betas, dim=0)
        self.num_timesteps = int(betas.shape[0])
        self.linear_start, self.linear_end, self.zsnr = linear_start, linear_end, zsnr
        sigmas = ((1 - alpha_bar) / alpha_bar) ** 0.5
        self.set_sigmas(rescale_zero_terminal_snr_sigmas(sigmas) if zsnr else sigmas)

    def set_sigmas(self, sigmas: Tensor) -> None:
        """Replace the table by ascending levels [n]."""
        self._set_table(sigmas.float())
        self.register_buffer("log_sigmas", sigmas.log().float(), persistent=False)

    def timestep(self, sigma: Tensor) -> Tensor:
        """Index of the table's nearest level in log sigma; the shape of sigma."""
        table = self.log_sigmas.to(sigma.device)
        distance = (sigma.log().reshape(1, -1) - table.reshape(-1, 1)).abs()
        return distance.argmin(dim=0).reshape(sigma.shape).to(sigma.device)

    def sigma(self, timestep: Tensor) -> Tensor:
        """Level at a possibly fractional index."""
        table = self.log_sigmas.to(timestep.device)
        position = timestep.float().clamp(min=0, max=len(table) - 1)
        low, high = position.floor().long(), position.ceil().long()
        weight = position.frac()
        return ((1 - weight) * table[low] + weight * table[high]).exp().to(timestep.device)

    def percent_to_sigma(self, percent: float) -> float:
        if percent <= 0.0:
            return ABOVE_ALL_LEVELS
        if percent >= 1.0:
            return 0.0
        return self.sigma(torch.tensor((1.0 - percent) * 999.0)).item()


_beta_schedule = beta_schedule  # the parameter of _register_schedule has the public name


class ModelSamplingDiscreteEDM(ModelSamplingDiscrete):
    """A discrete table whose network is told log(sigma) / 4."""

    def timestep(self, sigma: Tensor) -> Tensor:
        return 0.25 * sigma.log()

    def sigma(self, timestep: Tensor) -> Tensor:
        return (timestep / 0.25).exp()


class ModelSamplingContinuousEDM(NoiseLevels):
    """Log-uniform levels between two ends; the network is told log(sigma) / 4 (Karras 2022)."""

    def __init__(self, model_config: Any = None) -> None:
        super().__init__()
        settings = _settings(model_config)
        self.set_parameters(
            settings.get("sigma_min", 0.002),
            settings.get("sigma_max", 120.0),
            settings.get("sigma_data", 1.0),
        )

    def set_parameters(self, sigma_min: float, sigma_max: float, sigma_data: float) -> None:
        self.sigma_data = sigma_data
        sigmas = torch.linspace(math.log(sigma_min), math.log(sigma_max), 1000).exp()
        self._set_table(sigmas)
        self.register_buffer("log_sigmas", sigmas.log(), persistent=False)

    def timestep(self, sigma: Tensor) -> Tensor:
        return 0.25 * sigma.log()

    def sigma(self, timestep: Tensor) -> Tensor:
        return (timestep / 0.25).exp()

    def percent_to_sigma(self, percent: float) -> float:
        if percent <= 0.0:
            return ABOVE_ALL_LEVELS
        if percent >= 1.0:
            return 0.0
        low, high = math.log(self.sigma_min), math.log(self.sigma_max)
        return math.exp((high - low) * (1.0 - percent) + low)


class ModelSamplingContinuousV(ModelSamplingContinuousEDM):
    """Levels as angles: the network is told 2/pi * atan(sigma)."""

    def timestep(self, sigma: Tensor) -> Tensor:
        return sigma.atan() / math.pi * 2

    def sigma(self, timestep: Tensor) -> Tensor:
        return (timestep * math.pi * 0.5).tan()


class ModelSamplingCosmosRFlow(ModelSamplingContinuousEDM):
    """Log-uniform levels; the network is told the flow time sigma / (1 + sigma)."""

    def timestep(self, sigma: Tensor) -> Tensor:
        return sigma / (sigma + 1)

    def sigma(self, timestep: Tensor) -> Tensor:
        highest = self.sigma_max.to(timestep.device)
        latest = highest / (highest + 1)
        time = torch.minimum(timestep, latest)
        return torch.where(timestep >= latest, highest, time / (1 - time))


class ModelSamplingDiscreteFlow(NoiseLevels):
    """Flow times in 0..1, shifted towards noise; the network is told sigma * multiplier."""

    def __init__(self, model_config: Any = None) -> None:
        super().__init__()
        settings = _settings(model_config)
        self.set_parameters(
            shift=settings.get("shift", 1.0), multiplier=settings.get("multiplier", 1000)
        )

    def set_parameters(
        self, shift: float = 1.0, timesteps: int = 1000, multiplier: float = 1000
    ) -> None:
        self.shift, self.multiplier = shift, multiplier
        self._set_table(self.sigma(torch.arange(1, timesteps + 1) / timesteps * multiplier))

    def timestep(self, sigma: Tensor) -> Tensor:
        return sigma * self.multiplier

    def sigma(self, timestep: Tensor) -> Tensor:
        return time_snr_shift(self.shift, timestep / self.multiplier)

    def percent_to_sigma(self, percent: float) -> float:
        if percent <= 0.0:
            return 1.0
        if percent >= 1.0:
            return 0.0
        return time_snr_shift(self.shift, 1.0 - percent)


class ModelSamplingFlux(NoiseLevels):
    """Flow times with an exponential shift; the network is told sigma itself."""

    def __init__(self, model_config: Any = None) -> None:
        super().__init__()
        self.set_parameters(shift=_settings(model_config).get("shift", 1.15))

    def set_parameters(self, shift: float = 1.15, timesteps: int = 10000) -> None:
        self.shift = shift
        self._set_table(self.sigma(torch.arange(1, timesteps + 1) / timesteps))

    def timestep(self, sigma: Tensor) -> Tensor:
        return sigma

    def sigma(self, timestep: Tensor) -> Tensor:
        return flux_time_shift(self.shift, 1.0, timestep)

    def percent_to_sigma(self, percent: float) -> float:
        if percent <= 0.0:
            return 1.0
        if percent >= 1.0:
            return 0.0
        return flux_time_shift(self.shift, 1.0, 1.0 - percent)


def _sigmoid_of_each(values: Tensor) -> Tensor:
    """As if each value came alone: of many in a row, one in thirty is rounded the other way."""
    apart = torch.stack((values, values), dim=-1)[..., 0]  # not in a row
    return apart.sigmoid()


class StableCascadeSampling(ModelSamplingDiscrete):
    """A continuous cosine schedule with a resolution shift (Pernias et al. 2023)."""

    def __init__(self, model_config: Any = None) -> None:
        NoiseLevels.__init__(self)
        self.set_parameters(_settings(model_config).get("shift", 1.0))

    def set_parameters(self, shift: float = 1.0, cosine_s: float = 8e-3) -> None:
        self.shift, self.sigma_data, self.num_timesteps = shift, 1.0, 10000
        self.cosine_s = torch.tensor(cosine_s)
        self._init_alpha_cumprod = self._cosine(torch.tensor(0.0))
        self.set_sigmas(self.sigma(torch.arange(1, self.num_timesteps + 1) / self.num_timesteps))

    def _cosine(self, time: Tensor) -> Tensor:
        offset = self.cosine_s.to(time.device)
        return torch.cos((time + offset) / (1 + offset) * math.pi * 0.5) ** 2

    def sigma(self, timestep: Tensor) -> Tensor:
        alpha_bar = self._cosine(timestep) / self._init_alpha_cumprod.to(timestep.device)
        if self.shift != 1.0:
            # All in single precision, as pictures were made.
            moved = 2 * torch.log(1 / torch.tensor(self.shift, dtype=torch.float32))
            alpha_bar = _sigmoid_of_each((alpha_bar / (1 - alpha_bar)).log() + moved)
        alpha_bar = alpha_bar.clamp(0.0001, 0.9999)
        return ((1 - alpha_bar) / alpha_bar) ** 0.5

    def timestep(self, sigma: Tensor) -> Tensor:
        alpha_bar = (1 / (sigma * sigma + 1)).clamp(0, 1.0)
        start = self._init_alpha_cumprod.to(alpha_bar.device)
        offset = self.cosine_s.to(alpha_bar.device)
        return ((alpha_bar * start) ** 0.5).acos() / (math.pi * 0.5) * (1 + offset) - offset

    def percent_to_sigma(self, percent: float) -> float:
        if percent <= 0.0:
            return ABOVE_ALL_LEVELS
        if percent >= 1.0:
            return 0.0
        return self.sigma(torch.tensor(1.0 - percent)).item()


# Name in a model family -> (prediction type, levels).
SAMPLING_KINDS: dict[str, tuple[type, type[NoiseLevels]]] = {
    "EPS": (predictions.EPS, ModelSamplingDiscrete),
    "V_PREDICTION": (predictions.V_PREDICTION, ModelSamplingDiscrete),
    "V_PREDICTION_EDM": (predictions.V_PREDICTION, ModelSamplingContinuousEDM),
    "STABLE_CASCADE": (predictions.EPS, StableCascadeSampling),
    "EDM": (predictions.EDM, ModelSamplingContinuousEDM),
    "FLOW": (predictions.CONST, ModelSamplingDiscreteFlow),
    "V_PREDICTION_CONTINUOUS": (predictions.V_PREDICTION, ModelSamplingContinuousV),
    "FLUX": (predictions.CONST, ModelSamplingFlux),
    "IMG_TO_IMG": (predictions.IMG_TO_IMG, ModelSamplingDiscrete),
    "FLOW_COSMOS": (predictions.COSMOS_RFLOW, ModelSamplingCosmosRFlow),
    "IMG_TO_IMG_FLOW": (predictions.IMG_TO_IMG_FLOW, ModelSamplingDiscreteFlow),
}


def compose(levels: type[NoiseLevels], prediction: type, name: str = "ModelSampling") -> type:
    """Class of a sampling object with the given levels and prediction type."""
    return type(
        name, (levels, prediction), {"__doc__": f"{prediction.__name__} over {levels.__name__}."}
    )


def build_model_sampling(kind: str, model_config: Any = None) -> Any:
    """Sampling object of a kind in `SAMPLING_KINDS`, with `model_config.sampling_settings`.

    Raises:
        ValueError: the kind is not in the table.
    """
    if kind not in SAMPLING_KINDS:
        raise ValueError(f"unknown sampling kind {kind!r}; known: {', '.join(SAMPLING_KINDS)}")
    prediction, levels = SAMPLING_KINDS[kind]
    return compose(levels, prediction)(model_config)
