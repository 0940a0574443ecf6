"""Reads what shapes cannot tell from a file's header.

A safetensors header may carry text by key. Files of this project's small models hold, as JSON
objects, `unet_config` (`num_heads` or `num_head_channels`, `norm_num_groups`), `vae_config`
(`norm_num_groups`) and `text_config` (`num_attention_heads`). A file without them has the usual
values of its family.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from comfy.weights.fill import IncompleteWeightsError

logger = logging.getLogger(__name__)

# Hints that are understood, by header key. Anything else in these objects belongs to other
# programs.
KNOWN_HINTS: dict[str, tuple[str, ...]] = {
    "unet_config": ("num_heads", "num_head_channels", "norm_num_groups"),
    "vae_config": ("norm_num_groups",),
    "text_config": ("num_attention_heads",),
}


def read_hints(metadata: Mapping[str, str] | None, section: str) -> dict[str, int]:
    """Hints of one section of the header.

    Args:
        metadata: Header text by key, or None for files without a header.
        section: A key of `KNOWN_HINTS`.

    Raises:
        IncompleteWeightsError: A hint that is understood is not a whole number of 1 or more.
    """
    text = (metadata or {}).get(section)
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except ValueError:
        logger.warning("ignored header entry %s: it is not JSON", section)
        return {}
    if not isinstance(values, dict):
        logger.warning("ignored header entry %s: it is not a JSON object", section)
        return {}
    hints = {name: values[name] for name in KNOWN_HINTS[section] if name in values}
    for name, value in hints.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise IncompleteWeightsError(
                f"header entry {section}.{name} is {value!r}; it must be a whole number above 0"
            )
    return hints
