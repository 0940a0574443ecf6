"""A node of this server's own: what weights in a prompt do."""

from __future__ import annotations

from typing import Any

from comfy.text_encoders.weighting import INTERPRETATION_TEXT, INTERPRETATIONS
from comfy_api.latest import ComfyExtension, io


class CLIPSetWeightInterpretation(io.ComfyNode):
    """Chooses how a text encoder reads weights such as (cat:1.3)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPSetWeightInterpretation",
            display_name="CLIP Set Weight Interpretation",
            category="conditioning",
            description=INTERPRETATION_TEXT,
            inputs=[
                io.Clip.Input("clip"),
                io.Combo.Input("interpretation", options=list(INTERPRETATIONS)),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, interpretation: str) -> io.NodeOutput:
        changed = clip.clone()
        changed.weight_interpretation = interpretation
        return io.NodeOutput(changed)


class PromptWeightExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [CLIPSetWeightInterpretation]


async def comfy_entrypoint() -> PromptWeightExtension:
    """Called by the loader."""
    return PromptWeightExtension()
