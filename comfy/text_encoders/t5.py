"""The encoder of T5, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.t5.model import (
    T5,
    T5Attention,
    T5Block,
    T5Config,
    T5DenseActDense,
    T5DenseGatedActDense,
    T5LayerFF,
    T5LayerNorm,
    T5LayerSelfAttention,
    T5Stack,
)
from comfy.public import write_through

write_through(__name__)
