"""Autoencoders of the diffusers library, under the name custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.weights.diffusers_vae import convert_vae_state_dict

write_through(__name__)
