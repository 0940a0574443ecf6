"""The HTTP and WebSocket side: routes, sockets, users, files. Knows nothing of numerics.

main builds it in this order:

    options = ServerOptions(listen=("127.0.0.1",), port=8188, frontend_root=..., ...)
    queue = PromptQueue(interrupt=..., journal=...)
    services = Services(queue, node_names=..., node_info=..., validate=..., system_stats=...)
    server = PromptServer(loop, options, services, logs)   # becomes PromptServer.instance
    ...load node packs; server.packs.web_directories[name] = folder...
    server.add_routes()
    await serve(server)

`PromptServer` is the event sink of the queue and of the executor. `serve` returns after SIGINT or
SIGTERM, or when its task is cancelled. `running` is the same as a context manager, for tests.
"""

from __future__ import annotations

from comfy_server.logs import LogCapture
from comfy_server.options import ServerOptions
from comfy_server.prompt_server import PromptServer
from comfy_server.services import Services
from comfy_server.serving import CannotListen, Listener, running, serve

__all__ = [
    "CannotListen",
    "Listener",
    "LogCapture",
    "PromptServer",
    "ServerOptions",
    "Services",
    "running",
    "serve",
]
