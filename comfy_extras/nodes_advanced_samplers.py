"""Samplers with options that the menu does not offer."""

from __future__ import annotations

from comfy.sampling import samplers
from comfy.sampling.solvers import upscale
from comfy_api.latest import ComfyExtension, io

UPSCALE_METHODS = ["bislerp", "nearest-exact", "bilinear", "area", "bicubic"]


class SamplerLCMUpscale(io.ComfyNode):
    """LCM that enlarges the latent on the way."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SamplerLCMUpscale",
            category="sampling/custom_sampling/samplers",
            inputs=[
                io.Float.Input("scale_ratio", default=1.0, min=0.1, max=20.0, step=0.01),
                io.Int.Input(
                    "scale_steps",
                    default=-1,
                    min=-1,
                    max=1000,
                    step=1,
                    tooltip="Steps after which the full size is reached; -1: half of them.",
                ),
                io.Combo.Input("upscale_method", options=UPSCALE_METHODS),
            ],
            outputs=[io.Sampler.Output()],
        )

    @classmethod
    def execute(cls, scale_ratio: float, scale_steps: int, upscale_method: str) -> io.NodeOutput:
        options = {
            "total_upscale": scale_ratio,
            "upscale_steps": None if scale_steps < 0 else scale_steps,
            "upscale_method": upscale_method,
        }
        return io.NodeOutput(samplers.KSAMPLER(upscale.sample_lcm_upscale, options))

    get_sampler = execute


class SamplerEulerCFGpp(io.ComfyNode):
    """Euler with CFG++, in its published and in another form."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SamplerEulerCFGpp",
            display_name="SamplerEulerCFG++",
            category="_for_testing",
            is_experimental=True,
            inputs=[io.Combo.Input("version", options=["regular", "alternative"])],
            outputs=[io.Sampler.Output()],
        )

    @classmethod
    def execute(cls, version: str) -> io.NodeOutput:
        if version == "alternative":
            return io.NodeOutput(samplers.KSAMPLER(upscale.sample_euler_pp))
        return io.NodeOutput(samplers.ksampler("euler_cfg_pp"))

    get_sampler = execute


class AdvancedSamplersExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [SamplerLCMUpscale, SamplerEulerCFGpp]


async def comfy_entrypoint() -> AdvancedSamplersExtension:
    """Called by the loader of built-in modules."""
    return AdvancedSamplersExtension()
