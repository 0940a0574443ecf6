"""Sampling put together from parts: noise, guider, sampler, noise levels."""
# ruff: noqa: F401 - custom nodes import the classes from here

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io
from comfy_extras.custom_sampling import levels, runs, samplers
from comfy_extras.custom_sampling.guiders import (
    BasicGuider,
    CFGGuider,
    DualCFGGuider,
    Guider_Basic,
    Guider_DualCFG,
)
from comfy_extras.custom_sampling.levels import (
    BasicScheduler,
    BetaSamplingScheduler,
    ExponentialScheduler,
    ExtendIntermediateSigmas,
    FlipSigmas,
    KarrasScheduler,
    LaplaceScheduler,
    ManualSigmas,
    PolyexponentialScheduler,
    SamplingPercentToSigma,
    SDTurboScheduler,
    SetFirstSigma,
    SplitSigmas,
    SplitSigmasDenoise,
    VPScheduler,
)
from comfy_extras.custom_sampling.noise import (
    AddNoise,
    DisableNoise,
    Noise_EmptyNoise,
    Noise_RandomNoise,
    RandomNoise,
)
from comfy_extras.custom_sampling.runs import SamplerCustom, SamplerCustomAdvanced
from comfy_extras.custom_sampling.samplers import (
    KSamplerSelect,
    SamplerDPMAdaptative,
    SamplerDPMPP_2M_SDE,
    SamplerDPMPP_2S_Ancestral,
    SamplerDPMPP_3M_SDE,
    SamplerDPMPP_SDE,
    SamplerER_SDE,
    SamplerEulerAncestral,
    SamplerEulerAncestralCFGPP,
    SamplerLMS,
    SamplerSASolver,
    SamplerSEEDS2,
)


class CustomSamplersExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [*runs.NODES, *samplers.NODES, *levels.NODES]


async def comfy_entrypoint() -> CustomSamplersExtension:
    """Called by the loader of built-in modules."""
    return CustomSamplersExtension()
