"""The KL autoencoder, under the names custom nodes import."""
# ruff: noqa: F401
from comfy.ldm.autoencoder.kl import AutoencoderKL, DiagonalGaussianDistribution
from comfy.public import write_through

write_through(__name__)
