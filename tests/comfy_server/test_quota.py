"""What each user may keep, on a server with accounts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

import folder_paths
from comfy_server import PromptServer
from comfy_server.auth import add_account
from comfy_server.quota import OverQuota, Quota, folder_bytes
from tests.comfy_server.conftest import PROMPT, Start

LIMIT = 10_000


def test_files_are_measured_below_all_folders_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/one").write_bytes(b"x" * 10)
    (tmp_path / "a/b/two").write_bytes(b"x" * 5)
    (tmp_path / "a/loop").symlink_to(tmp_path)
    assert 15 <= folder_bytes(str(tmp_path)) < 15 + 4096
    assert folder_bytes(str(tmp_path / "absent")) == 0


def test_what_is_added_counts_at_once_and_what_was_deleted_no_longer(tmp_path: Path) -> None:
    now = [0.0]
    quota = Quota(100, lambda user: [str(tmp_path / user)], lambda: now[0])
    quota.take("ann", 60)
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/file").write_bytes(b"x" * 60)
    with pytest.raises(OverQuota, match="delete some"):
        quota.take("ann", 60)
    (tmp_path / "ann/file").unlink()
    quota.take("ann", 60)
    quota.take("bob", 100)
    quota.take(None, 10**9)
    now[0] = 60.0
    assert quota.used_bytes("ann") == 0


def test_somebody_exactly_at_the_limit_is_full(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    quota = Quota(100, lambda _: [str(tmp_path)])
    with pytest.raises(OverQuota):
        quota.take("ann")


class Users:
    """One server with a small quota, a user and an admin."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.tokens = {name: add_account(spec) for name, spec in SPECS.items()}

    async def ask(self, name: str, path: str, data: Any) -> int:
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        async with self.client.post(path, data=data, headers=headers) as answer:
            if answer.status == 507:
                error = (await answer.json())["error"]
                assert "quota" in (error if isinstance(error, str) else error["details"])
            return int(answer.status)


SPECS = {"ann": "ann", "root": "root:admin"}


@pytest.fixture
async def users(start: Start) -> Users:
    return Users(await start(auth=True, user_quota_bytes=LIMIT))


def upload(size: int) -> FormData:
    form = FormData()
    form.add_field("image", b"x" * size, filename=f"{size}.bin")
    return form


async def test_every_way_of_storing_is_bounded_and_admins_are_not(users: Users) -> None:
    big = "y" * (LIMIT - 1000)
    assert await users.ask("ann", "/upload/image", upload(LIMIT + 1)) == 507
    assert await users.ask("ann", "/userdata/a.json", "z" * (LIMIT + 1)) == 507
    assert await users.ask("ann", "/settings/x", json.dumps("z" * LIMIT)) == 507
    assert await users.ask("ann", "/userdata/a.json", big) == 200
    assert await users.ask("ann", "/userdata/a.json?overwrite=true", "short") in (200, 507)
    assert await users.ask("ann", "/userdata/a.json", big) in (200, 507)
    assert await users.ask("ann", "/upload/image", upload(2000)) == 507
    assert await users.ask("root", "/upload/image", upload(2 * LIMIT)) == 200


async def test_a_user_whose_folders_are_full_runs_nothing(users: Users, base: Path) -> None:
    body = json.dumps({"prompt": PROMPT})
    assert await users.ask("ann", "/prompt", body) == 200
    (base / "output/ann").mkdir()
    (base / "output/ann/result.png").write_bytes(b"x" * LIMIT)
    server = PromptServer.instance
    server.quota._measured.clear()
    assert await users.ask("ann", "/prompt", body) == 507
    assert await users.ask("root", "/prompt", body) == 200
    assert server.prompt_queue.get(timeout=1) is not None  # ann's, accepted while there was room
    with server.run_scope(), pytest.raises(OSError, match="user-quota"):
        folder_paths.get_save_image_path("x", folder_paths.get_output_directory())
