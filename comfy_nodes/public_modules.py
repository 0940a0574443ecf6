"""Modules that are there before packs load, as packs take for granted.

Many write `import comfy` and then `comfy.samplers.KSampler`, or look a module up in `sys.modules`.
Nothing of our own imports the modules of public names, so somebody has to.
"""

from __future__ import annotations

import importlib

PUBLIC_MODULES = (
    "comfy.cldm.cldm",
    "comfy.clip_vision",
    "comfy.comfy_types.node_typing",
    "comfy.controlnet",
    "comfy.diffusers_load",
    "comfy.gligen",
    "comfy.hooks",
    "comfy.k_diffusion.sampling",
    "comfy.k_diffusion.utils",
    "comfy.latent_formats",
    "comfy.ldm.models.autoencoder",
    "comfy.ldm.modules.attention",
    "comfy.ldm.modules.diffusionmodules.openaimodel",
    "comfy.ldm.modules.diffusionmodules.util",
    "comfy.lora",
    "comfy.model_base",
    "comfy.model_detection",
    "comfy.model_management",
    "comfy.model_patcher",
    "comfy.model_sampling",
    "comfy.ops",
    "comfy.patcher_extension",
    "comfy.sample",
    "comfy.sampler_helpers",
    "comfy.samplers",
    "comfy.sd",
    "comfy.sd1_clip",
    "comfy.sdxl_clip",
    "comfy.supported_models",
    "comfy.taesd.taesd",
    "comfy.text_encoders.flux",
    "comfy.text_encoders.sd3_clip",
    "comfy.utils",
    "comfy_api.latest",
    "comfy_execution.graph",
    "comfy_execution.graph_utils",
    "comfy_execution.utils",
    "execution",
    "latent_preview",
    "node_helpers",
    "nodes",
    "server",
)


def import_public_modules() -> None:
    """Imports them; they only name what is loaded, so this takes 30 ms."""
    for name in PUBLIC_MODULES:
        importlib.import_module(name)
