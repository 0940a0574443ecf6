"""Packs that see all news of a prompt by putting their own function in the place of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from comfy_execution import events
from comfy_server import PromptServer
from tests.comfy_server.test_socket import connect, publish, receive, silent

Client = TestClient[Any, Any]
Heard = list[tuple[str, str | None]]

NEWS = (
    events.ExecutionStart("p", 1, "me"),
    events.Executing("p", "1", "1", "me"),
    events.Progress(1, 2, "p", "1", "me"),
    events.ExecutionSuccess("p", 2, "me"),
)
KINDS = [event.name for event in NEWS]


def replace_send_sync_of_the_class(heard: Heard, patch: pytest.MonkeyPatch) -> None:
    old = PromptServer.send_sync

    def send_sync(self: PromptServer, event: Any, data: Any, sid: str | None = None) -> None:
        heard.append((event, sid))
        old(self, event, data, sid)

    patch.setattr(PromptServer, "send_sync", send_sync)


def replace_send_sync_of_the_instance(heard: Heard, patch: pytest.MonkeyPatch) -> None:
    old = PromptServer.instance.send_sync

    def send_sync(event: Any, data: Any, sid: str | None = None) -> None:
        heard.append((event, sid))
        old(event, data, sid)

    patch.setattr(PromptServer.instance, "send_sync", send_sync)


def replace_send_json(heard: Heard, patch: pytest.MonkeyPatch) -> None:
    server = PromptServer.instance
    old = server.send_json

    async def send_json(self: PromptServer, event: str, data: Any, sid: str | None = None) -> None:
        await asyncio.sleep(0.01 if event == "execution_start" else 0)  # asks another host
        heard.append((event, sid))
        await old(event, data, sid)

    patch.setattr(server, "send_json", send_json.__get__(server, PromptServer))


def replace_both(heard: Heard, patch: pytest.MonkeyPatch) -> None:
    """The class's `send_sync` goes on by `send_json`, which is replaced too."""
    replace_send_json(heard, patch)

    def send_sync(self: PromptServer, event: Any, data: Any, sid: str | None = None) -> None:
        asyncio.run_coroutine_threadsafe(self.send(event, data, sid), self.loop)

    patch.setattr(PromptServer, "send_sync", send_sync)


REPLACERS = (
    replace_send_sync_of_the_class,
    replace_send_sync_of_the_instance,
    replace_send_json,
    replace_both,
)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("replace", REPLACERS)
async def test_it_sees_the_news_and_so_does_the_page(
    replace: Callable[[Heard, pytest.MonkeyPatch], None], client: Client, patch: pytest.MonkeyPatch
) -> None:
    socket = await connect(client, "me")
    heard: Heard = []
    replace(heard, patch)
    publish(*NEWS)
    kinds = [(await receive(socket))["type"] for _ in NEWS]
    assert sorted(kinds) == sorted(KINDS)
    if replace is not replace_both:  # whose frames overtake each other by its own doing
        assert kinds == KINDS
    assert sorted(heard) == sorted((kind, "me") for kind in KINDS)


@pytest.mark.parametrize("replace", REPLACERS)
async def test_it_sees_the_news_of_prompts_that_no_socket_follows(
    replace: Callable[[Heard, pytest.MonkeyPatch], None], client: Client, patch: pytest.MonkeyPatch
) -> None:
    heard: Heard = []
    replace(heard, patch)
    publish(events.ExecutionSuccess("p", 2, "a program that only posts"))
    socket = await connect(client, "me")
    assert await silent(socket)
    assert ("execution_success", "a program that only posts") in heard


async def test_a_frame_it_fails_on_silences_no_other(
    client: Client, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = PromptServer.instance
    old = server.send_json

    async def send_json(event: str, data: Any, sid: str | None = None) -> None:
        if event == "executing":
            raise RuntimeError("no answer from the other host")
        await old(event, data, sid)

    patch.setattr(server, "send_json", send_json)
    socket = await connect(client, "me")
    publish(*NEWS)
    kinds = [(await receive(socket))["type"] for _ in NEWS[1:]]
    assert kinds == [kind for kind in KINDS if kind != "executing"]
    assert "executing could not be sent" in caplog.text
