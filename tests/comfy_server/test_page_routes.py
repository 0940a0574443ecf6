"""What the page loads: its files, packs' scripts, texts, templates, help, models, system facts."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from PIL import Image

from comfy_api import feature_flags
from comfy_server import PromptServer
from tests.comfy_server.conftest import NODES, Start

Client = TestClient[Any, Any]


def put(path: Path, content: str | bytes = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


async def test_the_page_and_its_files(client: Client) -> None:
    page = await client.get("/")
    assert (page.status, page.content_type) == (200, "text/html")
    assert page.headers["Cache-Control"] == "no-store, must-revalidate"
    assert (await client.get("/api/")).status == 200
    script = await client.get("/assets/app.js")
    assert script.content_type == "application/javascript"
    assert script.headers["Cache-Control"] == "no-cache"
    picture = await client.get("/assets/picture.png")
    assert picture.headers["Cache-Control"] == "public, max-age=86400"
    assert "ETag" in picture.headers
    assert "Last-Modified" in picture.headers
    missing = await client.get("/assets/none.png")
    assert (missing.status, missing.headers["Cache-Control"]) == (404, "public, max-age=3600")
    assert (await client.get("/assets")).status == 403
    again = await client.get("/user-select", allow_redirects=False)
    assert (again.status, again.headers["Location"]) == (302, "/")


@pytest.mark.parametrize(
    "path",
    [
        "/..%2fsecret",
        "/%2e%2e/secret",
        "/assets/..%2f..%2fsecret",
        "/link/secret",
        "/templates/..%2fsecret",
        "/docs/..%2f..%2fsecret",
        "/extensions/pack/..%2fsecret",
        "/extensions/..%2f/secret",
        "/api/workflow_templates/pack/..%2f..%2fsecret",
    ],
)
async def test_static_files_stay_below_their_folder(
    start: Start, base: Path, frontend: Path, path: str
) -> None:
    from yarl import URL

    put(base / "secret", "secret")
    put(base / "custom_nodes/pack/example_workflows/a.json")
    (frontend / "link").symlink_to(base)
    client = await start()
    PromptServer.instance.packs.web_directories["pack"] = str(base / "custom_nodes/pack")
    answer = await client.get(URL(path, encoded=True))
    assert answer.status in (403, 404)
    assert await answer.text() == ""


async def test_without_an_editor_the_answer_says_what_to_do(start: Start) -> None:
    client = await start(frontend_root=None)
    answer = await client.get("/")
    assert answer.status == 404
    assert "comfyui-frontend-package" in await answer.text()
    assert (await client.get("/features")).status == 200


async def test_scripts_of_the_editor_of_packs_and_our_own(start: Start, base: Path) -> None:
    put(base / "web/demo.js", "// ours")
    put(base / "pack web/js/deep/x y.js", "// pack")
    put(base / "pack web/readme.txt", "no script")
    client = await start(extension_root=base / "web")
    PromptServer.instance.packs.web_directories["my pack"] = str(base / "pack web")
    urls = await (await client.get("/extensions")).json()
    assert urls == [
        "/extensions/core/one.js",
        "/extensions/latentloom/demo.js",
        "/extensions/my%20pack/js/deep/x%20y.js",
    ]
    for address in urls:
        answer = await client.get(address)
        assert (answer.status, answer.content_type) == (200, "application/javascript")


async def test_example_workflows_texts_and_blueprints_of_packs(client: Client, base: Path) -> None:
    pack = base / "custom_nodes/pack"
    put(pack / "example_workflows/flow one.json", '{"nodes": []}')
    put(pack / "example_workflows/flow one.jpg", b"jpg")
    put(pack / "locales/en/main.json", '{"test": {"hello": "Hello"}}')
    put(pack / "locales/en/nodeDefs.json", '{"N": {"display_name": "Node"}}')
    put(base / "custom_nodes/zpack/locales/en/main.json", '{"test": {"bye": "Bye"}}')
    put(base / "custom_nodes/zpack/locales/de/main.json", "{broken")
    put(pack / "subgraphs/blue.json", '{"definitions": {}}')
    put(base / "custom_nodes/off.disabled/subgraphs/no.json")
    names = await (await client.get("/workflow_templates")).json()
    assert names == {"pack": ["flow one"]}
    flow = await client.get("/api/workflow_templates/pack/flow%20one.json")
    assert (flow.content_type, await flow.json()) == ("application/json", {"nodes": []})
    assert (await client.get("/api/workflow_templates/pack/flow%20one.jpg")).status == 200
    assert await (await client.get("/i18n")).json() == {
        "en": {
            "test": {"hello": "Hello", "bye": "Bye"},
            "nodeDefs": {"N": {"display_name": "Node"}},
        },
        "de": {},
    }
    blueprints = await (await client.get("/global_subgraphs")).json()
    ((identity, entry),) = blueprints.items()
    assert entry == {
        "source": "custom_node",
        "name": "blue",
        "info": {"node_pack": "custom_nodes.pack"},
    }
    one = await (await client.get(f"/global_subgraphs/{identity}")).json()
    assert one == {**entry, "data": '{"definitions": {}}'}
    assert await (await client.get("/global_subgraphs/none")).json() is None


async def test_templates_and_help_of_the_installed_packages(client: Client) -> None:
    index = await client.get("/templates/index.json")
    assert index.content_type == "application/json"
    assert isinstance(await index.json(), list)
    assert (await client.get("/templates/none-1.webp")).status == 404
    page = await client.get("/docs/KSampler/en.md")
    assert (page.status, page.content_type) == (200, "application/octet-stream")
    assert (await client.get("/docs/NoSuchNode/en.md")).status == 404


def flow(*kinds: str, inside: tuple[str, ...] = ()) -> dict[str, Any]:
    """A workflow of the page's form; the nodes `inside` are in a subgraph."""
    graph: dict[str, Any] = {"nodes": [{"type": kind} for kind in kinds]}
    if inside:
        graph["nodes"].append({"type": "5f1c-its-own"})
        graph["definitions"] = {"subgraphs": [{"id": "5f1c-its-own", **flow(*inside)}]}
    return graph


