"""Viewing and uploading files, by users and by attackers."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData
from aiohttp.test_utils import TestClient
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from comfy_server.paths import PathRefused, check_name, resolve_below
from tests.comfy_server.conftest import Start

Client = TestClient[Any, Any]


def png(color: tuple[int, ...] = (10, 20, 30, 40), size: tuple[int, int] = (8, 4)) -> bytes:
    buffer = io.BytesIO()
    texts = PngInfo()
    texts.add_text("prompt", '{"1": {}}')
    Image.new("RGBA" if len(color) == 4 else "RGB", size, color).save(buffer, "PNG", pnginfo=texts)
    return buffer.getvalue()


def form(data: bytes, name: str = "up.png", field: str = "image", **texts: str) -> FormData:
    made = FormData(quote_fields=False)
    for key, value in texts.items():
        made.add_field(key, value)
    made.add_field(field, data, filename=name, content_type="image/png")
    return made


async def upload(client: Client, data: bytes, name: str = "up.png", **texts: str) -> Any:
    answer = await client.post("/upload/image", data=form(data, name, **texts))
    return await answer.json() if answer.status == 200 else answer.status


def opened(body: bytes) -> Image.Image:
    return Image.open(io.BytesIO(body))


# -- viewing ----------------------------------------------------------------------------------


async def test_a_file_is_sent_with_type_name_ranges_and_tag(client: Client, base: Path) -> None:
    (base / "output/a.png").write_bytes(png())
    answer = await client.get("/view?filename=a.png")
    assert (answer.status, answer.content_type) == (200, "image/png")
    assert answer.headers["Content-Disposition"] == 'filename="a.png"'
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert await answer.read() == png()
    part = await client.get("/view?filename=a.png", headers={"Range": "bytes=0-3"})
    assert (part.status, await part.read()) == (206, png()[:4])
    again = await client.get(
        "/view?filename=a.png", headers={"If-None-Match": answer.headers["ETag"]}
    )
    assert again.status == 304
    assert "Cache-Control" not in answer.headers


@pytest.mark.parametrize("query", ["filename=a.png&type=input", "filename=a.png [input]&type=temp"])
async def test_the_directory_is_selected_by_type_or_annotation(
    client: Client, base: Path, query: str
) -> None:
    (base / "input/a.png").write_bytes(b"here")
    assert await (await client.get(f"/view?{query}")).read() == b"here"


async def test_names_with_two_dots_in_a_row_and_other_alphabets_are_served(
    client: Client, base: Path
) -> None:
    for name in ("a..b.png", "wait...png", 'quote".png', "grün 你好.png"):
        (base / "output" / name).write_bytes(b"x")
        answer = await client.get("/view", params={"filename": name})
        assert answer.status == 200, name
        assert "\n" not in answer.headers["Content-Disposition"]
    assert "filename*=UTF-8''gr%C3%BCn" in answer.headers["Content-Disposition"]


async def test_subfolders_are_reached(client: Client, base: Path) -> None:
    (base / "output/run/deep").mkdir(parents=True)
    (base / "output/run/deep/a.png").write_bytes(b"x")
    for subfolder in ("run/deep", "run\\deep", "run//deep/", "./run/deep"):
        answer = await client.get("/view", params={"filename": "a.png", "subfolder": subfolder})
        assert answer.status == 200, subfolder


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 404),
        ("filename=", 400),
        ("filename=/etc/passwd", 400),
        ("filename=../secret", 400),
        ("filename=..%2f..%2fsecret", 400),
        ("filename=..\\secret", 400),
        ("filename=a/../../s", 400),
        ("filename=C:\\secret", 404),
        ("filename=secret&type=models", 400),
        ("filename=secret&type=__class__", 400),
        ("filename=none.png", 404),
        ("filename=secret&subfolder=..", 403),
        ("filename=secret&subfolder=/etc", 403),
        ("filename=secret&subfolder=a/../..", 403),
        ("filename=secret&subfolder=..\\..", 403),
        ("filename=secret&subfolder=link", 403),
        ("filename=linked.png", 403),
        ("filename=secret%00.png", 400),
        ("filename=secret&subfolder=a%00b", 400),
        ("filename=CON", 400),
        ("filename=nul.png", 400),
        ("filename=%252e%252e%252fsecret", 404),
        ("filename=sub", 404),
        ("filename=" + "a" * 300, 400),
        ("filename=a%0d%0aX: y", 400),
        ("filename=secret [output] [output]&subfolder=..", 403),
    ],
)
async def test_no_spelling_leads_outside(
    client: Client, base: Path, query: str, status: int
) -> None:
    (base / "secret").write_text("secret")
    (base / "output/sub").mkdir()
    (base / "output/link").symlink_to(base)
    (base / "output/linked.png").symlink_to(base / "secret")
    answer = await client.get(f"/view?{query}")
    assert answer.status == status
    assert "secret" not in (await answer.text()).replace("no such", "") or answer.status != 200


@pytest.mark.parametrize(
    "name",
    [
        "x.html",
        "x.htm",
        "x.xhtml",
        "x.xml",
        "x.svg",
        "x.js",
        "x.mjs",
        "x.css",
        "x.pdf",
        "x.swf",
        "x.mht",
        "x.hta",
        "x",
        "x.htc",
        "x.xsl",
        "x.rdf",
        "x.html.gz",
        "x.svgz",
        "x.wasm",
    ],
)
@pytest.mark.parametrize("route", ["view", "userdata"])
async def test_stored_active_content_never_runs_in_our_origin(
    client: Client, base: Path, name: str, route: str
) -> None:
    folder = base / ("output" if route == "view" else "user/default")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("<script>alert(1)</script>")
    url = f"/view?filename={name}" if route == "view" else f"/userdata/{name}"
    answer = await client.get(url, headers={"Sec-Fetch-Dest": "document"})
    assert answer.status == 200
    assert answer.content_type == "application/octet-stream"
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in answer.headers["Content-Security-Policy"]
    assert "script" not in answer.headers["Content-Security-Policy"]


async def test_an_svg_is_shown_where_only_an_image_is_wanted(client: Client, base: Path) -> None:
    (base / "output/x.svg").write_text("<svg/>")
    answer = await client.get("/view?filename=x.svg", headers={"Sec-Fetch-Dest": "image"})
    assert answer.content_type == "image/svg+xml"
    assert "sandbox" in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("query", "mime", "mode"),
    [
        ("preview=webp;80", "image/webp", "RGBA"),
        ("preview=jpeg", "image/jpeg", "RGB"),
        ("preview=jpeg;999", "image/jpeg", "RGB"),
        ("preview=gif;x", "image/webp", "RGBA"),
        ("preview=webp%3B80&channel=rgb", "image/webp", "RGB"),
        ("preview=jpeg&channel=a", "image/webp", "RGBA"),
        ("channel=rgb", "image/png", "RGB"),
        ("channel=a", "image/png", "RGBA"),
    ],
)
async def test_previews_and_channels(
    client: Client, base: Path, query: str, mime: str, mode: str
) -> None:
    (base / "input/a.png").write_bytes(png())
    answer = await client.get(f"/view?filename=a.png&type=input&{query}")
    assert (answer.status, answer.content_type) == (200, mime)
    with opened(await answer.read()) as image:
        assert (image.mode, image.size) == (mode, (8, 4))
        if query == "channel=a":
            assert image.getpixel((0, 0)) == (0, 0, 0, 40)


async def test_a_preview_of_what_is_no_picture_is_the_file(client: Client, base: Path) -> None:
    (base / "input/sound.flac").write_bytes(b"fLaC")
    answer = await client.get("/view?filename=sound.flac&type=input&preview=webp")
    assert (answer.status, await answer.read()) == (200, b"fLaC")
    answer = await client.get("/view?filename=sound.flac&type=input&channel=a")
    assert answer.status == 415


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises far more pixels than its few bytes hold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("query", ["preview=webp", "channel=rgb"])
@pytest.mark.parametrize("size", [(100_000, 100_000), (30_000, 30_000)])
async def test_a_decompression_bomb_is_refused_by_its_header(
    client: Client, base: Path, query: str, size: tuple[int, int]
) -> None:
    (base / "input/bomb.png").write_bytes(bomb(*size))
    answer = await client.get(f"/view?filename=bomb.png&type=input&{query}")
    assert answer.status == 415


async def test_a_damaged_picture_is_no_server_error(client: Client, base: Path) -> None:
    (base / "input/half.png").write_bytes(png(size=(64, 64))[:90])
    assert (await client.get("/view?filename=half.png&type=input&channel=a")).status == 415


# -- uploading --------------------------------------------------------------------------------


async def test_an_upload_lands_in_input_and_is_listed(client: Client, base: Path) -> None:
    assert await upload(client, png()) == {"name": "up.png", "subfolder": "", "type": "input"}
    assert (base / "input/up.png").read_bytes() == png()
    assert await (await client.get("/internal/files/input")).json() == ["up.png"]
    assert oct((base / "input/up.png").stat().st_mode)[-3:] == "644"


async def test_equal_content_is_reused_and_other_content_renamed(
    client: Client, base: Path
) -> None:
    await upload(client, b"one")
    assert (await upload(client, b"one"))["name"] == "up.png"
    assert (await upload(client, b"two"))["name"] == "up (1).png"
    assert (await upload(client, b"two"))["name"] == "up (1).png"
    assert (await upload(client, b"three"))["name"] == "up (2).png"
    assert (await upload(client, b"four", overwrite="true"))["name"] == "up.png"
    assert (base / "input/up.png").read_bytes() == b"four"


async def test_subfolders_and_types(client: Client, base: Path) -> None:
    answer = await upload(client, b"x", subfolder="pasted/today", type="temp")
    assert answer == {"name": "up.png", "subfolder": "pasted/today", "type": "temp"}
    assert (base / "temp/pasted/today/up.png").exists()
    answer = await upload(client, b"y", name="deep/er.bin")
    assert (answer["subfolder"], answer["name"]) == ("deep", "er.bin")


@pytest.mark.parametrize(
    "texts",
    [
        {"name": "../out.png"},
        {"name": "a\\..\\..\\out.png"},
        {"name": "C:\\out.png"},
        {"name": "COM1.png"},
        {"name": "."},
        {"name": "x" * 400 + ".png"},
        {"subfolder": ".."},
        {"subfolder": "/tmp"},
        {"subfolder": "a/../../b"},
        {"subfolder": "link"},
        {"type": "models"},
        {"type": "../user"},
    ],
)
async def test_uploads_cannot_leave_or_confuse(
    client: Client, base: Path, texts: dict[str, str]
) -> None:
    (base / "input/link").symlink_to(base)
    before = sorted(path for path in base.rglob("*") if path.is_file())
    assert await upload(client, b"evil", **texts) == 400
    assert sorted(path for path in base.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (b"", {}),
        (b"junk", {"Content-Type": "multipart/form-data; boundary=x"}),
        (b"{}", {"Content-Type": "application/json"}),
        (b"--x\r\n\r\n", {"Content-Type": "multipart/form-data; boundary=x"}),
        (b"x", {"Content-Type": "multipart/form-data"}),
    ],
)
async def test_a_malformed_form_is_400(
    client: Client, data: bytes, headers: dict[str, str]
) -> None:
    for route in ("/upload/image", "/upload/mask"):
        assert (await client.post(route, data=data, headers=headers)).status == 400


async def test_a_form_without_a_file_is_400(client: Client) -> None:
    text_only = FormData()
    text_only.add_field("image", "just text")
    assert (await client.post("/upload/image", data=text_only)).status == 400
    wrong_field = form(b"x", field="picture")
    assert (await client.post("/upload/image", data=wrong_field)).status == 400


async def test_a_form_of_very_many_parts_is_refused(client: Client) -> None:
    many = form(b"x")
    for number in range(200):
        many.add_field(f"f{number}", "x")
    assert (await client.post("/upload/image", data=many)).status == 400


async def test_too_large_a_body_is_413_with_the_recorded_text(start: Start, base: Path) -> None:
    client = await start(max_upload_bytes=1000)
    for route, data in (("/upload/image", form(b"x" * 5000)), ("/userdata/a.json", b"x" * 5000)):
        answer = await client.post(route, data=data)
        assert answer.status == 413
        assert await answer.text() == "Maximum request body size 1000 exceeded."
    assert list((base / "input").iterdir()) == []


async def test_a_mask_replaces_the_alpha_and_keeps_the_texts(client: Client, base: Path) -> None:
    (base / "output/a.png").write_bytes(png((1, 2, 3, 255)))
    reference = json.dumps({"filename": "a.png"})
    masked = form(png((0, 0, 0, 77)), "m.png", original_ref=reference, subfolder="clipspace")
    answer = await client.post("/upload/mask", data=masked)
    assert await answer.json() == {"name": "m.png", "subfolder": "clipspace", "type": "input"}
    with Image.open(base / "input/clipspace/m.png") as image:
        assert image.getpixel((0, 0)) == (1, 2, 3, 77)
        assert image.text["prompt"] == '{"1": {}}'  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reference", "status"),
    [
        ('{"filename": "none.png"}', 404),
        ('{"filename": "../secret.png"}', 403),
        ("junk", 400),
        ("[]", 400),
        ('{"filename": 5}', 400),
        ('{"filename": "a.png", "type": "x"}', 400),
        ('{"filename": "text.png"}', 400),
    ],
)
async def test_a_mask_on_no_original_is_refused(
    client: Client, base: Path, reference: str, status: int
) -> None:
    (base / "secret.png").write_bytes(png())
    (base / "output/text.png").write_text("no picture")
    answer = await client.post("/upload/mask", data=form(png(), original_ref=reference))
    assert answer.status == status
    assert list((base / "input").iterdir()) == []


# -- the resolver -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a/b.png", "a\\b.png", "...", "a..b", ".hidden", "ü", "a b", ""])
def test_plain_names_resolve_below_the_root(tmp_path: Path, name: str) -> None:
    resolved = resolve_below(tmp_path, name)
    assert str(resolved).startswith(os.path.realpath(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/x",
        "\\x",
        "\\\\host\\share",
        "C:/x",
        "c:x",
        "a\0",
        "a\nb",
        "aux",
        "a/LPT1.txt",
        "con .txt",
        "\ud800",
        "x" * 256,
        "a/" * 1500,
    ],
)
def test_names_that_mean_trouble_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PathRefused):
        resolve_below(tmp_path, name)


def test_a_root_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    assert resolve_below(tmp_path / "root", "a") == (tmp_path / "real/a").resolve()
    check_name("a/b")


async def test_a_subfolder_that_is_a_file_is_refused(client: Client, base: Path) -> None:
    (base / "input/taken").write_bytes(b"x")
    for subfolder in ("taken", "taken/deeper"):
        form = FormData()
        form.add_field("image", b"x", filename="a.png")
        form.add_field("subfolder", subfolder)
        assert (await client.post("/upload/image", data=form)).status == 400
