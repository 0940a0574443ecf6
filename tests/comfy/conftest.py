"""The simulated accelerator for tests of numerics; without it tests run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """The simulated accelerator's controls, with it as the primary device."""
    from tests.support.accelerator import simulated_accelerator

    with simulated_accelerator() as fakegpu:
        yield fakegpu
