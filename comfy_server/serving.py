"""Listening: several addresses, IPv4 and IPv6, TLS, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web

from comfy_server.connections import CONNECTIONS
from comfy_server.gate import is_loopback
from comfy_server.options import ServerOptions
from comfy_server.prompt_server import PromptServer
from comfy_server.request_log import WIRE, shorten
from comfy_server.routes import object_info

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 3.0
SAME_KEYPRESS_S = 1.0
"""Ctrl-C reaches this process and its supervisor, which passes it on: the echo is no second one."""
KEEPALIVE_S = 75.0
BACKLOG = 512
EXPOSED = (
    "LISTENING ON %s WITHOUT AUTHENTICATION: anyone who can reach this address can run prompts and "
    "node packs' code, read and overwrite files in input, output and the user folders, and see "
    "everybody's queue and history. Start with --auth (make users with --add-user NAME:admin), or "
    "listen on 127.0.0.1 only. Name the server with --allow-host NAME to refuse pages that reach "
    "it under a name of their own."
)


class CannotListen(OSError):
    """An address that cannot be bound or secured; the text says which and what to do.

    Attributes:
        absent: The machine has no such address, or lacks its whole family.
    """

    def __init__(self, message: str, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


@dataclass(frozen=True)
class Listener:
    """One bound address."""

    address: str
    port: int
    url: str


def make_tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """The TLS context, when key and certificate are both given.

    Raises:
        CannotListen: a file is unreadable or the two do not belong together.
    """
    if not options.tls or options.tls_certfile is None:
        if options.tls_keyfile or options.tls_certfile:
            logger.warning(
                "serving WITHOUT TLS: it needs --tls-keyfile and --tls-certfile, and only one of "
                "them is given"
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.tls_certfile, options.tls_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise CannotListen(
            f"TLS key {options.tls_keyfile} and certificate {options.tls_certfile} "
            f"cannot be used: {error}"
        ) from error
    return context


def bind(address: str, port: int) -> socket.socket:
    """A listening socket; an IPv6 one does not take the IPv4 address of the same port.

    Raises:
        CannotListen: the address is malformed, not of this machine, or in use.
    """
    try:
        found = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise CannotListen(f"cannot listen on {address!r}: {error.strerror}", True) from error
    family, kind, protocol, _, target = found[0]
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {address!r}: {error.strerror}", True) from error
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"cannot listen on {address} port {port}: {error.strerror or error}; another program "
            "may be using the port: stop it, or start with --port",
            absent=error.errno == errno.EADDRNOTAVAIL,
        ) from error
    listener.setblocking(False)
    return listener


def _bind_all(options: ServerOptions) -> list[socket.socket]:
    """Binds every address; those the machine lacks are skipped as long as another works."""
    bound: list[socket.socket] = []
    absent: list[CannotListen] = []
    for address in options.listen:
        try:
            port = bound[0].getsockname()[1] if bound and options.port == 0 else options.port
            bound.append(bind(address, port))
        except CannotListen as error:
            if not error.absent:
                _close(bound)
                raise
            absent.append(error)
    if not bound:
        raise absent[0]
    for problem in absent:
        logger.warning("%s", problem)
    return bound


def _close(sockets: list[socket.socket]) -> None:
    for listener in sockets:
        listener.close()


def _describe(listener: socket.socket, scheme: str) -> Listener:
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if listener.family == socket.AF_INET6 else address
    return Listener(address, port, f"{scheme}://{host}:{port}")


def _warn_if_exposed(addresses: Iterable[str], options: ServerOptions) -> None:
    exposed = [address for address in addresses if not is_loopback(address)]
    if exposed and not options.auth:
        logger.warning(EXPOSED, ", ".join(exposed))


@contextlib.asynccontextmanager
async def running(server: PromptServer) -> AsyncIterator[list[Listener]]:
    """Serves while the block runs; yields the listeners."""
    options = server.options
    tls = make_tls_context(options)
    sockets = _bind_all(options)
    _warn_if_exposed(options.listen, options)
    runner = web.AppRunner(
        server.app,
        access_log=None,
        logger=WIRE,
        shutdown_timeout=SHUTDOWN_GRACE_S,
        keepalive_timeout=KEEPALIVE_S,
        handle_signals=False,
    )
    WIRE.addFilter(shorten)
    await runner.setup()
    handlers = runner.server
    assert handlers is not None  # it is there once the runner is set up
    watching = server.app[CONNECTIONS].watch(lambda: handlers.connections)
    watcher = asyncio.create_task(watching)
    try:
        for bound in sockets:
            await web.SockSite(runner, bound, ssl_context=tls, backlog=BACKLOG).start()
        scheme = "https" if tls else "http"
        listeners = [_describe(bound, scheme) for bound in sockets]
        server.address, server.port = listeners[0].address, listeners[0].port

        async def listen_too(address: str, port: int) -> tuple[str, int]:
            bound = bind(address, port)
            _warn_if_exposed([address], options)
            await web.SockSite(runner, bound, ssl_context=tls, backlog=BACKLOG).start()
            return scheme, _describe(bound, scheme).port

        server.listen_too = listen_too
        await object_info.make_ready(server.app)
        yield listeners
    finally:
        server.listen_too = None
        watcher.cancel()
        await runner.cleanup()


def _show(listener: Listener) -> str:
    """A URL a browser can open: the address that means 'all' is none."""
    return listener.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


async def serve(
    server: PromptServer, on_listening: Callable[[list[Listener]], None] | None = None
) -> None:
    """Listens until the task is cancelled or the process is told to end.

    `server.add_routes()` must have been called. Interrupt and terminate signals end it; a second
    one ends the process at once.

    Args:
        server: What is served.
        on_listening: Called once with the bound addresses, for instance to open a browser.
    Raises:
        CannotListen: an address cannot be bound, or the TLS files cannot be used.
    """
    ended, ended_by = asyncio.Event(), set[int]()
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        if not ended.is_set():
            ended.set()
            ended_by.add(number)
            loop.call_later(SAME_KEYPRESS_S, loop.remove_signal_handler, number)

    watched: set[int] = set()
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
            watched.add(number)
    try:
        async with running(server) as listeners:
            if server.options.print_addresses:
                for listener in listeners:
                    logger.info("the editor is at %s", _show(listener))
            if on_listening is not None:
                on_listening(listeners)
            await ended.wait()
    finally:
        for other in watched - ended_by:  # that one may come once more, by the supervisor
            loop.remove_signal_handler(other)
