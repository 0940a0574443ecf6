"""Nodes that change how a model's prediction and noise levels are understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy import latent_formats
from comfy.devices import formulas
from comfy.sampling import noise_levels, schedule_curves
from comfy.sampling import parameterisation as predictions
from comfy_extras.guidance import with_rule
from comfy_nodes.limits import MAX_RESOLUTION

CATEGORY = "advanced/model"
FLUX_TOKEN_PIXELS = 16  # side of the square of pixels that is one token


class LCM(predictions.EPS):
    """Prediction of latent consistency models: the estimate is blended with the input at low noise.

    Source: Luo et al. 2023, https://arxiv.org/abs/2310.04378, equation 9.
    """

    timestep: Callable[[Tensor], Tensor]  # of the noise levels this class is mixed with
    data_spread = 0.5
    timestep_scale = 10.0

    def calculate_denoised(
        self, sigma: Tensor, model_output: Tensor, model_input: Tensor
    ) -> Tensor:
        level = predictions.reshape_sigma(sigma, model_output.ndim)
        timestep = predictions.reshape_sigma(self.timestep(sigma), model_output.ndim)
        estimate = model_input - model_output * level
        scaled = timestep * self.timestep_scale
        total = scaled**2 + self.data_spread**2
        return estimate * (scaled / total**0.5) + model_input * (self.data_spread**2 / total)


class ModelSamplingDiscreteDistilled(noise_levels.ModelSamplingDiscrete):
    """The few levels of a table that a distilled model was trained on."""

    original_timesteps = 50

    def __init__(self, model_config: Any = None, zsnr: bool | None = None) -> None:
        super().__init__(model_config, zsnr)
        self.skip_steps = self.num_timesteps // self.original_timesteps
        self.set_sigmas(self.sigmas[self.skip_steps - 1 :: self.skip_steps])

    def timestep(self, sigma: Tensor) -> Tensor:
        return super().timestep(sigma) * self.skip_steps + (self.skip_steps - 1)

    def sigma(self, timestep: Tensor) -> Tensor:
        place = (timestep.float() - (self.skip_steps - 1)) / self.skip_steps
        return super().sigma(place)


def with_sampling(model: Any, sampling: Any) -> tuple[Any]:
    """A view of the model with another sampling object."""
    view = model.clone()
    view.add_object_patch("model_sampling", sampling)
    return (view,)


def advanced_sampling(levels: type, prediction: type, model: Any, **options: Any) -> Any:
    """A sampling object with the settings of the model's family."""
    kind = noise_levels.compose(levels, prediction, "ModelSamplingAdvanced")
    return kind(model.model.model_config, **options)


def check_levels(sigma_min: float, sigma_max: float) -> None:
    """Refuse noise levels between which no even steps in log sigma lie.

    Raises:
        ValueError: A level is not above 0, or the lower is above the higher.
    """
    if not 0 < sigma_min <= sigma_max:
        raise ValueError(
            "sigma_min, sigma_max: expected 0 < sigma_min <= sigma_max, found "
            f"{sigma_min:g} and {sigma_max:g}"
        )


def check_shift(shift: float) -> None:
    """Refuse a shift that leaves no noise levels.

    Raises:
        ValueError: It is not above 0.
    """
    if shift <= 0:
        raise ValueError(f"shift: expected a number above 0, found {shift:g}")


# Menu entry -> levels and prediction.
DISCRETE_KINDS: dict[str, tuple[type, type]] = {
    "eps": (noise_levels.ModelSamplingDiscrete, predictions.EPS),
    "v_prediction": (noise_levels.ModelSamplingDiscrete, predictions.V_PREDICTION),
    "lcm": (ModelSamplingDiscreteDistilled, LCM),
    "x0": (noise_levels.ModelSamplingDiscrete, predictions.X0),
    "img_to_img": (noise_levels.ModelSamplingDiscrete, predictions.IMG_TO_IMG),
}