@pytest.mark.parametrize("index_name", ["index.json", "index.zh-TW.json"])
async def test_the_index_names_templates_whose_nodes_are_all_here(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_name: str
) -> None:
    templates = tmp_path / "site/comfyui_workflow_templates_json/templates"
    put(templates.parent / "__init__.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    files: dict[str, Any] = {
        "plain": flow("EmptyImage", "SaveImage", "Note", "MarkdownNote", "Reroute"),
        "nested": flow("SaveImage", inside=("EmptyImage", "PrimitiveNode")),
        "later": flow("SaveImage", "Later"),
        "later_inside": flow("SaveImage", inside=("Later",)),
        "paid": flow("Paid", "SaveImage"),
        "no_workflow": {"nodes": 7},
    }
    for name, content in files.items():
        put(templates / f"{name}.json", json.dumps(content))
    put(templates / "broken.json", "{")
    rows = [{"name": name, "title": name.title()} for name in [*files, "broken", "absent"]]
    groups = [
        {"title": "Image", "icon": "i", "templates": rows},
        {"title": "Only paid", "templates": [{"name": "paid"}]},
    ]
    put(templates / index_name, json.dumps(groups))
    put(templates / "index.schema.json", '{"type": "array"}')
    known = list(NODES)
    client = await start(services={"node_names": lambda: known})

    async def listed() -> list[tuple[str, list[str]]]:
        answer = await client.get(f"/templates/{index_name}")
        assert (answer.status, answer.content_type) == (200, "application/json")
        return [
            (group["title"], [row["name"] for row in group["templates"]])
            for group in await answer.json()
        ]

    assert await listed() == [("Image", ["plain", "nested"])]
    known.append("Later")  # as by a pack
    assert await listed() == [("Image", ["plain", "nested", "later", "later_inside"])]
    known.append("Paid")
    assert (await listed())[1] == ("Only paid", ["paid"])
    shown = await (await client.get(f"/templates/{index_name}")).json()
    assert shown[0]["icon"] == "i"
    assert shown[0]["templates"][0] == rows[0]
    schema = await client.get("/templates/index.schema.json")
    assert await schema.json() == {"type": "array"}
    assert await (await client.get("/templates/paid.json")).json() == files["paid"]


GRAPH = {
    "nodes": [
        {"id": 1, "type": "A", "pos": [0, 0], "size": [200, 100], "widgets_values": [1, 2]},
        {"id": 2, "type": "B", "pos": {"0": 400, "1": 50}, "size": {"0": 200, "1": 80}},
        {"id": 3, "type": "C", "pos": [0, 300], "size": [9, 9], "flags": {"collapsed": True}},
    ],
    "links": [[1, 1, 0, 2, 0, "IMAGE"], {"origin_id": 2, "target_id": 3}, None, [7]],
}
ODD_GRAPHS = [
    [],
    {"nodes": "none"},
    {"nodes": [{"id": 1}, 7, {"pos": ["x", 1], "size": [1, 1]}, {"pos": [1e300, 0]}]},
    {"nodes": [{"id": 1, "pos": [0, 0], "size": [float("nan"), 1]}]},
    {"definitions": {"subgraphs": [None, {"nodes": None}]}},
]


