"""Autoencoders that are recognised but cannot be loaded: their networks are not built in.

They are named so that a person is told what the file is, instead of that it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy.weights.marks import Marks, first_match

# Keys that every autoencoder of a kind has -> its name; the first match wins.
AUTOENCODERS: Marks = (
    (("vocoder.activation_post.downsample.lowpass.filter",), "MMAudio"),
    (
        ("decoder.conv_in.weight", "decoder.mid.attn_1.q.weight"),
        "HunyuanImage 2.1, refiner in an early layout",
    ),
)


def name_of(state_dict: Mapping[str, Any]) -> str | None:
    """The kind of an autoencoder that is known by name only; None for any other file."""
    return first_match(AUTOENCODERS, state_dict)
