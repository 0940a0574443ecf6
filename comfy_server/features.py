"""What the server says it can do. A flag is named here only if its routes are served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.feature_flags import get_server_features
from comfy_server.options import ServerOptions


def server_features(options: ServerOptions) -> dict[str, Any]:
    """The features as `/features` and the socket answer them; core keys cannot be overwritten.

    What packs add to `comfy_api.feature_flags.SERVER_FEATURE_FLAGS` is among them.
    """
    core = {
        "supports_preview_metadata": True,
        "max_upload_size": options.max_upload_bytes,
        "node_replacements": True,
        "extension": {"manager": {"supports_v4": True}},
        "supports_resume": True,
        "partner_run_gate_enabled": False,
    }
    return merged(merged(get_server_features(), options.feature_flags), core)


def merged(flags: Mapping[str, Any], winning: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees of flags as one; where both have a value the second wins."""
    both = dict(flags)
    for name, value in winning.items():
        known = both.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            value = merged(known, value)
        both[name] = value
    return both
