"""Listening: several addresses, IPv6, TLS, warnings, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

from comfy_server import CannotListen, Listener, ServerOptions, running, serve
from comfy_server.serving import bind, make_tls_context
from tests.comfy_server.conftest import make_server
from tests.support.waiting import PATIENCE_S


def has_ipv6() -> bool:
    try:
        bind("::1", 0).close()
    except CannotListen:
        return False
    return True


async def test_several_addresses_share_a_port(options: ServerOptions) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    server = make_server(replace(options, listen=("127.0.0.1", "::1")))
    server.add_routes()
    async with running(server) as listeners, ClientSession() as session:
        assert [listener.address for listener in listeners] == ["127.0.0.1", "::1"]
        assert len({listener.port for listener in listeners}) == 1
        assert server.port == listeners[0].port
        for listener in listeners:
            assert (await session.get(f"{listener.url}/features")).status == 200


async def test_a_pack_has_another_address_served(
    options: ServerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(options)
    server.add_routes()
    with pytest.raises(RuntimeError, match="not running yet"):
        await server.start("127.0.0.1", 0)
    told: list[tuple[str, str, int]] = []
    async with running(server) as listeners, ClientSession() as session:
        with caplog.at_level(logging.INFO):
            await server.start("127.0.0.1", 0, call_on_start=lambda *args: told.append(args))
        [(scheme, address, port)] = told
        assert port != listeners[0].port
        assert f"also serving http://127.0.0.1:{port}" in caplog.text
        assert (await session.get(f"{scheme}://{address}:{port}/features")).status == 200
        with pytest.raises(CannotListen, match=str(port)):
            await server.start("127.0.0.1", port)
    with pytest.raises(OSError, match="refused"), socket.create_connection((address, port)):
        pass


async def test_an_address_the_machine_lacks_is_skipped_beside_one_it_has(
    options: ServerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(replace(options, listen=("127.0.0.1", "192.0.2.1")))
    server.add_routes()
    async with running(server) as listeners:
        assert len(listeners) == 1
    assert "192.0.2.1" in caplog.text
    alone = make_server(replace(options, listen=("192.0.2.1",)))
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1"):
        async with running(alone):
            pass


async def test_a_taken_port_is_named_with_the_mend(options: ServerOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = make_server(replace(options, port=port))
        with pytest.raises(CannotListen, match=f"{port}.*--port"):
            async with running(server):
                pass


@pytest.mark.parametrize(
    ("listen", "auth", "warned"),
    [(("127.0.0.1",), False, False), (("0.0.0.0",), False, True), (("0.0.0.0",), True, False)],
)
async def test_an_exposed_server_warns_loudly(
    options: ServerOptions,
    caplog: pytest.LogCaptureFixture,
    listen: tuple[str, ...],
    auth: bool,
    warned: bool,
) -> None:
    server = make_server(replace(options, listen=listen, auth=auth))
    server.add_routes()
    async with running(server):
        pass
    loud = [record.getMessage() for record in caplog.records if "LISTENING" in record.getMessage()]
    assert bool(loud) is warned
    if warned:
        assert "--auth" in loud[0]
        assert "0.0.0.0" in loud[0]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-keyout",
        str(key),
        "-out",
        str(cert),
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return key, cert


async def test_tls_serves_pages_and_sockets(options: ServerOptions, tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    server = make_server(replace(options, tls_keyfile=key, tls_certfile=cert))
    server.add_routes()
    trusted = ssl.create_default_context(cafile=str(cert))
    async with running(server) as listeners, ClientSession() as session:
        url = listeners[0].url
        assert url.startswith("https://")
        assert (await session.get(f"{url}/features", ssl=trusted)).status == 200
        async with session.ws_connect(f"{url}/ws", ssl=trusted) as opened:
            assert (await opened.receive_json())["type"] == "status"


def test_unusable_tls_files_are_named(tmp_path: Path) -> None:
    options = ServerOptions(tls_keyfile=tmp_path / "k", tls_certfile=tmp_path / "c")
    with pytest.raises(CannotListen, match="TLS key"):
        make_tls_context(options)


def test_half_of_the_tls_files_is_no_tls_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_tls_context(ServerOptions(tls_keyfile=tmp_path / "k")) is None
    assert "WITHOUT TLS" in caplog.text


async def test_serving_ends_when_cancelled_and_closes_sockets(options: ServerOptions) -> None:
    server = make_server(options)
    server.add_routes()
    bound: asyncio.Future[list[Listener]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(server, on_listening=bound.set_result))
    url = (await asyncio.wait_for(bound, PATIENCE_S))[0].url
    async with ClientSession() as session:
        opened: ClientWebSocketResponse = await session.ws_connect(f"{url}/ws")
        await opened.receive()
        task.cancel()
        message = await asyncio.wait_for(opened.receive(), PATIENCE_S)
        assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING)
        await asyncio.wait([task], timeout=30)  # a minute, did it wait for the socket
        assert task.cancelled()


async def test_the_page_address_is_logged(
    options: ServerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = make_server(options)
    server.add_routes()
    bound: asyncio.Future[list[Listener]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(server, on_listening=bound.set_result))
    url = (await asyncio.wait_for(bound, PATIENCE_S))[0].url
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert f"the editor is at {url}" in caplog.text


async def test_a_client_that_never_ends_its_request_is_cut_and_others_are_not(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfy_server.connections.CHECK_S", 0.01)
    monkeypatch.setattr("comfy_server.connections.HEAD_S", 0.2)
    monkeypatch.setattr("comfy_server.connections.BODY_S", 0.2)
    server = make_server(ServerOptions(port=0))
    server.add_routes()
    async with running(server) as listeners, ClientSession(listeners[0].url) as client:
        socket = await client.ws_connect("/ws")
        port = listeners[0].port
        ends = []
        for start in (
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
            b"",
            b"POST /prompt HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            ends.append(reader.read())
        answers = await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), PATIENCE_S)
        assert all(answer == b"" or isinstance(answer, OSError) for answer in answers)
        assert (await client.get("/prompt")).status == 200
        assert (await socket.receive_json())["type"] == "status"
        assert not socket.closed
        await socket.close()


MALFORMED = (
    b"GET /\xff?token=secret HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"secret" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"secret" * 3000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: secret\r\n" * 30_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: secret\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, secret\r\n\r\n0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


@pytest.mark.parametrize("sent", MALFORMED, ids=lambda sent: repr(sent[:24]))
async def test_what_is_no_request_is_refused_with_a_short_line_in_the_log(
    options: ServerOptions, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    server = make_server(options)
    server.add_routes()
    async with running(server) as listeners:
        reader, writer = await asyncio.open_connection("127.0.0.1", listeners[0].port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert b"Traceback" not in answer
    said = [record for record in caplog.records if record.name == "comfy_server.wire"]
    assert len(said) <= 1
    for record in said:
        text = logging.Formatter().format(record)
        assert text.isprintable()
        assert len(text) < 300
        assert "secret" not in text


async def test_a_client_that_leaves_in_the_middle_of_a_body_leaves_no_traceback(
    options: ServerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = make_server(options)
    server.add_routes()
    async with running(server) as listeners:
        _, writer = await asyncio.open_connection("127.0.0.1", listeners[0].port)
        head = b"POST /queue HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
        writer.write(head)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()
        await asyncio.sleep(0.02)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_announced_as_too_long_is_refused_before_it_is_sent(
    options: ServerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfy_server.serving.SHUTDOWN_GRACE_S", 0.1)
    server = make_server(options)
    server.add_routes()
    async with running(server) as listeners:
        reader, writer = await asyncio.open_connection("127.0.0.1", listeners[0].port)
        writer.write(
            b"POST /queue HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999\r\n\r\n{"
        )
        answer = await asyncio.wait_for(reader.read(4096), PATIENCE_S)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"aiohttp" not in answer  # nor which library, of which version, answers


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
async def test_a_signal_that_comes_twice_ends_the_server_once(options: ServerOptions) -> None:
    """A service manager sends it to all processes, and the supervisor passes its own on."""
    server = make_server(options)
    server.add_routes()
    await asyncio.wait_for(
        serve(server, lambda _: os.kill(os.getpid(), signal.SIGTERM)), PATIENCE_S
    )
    try:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
