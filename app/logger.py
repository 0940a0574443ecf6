"""The last lines of the terminal, under the name packs import."""

from __future__ import annotations

from comfy_server.prompt_server import PromptServer


def get_logs() -> list[dict[str, str]]:
    """The last writes, oldest first: ``{"t": ISO local time, "m": text}``; none if none serves."""
    server = getattr(PromptServer, "instance", None)
    return [] if server is None else server.logs.entries()
