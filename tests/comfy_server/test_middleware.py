"""What requests answer when the system refuses the server its files."""

from __future__ import annotations

import errno
import os

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from comfy_server.middleware import errors


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (errno.ENOSPC, 507, "disk is full"),
        (errno.EROFS, 500, "permissions are to be mended"),
        (errno.EACCES, 500, "permissions are to be mended"),
    ],
)
async def test_a_refusal_of_the_system_is_said_without_the_path(
    number: int, status: int, words: str
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        raise OSError(number, os.strerror(number), "/secret/place")

    app = web.Application(middlewares=[errors])
    app.router.add_get("/", refuse)
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/")
        text = await answer.text()
    assert answer.status == status
    assert words in text
    assert "/secret" not in text