def sides_and_format(content: bytes) -> tuple[tuple[int, int], str | None]:
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        return image.size, image.format


def packaged_index() -> list[dict[str, Any]]:
    """The index of the installed template packages, with templates for which nodes are lacking."""
    path = PromptServer.instance.packs.template_file("index.json")
    assert path is not None
    return list(json.loads(path.read_bytes()))


async def test_a_template_without_its_picture_shows_its_graph(client: Client) -> None:
    index = packaged_index()
    names = [row["name"] for group in index for row in group["templates"]]
    for name in names[::80]:
        answer = await client.get(f"/templates/{name}-1.webp")
        assert (answer.status, answer.content_type) == (200, "image/webp"), name
        size, kind = sides_and_format(await answer.read())
        assert size[0] > 100
        assert kind == "WEBP"
    logos = await (await client.get("/templates/index_logo.json")).json()
    for logo in set(logos.values()):
        answer = await client.get(f"/templates/{logo}")
        assert (answer.status, answer.content_type.partition("/")[0]) == (200, "image"), logo
    for absent in ("none-1.webp", "none-1.mp3", f"{names[0]}-1.exe", "logo/none.png", "-1.webp"):
        answer = await client.get(f"/templates/{absent}")
        assert (answer.status, await answer.read()) == (404, b""), absent


async def test_a_template_without_its_sound_answers_with_silence(client: Client) -> None:
    index = packaged_index()
    sounds = [
        f"/templates/{row['name']}-1.{row['mediaSubtype']}"
        for group in index
        for row in group["templates"]
        if row["mediaType"] == "audio"
    ]
    for path in sounds:
        answer = await client.get(path)
        assert (answer.status, answer.content_type.partition("/")[0]) == (200, "audio"), path


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
async def test_an_example_of_a_pack_without_thumbnail_shows_its_graph(
    client: Client, base: Path, suffix: str
) -> None:
    folder = base / "custom_nodes/pack/example_workflows"
    put(folder / "flow one.json", json.dumps(GRAPH))
    put(folder / "packed.json", json.dumps({"nodes": [], "definitions": {"subgraphs": [GRAPH]}}))
    for name in ("flow%20one", "packed"):
        answer = await client.get(f"/api/workflow_templates/pack/{name}.{suffix}")
        assert answer.status == 200
        shown = sides_and_format(await answer.read())
        assert shown == ((400, 400), "JPEG" if suffix == "jpg" else suffix.upper())
    for number, odd in enumerate(ODD_GRAPHS):
        put(folder / f"odd{number}.json", json.dumps(odd))
        answer = await client.get(f"/api/workflow_templates/pack/odd{number}.{suffix}")
        assert answer.status == 404, odd
    put(folder / "broken.json", "{")
    assert (await client.get(f"/api/workflow_templates/pack/broken.{suffix}")).status == 404


