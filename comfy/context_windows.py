"""Sampling in windows, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.sampling.context_windows import (
    ContextResults,
    IndexListContextHandler,
    IndexListContextWindow,
    apply_freenoise,
    create_prepare_sampling_wrapper,
    create_sampler_sample_wrapper,
)
from comfy.sampling.window_schedules import (
    CONTEXT_MAPPING,
    FUSE_MAPPING,
    ContextFuseMethod,
    ContextFuseMethods,
    ContextSchedule,
    ContextSchedules,
    get_matching_context_schedule,
    get_matching_fuse_method,
    match_weights_to_dim,
    ordered_halving,
)

write_through(
    __name__,
    CONTEXT_MAPPING="comfy.sampling.window_schedules",
    FUSE_MAPPING="comfy.sampling.window_schedules",
)
