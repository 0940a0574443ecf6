"""What the server says it can do. A flag is named here only if its routes are served."""

from __future__ import annotations

from typing import Any

from comfy_server.options import ServerOptions


def server_features(options: ServerOptions) -> dict[str, Any]:
    """The features as `/features` and the socket answer them; core keys cannot be overwritten."""
    core = {
        "supports_preview_metadata": True,
        "max_upload_size": options.max_upload_bytes,
        "node_replacements": True,
        "extension": {"manager": {"supports_v4": True}},
        "supports_resume": True,
        "partner_run_gate_enabled": False,
    }
    return {**options.feature_flags, **core}
