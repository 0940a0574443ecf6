"""The sound autoencoder of LTX-2, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.lightricks.av_model import SPECTRA_A_CELL as LATENT_DOWNSAMPLE_FACTOR
from comfy.public import write_through
from comfy.vae.ltx_audio import AudioVAE

write_through(__name__)
