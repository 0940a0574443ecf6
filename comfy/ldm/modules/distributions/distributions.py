"""The Gaussian of the KL autoencoder, under the name custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.autoencoder.kl import DiagonalGaussianDistribution
from comfy.public import write_through

write_through(__name__)
