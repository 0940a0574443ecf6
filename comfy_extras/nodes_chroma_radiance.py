"""Latents and options of Chroma Radiance, which works on pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.latest import io
from comfy_extras.declarations import batch_input, pixels_input
from comfy_extras.empty_latents import empty_image
from comfy_extras.extension import entrypoint_of

Options = dict[str, Any]


class EmptyChromaRadianceLatentImage(io.ComfyNode):
    """Empty pixels: the model needs no autoencoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyChromaRadianceLatentImage",
            category="latent/chroma_radiance",
            inputs=[pixels_input("width", 1024), pixels_input("height", 1024), batch_input()],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, *, width: int, height: int, batch_size: int = 1) -> io.NodeOutput:
        return io.NodeOutput({"samples": empty_image(batch_size, 3, height, width, 1)})


def with_options(
    earlier: Callable[..., Any] | None, chosen: Options, span: tuple[float, float]
) -> Callable[..., Any]:
    """A wrapper of the model's call that gives it options between two noise levels.

    Args:
        earlier: The wrapper there was, called in the end; None calls the model itself.
        span: Greatest and least noise level.
    """

    def wrapper(apply_model: Callable[..., Any], args: Options) -> Any:
        sigma = args["timestep"].max().item()
        conditions = dict(args["c"])
        if span[0] >= sigma >= span[1]:
            options = dict(conditions.get("transformer_options", {}))
            options["chroma_radiance_options"] = chosen
            conditions["transformer_options"] = options
        if earlier is not None:
            return earlier(apply_model, {**args, "c": conditions})
        return apply_model(args["input"], args["timestep"], **conditions)

    return wrapper


class ChromaRadianceOptions(io.ComfyNode):
    """Sets how the model's last part works, for a part of the sampling."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def level(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0.0, max=1.0)

        return io.Schema(
            node_id="ChromaRadianceOptions",
            category="model_patches/chroma_radiance",
            description="Advanced options of Chroma Radiance.",
            inputs=[
                io.Model.Input(id="model"),
                io.Boolean.Input(
                    "preserve_wrapper",
                    default=True,
                    tooltip="Call the wrapper that the model already has, if any.",
                ),
                level("start_sigma", 1.0),
                level("end_sigma", 0.0),
                io.Int.Input(
                    "nerf_tile_size",
                    default=-1,
                    min=-1,
                    tooltip="Patches the last part takes at once; 0: all; -1: the model's own.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        *,
        model: Any,
        preserve_wrapper: bool,
        start_sigma: float,
        end_sigma: float,
        nerf_tile_size: int,
    ) -> io.NodeOutput:
        if nerf_tile_size < 0:
            return io.NodeOutput(model)
        view = model.clone()
        earlier = model.model_options.get("model_function_wrapper") if preserve_wrapper else None
        chosen = {"nerf_tile_size": nerf_tile_size}
        view.set_model_unet_function_wrapper(
            with_options(earlier, chosen, (start_sigma, end_sigma))
        )
        return io.NodeOutput(view)


comfy_entrypoint = entrypoint_of(EmptyChromaRadianceLatentImage, ChromaRadianceOptions)
