"""What tests need to know of the processor they run on."""

from __future__ import annotations

from pathlib import Path


def has_equal_products() -> bool:
    """Whether products round alike in every batch: the math library's mode is Intel's."""
    facts = Path("/proc/cpuinfo")
    return facts.exists() and "GenuineIntel" in facts.read_text(encoding="utf-8")
