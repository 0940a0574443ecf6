"""Users, settings and user data."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from yarl import URL

from tests.comfy_server.conftest import Start

Client = TestClient[Any, Any]


def url(path: str) -> URL:
    return URL(path, encoded=True)


async def test_single_user_mode_says_whether_a_folder_exists(client: Client) -> None:
    assert await (await client.get("/users")).json() == {"storage": "server", "migrated": False}
    await client.post("/settings/a", data="1")
    assert (await (await client.get("/users")).json())["migrated"] is True


async def test_settings_are_merged_and_kept(client: Client, base: Path) -> None:
    assert await (await client.get("/settings")).json() == {}
    answer = await client.post("/api/settings", data=json.dumps({"a": 1, "b": [2]}))
    assert (answer.status, await answer.read()) == (200, b"")
    await client.post("/api/settings/b", data="true", headers={"Content-Type": "text/plain"})
    assert await (await client.get("/settings")).json() == {"a": 1, "b": True}
    assert await (await client.get("/settings/b")).json() is True
    assert await (await client.get("/settings/none")).json() is None
    assert json.loads((base / "user/default/comfy.settings.json").read_text())["b"] is True


async def test_settings_sent_at_once_do_not_lose_each_other(client: Client) -> None:
    sent = [client.post(f"/settings/key{number}", data=str(number)) for number in range(40)]
    await asyncio.gather(*sent)
    assert len(await (await client.get("/settings")).json()) == 40


async def test_unreadable_settings_count_as_none(client: Client, base: Path) -> None:
    (base / "user/default").mkdir(parents=True)
    (base / "user/default/comfy.settings.json").write_text("{broken")
    assert await (await client.get("/settings")).json() == {}


@pytest.mark.parametrize("body", [b"[1]", b"junk", b""])
async def test_malformed_settings_are_400(client: Client, body: bytes) -> None:
    assert (await client.post("/settings", data=body)).status == 400


async def test_multi_user_mode_tells_users_apart_by_header(start: Start, base: Path) -> None:
    client = await start(multi_user=True)
    created = await client.post("/users", json={"username": "Ann Bee!"})
    user_id = await created.json()
    assert user_id.startswith("Ann-Bee-_")
    assert (await (await client.get("/users")).json())["users"] == {user_id: "Ann Bee!"}
    for name in ("Ann Bee!", "", "   ", "__system", "x" * 500):
        answer = await client.post("/users", json={"username": name})
        assert answer.status == 400, name
        assert (await answer.json())["error"]
    headers = {"comfy-user": user_id}
    await client.post("/settings/a", data="1", headers=headers)
    assert (base / "user" / user_id / "comfy.settings.json").is_file()
    refused = {"/settings": 401, "/userdata?dir=x": 401, "/v2/userdata": 403, "/userdata/a": 401}
    for path, status in refused.items():
        for claim in ("nobody", "../default", "__system", ""):
            assert (await client.get(path, headers={"comfy-user": claim})).status == status
    for folder in ("workflows", "subgraphs", "keybindings"):  # where the editor looks at once
        listed = await client.get(f"/userdata?dir={folder}", headers=headers)
        assert await listed.json() == []
    restarted = await start(multi_user=True)
    assert user_id in (await (await restarted.get("/users")).json())["users"]


async def test_a_browsers_socket_needs_no_user_in_multi_user_mode(start: Start) -> None:
    client = await start(multi_user=True)
    async with client.ws_connect("/ws?clientId=tab") as socket:
        assert (await socket.receive_json())["data"]["sid"] == "tab"


async def test_a_file_is_saved_listed_moved_and_deleted(client: Client, base: Path) -> None:
    saving = url("/api/userdata/workflows%2Fmywf.json?overwrite=false&full_info=true")
    info = await (await client.post(saving, data="{}")).json()
    assert set(info) == {"path", "size", "modified", "created"}
    assert (info["path"], info["size"]) == ("workflows/mywf.json", 2)
    assert isinstance(info["modified"], float)
    assert (await client.post(saving, data="{}")).status == 409
    plain = await client.post(url("/userdata/workflows%2Fmywf.json"), data='{"a":1}')
    assert await plain.json() == "workflows/mywf.json"
    content = await client.get(url("/userdata/workflows%2Fmywf.json"))
    assert (content.content_type, await content.text()) == ("application/json", '{"a":1}')
    moved = await client.post(
        url("/userdata/workflows%2Fmywf.json/move/workflows%2Fsub%2Fnew.json?overwrite=false")
    )
    assert await moved.json() == "workflows/sub/new.json"
    gone = await client.delete(url("/userdata/workflows%2Fsub%2Fnew.json"))
    assert (gone.status, await gone.read()) == (204, b"")
    assert (await client.delete(url("/userdata/workflows%2Fsub%2Fnew.json"))).status == 404


async def test_listings_in_their_forms(client: Client, base: Path) -> None:
    for name in ("a.json", "sub/b.json", ".index.json"):
        path = base / "user/default/workflows" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    get = client.get
    assert await (await get("/userdata?dir=workflows")).json() == ["a.json"]
    recursive = await (await get("/userdata?dir=workflows&recurse=true")).json()
    assert recursive == ["a.json", "sub/b.json"]
    split = await (await get("/userdata?dir=workflows&recurse=true&split=true")).json()
    assert split == [["a.json", "a.json"], ["sub/b.json", "sub", "b.json"]]
    full = await (await get("/userdata?dir=workflows&recurse=true&full_info=true")).json()
    assert [entry["path"] for entry in full] == ["a.json", "sub/b.json"]
    tree = await (await get("/v2/userdata?path=workflows")).json()
    assert [(entry["type"], entry["path"]) for entry in tree] == [
        ("directory", "workflows/sub"),
        ("file", "workflows/.index.json"),
        ("file", "workflows/a.json"),
        ("file", "workflows/sub/b.json"),
    ]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/userdata", 400),
        ("/userdata?dir=none", 404),
        ("/userdata?dir=..", 403),
        ("/userdata?dir=/etc", 403),
        ("/userdata?dir=link", 403),
        ("/v2/userdata?path=..", 400),
        ("/v2/userdata?path=none", 404),
        ("/v2/userdata?path=file.txt", 400),
        ("/userdata/none.json", 404),
        ("/userdata/..%2Fother%2Fsecret", 403),
        ("/userdata/%252e%252e%252fother%252fsecret", 403),
        ("/userdata/..%5Cother%5Csecret", 403),
        ("/userdata/%2Fetc%2Fpasswd", 403),
        ("/userdata/link%2Fsecret", 403),
        ("/userdata/a%00b", 400),
        ("/userdata/con", 400),
        ("/userdata/%20", 400),
        ("/userdata/a/b.json", 404),
        ("/userdata/.", 404),
    ],
)
async def test_user_data_stays_in_the_user_folder(
    client: Client, base: Path, path: str, status: int
) -> None:
    mine, other = base / "user/default", base / "user/other"
    mine.mkdir(parents=True)
    other.mkdir()
    (mine / "file.txt").write_text("x")
    (other / "secret").write_text("secret")
    (mine / "link").symlink_to(other)
    answer = await client.get(url(path))
    assert answer.status == status
    assert await answer.text() != "secret"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/userdata/..%2Fother%2Fnew", 403),
        ("POST", "/userdata/%2Ftmp%2Fnew", 403),
        ("POST", "/userdata/file.txt%2Fnew", 400),
        ("POST", "/userdata/folder", 400),
        ("DELETE", "/userdata/..%2Fother%2Fsecret", 403),
        ("DELETE", "/userdata/folder", 404),
        ("POST", "/userdata/file.txt/move/..%2Fother%2Fnew", 403),
        ("POST", "/userdata/..%2Fother%2Fsecret/move/stolen", 403),
        ("POST", "/userdata/none/move/x", 404),
        ("POST", "/userdata/file.txt/move/folder", 400),
        ("POST", "/userdata/file.txt/move/taken?overwrite=false", 409),
        ("POST", "/userdata/a/b.json", 405),
    ],
)
async def test_writes_stay_in_the_user_folder(
    client: Client, base: Path, method: str, path: str, status: int
) -> None:
    mine, other = base / "user/default", base / "user/other"
    (mine / "folder").mkdir(parents=True)
    other.mkdir()
    for file in (mine / "file.txt", mine / "taken", other / "secret"):
        file.write_text("kept")
    before = {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}
    answer = await client.request(method, url(path), data=b"evil")
    assert answer.status == status
    assert {file: file.read_bytes() for file in base.rglob("*") if file.is_file()} == before


async def test_the_user_style_sheet_is_a_style_sheet(client: Client, base: Path) -> None:
    for path in ("/api/userdata/user.css", "/user.css"):
        absent = await client.get(path)
        assert (absent.status, absent.content_type) == (404, "text/css")
        assert await absent.read() == b""
    await client.post("/userdata/user.css", data="a{}")
    answer = await client.get("/api/userdata/user.css")
    assert answer.content_type == "text/css"
    await client.post("/userdata/other.css", data="a{}")
    assert (await client.get("/userdata/other.css")).content_type == "application/octet-stream"


async def test_a_crash_while_saving_leaves_no_half_file(client: Client, base: Path) -> None:
    await client.post("/userdata/w.json", data="old")
    names = {path.name for path in (base / "user/default").iterdir()}
    assert names == {"w.json"}
