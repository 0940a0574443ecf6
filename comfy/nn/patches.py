"""What custom nodes put after the attention of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

PATCH_TABLES = ("patches", "patches_replace")
OUTPUT, CROSS_OUTPUT = "attn1_output_patch", "attn2_output_patch"


def told(options: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """What a patch is told: all of ``transformer_options`` but the tables, and facts of a layer."""
    return {key: value for key, value in options.items() if key not in PATCH_TABLES} | facts


def attention_output(
    attn: Tensor,
    options: dict[str, Any] | None,
    heads: int,
    picture: Sequence[int] | None,
    name: str = OUTPUT,
) -> Tensor:
    """An attention's result ``[B, L, D]``, before its projection, through the patches
    ``patch(attn, extra_options)``.

    Args:
        options: The ``transformer_options`` of the call.
        picture: Start and stop of the picture's tokens where text attends with it; patches read
            them as ``img_slice``.
        name: The patches' name, `CROSS_OUTPUT` for an attention of the picture with the text.
    """
    patches = ((options or {}).get("patches") or {}).get(name)
    if not patches:
        return attn
    facts = told(options or {}, n_heads=heads, dim_head=attn.shape[-1] // heads)
    facts.pop("img_slice", None)
    if picture is not None:
        facts["img_slice"] = list(picture)
    for patch in patches:
        attn = patch(attn, facts)
    return attn
