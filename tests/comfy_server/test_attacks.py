"""What attackers of this kind of server have tried, as whole kinds; other modules have the rest."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import FormData, WSMsgType, web
from aiohttp.test_utils import TestClient
from PIL import Image, PngImagePlugin

from comfy_execution import jobs
from comfy_execution.items import ExecutionStatus
from comfy_execution.registry import NodeRegistry
from comfy_execution.validation import validate_prompt
from comfy_server import PromptServer, images
from comfy_server.auth import add_account
from comfy_server.connections import (
    BODY_S,
    FEWEST,
    HEAD_S,
    TRICKLE_BYTES,
    Connections,
    most_connections,
)
from tests.comfy_server.conftest import PROMPT, Start
from tests.comfy_server.trace_nodes import NODES
from tests.support.waiting import PATIENCE_S

Client = TestClient[Any, Any]

SECRET = "top secret"
NAMES = (
    "../secret.txt", "..\\secret.txt", "....//secret.txt", "..%2fsecret.txt", "..%252fsecret.txt",
    "%2e%2e/secret.txt", "..%c0%afsecret.txt", "..%ef%bc%8fsecret.txt", "\u2025/secret.txt",
    "/etc/passwd", "//etc/passwd", "\\\\host\\share\\x", "C:\\windows\\win.ini", "C:secret.txt",
    "file:///etc/passwd", "secret.txt\0.png", "\0", ".", "..", "...", "", " ", "CON", "con.png",
    "nul.txt", "aux", "x" * 300, "a/" * 1500 + "b", "x\r\nSet-Cookie: a=b", "\u202egnp.exe",
    "\ud83d\ude00.png", "a:b", "a::$DATA", "~root", "~/x", "$HOME/x", "%s%s%n", "{0}", "a?b", "a#b",
    "outside/secret.txt", "link.txt",
)  # fmt: skip


@pytest.fixture
def tempting(base: Path) -> Path:
    """A secret beside the served folders, and links in them that lead there."""
    (base / "secret.txt").write_text(SECRET)
    for folder in ("input", "output", "temp", "user/default", "models/checkpoints"):
        (base / folder).mkdir(parents=True, exist_ok=True)
        if folder != "models/checkpoints":  # owners link their collections in, so there it is fine
            (base / folder / "outside").symlink_to(base)
            (base / folder / "link.txt").symlink_to(base / "secret.txt")
    return base


# -- every route --------------------------------------------------------------------------------


def paths_with(app: web.Application, name: str) -> set[tuple[str, str]]:
    """(method, path) of every route that takes a part, with the part given in two spellings."""
    found = set()
    for route in app.router.routes():
        assert route.resource is not None
        pattern = route.resource.canonical
        if "{" in pattern and route.method != "HEAD":
            for spelling in (quote(name, safe=""), quote(quote(name, safe=""), safe="")):
                filled = [spelling if part.startswith("{") else part for part in pattern.split("/")]
                found.add((route.method, "/".join(filled)))
    return found


@pytest.mark.parametrize("name", NAMES)
async def test_no_route_fails_on_or_follows_a_hostile_name(
    client: Client, tempting: Path, name: str
) -> None:
    name = name.encode("utf-8", "replace").decode()
    asked = paths_with(PromptServer.instance.app, name)
    text = quote(name, safe="")
    for kind in ("output", "input", "temp"):
        asked.add(("GET", f"/view?filename={text}&type={kind}"))
        asked.add(("GET", f"/view?filename=x&subfolder={text}&type={kind}"))
        asked.add(("GET", f"/view?filename={text}%20%5B{kind}%5D&preview=webp"))
    asked.add(("GET", f"/userdata?dir={text}&recurse=true&full_info=true"))
    asked.add(("GET", f"/v2/userdata?path={text}"))
    asked.add(("GET", f"/view_metadata/checkpoints?filename={text}"))
    for method, path in sorted(asked):
        answer = await client.request(method, path, data=b"{}")
        body = await answer.read()
        assert answer.status < 500, (method, path, body)
        assert SECRET.encode() not in body, (method, path)
        assert "Set-Cookie" not in answer.headers
    assert (tempting / "secret.txt").read_text() == SECRET


def raw_form(filename: str, texts: dict[str, str]) -> bytes:
    """A form as no well-meaning program writes it: names stand in it as they are."""
    head = f'--b\r\nContent-Disposition: form-data; name="image"; filename="{filename}"\r\n\r\nevil'
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}'
        for name, text in texts.items()
    ]
    return "\r\n".join([*parts, head, "--b--\r\n"]).encode()


@pytest.mark.parametrize("name", NAMES)
async def test_no_upload_leaves_its_folder(client: Client, tempting: Path, name: str) -> None:
    name = name.encode("utf-8", "replace").decode()
    before = set(tempting.iterdir())
    for filename, subfolder in ((name, ""), ("x.png", name)):
        for path in ("/upload/image", "/upload/mask"):
            texts = {
                "subfolder": subfolder,
                "overwrite": "true",
                "original_ref": json.dumps({"filename": name, "type": "output"}),
            }
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            answer = await client.post(path, data=raw_form(filename, texts), headers=kind)
            assert answer.status in (200, 400, 403, 404), (filename, subfolder, answer.status)
    assert (tempting / "secret.txt").read_text() == SECRET
    assert set(tempting.iterdir()) == before


# -- bodies -------------------------------------------------------------------------------------

HOSTILE_JSON = (
    b"[" * 100_000, b'{"a":' * 100_000, b"{" + b'"k":1,' * 10**6 + b'"k":1}', b"9" * 5000,
    b"1e999", b"-1e999", b"NaN", b"Infinity", b'"\\ud800"', b'{"\\udfff":1}', b"\xff\xfe", b"\x00",
    b'{"a":1,"a":2}', b"", b"null", b"true", b"[]", b'""', b'{"__proto__":{"x":1}}',
    b'{"prompt":null}', b'{"prompt":[]}', b'{"prompt":{"1":null}}', b'{"prompt":{"1":{}}}',
    b'{"prompt":{"":{"class_type":""}}}', b'{"prompt":{"1":{"class_type":{}}}}',
    b'{"prompt":{"1":{"class_type":"SaveImage","inputs":[]}}}', b'{"delete":{}}',
    b'{"delete":[{}]}', b'{"job_ids":[null,{}]}', b'{"clear":"x"}', b'{"username":{}}',
    b'{"prompt_id":{}}', b'{"prompt_id":"x","number":1e308}', b'{"prompt_ids":[[]]}',
    b'{"number":' + b"9" * 400 + b',"prompt_id":"x"}', b'{"clientId":{},"enabled":5}',
)  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE_JSON, ids=lambda body: repr(body[:30]))
async def test_no_route_fails_on_a_hostile_body(start: Start, body: bytes) -> None:
    async def validate(prompt_id: str, prompt: Any, targets: Any) -> Any:
        return await validate_prompt(prompt_id, prompt, targets, NodeRegistry(NODES))

    client = await start(services={"validate": validate})
    app: web.Application = client.server.app
    routes = [route for route in app.router.routes() if route.method in ("POST", "PATCH", "PUT")]
    assert len(routes) > 30
    for route in routes if len(body) < 10**6 else routes[::15]:
        assert route.resource is not None
        answer = await client.request(
            route.method, route.resource.canonical.replace("{", "").replace("}", ""), data=body
        )
        assert answer.status < 500, (route, await answer.text())


@pytest.mark.parametrize(
    "extra",
    [
        {"client_id": {"a": 1}}, {"client_id": 5}, {"client_id": ["x"]}, {"extra_pnginfo": "x"},
        {"extra_pnginfo": [1]}, {"extra_pnginfo": {"workflow": "x"}}, {"create_time": "x"},
        {"extra_pnginfo": {"workflow": {"id": {"a": 1}}}}, {"preview_method": {"x": 1}},
        {"auth_token_comfy_org": {"x": 1}}, {"user_id": "root"}, {"": None}, {"__proto__": {}},
    ],
    ids=str,
)  # fmt: skip
async def test_odd_extra_data_is_taken_or_refused_and_spoils_no_list(
    client: Client, extra: dict[str, Any]
) -> None:
    answer = await client.post("/prompt", json={"prompt": PROMPT, "extra_data": extra})
    assert answer.status == (400 if "client_id" in extra else 200)
    queue = PromptServer.instance.prompt_queue
    if answer.status == 200:
        assert (await client.get("/api/jobs")).status == 200
        taken = queue.get(timeout=1)
        assert taken is not None
        queue.task_done(taken[1], {"outputs": {}}, ExecutionStatus("success", True, []))
    for path in ("/api/jobs", "/queue", "/history", "/api/jobs?workflow_id=x"):
        assert (await client.get(path)).status == 200
    for job in (await (await client.get("/api/jobs")).json())["jobs"]:
        assert isinstance(job["create_time"], (int, float))  # or the editor shows no job at all
        assert job["status"] in jobs.STATUSES


async def test_a_compressed_bomb_is_cut_off_at_the_limit(start: Start) -> None:
    client = await start(max_upload_bytes=1024 * 1024)
    bomb = gzip.compress(b" " * (64 * 1024 * 1024))
    assert len(bomb) < 100_000
    for path in ("/prompt", "/userdata/x"):
        answer = await client.post(path, data=bomb, headers={"Content-Encoding": "gzip"})
        assert answer.status in (400, 413)


async def test_a_setting_cannot_be_called_like_the_prototype(client: Client) -> None:
    assert (await client.post("/settings", data=b'{"__proto__":{"x":1}}')).status == 400
    assert (await client.post("/settings/__proto__", data=b"1")).status == 400
    assert await (await client.get("/settings")).json() == {}
    planted = b'{"__proto__":{"x":1},"a":2}'
    assert (await client.post("/userdata/comfy.settings.json", data=planted)).status == 200
    assert await (await client.get("/settings")).json() == {"a": 2}


# -- pictures -----------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def bombs() -> dict[str, bytes]:
    """Files whose decoding would take very much memory or time, or start a program."""
    deflated = zlib.compress(b"x" * (128 * 1024 * 1024), 1)
    frames = [Image.new("P", (64, 64), index % 255) for index in range(200)]
    animation = io.BytesIO()
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:])
    animation_bytes = animation.getvalue()
    return {
        "pixels.png": png(60_000, 60_000, chunk(b"IDAT", zlib.compress(b"\0"))),
        "wide.png": png(2**31 - 1, 1, chunk(b"IDAT", zlib.compress(b"\0"))),
        "text.png": png(8, 8, chunk(b"zTXt", b"k\0\0" + deflated), chunk(b"IDAT", b"x")),
        "profile.png": png(8, 8, chunk(b"iCCP", b"k\0\0" + deflated), chunk(b"IDAT", b"x")),
        "data.png": png(8, 8, chunk(b"IDAT", deflated)),
        "screen.gif": b"GIF89a" + struct.pack("<HH", 65535, 65535) + animation_bytes[10:],
        "frames.gif": animation_bytes,
        "program.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nquit\n",
        "program.ps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nquit\n",
        "cut.webp": b"RIFF\xff\xff\xff\x7fWEBPVP8X\n\0\0\0\x02\0\0\0\xff\xff\xff\xff\xff\xff",
        "cut.tiff": b"II*\0\xff\xff\xff\xff",
        "loop.tiff": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
        "icon.ico": b"\0\0\1\0\xff\xff" + b"\0" * 16,
        "nothing.jpg": b"\xff\xd8\xff" + b"\0" * 100,
    }


async def test_pictures_that_are_bombs_are_refused_or_sent_as_they_are(
    client: Client, base: Path
) -> None:
    for name, content in bombs().items():
        (base / "input" / name).write_bytes(content)
        (base / "models/checkpoints").mkdir(parents=True, exist_ok=True)
        (base / "models/checkpoints" / name).write_bytes(content)
        for query in ("preview=webp", "preview=jpeg;1", "channel=rgb", "channel=a"):
            answer = await client.get(f"/view?filename={name}&type=input&{query}")
            assert answer.status in (200, 415), (name, query)
            await answer.read()
        form = FormData()
        form.add_field("image", content, filename="m.png")
        form.add_field("original_ref", json.dumps({"filename": name, "type": "input"}))
        assert (await client.post("/upload/mask", data=form)).status in (200, 400), name
        stem = name.rpartition(".")[0]
        path = f"/experiment/models/preview/checkpoints/0/{stem}.webp"
        assert (await client.get(path)).status in (200, 404), name


async def test_formats_that_start_programs_are_not_opened(client: Client, base: Path) -> None:
    Image.new("RGB", (4, 4)).save(base / "input/picture.eps", "EPS")
    with (
        pytest.raises(images.ImageRefused),
        images.open_image(base / "input/picture.eps", "picture.eps"),
    ):
        pass
    answer = await client.get("/view?filename=picture.eps&type=input&channel=rgb")
    assert answer.status == 415
    assert "EPS" not in images.FORMATS


def test_every_listed_format_that_the_library_writes_is_opened(tmp_path: Path) -> None:
    for kind in set(images.FORMATS) & set(Image.SAVE):
        path = tmp_path / f"x.{kind.lower()}"
        Image.new("RGB", (16, 16), "red").save(path, kind)
        with images.open_image(path, path.name) as picture:
            assert picture.size == (16, 16)


async def test_metadata_of_a_picture_cannot_be_a_header(client: Client, base: Path) -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("prompt", "x\r\nSet-Cookie: a=b")
    Image.new("RGB", (4, 4)).save(base / "output/a.png", pnginfo=texts)
    answer = await client.get("/view?filename=a.png")
    assert "Set-Cookie" not in answer.headers


# -- model files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 100 * 2**30) + b"{}", struct.pack("<Q", 2**64 - 1), b"", b"\x01",
        struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 4) + b"null", struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 19) + b'{"__metadata__":[]}', struct.pack("<Q", 9) + b'{"a":NaN}',
        struct.pack("<Q", 100_000) + b"[" * 100_000, struct.pack("<Q", 2) + b"\xff\xfe",
    ],
    ids=lambda header: repr(header[:12]),
)  # fmt: skip
async def test_a_hostile_header_has_no_metadata_and_no_preview(
    client: Client, base: Path, header: bytes
) -> None:
    folder = base / "models/checkpoints"
    folder.mkdir(parents=True)
    (folder / "x.safetensors").write_bytes(header)
    answer = await client.get("/view_metadata/checkpoints?filename=x.safetensors")
    assert (answer.status, await answer.read()) == (404, b"")
    assert (await client.get("/experiment/models/preview/checkpoints/0/x.webp")).status == 404


async def test_metadata_is_strict_json_whatever_the_file_says(client: Client, base: Path) -> None:
    folder = base / "models/checkpoints"
    folder.mkdir(parents=True)
    text = b'{"__metadata__":{"a":NaN,"b":"\\ud800</script>","c":1e999}}'
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    answer = await client.get("/view_metadata/checkpoints?filename=x.safetensors")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(await answer.text())["a"] is None


# -- logs ---------------------------------------------------------------------------------------


async def test_nobody_writes_lines_of_their_own_into_the_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = "/x%0Aroot%20logged%20in%1B%5B2J%E2%80%A8"
    await client.post(path)
    await client.post(path, headers={"Origin": "http://evil\u2028.example"})
    await client.get("/view?filename=%0Afake")
    await client.post("/prompt", json={"prompt": PROMPT, "client_id": "a\nfake\x1b[2J"})
    await client.post("/login", data=b"\nfake")
    assert caplog.records
    for record in caplog.records:
        if record.name.startswith("comfy"):
            assert record.getMessage().isprintable(), record.getMessage()


# -- roles --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/internal/logs", "/internal/logs/raw", "/metrics", "/api/metrics", "/internal/log%73",
        "/internal/logs/", "/api/internal/logs", "/internal/../internal/logs",
        "/INTERNAL/LOGS", "/internal%2Flogs", "/internal/logs?x", "/internal/logs;x",
    ],
)  # fmt: skip
async def test_no_spelling_opens_what_is_for_admins(start: Start, path: str) -> None:
    client, token = await start(auth=True), add_account("ann")
    headers = {"Authorization": f"Bearer {token}"}
    for method in ("GET", "HEAD", "POST", "PUT", "TRACE"):
        answer = await client.request(method, path, headers=headers)
        assert answer.status in (403, 404, 405), (method, path)
        assert (await client.request(method, path)).status in (401, 403, 404, 405)


@pytest.mark.parametrize(
    "path", ["/login/", "/api/login/x", "/login/../queue", "/login%2F..%2Fqueue",
             "/healthz/../history", "/login;/queue", "/queue?/login", "/queue#/login"]
)  # fmt: skip
async def test_no_spelling_passes_for_the_open_pages(start: Start, path: str) -> None:
    client = await start(auth=True)
    for method in ("GET", "HEAD", "POST"):
        assert (await client.request(method, path)).status in (401, 404, 405)


async def test_a_token_is_taken_from_its_header_only(start: Start) -> None:
    client, token = await start(auth=True), add_account("ann:admin")
    for path in (f"/queue?token={token}", f"/queue?access_token={token}", f"/queue?auth={token}"):
        assert (await client.get(path)).status == 401
    for headers in (
        {"Cookie": f"latentloom_session={token}"},
        {"Authorization": token},
        {"Authorization": f"Token {token}"},
        {"X-Forwarded-User": "ann"},
        {"comfy-user": "ann"},
        {"X-Original-URL": "/login"},
        {"X-HTTP-Method-Override": "OPTIONS"},
    ):
        assert (await client.get("/queue", headers=headers)).status == 401, headers


# -- sockets and connections ----------------------------------------------------------------------


async def test_a_huge_first_frame_takes_no_effect_and_a_larger_one_closes(client: Client) -> None:
    socket = await client.ws_connect("/ws?clientId=a")
    await socket.receive_json()
    flags = {"type": "feature_flags", "data": {f"flag{n}": True for n in range(20_000)}}
    await socket.send_json(flags)
    await socket.send_json({"type": "feature_flags", "data": {"x": True}})
    assert PromptServer.instance.sockets_metadata["a"]["feature_flags"] == {}
    await socket.send_str("x" * (4 * 1024 * 1024 + 1))
    closing = await asyncio.wait_for(socket.receive(), PATIENCE_S)
    assert closing.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
    assert (await client.get("/prompt")).status == 200


class FakeTransport:
    def __init__(self) -> None:
        self.is_cut = False
        self.transport = self

    def abort(self) -> None:
        self.is_cut = True


class FakeBody:
    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def is_eof(self) -> bool:
        return False


class FakeRequest:
    def __init__(self, transport: FakeTransport, received: int) -> None:
        self.transport, self.content = transport, FakeBody(received)


async def test_connections_that_only_take_up_room_are_cut() -> None:
    now = [0.0]
    connections = Connections(100, lambda: now[0])
    silent, idle, trickling, uploading = (FakeTransport() for _ in range(4))
    everybody = [silent, idle, trickling, uploading]
    ending, handling = asyncio.Event(), []

    async def wait(_: Any) -> Any:
        await ending.wait()

    async def answer(_: Any) -> Any:
        return web.Response()

    assert connections.sweep(everybody) == 0  # type: ignore[arg-type]
    await connections.note(FakeRequest(idle, 0), answer)  # type: ignore[arg-type]
    for transport, received in ((trickling, 10), (uploading, TRICKLE_BYTES)):
        request: Any = FakeRequest(transport, received)
        handling.append(asyncio.ensure_future(connections.note(request, wait)))
    await asyncio.sleep(0)
    now[0] = HEAD_S + 1
    assert connections.sweep(everybody) == 1  # type: ignore[arg-type]
    assert silent.is_cut
    now[0] = BODY_S + 1
    assert connections.sweep([idle, trickling, uploading]) == 1  # type: ignore[list-item]
    assert trickling.is_cut
    ending.set()
    await asyncio.gather(*handling)


async def test_of_too_many_connections_the_idle_ones_are_cut() -> None:
    connections, many = Connections(5), [FakeTransport() for _ in range(8)]
    connections.sweep(many)  # type: ignore[arg-type]
    assert sum(transport.is_cut for transport in many) == 3
    assert most_connections() >= FEWEST


async def test_of_too_many_connections_that_are_all_in_use_the_newest_are_cut() -> None:
    now = [0.0]
    connections, many = Connections(5, lambda: now[0]), [FakeTransport() for _ in range(8)]
    ending, handling = asyncio.Event(), []

    async def wait(_: Any) -> Any:
        await ending.wait()

    for transport in many[:-1]:
        now[0] += 0.1
        request: Any = FakeRequest(transport, TRICKLE_BYTES)
        handling.append(asyncio.ensure_future(connections.note(request, wait)))
        await asyncio.sleep(0)
    assert connections.sweep(many) == 3  # type: ignore[arg-type]
    assert [transport.is_cut for transport in many] == [False] * 5 + [True] * 3
    ending.set()
    await asyncio.gather(*handling)


@pytest.mark.parametrize("suffix", ["gz", "br", "zst"])
async def test_a_stored_neighbour_is_never_sent_for_a_file(
    client: Client, tempting: Path, suffix: str
) -> None:
    for folder in ("output", "user/default"):
        (tempting / folder / "a.txt").write_bytes(b"mine")
        (tempting / folder / f"a.txt.{suffix}").symlink_to(tempting / "secret.txt")
    for path in ("/view?filename=a.txt", "/userdata/a.txt"):
        answer = await client.get(path, headers={"Accept-Encoding": "gzip, br, zstd"})
        assert (await answer.read(), answer.headers.get("Content-Encoding")) == (b"mine", None)


async def test_lists_of_very_many_ids_take_the_queue_and_the_others_no_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, token = await start(auth=True), add_account("ann")
    headers = {"Authorization": f"Bearer {token}"}
    queue = PromptServer.instance.prompt_queue
    body = {"prompt": PROMPT, "prompt_id": "mine"}
    assert (await client.post("/prompt", json=body, headers=headers)).status == 200
    calls = []
    looked = queue.get_current_queue
    monkeypatch.setattr(queue, "get_current_queue", lambda: calls.append(1) or looked())
    ids = [f"x{number}" for number in range(50_000)]
    answer = await client.post("/api/jobs/cancel", json={"job_ids": ids}, headers=headers)
    assert await answer.json() == {"cancelled": False}
    for path in ("/queue", "/history"):
        assert (await client.post(path, json={"delete": ids}, headers=headers)).status == 200
    twice = {"job_ids": [*ids, "mine", "mine"]}
    answer = await client.post("/api/jobs/cancel", json=twice, headers=headers)
    assert await answer.json() == {"cancelled": True}
    assert len(calls) < 20  # a look at the queue for the whole list, not for each id
