"""Prediction types and noise levels, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.sampling.noise_levels import (
    ModelSamplingContinuousEDM,
    ModelSamplingContinuousV,
    ModelSamplingCosmosRFlow,
    ModelSamplingDiscrete,
    ModelSamplingDiscreteEDM,
    ModelSamplingDiscreteFlow,
    ModelSamplingFlux,
    StableCascadeSampling,
    flux_time_shift,
    rescale_zero_terminal_snr_sigmas,
    time_snr_shift,
)
from comfy.sampling.parameterisation import (
    CONST,
    COSMOS_RFLOW,
    EDM,
    EPS,
    IMG_TO_IMG,
    IMG_TO_IMG_FLOW,
    V_PREDICTION,
    X0,
    reshape_sigma,
)

write_through(__name__)
