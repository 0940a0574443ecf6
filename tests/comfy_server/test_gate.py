"""Which requests are let in: Host, Origin and Sec-Fetch-Site, on every route."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import WSServerHandshakeError, web
from aiohttp.test_utils import TestClient

from comfy_server import PromptServer
from comfy_server.gate import Gate, is_loopback
from tests.comfy_server.conftest import PROMPT, Start

Client = TestClient[Any, Any]

LOCAL = Gate(loopback_only=True, allowed_hosts=("studio.example",))
OPEN = Gate(loopback_only=False)


def passes(gate: Gate, method: str = "POST", path: str = "/prompt", **headers: str) -> bool:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return gate.refusal(sent, method, path) is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("app.localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example", False),
        ("", False),
    ],
)
def test_loopback_names(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8188"},
        {"Host": "127.0.0.1:8188", "Origin": "http://127.0.0.1:8188"},
        {"Host": "localhost:8188", "Sec_Fetch_Site": "same-origin"},
        {"Host": "[::1]:8188", "Origin": "http://[::1]:8188"},
        {"Host": "studio.example", "Origin": "http://studio.example"},
        {"Host": "127.0.0.1:8188", "Sec_Fetch_Site": "none"},
        {},
    ],
)
def test_our_own_page_and_programs_pass(headers: dict[str, str]) -> None:
    assert passes(LOCAL, **headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8188", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1:8188", "Origin": "http://127.0.0.1:9999"},
        {"Host": "127.0.0.1:8188", "Origin": "http://localhost:8188"},
        {"Host": "127.0.0.1:8188", "Origin": "null"},
        {"Host": "127.0.0.1:8188", "Origin": "file://"},
        {"Host": "127.0.0.1:8188", "Origin": ""},
        {"Host": "127.0.0.1:8188", "Origin": "http://127.0.0.1:8188.evil.example"},
        {"Host": "127.0.0.1:8188", "Origin": "http://127.0.0.1:8188@evil.example"},
        {"Host": "127.0.0.1:8188", "Sec_Fetch_Site": "cross-site"},
        {"Host": "127.0.0.1:8188", "Sec_Fetch_Site": "Cross-Site"},
        {"Host": "127.0.0.1:8188", "Origin": "http://evil.example", "X_Forwarded_For": "1.2.3.4"},
        {"Host": "evil.example:8188", "Origin": "http://evil.example:8188"},
        {"Host": "evil.example:8188"},
        {"Host": "169.254.1.1:8188"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
    ],
)
def test_foreign_pages_and_rebound_names_are_refused(headers: dict[str, str]) -> None:
    assert not passes(LOCAL, **headers)


def test_a_link_from_elsewhere_may_open_the_page_but_nothing_else() -> None:
    followed = {
        "Host": "localhost:8188",
        "Sec_Fetch_Site": "cross-site",
        "Sec_Fetch_Mode": "navigate",
        "Sec_Fetch_Dest": "document",
    }
    assert passes(LOCAL, "GET", "/", **followed)
    assert not passes(LOCAL, "GET", "/view", **followed)
    assert not passes(LOCAL, "POST", "/", **followed)
    framed = {**followed, "Sec_Fetch_Dest": "iframe"}
    assert not passes(LOCAL, "GET", "/", **framed)


def test_an_open_server_answers_to_any_name_but_not_to_other_origins() -> None:
    assert passes(OPEN, Host="studio.lan:8188", Origin="http://studio.lan:8188")
    assert passes(OPEN, Host="studio.lan", Origin="https://studio.lan")
    assert not passes(OPEN, Host="192.168.1.5:8188", Origin="http://evil.example")
    assert not passes(OPEN, Host="127.0.0.1:8188", Origin="http://evil.example")


NAMED = Gate(loopback_only=False, allowed_hosts=("studio.example",))


@pytest.mark.parametrize(
    "host",
    ["studio.example", "studio.example:8188", "192.168.1.5:8188", "[fe80::1%eth0]:8188", "[::1]",
     "127.0.0.1:8188", "localhost", "backend:8188", "a.localhost"],
)  # fmt: skip
def test_an_open_server_that_was_named_answers_to_its_names_and_addresses(host: str) -> None:
    assert passes(NAMED, Host=host, Origin=f"http://{host}")


@pytest.mark.parametrize(
    "host",
    ["evil.example:8188", "x.studio.example", "studio.example.evil.example", "1.2.3.4.nip.io",
     "evil.example.", "localhost.evil.example", "0x7f.1"],
)  # fmt: skip
def test_an_open_server_that_was_named_refuses_rebound_names(host: str) -> None:
    assert not passes(NAMED, Host=host, Origin=f"http://{host}")
    reason = NAMED.refusal({"Host": host}, "GET", "/")
    assert reason is not None
    assert "--allow-host" in reason
    assert "this machine only" not in reason


def test_a_proxy_that_renames_the_host_is_let_through() -> None:
    renamed = {"Host": "backend:8188", "Origin": "https://studio.example"}
    assert not passes(OPEN, **renamed)
    assert passes(OPEN, **renamed, X_Forwarded_For="1.2.3.4")


def test_cors_lets_in_everyone_or_one_origin() -> None:
    evil = {"Host": "127.0.0.1:8188", "Origin": "http://evil.example"}
    friend = {"Host": "127.0.0.1:8188", "Origin": "http://friend.example"}
    assert passes(Gate(cors_origin="*"), **evil)
    one = Gate(cors_origin="http://friend.example")
    assert passes(one, **friend, Sec_Fetch_Site="cross-site")
    assert not passes(one, **evil)


EVIL = {"Origin": "http://evil.example"}
METHODS_AND_PATHS = [
    ("GET", "/"),
    ("GET", "/system_stats"),
    ("POST", "/prompt"),
    ("POST", "/api/prompt"),
    ("POST", "/upload/image"),
    ("POST", "/settings/x"),
    ("DELETE", "/userdata/x"),
    ("PATCH", "/internal/logs/subscribe"),
    ("GET", "/view?filename=a.png"),
    ("POST", "/pack/run"),
    ("POST", "/api/pack/run"),
    ("GET", "/pack/direct"),
    ("GET", "/assets/app.js"),
    ("OPTIONS", "/prompt"),
    ("GET", "/nothing/here"),
]


def add_pack_routes(server: PromptServer) -> None:
    @server.routes.post("/pack/run")
    async def run(request: web.Request) -> web.Response:
        return web.Response(text="ran")

    async def direct(request: web.Request) -> web.Response:
        return web.Response(text="direct")

    server.app.router.add_get("/pack/direct", direct)


@pytest.mark.parametrize(("method", "path"), METHODS_AND_PATHS)
async def test_every_route_is_behind_the_gate(start: Start, method: str, path: str) -> None:
    client = await start(add_pack_routes)
    for headers in (
        EVIL,
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        answer = await client.request(method, path, headers=headers)
        assert answer.status == 403, headers
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json"],
)
async def test_a_cross_site_post_queues_nothing(client: Client, content_type: str) -> None:
    headers = {**EVIL, "Content-Type": content_type}
    answer = await client.post("/prompt", json={"prompt": PROMPT}, headers=headers)
    assert answer.status == 403
    assert PromptServer.instance.prompt_queue.get_tasks_remaining() == 0


async def test_a_foreign_page_cannot_open_the_socket(client: Client) -> None:
    with pytest.raises(WSServerHandshakeError) as refused:
        await client.ws_connect("/ws", origin="http://evil.example")
    assert refused.value.status == 403


async def test_options_is_answered_empty_on_any_path(client: Client) -> None:
    answer = await client.options("/anything")
    assert (answer.status, await answer.read()) == (200, b"")


async def test_cors_headers_are_on_every_answer(start: Start) -> None:
    client = await start(cors_origin="https://friend.example")
    friend = {"Origin": "https://friend.example"}
    for method, path in (("GET", "/features"), ("OPTIONS", "/prompt"), ("GET", "/missing")):
        answer = await client.request(method, path, headers=friend)
        assert answer.headers["Access-Control-Allow-Origin"] == "https://friend.example"
        assert answer.headers["Access-Control-Allow-Credentials"] == "true"
        assert "PATCH" in answer.headers["Access-Control-Allow-Methods"]


async def test_routes_of_packs_have_twins_however_they_were_added(start: Start) -> None:
    client = await start(add_pack_routes)
    for prefix in ("", "/api"):
        assert await (await client.post(f"{prefix}/pack/run")).text() == "ran"
        assert await (await client.get(f"{prefix}/pack/direct")).text() == "direct"


async def test_a_failing_route_is_500_with_a_short_text(start: Start) -> None:
    def prepare(server: PromptServer) -> None:
        @server.routes.get("/pack/broken")
        async def broken(request: web.Request) -> web.Response:
            raise RuntimeError("secret detail")

    answer = await (await start(prepare)).get("/pack/broken")
    assert answer.status == 500
    assert "secret" not in await answer.text()


async def test_unknown_paths_and_methods(client: Client) -> None:
    assert (await client.get("/no/such/page")).status == 404
    answer = await client.post("/no/such/page")
    assert (answer.status, await answer.text()) == (405, "405: Method Not Allowed")
    assert (await client.get("/api/internal/logs")).status == 404


async def test_a_confined_page_gets_its_policy(start: Start) -> None:
    policy = (await (await start(confine_page=True)).get("/")).headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "connect-src 'self' data:" in policy


async def test_json_is_compressed_only_when_asked_for(start: Start) -> None:
    asked = {"Accept-Encoding": "gzip"}
    client = await start(compress=True)
    assert (await client.get("/features", headers=asked)).headers["Content-Encoding"] == "gzip"
    plain = await start()
    assert "Content-Encoding" not in (await plain.get("/features", headers=asked)).headers
