"""Rounding of weights, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.weights.rounding import stochastic_rounding

write_through(__name__)
