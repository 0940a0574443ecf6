"""Sampling runs and their noise, under the names custom nodes import."""
# ruff: noqa: F401

import numpy as np  # custom nodes read it here

from comfy.public import write_through
from comfy.sampling.conditioning import convert_cond
from comfy.sampling.masks import prepare_mask
from comfy.sampling.noise import prepare_noise, prepare_noise_inner
from comfy.sampling.preparation import (
    cleanup_additional_models,
    get_models_from_cond,
    prepare_sampling,
)
from comfy.sampling.run import fix_empty_latent_channels, sample, sample_custom

write_through(__name__)
