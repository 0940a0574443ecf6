"""What custom nodes put behind the attention of networks whose text and picture attend together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

PATCH_TABLES = ("patches", "patches_replace")
OUTPUT = "attn1_output_patch"


def told(options: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """What a patch is told: all of ``transformer_options`` but the tables, and facts of a layer."""
    return {key: value for key, value in options.items() if key not in PATCH_TABLES} | facts


def attention_output(
    attn: Tensor, options: dict[str, Any] | None, heads: int, picture: Sequence[int]
) -> Tensor:
    """A joint attention's result ``[B, L, D]``, before its projection, through the patches
    ``patch(attn, extra_options)``.

    Args:
        options: The ``transformer_options`` of the call.
        picture: Start and stop of the picture's tokens; patches read them as ``img_slice``.
    """
    patches = ((options or {}).get("patches") or {}).get(OUTPUT)
    if not patches:
        return attn
    facts = told(
        options or {}, n_heads=heads, dim_head=attn.shape[-1] // heads, img_slice=list(picture)
    )
    for patch in patches:
        attn = patch(attn, facts)
    return attn
