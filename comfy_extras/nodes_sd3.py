"""Skip-layer guidance with the settings of Stable Diffusion 3.5."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.nodes_slg import Span, guided_by_skipping, layers_input, layers_of, percent_input


class SkipLayerGuidanceSD3(io.ComfyNode):
    """Adds the difference to an estimate made without some joint blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SkipLayerGuidanceSD3",
            category="advanced/guidance",
            description="Guides away from the estimate of the network without some layers.",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                layers_input("layers"),
                io.Float.Input("scale", default=3.0, min=0.0, max=10.0, step=0.1),
                percent_input("start_percent", 0.01),
                percent_input("end_percent", 0.15),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, layers: str, scale: float, start_percent: float, end_percent: float
    ) -> io.NodeOutput:
        double = layers_of(layers)
        if not double:
            return io.NodeOutput(model)
        span = Span(model, start_percent, end_percent)
        return io.NodeOutput(guided_by_skipping(model, double, [], scale, span, 0.0))

    skip_guidance_sd3 = execute


comfy_entrypoint = entrypoint_of(SkipLayerGuidanceSD3)
