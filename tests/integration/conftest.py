"""One server for all integration tests that do not stop it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server_process import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A running server with the demo model, shared by the session."""
    with running_server(tmp_path_factory.mktemp("server"), "--cpu") as running:
        yield running
