"""The HTTP server, under the names node packs import."""

from __future__ import annotations

import uuid

from aiohttp import web

from comfy_server.prompt_server import PromptServer
from protocol import BinaryEventTypes

__all__ = ["BinaryEventTypes", "PromptServer", "uuid", "web"]
