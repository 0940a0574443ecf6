"""Accounts, login, roles, what each user sees, rate limits, health and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import (
    ClientSession,
    CookieJar,
    FormData,
    WSServerHandshakeError,
    encode_basic_auth,
    web,
)
from aiohttp.test_utils import TestClient

import folder_paths
from comfy_execution import events
from comfy_execution.items import ExecutionStatus
from comfy_server import PromptServer, hub
from comfy_server.accounts import AccountRefused, AccountStore
from comfy_server.auth import FAILURES_PER_MINUTE, account_store, add_account
from comfy_server.rates import RateLimit
from tests.comfy_server.conftest import PROMPT, Start
from tests.support.waiting import PATIENCE_S

Client = TestClient[Any, Any]


class People:
    """Three users and requests in their names."""

    def __init__(self, client: Client, tokens: dict[str, str]) -> None:
        self.client, self.tokens = client, tokens

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[name]}"}

    async def get(self, name: str, path: str) -> Any:
        answer = await self.client.get(path, headers=self.headers(name))
        return await answer.json() if answer.status == 200 else answer.status

    async def post(self, name: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body or {})
        answer = await self.client.post(path, data=data, headers=self.headers(name))
        return await answer.json() if answer.content_type == "application/json" else answer.status

    async def submit(self, name: str, prompt_id: str, **extra: Any) -> Any:
        body = {"prompt": PROMPT, "prompt_id": prompt_id, **extra}
        return await self.post(name, "/prompt", body)


@pytest.fixture
async def people(start: Start) -> People:
    specs = {"ann": "ann", "bob": "bob:user", "root": "root:admin"}
    tokens = {name: add_account(spec) for name, spec in specs.items()}
    return People(await start(auth=True), tokens)


def finish() -> None:
    queue = PromptServer.instance.prompt_queue
    taken = queue.get(timeout=1)
    assert taken is not None
    queue.task_done(taken[1], {"outputs": {}, "meta": {}}, ExecutionStatus("success", True, []))


async def test_no_cache_between_may_keep_what_a_user_was_given(people: People, base: Path) -> None:
    for path in ("output/ann/a.png", "user/ann/a.png", "user/ann/a.json", "models/vae/a.png"):
        file = base / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"{}")
    (base / "models/vae/a.safetensors").write_bytes(b"x")
    for path in (
        "/view?filename=a.png",
        "/userdata/a.png",
        "/userdata/a.json",
        "/userdata/absent.png",
        "/experiment/models/preview/vae/0/a.webp",
        "/settings",
        "/api/jobs",
        "/object_info",
    ):
        answer = await people.client.get(path, headers=people.headers("ann"))
        kept = answer.headers["Cache-Control"]
        assert kept.startswith(("private", "no-cache", "no-store")), (path, kept)


# -- accounts ---------------------------------------------------------------------------------


def test_only_hashes_are_stored_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep/accounts.json"
    store = AccountStore(path)
    account, token = store.add("ann:admin")
    session = store.open_session(account)
    stored = path.read_text()
    assert token not in stored
    assert session not in stored
    assert path.stat().st_mode & 0o077 == 0
    assert store.by_token(token) == account
    assert store.by_token(token, "bob") is None
    assert store.by_token("wrong") is None
    assert store.by_session(session) == account
    assert AccountStore(path).by_session(session) == account  # survives a restart
    store.close_session(session)
    assert store.by_session(session) is None


def test_renewing_a_token_ends_the_old_one_and_its_sessions(tmp_path: Path) -> None:
    store = AccountStore(tmp_path / "a.json")
    account, old = store.add("ann")
    session = store.open_session(account)
    other_process = AccountStore(tmp_path / "a.json")
    _, new = other_process.add("ann")
    assert store.by_token(old) is None
    assert store.by_session(session) is None
    assert store.by_token(new) == account


@pytest.mark.parametrize(
    "spec", ["", ":admin", "a b", "../x", "__system", "a:root", "x" * 65, "a/b", "a.", ".."]
)
def test_unusable_names_and_roles_are_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(AccountRefused):
        AccountStore(tmp_path / "a.json").add(spec)


# -- getting in -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/system_stats"),
        ("GET", "/api/queue"),
        ("POST", "/prompt"),
        ("GET", "/view"),
        ("POST", "/upload/image"),
        ("GET", "/assets/app.js"),
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/internal/logs"),
        ("GET", "/nothing"),
        ("DELETE", "/userdata/x"),
    ],
)
async def test_without_credentials_nothing_is_served(
    people: People, method: str, path: str
) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic !!"},
        {"Cookie": "latentloom_session=forged"},
        {"comfy-user": "ann"},
    ):
        answer = await people.client.request(method, path, headers=headers)
        assert answer.status == 401
        assert "WWW-Authenticate" in answer.headers


async def test_the_socket_needs_credentials(people: People) -> None:
    with pytest.raises(WSServerHandshakeError) as refused:
        await people.client.ws_connect("/ws")
    assert refused.value.status == 401
    socket = await people.client.ws_connect("/ws", headers=people.headers("ann"))
    assert (await socket.receive_json())["type"] == "status"


async def test_basic_credentials_work_for_the_right_name(people: People) -> None:
    def basic(name: str) -> dict[str, str]:
        return {"Authorization": encode_basic_auth(name, people.tokens["ann"])}

    assert (await people.client.get("/queue", headers=basic("ann"))).status == 200
    assert (await people.client.get("/queue", headers=basic("bob"))).status == 401


async def test_a_browser_is_sent_to_the_login_page_and_back(people: People) -> None:
    browser = {"Accept": "text/html,*/*"}
    answer = await people.client.get("/?a=1", headers=browser, allow_redirects=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/login?next=/?a=1")
    page = await people.client.get("/login?next=%22><script>")
    text = await page.text()
    assert "<script>" not in text
    assert "script-src" not in page.headers["Content-Security-Policy"]
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")


async def test_logging_in_on_the_page_sets_a_guarded_cookie(people: People) -> None:
    url = people.client.make_url("/login")
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
        form = {"name": "ann", "token": people.tokens["ann"], "next": "/queue"}
        answer = await browser.post(url, data=form, allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/queue")
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert (await browser.get(people.client.make_url("/queue"))).status == 200
        assert (await browser.post(people.client.make_url("/logout"))).status == 200
        assert (await browser.get(people.client.make_url("/queue"))).status == 401


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil", "/login"])
async def test_the_login_page_leads_nowhere_else(people: People, target: str) -> None:
    form = {"name": "ann", "token": people.tokens["ann"], "next": target}
    answer = await people.client.post("/login", data=form, allow_redirects=False)
    assert answer.headers["Location"] == "/"


async def test_guessing_at_the_login_page_is_slowed_down(people: People) -> None:
    statuses = [
        (await people.client.post("/login", data={"name": "ann", "token": "guess"})).status
        for _ in range(12)
    ]
    assert statuses[:10] == [401] * 10
    assert statuses[10:] == [429] * 2


async def test_programs_log_in_with_json(people: People) -> None:
    body = {"name": "root", "token": people.tokens["root"]}
    answer = await people.client.post("/login", json=body)
    assert await answer.json() == {"name": "root", "role": "admin"}


async def test_some_routes_need_an_admin(people: People) -> None:
    for path in ("/internal/logs", "/internal/logs/raw", "/metrics", "/api/metrics"):
        assert await people.get("ann", path) == 403
    assert (await people.post("ann", "/free", {"unload_models": True}))["error"]
    assert (await people.post("ann", "/users", {"username": "x"}))["error"]
    assert await people.get("root", "/internal/logs") == ""


# -- each to their own ------------------------------------------------------------------------


async def test_users_see_and_stop_only_their_own_prompts(people: People) -> None:
    await people.submit("ann", "a1")
    await people.submit("bob", "b1")
    await people.submit("bob", "b2", extra_data={"user_id": "ann"})
    ids = {
        name: [item[1] for item in (await people.get(name, "/queue"))["queue_pending"]]
        for name in people.tokens
    }
    assert ids == {"ann": ["a1"], "bob": ["b1", "b2"], "root": ["a1", "b1", "b2"]}
    await people.post("ann", "/queue", {"delete": ["b1"]})
    assert await people.post("ann", "/api/jobs/b1/cancel") == {"cancelled": False}
    await people.post("ann", "/api/jobs/cancel", {"job_ids": ["b1", "b2"]})
    await people.post("ann", "/queue", {"clear": True})
    assert [item[1] for item in (await people.get("root", "/queue"))["queue_pending"]] == [
        "b1",
        "b2",
    ]
    assert await people.get("ann", "/api/jobs/b1") == 404
    jobs = (await people.get("bob", "/api/jobs"))["jobs"]
    assert {job["id"] for job in jobs} == {"b1", "b2"}


async def test_users_interrupt_only_their_own_prompt(people: People) -> None:
    hit: list[str] = []
    queue = PromptServer.instance.prompt_queue
    queue.add_interrupt_listener(hit.append)
    await people.submit("bob", "b1")
    queue.get(timeout=1)
    await people.post("ann", "/interrupt")
    await people.post("ann", "/interrupt", {"prompt_id": "b1"})
    assert hit == []
    await people.post("bob", "/interrupt")
    assert hit == ["b1"]


async def test_users_see_and_forget_only_their_own_history(people: People) -> None:
    for name, prompt_id in (("ann", "a1"), ("bob", "b1"), ("ann", "a2")):
        await people.submit(name, prompt_id)
        finish()
    assert list(await people.get("ann", "/history")) == ["a1", "a2"]
    assert list(await people.get("ann", "/history?max_items=1")) == ["a2"]
    assert list(await people.get("ann", "/history?max_items=1&offset=0")) == ["a1"]
    assert await people.get("ann", "/history/b1") == {}
    await people.post("ann", "/history", {"delete": ["b1"]})
    await people.post("ann", "/history", {"clear": True})
    assert list(await people.get("root", "/history")) == ["b1"]


async def test_files_and_settings_are_kept_apart(people: People, base: Path) -> None:
    await people.post("ann", "/settings/theme", "dark")
    assert await people.get("bob", "/settings") == {}
    assert (base / "user/ann/comfy.settings.json").is_file()
    form = FormData()
    form.add_field("image", b"mine", filename="a.png")
    answer = await people.client.post("/upload/image", data=form, headers=people.headers("ann"))
    assert await answer.json() == {"name": "a.png", "subfolder": "", "type": "input"}
    assert (base / "input/ann/a.png").read_bytes() == b"mine"
    (base / "output/ann").mkdir()
    (base / "output/ann/r.png").write_bytes(b"result")
    for path in (
        "/view?filename=a.png&type=input",
        "/view?filename=r.png",
        "/view?filename=r.png&subfolder=../ann",
    ):
        assert await people.get("bob", path) in (403, 404)
    view = await people.client.get("/view?filename=r.png", headers=people.headers("ann"))
    assert await view.read() == b"result"
    assert await people.get("bob", "/internal/files/input") == []
    assert await people.get("ann", "/internal/files/input") == ["a.png"]


async def test_the_worker_writes_into_the_owners_folders(people: People, base: Path) -> None:
    server = PromptServer.instance
    for name, folder in (("ann", base / "output/ann"), ("root", base / "output")):
        await people.submit(name, f"p-{name}")
        taken = server.prompt_queue.get(timeout=1)
        assert taken is not None
        with server.run_scope():
            assert folder_paths.get_output_directory() == str(folder)
        server.prompt_queue.task_done(taken[1], {}, ExecutionStatus("success", True, []))


async def test_a_client_id_belongs_to_its_first_user(people: People) -> None:
    socket = await people.client.ws_connect("/ws?clientId=mine", headers=people.headers("ann"))
    await socket.receive_json()
    with pytest.raises(WSServerHandshakeError) as refused:
        await people.client.ws_connect("/ws?clientId=mine", headers=people.headers("bob"))
    assert refused.value.status == 403
    answer = await people.submit("bob", "b1", client_id="mine")
    assert answer["error"]["type"] == "invalid_client_id"


async def test_news_of_an_ownerless_prompt_stays_with_its_user(people: People) -> None:
    ann = await people.client.ws_connect("/ws?clientId=a", headers=people.headers("ann"))
    bob = await people.client.ws_connect("/ws?clientId=b", headers=people.headers("bob"))
    for socket in (ann, bob):
        await socket.receive_json()
    await people.submit("ann", "a1")
    PromptServer.instance.prompt_queue.get(timeout=1)
    PromptServer.instance.publish(events.Progress(1, 2, "a1", "3"))
    PromptServer.instance.queue_updated()
    kinds: dict[str, list[str]] = {"ann": [], "bob": []}
    for name, socket in (("ann", ann), ("bob", bob)):
        while kinds[name].count("status") < 3:
            kinds[name].append((await asyncio.wait_for(socket.receive_json(), PATIENCE_S))["type"])
    assert "progress" in kinds["ann"]
    assert "progress" not in kinds["bob"]


async def test_of_several_prompts_at_once_everybody_gets_the_news_of_their_own(
    people: People,
) -> None:
    server = PromptServer.instance
    names = ("ann", "bob")
    sockets = []
    for name in names:
        path = f"/ws?clientId={name}"
        sockets.append(await people.client.ws_connect(path, headers=people.headers(name)))
        await sockets[-1].receive_json()
        await people.submit(name, f"p-{name}")
    for _ in names:
        taken = server.prompt_queue.get(timeout=1)
        assert taken is not None
        with server.news_of(taken[0]):
            server.publish(events.Progress(1, 2, taken[0][1], "3"))
            server.send_sync("from.a.pack", {"of": taken[0][1]})
    for name, socket in zip(names, sockets):
        seen: list[Any] = []
        while not seen or seen[-1]["type"] != "from.a.pack":
            seen.append(await asyncio.wait_for(socket.receive_json(), PATIENCE_S))
        server.queue_updated()
        while seen[-1]["type"] != "status":
            seen.append(await asyncio.wait_for(socket.receive_json(), PATIENCE_S))
        told = [
            s["data"].get("prompt_id") or s["data"]["of"] for s in seen if s["type"] != "status"
        ]
        assert told == [f"p-{name}", f"p-{name}"]


# -- limits, health, figures ------------------------------------------------------------------


def test_a_bucket_refills_with_time() -> None:
    now = [0.0]
    limit = RateLimit(60, lambda: now[0])
    assert [limit.take("a") for _ in range(60)] == [None] * 60
    assert limit.take("a") == pytest.approx(1.0)
    assert limit.take("b") is None
    now[0] = 1.0
    assert limit.take("a") is None


async def test_too_many_requests_are_429_and_page_files_are_not_counted(start: Start) -> None:
    client = await start(requests_per_minute=3)
    for _ in range(10):
        assert (await client.get("/assets/app.js")).status == 200
    statuses = [(await client.get("/queue")).status for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]


async def test_health_and_readiness(start: Start) -> None:
    client = await start(auth=True)
    assert await (await client.get("/healthz")).json() == {"status": "ok"}
    assert (await client.get("/readyz")).status == 200
    waiting = await start(services={"validate": None})
    answer = await waiting.get("/readyz")
    assert (answer.status, (await answer.json())["status"]) == (503, "not ready")
    broken = await start(services={"ready": lambda: "no model"})
    assert (await (await broken.get("/readyz")).json())["reason"] == "no model"


async def test_metrics_count_requests_jobs_nodes_and_memory(start: Start) -> None:
    client = await start(services={"metrics": lambda: {"memory_bytes": {"unet": 5}}})
    await client.post("/prompt", json={"prompt": PROMPT})
    await client.post("/prompt", json={"prompt": PROMPT})
    queue = PromptServer.instance.prompt_queue
    taken = queue.get(timeout=1)
    assert taken is not None
    PromptServer.instance.publish(events.ExecutionCached(("1",), "p", 1))
    nodes = {
        "1": {"cached": True},
        "2": {"class_type": "SaveImage", "cached": False, "wall_ms": 20.0},
    }
    PromptServer.instance.publish(events.ExecutionSuccess("p", 1))
    PromptServer.instance.publish(events.NodeFigures("p", nodes))
    queue.task_done(taken[1], {"nodes": nodes}, ExecutionStatus("success", True, []))
    await client.get("/history/../../" + "x" * 50)
    page = await (await client.get("/metrics")).text()
    for line in (
        'latentloom_jobs_total{result="success"} 1.0',
        "latentloom_queue_pending 1.0",
        "latentloom_cache_hits_total 1.0",
        'latentloom_memory_bytes{owner="unet"} 5.0',
        'latentloom_node_seconds_count{class_type="SaveImage"} 1.0',
        'latentloom_http_requests_total{method="POST",route="/prompt",status="200"} 2.0',
    ):
        assert line in page
    assert "x" * 50 not in page


async def test_the_request_log_names_user_and_prompt(
    people: People, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "comfy_server.request_log")
    await people.submit("ann", "my-prompt")
    line = caplog.records[-1].getMessage()
    assert "POST /prompt 200" in line
    assert "user=ann" in line
    assert "prompt=my-prompt" in line
    assert people.tokens["ann"] not in caplog.text


async def test_a_server_without_accounts_says_so(start: Start, base: Path) -> None:
    assert account_store().is_empty()
    client = await start()
    assert (await client.get("/login", allow_redirects=False)).status == 303
    assert (await client.post("/login", json={})).status == 400


async def test_a_run_counts_how_often_its_owners_folders_are_asked_for(people: People) -> None:
    server = PromptServer.instance
    assert folder_paths.scoped_user() == ""
    for name, scoped in (("ann", "ann"), ("root", "*")):
        await people.submit(name, f"p-{name}")
        taken = server.prompt_queue.get(timeout=1)
        assert taken is not None
        with server.run_scope():
            assert (folder_paths.scoped_user(), folder_paths.scope_uses()) == (scoped, 0)
            folder_paths.get_annotated_filepath("a.png")
            folder_paths.get_save_image_path("x", folder_paths.get_output_directory())
            assert folder_paths.scope_uses() == 2
        server.prompt_queue.task_done(taken[1], {}, ExecutionStatus("success", True, []))


async def test_very_many_client_ids_do_not_free_that_of_an_open_socket(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "MOST_CLAIMS", 5)
    headers = people.headers("ann")
    socket = await people.client.ws_connect("/ws?clientId=of-ann", headers=headers)
    for number in range(20):
        taken = await people.submit("bob", f"p{number}", client_id=f"of-bob-{number}")
        assert "prompt_id" in taken
    with pytest.raises(WSServerHandshakeError, match="403"):
        await people.client.ws_connect("/ws?clientId=of-ann", headers=people.headers("bob"))
    assert "error" in await people.submit("bob", "mine", client_id="of-ann")
    assert len(PromptServer.instance.hub._owners) <= 6
    await socket.close()


async def test_wrong_tokens_and_sessions_are_counted_before_anybody_is_known(
    people: People,
) -> None:
    for number in range(FAILURES_PER_MINUTE + 20):
        wrong = (
            {"Authorization": f"Bearer wrong{number}"}
            if number % 2
            else {"Cookie": f"latentloom_session=wrong{number}"}
        )
        answer = await people.client.get("/queue", headers=wrong)
        assert answer.status == (401 if number < FAILURES_PER_MINUTE else 429), number
    assert int(answer.headers["Retry-After"]) >= 1
    assert (await people.client.get("/queue")).status == 401  # who shows nothing guesses nothing
    assert await people.get("ann", "/queue") == {"queue_running": [], "queue_pending": []}


async def test_only_admins_reach_what_installs_programs(start: Start) -> None:
    """The node manager's routes, whatever they are called, also under /api."""

    async def install(request: web.Request) -> web.Response:
        return web.json_response({"installed": True})

    install.__module__ = "comfyui_manager.glob.manager_server"
    tokens = {
        name: add_account(spec) for name, spec in {"ann": "ann", "root": "root:admin"}.items()
    }
    client = await start(lambda server: server.routes.get("/v2/customnode/x")(install), auth=True)
    people = People(client, tokens)
    for path in ("/v2/customnode/x", "/api/v2/customnode/x"):
        assert await people.get("ann", path) == 403
        assert await people.get("root", path) == {"installed": True}


async def test_requests_that_end_together_have_a_line_each(
    people: People, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "comfy_server.request_log")
    await asyncio.gather(*(people.submit("ann", f"p{number}") for number in range(20)))
    lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
    told = [line for line in lines if line.startswith("POST /prompt 200")]
    assert sorted(line.rpartition("prompt=")[2] for line in told) == sorted(
        f"p{number}" for number in range(20)
    )
