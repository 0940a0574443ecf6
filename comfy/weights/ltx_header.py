"""What files of LTX video tell in their header of each part, in one JSON object under `config`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


def told_of(metadata: Mapping[str, str] | None, *names: str) -> dict[str, Any]:
    """The settings of a part, such as ``("audio_vae", "preprocessing", "stft")``; empty if there
    are none.
    """
    try:
        told = json.loads((metadata or {}).get("config", "{}"))
    except ValueError:
        told = None
    if not isinstance(told, dict):
        logger.warning("ignored header entry config: it is no JSON object")
        return {}
    for number, name in enumerate(names):
        inner = told.get(name) or {}
        if not isinstance(inner, dict):
            where = ".".join(names[: number + 1])
            logger.warning("ignored header entry config: its %s is no JSON object", where)
            return {}
        told = inner
    return told
