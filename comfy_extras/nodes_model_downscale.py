"""Deep shrink: the network sees a smaller picture while the composition is found."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy import resize
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.nodes_slg import Span, percent_input

METHODS = ["bicubic", "nearest-exact", "bilinear", "area", "bislerp"]


def shrunk(h: Tensor, factor: float, method: str) -> Tensor:
    """Features [B, C, H, W] at 1 / factor of their size."""
    # By the reciprocal, as pictures have it: where it matters, rounding falls the other way.
    width, height = (max(1, round(side * (1.0 / factor))) for side in (h.shape[-1], h.shape[-2]))
    return resize.common_upscale(h, width, height, method, "disabled")


class PatchModelAddDownscale(io.ComfyNode):
    """Shrinks the features at one block of the encoder for a part of the sampling."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PatchModelAddDownscale",
            display_name="PatchModelAddDownscale (Kohya Deep Shrink)",
            category="model_patches/unet",
            inputs=[
                io.Model.Input("model"),
                io.Int.Input("block_number", default=3, min=1, max=32, step=1),
                io.Float.Input("downscale_factor", default=2.0, min=0.1, max=9.0, step=0.001),
                percent_input("start_percent", 0.0),
                percent_input("end_percent", 0.35),
                io.Boolean.Input("downscale_after_skip", default=True),
                io.Combo.Input("downscale_method", options=METHODS),
                io.Combo.Input("upscale_method", options=METHODS),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        block_number: int,
        downscale_factor: float,
        start_percent: float,
        end_percent: float,
        downscale_after_skip: bool,
        downscale_method: str,
        upscale_method: str,
    ) -> io.NodeOutput:
        span = Span(model, start_percent, end_percent)

        def shrink(h: Tensor, transformer_options: dict[str, Any]) -> Tensor:
            here = transformer_options["block"][1] == block_number
            if here and span.holds(transformer_options["sigmas"]):
                return shrunk(h, downscale_factor, downscale_method)
            return h

        def match(
            h: Tensor, skip: Tensor, transformer_options: dict[str, Any]
        ) -> tuple[Tensor, Tensor]:
            del transformer_options
            if h.shape[-2:] != skip.shape[-2:]:
                height, width = skip.shape[-2:]
                h = resize.common_upscale(h, width, height, upscale_method, "disabled")
            return h, skip

        view = model.clone()
        if downscale_after_skip:
            view.set_model_input_block_patch_after_skip(shrink)
        else:
            view.set_model_input_block_patch(shrink)
        view.set_model_output_block_patch(match)
        return io.NodeOutput(view)

    patch = execute


comfy_entrypoint = entrypoint_of(PatchModelAddDownscale)
