"""What the machine offers, and the advice after memory ran out."""

from __future__ import annotations

import torch

from comfy.devices import report


def test_the_statistics_name_the_primary_device_with_its_memory() -> None:
    stats = report.system_stats()
    assert stats["system"]["ram_total"] >= stats["system"]["ram_free"] > 0
    assert stats["system"]["pytorch_version"] == torch.__version__
    assert stats["devices"][0]["vram_total"] >= stats["devices"][0]["vram_free"] > 0


def test_only_lack_of_memory_gets_the_advice() -> None:
    assert report.free_after_oom(ValueError("no")) is None
    advice = report.free_after_oom(torch.OutOfMemoryError("full"))
    assert advice is not None
    assert "--lowvram" in advice
