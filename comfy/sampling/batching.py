"""Evaluating many conditioning entries with few model calls.

At one noise level every active entry is a job: a cut of the latent, a weight map, network inputs.
Jobs whose shapes and inputs agree are joined into one call as long as memory allows. Results are
added into the full latent under their weights and divided by the total weight of each cell.

Order matters for equal pictures: jobs of a call are taken from the end of the list, so with one
positive and one negative entry the negative comes first in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comfy.devices import memory
from comfy.nn.wrappers import run_wrapped

# Part of an area's edge over which its weight fades in where it does not touch the latent's border.
FEATHER_CELLS = 8
# A joined call must fit this many times over into free memory.
MEMORY_MARGIN = 1.5
# Starting value of the total weight: cells that no entry covers come out as 0, not as NaN.
NO_WEIGHT = 1e-37


class Job(NamedTuple):
    """One active conditioning entry at one noise level.

    Attributes:
        input_x: Cut of the noisy latent [B, C, ...].
        mult: Weight of each cell, shaped like input_x.
        conditioning: Network inputs by argument name (classes of ``comfy.conds``).
        area: (sizes..., offsets...) of the cut, or None for the whole latent.
        control: Control net of the entry, or None.
        patches: Network patches that only this entry needs, or None.
        uuid: Identity of the entry.
        hooks: Group of hooks whose weights the entry is evaluated with, or None.
    """

    input_x: Tensor
    mult: Tensor
    conditioning: dict[str, Any]
    area: Sequence[int] | None
    control: Any
    patches: dict[str, list[Any]] | None
    uuid: Any
    hooks: Any


def get_area_and_mult(conds: dict[str, Any], x_in: Tensor, timestep_in: Tensor) -> Job | None:
    """The job of one entry at noise level timestep_in [B]; None where the entry is not active."""
    sigma = float(timestep_in[0]) if "timestep_start" in conds or "timestep_end" in conds else 0.0
    if sigma > conds.get("timestep_start", sigma) or sigma < conds.get("timestep_end", sigma):
        return None
    area, input_x = conds.get("area"), x_in
    if area is not None:
        area = _clamped(area, x_in.shape[2:])
        input_x = cut(x_in, area)
    mult = _weights(conds, input_x, area, x_in.shape[2:])
    inputs = {
        name: value.process_cond(
            batch_size=x_in.shape[0], device=x_in.device, area=area,
        )
        for name, value in conds["model_conds"].items()
    }  # fmt: skip
    patches = None
    if "gligen" in conds:
        patches = _gligen_patches(conds["gligen"], input_x)
    return Job(
        input_x,
        mult,
        inputs,
        area,
        conds.get("control"),
        patches,
        conds["uuid"],
        conds.get("hooks"),
    )


def _clamped(area: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The part of an area inside the latent."""
    axes = len(dims)
    return [min(area[i], dims[i] - area[i + axes]) for i in range(axes)] + list(area[axes:])


def cut(tensor: Tensor, area: Sequence[int] | None, first_axis: int = 2) -> Tensor:
    """View of the cells of an area; axes before `first_axis` are kept whole."""
    if area is None:
        return tensor
    axes = len(area) // 2
    for axis in range(axes):
        tensor = tensor.narrow(axis + first_axis, area[axis + axes], area[axis])
    return tensor


