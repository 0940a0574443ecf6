"""Parts of the KL autoencoder, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.autoencoder.layers import (
    AttnBlock,
    Decoder,
    Downsample,
    Encoder,
    ResnetBlock,
    Upsample,
    nonlinearity,
    vae_attention,
)
from comfy.public import write_through

write_through(__name__)
