"""The optional built-in node modules, in the order in which they are loaded."""

from __future__ import annotations

MODULES: tuple[str, ...] = (
    "nodes_latent",
    "nodes_custom_sampler",
    "nodes_align_your_steps",
    "nodes_advanced_samplers",
    "nodes_clip_sdxl",
    "nodes_controlnet",
    "nodes_prompt_weights",
    "nodes_mask",
    "nodes_compositing",
    "nodes_images",
    "nodes_post_processing",
    "nodes_rebatch",
    "nodes_model_advanced",
    "nodes_model_merging",
    "nodes_cfg",
    "nodes_apg",
    "nodes_mahiro",
    "nodes_tcfg",
    "nodes_fresca",
    "nodes_eps",
    "nodes_perpneg",
    "nodes_differential_diffusion",
    "nodes_string",
    "nodes_primitive",
    "nodes_preview_any",
)
