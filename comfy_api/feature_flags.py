"""What server and client can do: the flags they exchange when a socket opens.

Flags are a tree of dictionaries; a dotted name such as `extension.manager.supports_v4` leads to
one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

SERVER_FEATURE_FLAGS: dict[str, Any] = {"supports_preview_metadata": True}
"""Flags of this server, which main completes before packs load; what packs add is told as well."""


def flag_at(flags: Mapping[str, Any], name: str, default: Any = False) -> Any:
    """The flag with a dotted name, or the default if there is none."""
    found: Any = flags
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return found


def get_connection_feature(
    sockets_metadata: Mapping[str, Mapping[str, Any]],
    sid: str,
    feature_name: str,
    default: Any = False,
) -> Any:
    """A flag that one client sent.

    Args:
        sockets_metadata: What is known of each client by id, with `feature_flags` if it sent any.
        sid: Id of the client.
        feature_name: Name of the flag, dotted if nested.
    """
    flags = sockets_metadata.get(sid, {}).get("feature_flags", {})
    return flag_at(flags, feature_name, default)


def supports_feature(
    sockets_metadata: Mapping[str, Mapping[str, Any]], sid: str, feature_name: str
) -> bool:
    """Whether one client said that it can do something."""
    return get_connection_feature(sockets_metadata, sid, feature_name, False) is True


def get_server_features() -> dict[str, Any]:
    """A copy of this server's flags."""
    return copy.deepcopy(SERVER_FEATURE_FLAGS)
