"""Kinds of weight adapters, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.weights.adapters import (
    ADAPTERS as adapters,
)
from comfy.weights.adapters import (
    BOFTAdapter,
    GLoRAAdapter,
    LoHaAdapter,
    LoKrAdapter,
    LoRAAdapter,
    OFTAdapter,
    WeightAdapterBase,
)

write_through(__name__)
