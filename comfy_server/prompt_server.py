"""PromptServer: the object node packs know, and the event sink of the execution side.

It holds the application, the routes packs decorate, the sockets and a few counters packs read. What
the routes work on arrives as `Services`. `PromptServer.instance` exists before packs load.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, cast

from aiohttp import web

import folder_paths
from comfy_execution.events import (
    Event,
    Executing,
    ExecutionStart,
    Preview,
    ProgressState,
    ProgressText,
)
from comfy_execution.items import QueueItem, Submission
from comfy_execution.progress import EVERY_CHANGE_UP_TO
from comfy_execution.queue import PromptQueue
from comfy_server import frames
from comfy_server.application import add_routes, build_application
from comfy_server.auth import STORE
from comfy_server.detour import Detour
from comfy_server.features import server_features
from comfy_server.hub import Client, Hub
from comfy_server.logs import LogCapture
from comfy_server.metrics import Metrics
from comfy_server.options import ServerOptions
from comfy_server.outbox import LazyFrame
from comfy_server.ownership import owner_of_item
from comfy_server.packs import Packs
from comfy_server.quota import Quota
from comfy_server.services import Services
from comfy_server.submissions import Submissions
from comfy_server.users import UserManager
from protocol import BinaryEventTypes

logger = logging.getLogger(__name__)

PromptHandler = Callable[[dict[str, Any]], dict[str, Any]]

_news_item: ContextVar[QueueItem | None] = ContextVar("news_item", default=None)


def _wants_metadata(client: Client) -> bool:
    return bool(client.flags.get("supports_preview_metadata"))


def _wants_plain(client: Client) -> bool:
    return not _wants_metadata(client)


class PromptServer:
    """The HTTP and WebSocket side of one process.

    Attributes:
        routes: Decorated by packs while they load; added bare and under /api at start.
        app: The aiohttp application.
        number: Counter of submitted prompts, read and increased by packs.
        client_id: Whose prompt runs; valid while one does.
        last_node_id: The node that runs, as shown in the graph.
        supports: Names of extras, tested for membership by packs.
        listen_too: Binds another address while the server runs; gives its scheme and port.
    """

    instance: ClassVar[PromptServer]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: ServerOptions | None = None,
        services: Services | None = None,
        logs: LogCapture | None = None,
    ) -> None:
        PromptServer.instance = self
        self.loop = loop
        self.options = options or ServerOptions()
        self.services = services or Services(PromptQueue())
        self.services.queue.sink = self
        self.address = self.options.listen[0]
        self.port = self.options.port
        self.number = 0
        self.client_id: str | None = None
        self.last_node_id: str | None = None
        self.last_prompt_id: str | None = None
        self._running_nodes: dict[str | None, str] = {}  # by client: several prompts may run
        self.supports = ["custom_nodes_from_web"]
        self.on_prompt_handlers: list[PromptHandler] = []
        self.routes = web.RouteTableDef()
        self._submissions = Submissions(lambda items: self.prompt_queue.submit_all(items))
        self.hub = Hub(loop, self.options.preview_interval_s)
        self._detour = Detour()
        self.packs = Packs(self.options.frontend_root, self.options.extension_root)
        self.user_manager = UserManager(
            lambda: folder_paths.user_directory, multi_user=self.options.multi_user
        )
        self.quota = Quota(self.options.user_quota_bytes, self._folders_of)
        self.logs = logs or LogCapture()
        self.logs.listen(self._on_logs)
        self.metrics = Metrics(self)
        self.listen_too: Callable[[str, int], Awaitable[tuple[str, int]]] | None = None
        self.app = build_application(self)

    # -- what packs use ------------------------------------------------------------------------

    @property
    def prompt_queue(self) -> PromptQueue:
        """The queue prompts go through."""
        return self.services.queue

    @property
    def sockets(self) -> dict[str, web.WebSocketResponse]:
        """Open sockets by client id."""
        return self.hub.sockets

    @property
    def sockets_metadata(self) -> dict[str, dict[str, Any]]:
        """Client id -> `{"feature_flags": {...}}`."""
        return self.hub.metadata

    def add_on_prompt_handler(self, handler: PromptHandler) -> None:
        """Adds a function that sees, and may change, each posted body before validation."""
        self.on_prompt_handlers.append(handler)

    def trigger_on_prompt(self, json_data: dict[str, Any]) -> dict[str, Any]:
        """Passes a posted body through all handlers; one that fails is logged and skipped."""
        for handler in self.on_prompt_handlers:
            try:
                json_data = handler(json_data)
            except Exception:  # a pack's mistake must not refuse everybody's prompts
                logger.exception("the on-prompt handler %r failed", handler)
        return json_data

    def get_queue_info(self) -> dict[str, Any]:
        """`{"exec_info": {"queue_remaining": N}}`."""
        return {"exec_info": {"queue_remaining": self.prompt_queue.get_tasks_remaining()}}

    def queue_updated(self) -> None:
        """Tells everybody how many prompts wait."""
        self.send_sync("status", {"status": self.get_queue_info()})

    def send_sync(self, event: str | int, data: Any, sid: str | None = None) -> None:
        """Sends to one client, or to all when `sid` is None; callable from any thread.

        A pack that wants to see all news of a prompt puts a function of its own in the place of
        this one, or of `send_json`, and calls the old one in it.
        """
        if isinstance(event, int):
            self._post_binary(event, data, sid)
        elif self._is_replaced("send_json"):
            self.hub.post(lambda: self._detour.take(self.send_json, event, data, sid))
        else:
            self._post_text(event, data, sid)

    async def send(self, event: str | int, data: Any, sid: str | None = None) -> None:
        """As `send_sync`, from a coroutine."""
        if isinstance(event, int):
            self._post_binary(event, data, sid)
        else:
            await self.send_json(event, data, sid)

    async def send_json(self, event: str, data: Any, sid: str | None = None) -> None:
        """Sends a text frame."""
        self._post_text(event, data, sid)

    async def send_bytes(self, event: int, data: bytes, sid: str | None = None) -> None:
        """Sends a binary frame whose body is ready."""
        self._post_binary(event, data, sid)

    async def send_image(
        self, image_data: tuple[str, Any, int | None], sid: str | None = None
    ) -> None:
        """Encodes and sends (format, PIL image, largest side)."""
        self._post_binary(BinaryEventTypes.UNENCODED_PREVIEW_IMAGE, image_data, sid)

    def send_progress_text(self, text: str | bytes, node_id: str, sid: str | None = None) -> None:
        """Shows a line of text under a node."""
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        frame = frames.progress_text(str(node_id), plain)
        user = self._audience
        self.hub.post(lambda: self.hub.send_binary(frame, sid, user))

    def get_feature_flags(self) -> dict[str, Any]:
        """What the server offers, as `/features` answers."""
        return server_features(self.options)

    async def start(
        self,
        address: str,
        port: int,
        verbose: bool = True,
        call_on_start: Callable[[str, str, int], Any] | None = None,
    ) -> None:
        """Serves another address beside those of the options, as some packs do for TLS of theirs.

        Args:
            verbose: Whether the address is logged.
            call_on_start: Called with scheme, address and port once it is served.
        Raises:
            RuntimeError: The server does not run yet: there is nothing to serve.
            CannotListen: The address cannot be bound.
        """
        if self.listen_too is None:
            raise RuntimeError(
                f"cannot serve {address} port {port}: the server is not running yet; call start "
                "from an on_startup callback or a route"
            )
        scheme, port = await self.listen_too(address, port)
        if verbose:
            logger.info("also serving %s://%s:%d", scheme, address, port)
        if call_on_start is not None:
            call_on_start(scheme, address, port)

    def add_routes(self) -> None:
        """Adds our routes and those of packs; called once, after all packs are loaded."""
        add_routes(self)

    async def submit(self, item: Sequence[Any]) -> Submission:
        """Puts a prompt in the queue; it is on disk when this returns."""
        return await self._submissions.submit(item)

    @property
    def _audience(self) -> str | None:
        """With accounts, the only user who may see news of the running prompt; else None."""
        if not self.options.auth:
            return None
        item = _news_item.get()
        running = self.prompt_queue.get_running() if item is None else [item]
        return next(map(owner_of_item, running), None)

    @contextlib.contextmanager
    def news_of(self, item: QueueItem | None) -> Iterator[None]:
        """While the block runs, what this thread sends is news of this of several prompts."""
        token = _news_item.set(item)
        try:
            yield
        finally:
            _news_item.reset(token)

    def client_info(self, client_id: str | None) -> dict[str, Any] | None:
        """What is known of the socket of a client, as of now; None if there is none."""
        return copy.deepcopy(self.sockets_metadata.get(str(client_id)))

    @contextlib.contextmanager
    def run_scope(self) -> Iterator[None]:
        """For the worker: inside, files go to the folders of the running prompt's owner."""
        if not self.options.auth:
            yield
            return
        owner = self._audience
        scoped = owner is not None and not self._is_admin_name(owner)
        user = owner if scoped else None
        with folder_paths.user_scope(user, before_save=lambda: self.quota.take(user)):
            yield

    def _folders_of(self, user: str) -> list[str]:
        with folder_paths.user_scope(user):
            kinds = map(folder_paths.get_directory_by_type, ("input", "output", "temp"))
            folders = [folder for folder in kinds if folder is not None]
        return [*folders, str(self.user_manager.folder_of(user))]

    def _is_admin_name(self, name: str) -> bool:
        store = self.app.get(STORE)
        return store is not None and store.role_of(name) == "admin"

    # -- event sink of the execution side ------------------------------------------------------

    def publish(self, event: Event) -> None:
        """Takes an event from any thread; never blocks and never raises."""
        try:
            self._publish(event)
        except Exception:  # the worker must go on even if a message cannot be made
            logger.exception("the event %s could not be sent", event.name)

    def _publish(self, event: Event) -> None:
        self.metrics.count_event(event)
        if isinstance(event, Preview):
            self._post_preview(event)
            return
        if isinstance(event, ProgressText):
            self.send_progress_text(event.text, event.node_id, event.client_id)
            return
        self._note(event)
        sid = event.client_id
        if sid is None and not event.broadcast:
            return
        receiver = None if event.broadcast else sid
        if self._is_replaced("send_sync") or self._is_replaced("send_json"):
            self.send_sync(event.name, event.payload(), receiver)
            return
        if not self.hub.is_heard(sid):
            return
        key: object | None = None
        if isinstance(event, ProgressState) and len(event.nodes) > EVERY_CHANGE_UP_TO:
            key = (event.name, event.prompt_id)  # large, and each shows all that was before it
        is_last = not (isinstance(event, ProgressState) and event.is_followed)
        self._post_text(event.name, event.payload(), receiver, key, is_last)

    def _note(self, event: Event) -> None:
        """Keeps what packs read: whose prompt runs, and which node."""
        if isinstance(event, ExecutionStart):
            self.client_id = event.client_id
            self.last_prompt_id = event.prompt_id
            self.last_node_id = None
            self._running_nodes.pop(event.client_id, None)
        elif isinstance(event, Executing):
            self.last_node_id = event.display_node
            if event.display_node is None:
                self._running_nodes.pop(event.client_id, None)
            else:
                self._running_nodes[event.client_id] = event.display_node

    def running_node(self, client_id: str) -> str | None:
        """The node that runs of this client's prompt, as shown in the graph."""
        return self._running_nodes.get(client_id)

    def _is_replaced(self, name: str) -> bool:
        """Whether a pack has put its own function in the place of a method."""
        return getattr(getattr(self, name), "__func__", None) is not _OWN[name]

    def _post_text(
        self,
        kind: str,
        data: Any,
        sid: str | None,
        key: object | None = None,
        is_last: bool = True,
    ) -> None:
        frame = frames.text_frame(kind, data)
        user = None if kind == "status" else self._audience
        self.hub.post(lambda: self.hub.send_frame(frame, sid, user, key), is_last)

    def _post_preview(self, event: Preview) -> None:
        image_format, image, size = event.format, event.image, event.max_size
        metadata = event.metadata
        node = (metadata or {}).get("node_id")
        # a picture without a size limit is a result, not a preview: it must arrive
        key = None if size is None else ("preview", node, metadata is None)
        if metadata is None:
            frame = LazyFrame(lambda: frames.preview(image_format, image, size), key)
            wanted = _wants_plain
        else:
            record = event.payload()
            frame = LazyFrame(
                lambda: frames.preview_with_metadata(image_format, image, size, record), key
            )
            wanted = _wants_metadata
        user = self._audience
        self.hub.post(lambda: self.hub.send_preview(frame, event.client_id, wanted, user))

    def _post_binary(self, event: int, data: Any, sid: str | None) -> None:
        """Binary events as packs send them: bytes, an image tuple, or that and a record."""
        frame: bytes | LazyFrame
        if event == BinaryEventTypes.UNENCODED_PREVIEW_IMAGE:
            image_format, image, size = data
            frame = LazyFrame(lambda: frames.preview(image_format, image, size))
        elif event == BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA and isinstance(data, tuple):
            (image_format, image, size), record = data
            frame = LazyFrame(
                lambda: frames.preview_with_metadata(image_format, image, size, record)
            )
        else:
            frame = frames.raw_binary(event, cast(bytes, data))
        user = self._audience
        self.hub.post(lambda: self.hub.send_binary(frame, sid, user))

    def _on_logs(self, entries: list[dict[str, str]], size: dict[str, int] | None) -> None:
        if self.hub.is_watched:
            self.hub.post(lambda: self.hub.send_logs(entries, size))


_OWN = {name: vars(PromptServer)[name] for name in ("send_sync", "send_json")}
