"""Reference pictures for models that edit."""

from __future__ import annotations

from typing import Any

import node_helpers
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


class ReferenceLatent(io.ComfyNode):
    """Adds a latent for the model to look at; chained, several are given."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ReferenceLatent",
            category="advanced/conditioning/edit_models",
            description="Sets the reference picture of an editing model.",
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.Latent.Input("latent", optional=True),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: Any, latent: dict[str, Any] | None = None) -> io.NodeOutput:
        if latent is not None:
            values = {"reference_latents": [latent["samples"]]}
            conditioning = node_helpers.conditioning_set_values(conditioning, values, append=True)
        return io.NodeOutput(conditioning)


comfy_entrypoint = entrypoint_of(ReferenceLatent)