async def test_object_info_lists_nodes_with_tag_and_compression(client: Client) -> None:
    answer = await client.get("/object_info")
    assert set(await answer.json()) == set(NODES)
    tag = {"If-None-Match": answer.headers["ETag"]}
    again = await client.get("/object_info", headers=tag)
    assert (again.status, await again.read()) == (304, b"")
    assert answer.headers["Content-Encoding"] == "gzip"
    plain = await client.get("/object_info", headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    one = await (await client.get("/object_info/EmptyImage")).json()
    assert set(one) == {"EmptyImage"}
    odd = await client.get("/object_info/%C3%9Cn%C3%AFcode%20%7C%20Node%20(1%2F2)")
    assert set(await odd.json()) == {"Ünïcode | Node (1/2)"}
    assert await (await client.get("/object_info/None")).json() == {}


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("count", [0, 1, 60])
async def test_a_fresh_node_list_is_sent_while_it_is_made(
    start: Start, encoding: str, count: int
) -> None:
    made: list[str] = []

    def describe(name: str) -> dict[str, Any]:
        time.sleep(0.002)
        made.append(name)
        return {"name": name, "text": "grün" * 500}

    names = [f"Node {number}" for number in range(count)]
    client = await start(services={"node_info": describe, "node_names": lambda: names})
    await (await client.get("/object_info")).read()
    made.clear()
    headers = {"Cache-Control": "no-cache", "Accept-Encoding": encoding}
    answer = await client.get("/object_info", headers=headers)
    if count > 1:
        assert 0 < len(made) < count  # the head has come, not all nodes were asked
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.content_type == "application/json"
    listed = await answer.json()
    assert list(listed) == names == made
    tagged = await client.get("/object_info")
    assert "ETag" in tagged.headers
    assert await tagged.json() == listed
    assert len(made) == count  # the fresh list is what others get from then on
    head = await client.head("/object_info", headers=headers)
    assert (head.status, await head.read()) == (200, b"")


async def test_a_fresh_node_list_is_compared_with_the_tag_that_is_known(client: Client) -> None:
    answer = await client.get("/object_info")
    headers = {"Cache-Control": "no-cache", "If-None-Match": answer.headers["ETag"]}
    again = await client.get("/object_info", headers=headers)
    assert (again.status, await again.read()) == (304, b"")


async def test_a_node_that_cannot_describe_itself_is_left_out(start: Start) -> None:
    def describe(name: str) -> dict[str, Any]:
        if name == "SaveImage":
            raise RuntimeError("broken pack")
        return {"name": name, "default": float("inf")}

    client = await start(services={"node_info": describe})
    listed = await (await client.get("/object_info")).json()
    assert "SaveImage" not in listed
    assert listed["EmptyImage"]["default"] is None
    assert await (await client.get("/object_info/SaveImage")).json() == {}


async def test_node_replacements_are_served_as_given(start: Start) -> None:
    given = {"Old": [{"new_node_id": "New", "old_node_id": "Old"}]}
    client = await start(services={"node_replacements": lambda: given})
    assert await (await client.get("/api/node_replacements")).json() == given
    assert (await (await client.get("/features")).json())["node_replacements"] is True


def safetensors(metadata: dict[str, str]) -> bytes:
    header = json.dumps({"__metadata__": metadata}).encode()
    return struct.pack("<Q", len(header)) + header


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (255, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


async def test_models_are_listed_with_facts_and_previews(client: Client, base: Path) -> None:
    folder = base / "models/checkpoints"
    cover = "data:image/png;base64," + base64.b64encode(picture()).decode()
    put(folder / "a.safetensors", safetensors({"modelspec.title": "T"}))
    put(folder / "sub/b.safetensors", safetensors({"modelspec.thumbnail": cover}))
    put(folder / "a.preview.png", picture())
    put(folder / ".hidden/c.safetensors")
    put(base / "models/embeddings/emb.pt")
    get = client.get
    assert "checkpoints" in await (await get("/models")).json()
    listed = await (await get("/api/models/checkpoints")).json()
    assert listed[-2:] == ["a.safetensors", "sub/b.safetensors"]
    assert (await get("/models/unet")).status == 404
    assert await (await get("/embeddings")).json() == ["emb"]
    folders = await (await get("/experiment/models")).json()
    assert {"configs", "custom_nodes"}.isdisjoint({row["name"] for row in folders})
    files = await (await get("/experiment/models/checkpoints")).json()
    assert [(row["name"], row["pathIndex"]) for row in files] == [
        ("a.safetensors", 0),
        ("sub/b.safetensors", 0),
    ]
    assert (await get("/experiment/models/nope")).status == 404
    for name in ("a.webp", "sub/b.webp", "sub%2Fb.webp"):
        shown = await get(f"/experiment/models/preview/checkpoints/0/{name}")
        assert (shown.status, shown.content_type) == (200, "image/webp"), name
    metadata = await get("/view_metadata/checkpoints?filename=a.safetensors")
    assert await metadata.json() == {"modelspec.title": "T"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/experiment/models/preview/checkpoints/0/none.webp", 404),
        ("/experiment/models/preview/checkpoints/7/a.webp", 404),
        ("/experiment/models/preview/checkpoints/-1/a.webp", 404),
        ("/experiment/models/preview/checkpoints/99999999999999999999/a.webp", 404),
        ("/experiment/models/preview/nope/0/a.webp", 404),
        ("/experiment/models/preview/checkpoints/0/..%2F..%2Fsecret.webp", 403),
        ("/experiment/models/preview/checkpoints/0/%2Fetc%2Fsecret.webp", 403),
        ("/view_metadata/checkpoints?filename=../../secret.safetensors", 404),
        ("/view_metadata/checkpoints?filename=text.safetensors", 404),
        ("/view_metadata/checkpoints?filename=huge.safetensors", 404),
        ("/view_metadata/checkpoints?filename=model.ckpt", 404),
        ("/view_metadata/checkpoints", 404),
        ("/view_metadata/nope?filename=a", 404),
        ("/models/__class__", 404),
    ],
)
async def test_model_routes_refuse_what_is_not_there(
    client: Client, base: Path, path: str, status: int
) -> None:
    from yarl import URL

    put(base / "secret.safetensors", safetensors({"secret": "1"}))
    put(base / "secret.png", picture())
    put(base / "models/checkpoints/text.safetensors", "<html>not a model</html>")
    put(base / "models/checkpoints/huge.safetensors", struct.pack("<Q", 1 << 60) + b"{}")
    put(base / "models/checkpoints/model.ckpt", safetensors({"a": "b"}))
    answer = await client.get(URL(path, encoded=True))
    assert answer.status == status
    if path.startswith("/view_metadata"):  # the editor parses any body as JSON
        assert await answer.read() == b""


async def test_memory_says_who_holds_what(start: Start) -> None:
    rows = [{"model": "BaseModel", "device": "cpu", "loaded_bytes": 7}]
    client = await start(services={"memory": lambda: rows})
    answer = await (await client.get("/api/memory")).json()
    assert answer == {"models": rows, "devices": []}


async def test_system_stats_have_the_fields_the_page_needs(start: Start) -> None:
    def facts() -> dict[str, Any]:
        return {"system": {"ram_total": 5}, "devices": [{"name": "cpu", "type": "cpu"}]}

    client = await start(services={"system_stats": facts}, argv=("main.py", "--cpu"))
    stats = await (await client.get("/system_stats")).json()
    assert stats["system"]["argv"] == ["main.py", "--cpu"]
    assert stats["system"]["ram_total"] == 5
    assert stats["system"]["comfyui_version"] == "0.8.0"  # the interface, not this program
    assert stats["devices"] == [{"name": "cpu", "type": "cpu"}]
    recorded = {
        "os",
        "ram_total",
        "ram_free",
        "comfyui_version",
        "required_frontend_version",
        "installed_templates_version",
        "required_templates_version",
        "python_version",
        "pytorch_version",
        "embedded_python",
        "argv",
    }
    assert recorded <= set(stats["system"])


async def test_logs_keep_writes_and_replace_unfinished_lines(client: Client) -> None:
    logs = PromptServer.instance.logs
    stream = logs.wrap(io.StringIO())
    stream.write("start\n")
    for percent in (10, 20):
        stream.write(f"\r{percent}%")
    stream.write("\r100%\n")
    raw = await (await client.get("/internal/logs/raw")).json()
    assert [entry["m"] for entry in raw["entries"]] == ["start\n", "\r100%\n"]
    assert set(raw["size"]) == {"cols", "rows"}
    text = await (await client.get("/internal/logs")).json()
    assert text.endswith(" - \r100%\n")
    for number in range(400):
        stream.write(f"{number}\n")
    assert len((await (await client.get("/internal/logs/raw")).json())["entries"]) == 300


async def test_internal_files_are_newest_first_without_hidden_ones(
    client: Client, base: Path
) -> None:
    import os

    for age, name in enumerate(("new.png", "old.png", ".hidden")):
        path = put(base / "output" / name)
        os.utime(path, (1000 - age, 1000 - age))
    assert await (await client.get("/internal/files/output")).json() == ["new.png", "old.png"]
    answer = await client.get("/internal/files/models")
    assert answer.status == 400
    assert (await answer.json())["error"]


async def test_the_node_list_is_kept_until_a_file_comes_or_a_fresh_one_is_wanted(
    start: Start, base: Path
) -> None:
    import folder_paths

    made: list[str] = []

    def describe(name: str) -> dict[str, Any]:
        made.append(name)
        return {"name": name, "models": folder_paths.get_filename_list("vae")}

    client = await start(services={"node_info": describe})

    async def names(**headers: str) -> int:
        made.clear()
        await (await client.get("/object_info", headers=headers)).read()
        return len(made)

    await names()  # unless it was made when the server started
    assert await names() == 0
    assert await names(**{"Cache-Control": "no-cache"}) == len(NODES)
    assert await names() == 0
    put(base / "models/vae/new.safetensors")
    await client.get("/models/vae")  # somebody else has looked meanwhile
    assert await names() == len(NODES)
    listed = await (await client.get("/object_info")).json()
    assert listed["EmptyImage"]["models"] == ["new.safetensors"]
    put(base / "input/new.png")
    assert await names() == len(NODES)


async def test_what_packs_add_to_the_features_is_told(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a branch that the server has itself, and without changing what it says."""
    added = {"extension": {"manager": {"supports_csrf_post": True, "supports_v4": False}}, "own": 1}
    for name, value in added.items():
        monkeypatch.setitem(feature_flags.SERVER_FEATURE_FLAGS, name, value)
    told = await (await client.get("/features")).json()
    assert told["extension"]["manager"] == {"supports_csrf_post": True, "supports_v4": True}
    assert told["own"] == 1
    assert told["max_upload_size"] > 0
