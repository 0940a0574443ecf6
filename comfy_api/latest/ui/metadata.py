"""The texts that saved files carry: the prompt and the workflow that made them."""

from __future__ import annotations

import json
from typing import Any

from comfy_api.internal.policy import save_policy
from comfy_api.latest.io.node import ComfyNode


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