def _weights(
    conds: dict[str, Any], input_x: Tensor, area: Sequence[int] | None, dims: Sequence[int]
) -> Tensor:
    """Weight map of an entry: its strength, times its mask or faded at the edges of its area."""
    strength = conds.get("strength", 1.0)
    mask = conds.get("mask")
    if mask is not None:
        if tuple(mask.shape[1:]) != tuple(dims):
            raise ValueError(
                f"conditioning mask of shape {tuple(mask.shape)} does not fit a latent of "
                f"{tuple(dims)} cells"
            )
        mask = cut(mask[: input_x.shape[0]], area, first_axis=1)
        mask = mask * (conds.get("mask_strength", 1.0) * strength)
        repeats = (-(-input_x.shape[0] // mask.shape[0]), input_x.shape[1])
        mask = mask.unsqueeze(1).repeat(*repeats, *(1,) * (mask.ndim - 1))
        return mask[: input_x.shape[0]]
    if area is None:
        return input_x.new_full((), strength).expand_as(input_x)
    mult = torch.full_like(input_x, strength)
    _feather(mult, area, dims)
    return mult


def _feather(mult: Tensor, area: Sequence[int], dims: Sequence[int]) -> None:
    """Fade an area's weights in linearly from each of its edges inside the latent, in place."""
    axes = len(area) // 2
    for axis in range(axes):
        size, offset = area[axis], area[axis + axes]
        width = min(FEATHER_CELLS, mult.shape[axis + 2] // 4)
        ramp = torch.arange(1, width + 1, device=mult.device, dtype=mult.dtype) / max(width, 1)
        ramp = ramp.reshape(-1, *(1,) * (axes - 1 - axis))
        if offset != 0:
            mult.narrow(axis + 2, 0, width).mul_(ramp)
        if offset + size < dims[axis]:
            mult.narrow(axis + 2, size - width, width).mul_(ramp.flip(0))


def _gligen_patches(gligen: Sequence[Any], input_x: Tensor) -> dict[str, list[Any]]:
    """Position boxes: gligen is (kind, model patcher, boxes)."""
    kind, patcher, boxes = gligen[0], gligen[1].model, gligen[2]
    place = patcher.set_position if kind == "position" else patcher.set_empty
    arguments = (input_x.shape, boxes) if kind == "position" else (input_x,)
    return {"middle_patch": [place(*arguments, input_x.device)]}


def cond_equal_size(c1: Any, c2: Any) -> bool:
    """Whether two sets of network inputs could be joined."""
    if c1 is c2:
        return True
    return c1.keys() == c2.keys() and all(c1[name].can_concat(c2[name]) for name in c1)


def can_concat_cond(c1: Job, c2: Job) -> bool:
    """Whether two jobs can share a model call."""
    return (
        c1.input_x.shape == c2.input_x.shape
        and c1.control is c2.control
        and c1.patches is c2.patches
        and cond_equal_size(c1.conditioning, c2.conditioning)
    )


def cond_cat(c_list: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the network inputs of several jobs into the arguments of one call."""
    return {
        name: c_list[0][name].concat([inputs[name] for inputs in c_list[1:]]) for name in c_list[0]
    }


def _shapes_of(jobs: Sequence[tuple[Job, int]]) -> dict[str, list[list[int]]]:
    shapes: dict[str, list[list[int]]] = {}
    for job, _ in jobs:
        for name, value in job.conditioning.items():
            shapes.setdefault(name, []).append(value.size())
    return shapes


def _choose_batch(model: Any, jobs: Sequence[tuple[Job, int]], device: Any) -> list[int]:
    """Indices of the jobs of the next call, newest first: as many as fit into memory."""
    first = jobs[0][0]
    alike = [i for i in range(len(jobs)) if can_concat_cond(jobs[i][0], first)][::-1]
    if len(alike) == 1:
        return alike
    free = memory.get_free_memory(device)
    for share in range(1, len(alike) + 1):
        chosen = alike[: len(alike) // share]
        shape = [len(chosen) * first.input_x.shape[0], *first.input_x.shape[1:]]
        needed = model.memory_required(shape, cond_shapes=_shapes_of([jobs[i] for i in chosen]))
        if needed * MEMORY_MARGIN < free:
            return chosen
    return alike[:1]


def _merge_patches(options: dict[str, Any], patches: dict[str, list[Any]] | None) -> None:
    if patches:
        known = options.get("patches", {})
        added = {name: [*known.get(name, []), *fns] for name, fns in patches.items()}
        options["patches"] = {**known, **added}


class _Accumulator:
    """Weighted mean of results for one conditioning list.

    The usual list has one entry with one weight for all cells: its result is the mean.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.only: tuple[Tensor, Job] | None = None
        self.total: Tensor | None = None
        self.weight: Tensor | None = None

    def add(self, result: Tensor, job: Job) -> None:
        if self.total is None and self.only is None and _is_uniform(job):
            self.only = (result, job)
            return
        if self.total is None:
            self.total = torch.zeros_like(self.x)
            self.weight = torch.full_like(self.x, NO_WEIGHT)
        if self.only is not None:
            waiting, self.only = self.only, None
            self._add(*waiting)
        self._add(result, job)

    def _add(self, result: Tensor, job: Job) -> None:
        cut(self.total, job.area).add_(result * job.mult)
        cut(self.weight, job.area).add_(job.mult)

    def mean(self) -> Tensor:
        if self.only is not None:
            return self.only[0]
        return torch.zeros_like(self.x) if self.total is None else self.total.div_(self.weight)


def _is_uniform(job: Job) -> bool:
    """Whether a job covers everything with one weight, which is stored as one expanded number."""
    return job.area is None and not any(job.mult.stride())


def _active_jobs(
    model: Any, conds: Sequence[Any], x_in: Tensor, timestep: Tensor, model_options: dict[str, Any]
) -> dict[Any, list[tuple[Job, int]]]:
    """Jobs with the index of their list, by hook group; default entries fill what is left."""
    by_hooks: dict[Any, list[tuple[Job, int]]] = {}
    defaults: list[list[dict[str, Any]]] = [[] for _ in conds]
    for index, entries in enumerate(conds):
        for entry in entries or ():
            if "default" in entry:
                defaults[index].append(entry)
                continue
            job = get_area_and_mult(entry, x_in, timestep)
            if job is not None:
                _keyframe_hooks(model, timestep, job, model_options)
                by_hooks.setdefault(job.hooks, []).append((job, index))
    if any(defaults):
        finalize_default_conds(model, by_hooks, defaults, x_in, timestep, model_options)
    return by_hooks


def _keyframe_hooks(model: Any, timestep: Tensor, job: Job, model_options: dict[str, Any]) -> None:
    """Move a job's scheduled hooks to their strength at this noise level."""
    if job.hooks is not None:
        model.current_patcher.prepare_hook_patches_current_keyframe(
            timestep, job.hooks, model_options
        )


def finalize_default_conds(
    model: Any,
    hooked_to_run: dict[Any, list[tuple[Job, int]]],
    default_conds: Sequence[Sequence[dict[str, Any]]],
    x_in: Tensor,
    timestep: Tensor,
    model_options: dict[str, Any],
) -> None:
    """Add jobs of entries marked `default`, weighted by what the other entries leave uncovered."""
    left = [torch.ones_like(x_in) for _ in default_conds]
    for jobs in hooked_to_run.values():
        for job, index in jobs:
            if default_conds[index]:
                cut(left[index], job.area).sub_(job.mult)
    for index, entries in enumerate(default_conds):
        mult = left[index].clamp_(min=0.0)
        if not entries or not bool(mult.any()):
            continue
        for entry in entries:
            job = get_area_and_mult(entry, x_in, timestep)
            if job is not None:
                job = job._replace(mult=mult)
                _keyframe_hooks(model, timestep, job, model_options)
                hooked_to_run.setdefault(job.hooks, []).append((job, index))


def calc_cond_batch(
    model: Any,
    conds: Sequence[Any],
    x_in: Tensor,
    timestep: Tensor,
    model_options: dict[str, Any],
) -> list[Tensor]:
    """Evaluate conditioning lists at one noise level.

    Args:
        model: A base model.
        conds: Processed lists (see ``conditioning.process_conds``); None counts as empty.
        x_in: Noisy latent [B, C, ...].
        timestep: Sigma [B].
        model_options: Options of the run; a `context_handler` divides a long latent into windows,
            wrappers of kind "calc_cond_batch" run around each evaluation.
    Returns:
        One denoised latent per list; zeros where a list has nothing active.
    """
    handler = model_options.get("context_handler")
    arguments = (model, conds, x_in, timestep, model_options)
    if handler is not None and handler.should_use_context(*arguments):
        return handler.execute(_wrapped_calc_cond_batch, *arguments)
    return _wrapped_calc_cond_batch(*arguments)


def _wrapped_calc_cond_batch(
    model: Any, conds: Sequence[Any], x_in: Tensor, timestep: Tensor, model_options: dict[str, Any]
) -> list[Tensor]:
    options = model_options.get("transformer_options", {})
    arguments = (model, conds, x_in, timestep, model_options)
    return run_wrapped(_calc_cond_batch, None, "calc_cond_batch", options, *arguments)


def _calc_cond_batch(
    model: Any, conds: Sequence[Any], x_in: Tensor, timestep: Tensor, model_options: dict[str, Any]
) -> list[Tensor]:
    results = [_Accumulator(x_in) for _ in conds]
    by_hooks = _active_jobs(model, conds, x_in, timestep, model_options)
    patcher = getattr(model, "current_patcher", None)
    if patcher is not None:
        patcher.prepare_state(timestep)
    # The weights may still show another entry's hooks, so entries without any count too.
    hooked = any("hooks" in entry for entries in conds for entry in entries or ())
    for hooks, jobs in by_hooks.items():
        hook_options = patcher.apply_hooks(hooks=hooks) if hooked else {}
        while jobs:
            chosen = _choose_batch(model, jobs, x_in.device)
            batch = [jobs.pop(index) for index in chosen]
            outputs = _call_model(model, batch, timestep, model_options, hook_options)
            for output, (job, index) in zip(outputs, batch):
                results[index].add(output, job)
    return [result.mean() for result in results]


def _call_model(
    model: Any,
    batch: Sequence[tuple[Job, int]],
    timestep: Tensor,
    model_options: dict[str, Any],
    hook_options: dict[str, Any],
) -> Sequence[Tensor]:
    """One model call for several jobs; returns their denoised cuts in order."""
    jobs = [job for job, _ in batch]
    input_x = torch.cat([job.input_x for job in jobs]) if len(jobs) > 1 else jobs[0].input_x
    sigma = torch.cat([timestep] * len(jobs)) if len(jobs) > 1 else timestep
    inputs = cond_cat([job.conditioning for job in jobs])
    cond_or_uncond = [index for _, index in batch]
    options = _merged(hook_options, model_options.get("transformer_options", {}))
    _merge_patches(options, jobs[0].patches)
    options["cond_or_uncond"] = cond_or_uncond[:]
    options["uuids"] = [job.uuid for job in jobs]
    options["sigmas"] = sigma
    inputs["transformer_options"] = options
    if jobs[0].control is not None:
        inputs["control"] = jobs[0].control.get_control(
            input_x, sigma, inputs, len(cond_or_uncond), options
        )
    wrapper = model_options.get("model_function_wrapper")
    if wrapper is None:
        output = model.apply_model(input_x, sigma, **inputs)
    else:
        arguments = {
            "input": input_x, "timestep": sigma, "c": inputs, "cond_or_uncond": cond_or_uncond,
        }  # fmt: skip
        output = wrapper(model.apply_model, arguments)
    return output.chunk(len(jobs))


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both option dicts as a new one; lists are joined, dicts merged, else the second wins."""
    merged = dict(first)
    for name, value in second.items():
        known = merged.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[name] = _merged(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            merged[name] = [*known, *value]
        else:
            merged[name] = value
    return merged
