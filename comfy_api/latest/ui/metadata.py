"""The texts that saved files carry: the prompt and the workflow that made them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from comfy_api.internal.policy import save_policy
from comfy_api.latest.io.node import ComfyNode

logger = logging.getLogger(__name__)


def workflow_texts(cls: type[ComfyNode] | None) -> dict[str, str]:
    """`prompt` and the extra texts of a prompt, each as JSON; empty if files shall carry none.

    Args:
        cls: The node class as `execute` receives it; None has no prompt.
    """
    if cls is None or not save_policy().metadata:
        return {}
    texts: dict[str, str] = {}
    if cls.hidden.prompt is not None:
        texts["prompt"] = json.dumps(cls.hidden.prompt)
    extra: dict[str, Any] = cls.hidden.extra_pnginfo or {}
    return texts | {key: json.dumps(value) for key, value in extra.items()}


def with_latin_names(texts: Mapping[str, Any]) -> dict[str, Any]:
    """The texts whose names are in Latin-1, as PNG and WebP files need.

    Others, which only a client can add, are named in the log: no picture is lost for them.
    """
    kept = {}
    for name, text in texts.items():
        try:
            name.encode("latin-1")
        except UnicodeEncodeError:
            logger.warning(
                "saved without the text %.60r of extra_pnginfo: its name has letters that the file "
                "cannot hold; expected Latin-1",
                name,
            )
        else:
            kept[name] = text
    return kept
