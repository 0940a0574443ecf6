"""Models of the recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.comfy.sampling.support import ClosedFormModel, patcher


@pytest.fixture(scope="session")
def kind_settings(golden_json: Callable[[str], Any]) -> dict[str, Any]:
    """Sampling type and settings of each recorded kind of model."""
    return golden_json("schedules_meta.json")["kind_definition"]


@pytest.fixture(scope="session")
def closed_form(kind_settings: dict[str, Any]) -> Callable[..., Any]:
    """Makes the MODEL with the closed-form estimate for a kind."""

    def make(kind: str, **options: Any) -> Any:
        row = kind_settings[kind]
        return patcher(ClosedFormModel(row["sampling_type"], row["sampling_settings"], **options))

    return make
