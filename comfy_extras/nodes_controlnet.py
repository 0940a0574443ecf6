"""More nodes for control networks: which kind of hint a union network gets, and inpainting."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from comfy import progress, resize
from comfy.cldm.control_types import UNION_CONTROLNET_TYPES
from comfy.control.union import check_kinds, known_kinds
from comfy_api.latest import ComfyExtension, io
from comfy_nodes.control import ControlNetApplyAdvanced

logger = logging.getLogger(__name__)


class SetUnionControlNetType(io.ComfyNode):
    """Tells a union ControlNet what kind of hint it is given."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SetUnionControlNetType",
            category="conditioning/controlnet",
            inputs=[
                io.ControlNet.Input("control_net"),
                io.Combo.Input("type", options=["auto", *UNION_CONTROLNET_TYPES]),
            ],
            outputs=[io.ControlNet.Output()],
        )

    @classmethod
    def execute(cls, control_net: Any, type: str) -> io.NodeOutput:
        numbers = [UNION_CONTROLNET_TYPES[type]] if type in UNION_CONTROLNET_TYPES else []
        network = getattr(control_net, "control_model", None)
        check_kinds(network, numbers)
        if numbers and network is not None and not known_kinds(network):
            progress.warn(
                logger, "The type has no effect: this is no union ControlNet, it knows one kind"
            )
        control = control_net.copy()
        control.set_extra_arg("control_type", numbers)
        return io.NodeOutput(control)

    set_controlnet_type = execute


class ControlNetInpaintingAliMamaApply(io.ComfyNode):
    """Applies a ControlNet to a picture with a hole, for networks that take the mask too."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def percent(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0.0, max=1.0, step=0.001)

        return io.Schema(
            node_id="ControlNetInpaintingAliMamaApply",
            category="conditioning/controlnet",
            inputs=[
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.ControlNet.Input("control_net"),
                io.Vae.Input("vae"),
                io.Image.Input("image"),
                io.Mask.Input("mask"),
                io.Float.Input("strength", default=1.0, min=0.0, max=10.0, step=0.01),
                percent("start_percent", 0.0),
                percent("end_percent", 1.0),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        control_net: Any,
        vae: Any,
        image: Tensor,
        mask: Tensor,
        strength: float,
        start_percent: float,
        end_percent: float,
    ) -> io.NodeOutput:
        extra = []
        if control_net.concat_mask:
            kept = 1.0 - mask.reshape(-1, 1, mask.shape[-2], mask.shape[-1])
            size = (image.shape[2], image.shape[1], "bilinear", "center")
            image = image * resize.common_upscale(kept, *size).round().movedim(1, -1)
            extra = [kept]
        both = ControlNetApplyAdvanced().apply_controlnet(
            positive,
            negative,
            control_net,
            image,
            strength,
            start_percent,
            end_percent,
            vae=vae,
            extra_concat=extra,
        )
        return io.NodeOutput(*both)

    apply_inpaint_controlnet = execute


class ControlNetExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [SetUnionControlNetType, ControlNetInpaintingAliMamaApply]


async def comfy_entrypoint() -> ControlNetExtension:
    """Called by the loader."""
    return ControlNetExtension()
