"""Qwen 3.5: three layers of four have a memory of fixed size (`comfy.ldm.llm.delta`), the fourth
sees all tokens and is gated. It takes pictures like Qwen 3 VL, without rows for inner layers.

Source: https://qwen.ai/blog?id=qwen3.5, and the published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from comfy import ops
from comfy.ldm.llm.qwen3_vl import Qwen3VL

FACTS: dict[str, Any] = {
    "transformer_type": "qwen35",
    "rope_theta": 10000000.0,
    "rope_dims": (11, 11, 10),
    "rope_part": 0.25,
}


class Qwen35(Qwen3VL):
    """The language model, and the tower where its file has it (`vision_config`)."""

    name: ClassVar[str] = "Qwen 3.5"

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__({**FACTS, **config_dict}, dtype, device, operations)