# Menu entry -> levels, prediction, spread of the data.
CONTINUOUS_KINDS: dict[str, tuple[type, type, float]] = {
    "v_prediction": (
        noise_levels.ModelSamplingContinuousEDM,
        predictions.V_PREDICTION,
        1.0,
    ),
    "edm": (noise_levels.ModelSamplingContinuousEDM, predictions.EDM, 0.5),
    "edm_playground_v2.5": (noise_levels.ModelSamplingContinuousEDM, predictions.EDM, 0.5),
    "eps": (noise_levels.ModelSamplingContinuousEDM, predictions.EPS, 1.0),
    "cosmos_rflow": (noise_levels.ModelSamplingCosmosRFlow, predictions.COSMOS_RFLOW, 1.0),
}


class ModelSamplingDiscrete:
    """Chooses the prediction of a model with a table of levels."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "sampling": (list(DISCRETE_KINDS),),
                "zsnr": ("BOOLEAN", {"default": False}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(self, model: Any, sampling: str, zsnr: bool) -> tuple[Any]:
        """With `zsnr` the last level carries no signal."""
        levels, prediction = DISCRETE_KINDS[sampling]
        return with_sampling(model, advanced_sampling(levels, prediction, model, zsnr=zsnr))


class ModelSamplingStableCascade:
    """Shifts the levels of Stable Cascade."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "shift": shift_input(2.0)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(self, model: Any, shift: float) -> tuple[Any]:
        """Larger shifts spend more steps at high noise."""
        check_shift(shift)
        sampling = advanced_sampling(noise_levels.StableCascadeSampling, predictions.EPS, model)
        sampling.set_parameters(shift)
        return with_sampling(model, sampling)


class ModelSamplingSD3:
    """Shifts the levels of a flow model."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "shift": shift_input(3.0)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(self, model: Any, shift: float, multiplier: float = 1000) -> tuple[Any]:
        """Larger shifts spend more steps at high noise; the network is told sigma * multiplier."""
        check_shift(shift)
        sampling = advanced_sampling(
            noise_levels.ModelSamplingDiscreteFlow, predictions.CONST, model
        )
        sampling.set_parameters(shift=shift, multiplier=multiplier)
        return with_sampling(model, sampling)


class ModelSamplingAuraFlow(ModelSamplingSD3):
    """Shifts the levels of a flow model that is told sigma itself."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "shift": shift_input(1.73)}}

    FUNCTION = "patch_aura"

    def patch_aura(self, model: Any, shift: float) -> tuple[Any]:
        """As the base, with a multiplier of 1."""
        return self.patch(model, shift, multiplier=1.0)


class ModelSamplingFlux:
    """Shifts the levels of FLUX by the size of the picture."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"default": 1024, "min": 16, "max": MAX_RESOLUTION, "step": 8}
        return {
            "required": {
                "model": ("MODEL",),
                "max_shift": shift_input(1.15),
                "base_shift": shift_input(0.5),
                "width": ("INT", side),
                "height": ("INT", side),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(
        self, model: Any, max_shift: float, base_shift: float, width: int, height: int
    ) -> tuple[Any]:
        """The shift is linear in the tokens: base at 256, max at 4096."""
        tokens = width * height / FLUX_TOKEN_PIXELS**2
        shift = schedule_curves.shift_for_tokens(tokens, base_shift, max_shift, base_tokens=256)
        sampling = advanced_sampling(noise_levels.ModelSamplingFlux, predictions.CONST, model)
        sampling.set_parameters(shift=shift)
        return with_sampling(model, sampling)


class ModelSamplingContinuousEDM:
    """Chooses the prediction of a model with levels between two ends."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "sampling": (list(CONTINUOUS_KINDS),),
                "sigma_max": sigma_input(120.0),
                "sigma_min": sigma_input(0.002),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(self, model: Any, sampling: str, sigma_max: float, sigma_min: float) -> tuple[Any]:
        """The entry for Playground 2.5 also sets its latent format."""
        levels, prediction, spread = CONTINUOUS_KINDS[sampling]
        made = advanced_sampling(levels, prediction, model)
        check_levels(sigma_min, sigma_max)
        made.set_parameters(sigma_min, sigma_max, spread)
        (view,) = with_sampling(model, made)
        if sampling == "edm_playground_v2.5":
            view.add_object_patch("latent_format", latent_formats.SDXL_Playground_2_5())
        return (view,)


