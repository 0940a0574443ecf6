"""What the processor is good at: measured, and said."""

from __future__ import annotations

import logging

import pytest
import torch

from comfy.devices import processor


@pytest.fixture(autouse=True)
def measured_anew() -> None:
    processor.multiplies_bf16.cache_clear()


def test_the_speed_of_bfloat16_is_a_positive_ratio() -> None:
    assert 0 < processor.bf16_speed() < 1000
    assert processor.bf16_speed() == processor.bf16_speed()


@pytest.mark.parametrize(
    ("instruction", "speed", "expected"),
    [("avx512_bf16", 2.0, True), ("avx512_bf16", 0.6, False), ("avx2", 2.0, False)],
)
def test_bfloat16_needs_an_instruction_and_speed(
    instruction: str, speed: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instruction: True})
    monkeypatch.setattr(processor, "bf16_speed", lambda: speed)
    assert processor.multiplies_bf16() is expected
    processor.multiplies_bf16.cache_clear()


@pytest.mark.parametrize(
    ("tune", "if_fast", "forced", "fast", "said"),
    [
        (True, False, False, False, ["--disable-cpu-tuning"]),
        (False, False, False, False, ["usual layouts"]),
        (True, True, False, True, ["compute in bfloat16", "3.0 x"]),
        (True, True, False, False, ["compute in float32", "3.0 x"]),
        (True, False, True, False, ["was asked for", "3.0 x"]),
    ],
)
def test_choices_are_said(
    tune: bool, if_fast: bool, forced: bool, fast: bool, said: list[str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(processor, "bf16_speed", lambda: 3.0)
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: fast)
    with caplog.at_level(logging.INFO):
        processor.log_choices(tune, if_fast, forced)
    assert all(words in caplog.text for words in said)
