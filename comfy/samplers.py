"""Sampling, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.k_diffusion import sampling as k_diffusion_sampling
from comfy.public import write_through
from comfy.sampling.batching import (
    calc_cond_batch,
    calc_cond_uncond_batch,
    finalize_default_conds,
)
from comfy.sampling.conditioning import (
    apply_empty_x_to_equal_area,
    calculate_start_end_timesteps,
    create_cond_with_same_area_if_none,
    encode_model_conds,
    pre_run_control,
    process_conds,
    resolve_areas_and_cond_masks,
    resolve_areas_and_cond_masks_multidim,
)
from comfy.sampling.guidance import CFGGuider, cfg_function, sampling_function
from comfy.sampling.hooked import drop_unregistered as filter_registered_hooks_on_conds
from comfy.sampling.hooked import share_control_hooks as preprocess_conds_hooks
from comfy.sampling.jobs import (
    can_concat_cond,
    cond_cat,
    cond_equal_size,
    get_area_and_mult,
)
from comfy.sampling.masks import get_mask_aabb
from comfy.sampling.samplers import (
    KSAMPLER,
    KSAMPLER_NAMES,
    SAMPLER_NAMES,
    KSampler,
    KSamplerX0Inpaint,
    Sampler,
    ksampler,
    sample,
    sampler_object,
)
from comfy.sampling.schedules import (
    SCHEDULER_HANDLERS,
    SCHEDULER_NAMES,
    SchedulerHandler,
    beta_scheduler,
    calculate_sigmas,
    ddim_scheduler,
    kl_optimal_scheduler,
    linear_quadratic_schedule,
    normal_scheduler,
    simple_scheduler,
)

write_through(
    __name__,
    KSAMPLER_NAMES="comfy.sampling.samplers",
    SAMPLER_NAMES="comfy.sampling.samplers",
    SCHEDULER_HANDLERS="comfy.sampling.schedules",
    SCHEDULER_NAMES="comfy.sampling.schedules",
)
