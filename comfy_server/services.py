"""What the routes work on: everything main hands to the server, and the keys to find it by."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from comfy_execution.planning import Plan
from comfy_execution.queue import PromptQueue
from comfy_server.accounts import Account
from comfy_server.options import ServerOptions

if TYPE_CHECKING:
    from comfy_server.logs import LogCapture
    from comfy_server.packs import Packs
    from comfy_server.prompt_server import PromptServer
    from comfy_server.users import UserManager

JsonDict = dict[str, Any]
# (valid, error or None, ids of valid output nodes, errors by node id)
Validation = tuple[bool, JsonDict | None, list[str], JsonDict]


@dataclass
class Services:
    """Callables and objects from the other side of the house.

    Attributes:
        queue: The prompt queue; main sets it once it is built.
        node_names: All class names, in listing order.
        node_info: Class name -> its /object_info entry; may raise, the entry is then left out.
        validate: (prompt id, prompt, partial targets or None) -> Validation, plain or awaitable.
        system_stats: Versions, memory and devices, as `/system_stats` shows them.
        node_replacements: Old class name -> how to replace it.
        apply_replacements: Rewrites old node names of a submitted prompt.
        plan: (prompt, ids of its valid outputs, extra data) -> what would run, for dry runs.
        memory: Which models hold how much of which device.
        ready: Whether models can run: what /readyz answers; text says why not.
    """

    queue: PromptQueue
    node_names: Callable[[], Iterable[str]] = tuple
    node_info: Callable[[str], JsonDict] = lambda _: {}
    validate: Callable[..., Validation | Awaitable[Validation]] | None = None
    system_stats: Callable[[], JsonDict] = dict
    node_replacements: Callable[[], Mapping[str, Any]] = dict
    apply_replacements: Callable[[JsonDict], JsonDict] | None = None
    plan: Callable[[JsonDict, list[str], JsonDict], Awaitable[Plan]] | None = None
    memory: Callable[[], list[JsonDict]] = list
    ready: Callable[[], str | None] = lambda: None
    metrics: Callable[[], JsonDict] = field(default=dict)


async def resolve(value: Any) -> Any:
    """Awaits `value` when it is awaitable, so that given callables may be of either kind."""
    return await value if inspect.isawaitable(value) else value


# of one request
ACCOUNT: web.RequestKey[Account] = web.RequestKey("account", Account)
USER: web.RequestKey[str] = web.RequestKey("user", str)
PROMPT_ID: web.RequestKey[str] = web.RequestKey("prompt_id", str)

OPTIONS: web.AppKey[ServerOptions] = web.AppKey("options", ServerOptions)
SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
SERVER: web.AppKey[PromptServer] = web.AppKey("server")
USERS: web.AppKey[UserManager] = web.AppKey("users")
PACKS: web.AppKey[Packs] = web.AppKey("packs")
LOGS: web.AppKey[LogCapture] = web.AppKey("logs")