class ModelSamplingContinuousV:
    """Velocity prediction with levels between two ends."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "sampling": (["v_prediction"],),
                "sigma_max": sigma_input(500.0),
                "sigma_min": sigma_input(0.03),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(
        self,
        model: Any,
        sampling: str,  # noqa: ARG002 - the menu has one entry
        sigma_max: float,
        sigma_min: float,
    ) -> tuple[Any]:
        """Levels evenly spaced in the angle between signal and noise."""
        made = advanced_sampling(
            noise_levels.ModelSamplingContinuousV, predictions.V_PREDICTION, model
        )
        check_levels(sigma_min, sigma_max)
        made.set_parameters(sigma_min, sigma_max, 1.0)
        return with_sampling(model, made)


class RescaleCFG:
    """Keeps guidance from raising the contrast.

    Source: Lin et al. 2023, https://arxiv.org/abs/2305.08891, section 3.4.
    """

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        share = {"default": 0.7, "min": 0.0, "max": 1.0, "step": 0.01}
        return {"required": {"model": ("MODEL",), "multiplier": ("FLOAT", share)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(self, model: Any, multiplier: float) -> tuple[Any]:
        """The guided velocity takes `multiplier` of the positive velocity's spread."""

        def guide(facts: dict[str, Any]) -> Tensor:
            x = facts["input"]
            sigma = predictions.reshape_sigma(facts["sigma"], x.ndim)
            norm = (sigma**2 + 1.0) ** 0.5

            def velocity(difference: Tensor) -> Tensor:  # of x minus the clean estimate
                return (x / norm**2 - (x - difference)) * norm / sigma

            positive, negative = velocity(facts["cond"]), velocity(facts["uncond"])
            guided = negative + facts["cond_scale"] * (positive - negative)
            # Of a video, each column has had a spread of its own; the paper's is one for an item.
            axes = tuple(range(1, x.ndim if formulas.as_published() else min(x.ndim, 4)))
            spread = guided.std(axes, keepdim=True)
            ratio = torch.where(spread > 0, positive.std(axes, keepdim=True) / spread, 1.0)
            final = multiplier * guided * ratio + (1.0 - multiplier) * guided
            return x - (x / norm**2 - final * sigma / norm)

        return (with_rule(model, guide),)


class ModelComputeDtype:
    """Chooses the number type a model computes in."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = ["default", "fp32", "fp16", "bf16"]
        return {"required": {"model": ("MODEL",), "dtype": (names,)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "advanced/debug/model"

    def patch(self, model: Any, dtype: str) -> tuple[Any]:
        """ "default" leaves the choice to the server."""
        view = model.clone()
        view.set_model_compute_dtype(node_helpers.string_to_torch_dtype(dtype))
        return (view,)


def shift_input(default: float) -> tuple[str, dict[str, float]]:
    """Declaration of a shift."""
    return ("FLOAT", {"default": default, "min": 0.0, "max": 100.0, "step": 0.01})


def sigma_input(default: float) -> tuple[str, dict[str, Any]]:
    """Declaration of a noise level."""
    limits = {"min": 0.0, "max": 1000.0, "step": 0.001, "round": False}
    return ("FLOAT", {"default": default, **limits})


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "ModelSamplingDiscrete": ModelSamplingDiscrete,
    "ModelSamplingContinuousEDM": ModelSamplingContinuousEDM,
    "ModelSamplingContinuousV": ModelSamplingContinuousV,
    "ModelSamplingStableCascade": ModelSamplingStableCascade,
    "ModelSamplingSD3": ModelSamplingSD3,
    "ModelSamplingAuraFlow": ModelSamplingAuraFlow,
    "ModelSamplingFlux": ModelSamplingFlux,
    "RescaleCFG": RescaleCFG,
    "ModelComputeDtype": ModelComputeDtype,
}
