"""GLIGEN, under the names custom nodes import, and its loader."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from comfy.ldm.gligen.model import Gligen, build_gligen
from comfy.public import write_through


def load_gligen(sd: Mapping[str, Tensor]) -> Gligen:
    """The network of a file's tensors."""
    return build_gligen(sd)


write_through(__name__)
