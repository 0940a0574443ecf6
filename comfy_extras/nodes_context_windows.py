"""Sampling long latents in overlapping windows."""

from __future__ import annotations

from typing import Any

from comfy.sampling.context_windows import (
    IndexListContextHandler,
    create_prepare_sampling_wrapper,
    create_sampler_sample_wrapper,
)
from comfy.sampling.window_schedules import (
    ContextFuseMethods,
    ContextSchedules,
    get_matching_context_schedule,
    get_matching_fuse_method,
)
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

SCHEDULES = [
    ContextSchedules.STATIC_STANDARD,
    ContextSchedules.UNIFORM_STANDARD,
    ContextSchedules.UNIFORM_LOOPED,
    ContextSchedules.BATCHED,
]
WAN_FRAMES_PER_LATENT = 4
WAN_TIME_AXIS = 2


def windowed(model: Any, schedule: str, fuse_method: str, freenoise: bool, **options: Any) -> Any:
    """A view of the model that is sampled in windows."""
    view = model.clone()
    view.model_options["context_handler"] = IndexListContextHandler(
        get_matching_context_schedule(schedule),
        get_matching_fuse_method(fuse_method),
        freenoise=freenoise,
        **options,
    )
    create_prepare_sampling_wrapper(view)
    if freenoise:
        create_sampler_sample_wrapper(view)
    return view


def inputs(length: io.Int.Input, overlap: int, *more: io.Input) -> list[io.Input]:
    """Declarations that both nodes have."""
    return [
        io.Model.Input("model", tooltip="Model to sample in windows."),
        length,
        io.Int.Input("context_overlap", default=overlap, min=0),
        io.Combo.Input("context_schedule", options=SCHEDULES),
        io.Int.Input("context_stride", default=1, min=1),
        io.Boolean.Input("closed_loop", default=False),
        io.Combo.Input(
            "fuse_method",
            options=list(ContextFuseMethods.LIST_STATIC),
            default=ContextFuseMethods.PYRAMID,
        ),
        *more,
        io.Boolean.Input("freenoise", default=False),
    ]


class ContextWindowsManual(io.ComfyNode):
    """Windows along any axis, counted in latent cells."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ContextWindowsManual",
            display_name="Context Windows (Manual)",
            category="context",
            is_experimental=True,
            inputs=inputs(
                io.Int.Input("context_length", default=16, min=1),
                4,
                io.Int.Input("dim", default=0, min=0, max=5),
            ),
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        context_length: int,
        context_overlap: int,
        context_schedule: str,
        context_stride: int,
        closed_loop: bool,
        fuse_method: str,
        dim: int,
        freenoise: bool,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            windowed(
                model,
                context_schedule,
                fuse_method,
                freenoise,
                context_length=context_length,
                context_overlap=context_overlap,
                context_stride=context_stride,
                closed_loop=closed_loop,
                dim=dim,
            )
        )


class WanContextWindowsManual(io.ComfyNode):
    """Windows along time for Wan models, counted in video frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        length = io.Int.Input("context_length", default=81, min=1, max=16384, step=4)
        return io.Schema(
            node_id="WanContextWindowsManual",
            display_name="WAN Context Windows (Manual)",
            category="context",
            is_experimental=True,
            inputs=inputs(length, 30),
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        context_length: int,
        context_overlap: int,
        context_schedule: str,
        context_stride: int,
        closed_loop: bool,
        fuse_method: str,
        freenoise: bool,
    ) -> io.NodeOutput:
        def latents(frames: int) -> int:
            return (frames - 1) // WAN_FRAMES_PER_LATENT + 1

        return io.NodeOutput(
            windowed(
                model,
                context_schedule,
                fuse_method,
                freenoise,
                context_length=max(latents(context_length), 1),
                context_overlap=max(latents(context_overlap), 0),
                context_stride=context_stride,
                closed_loop=closed_loop,
                dim=WAN_TIME_AXIS,
            )
        )


comfy_entrypoint = entrypoint_of(ContextWindowsManual, WanContextWindowsManual)
