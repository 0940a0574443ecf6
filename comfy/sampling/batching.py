"""Evaluating many conditioning entries with few model calls.

At one noise level every active entry is a job: a cut of the latent, a weight map, network inputs.
Jobs whose shapes and inputs agree are joined into one call as long as memory allows. Results are
added into the full latent under their weights and divided by the total weight of each cell.

Order matters for equal pictures: jobs of a call are taken from the end of the list, so with one
positive and one negative entry the negative comes first in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comfy.devices import memory, residency
from comfy.devices.runtime import get_runtime
from comfy.nn.wrappers import run_wrapped
from comfy.sampling import jobs as job_functions
from comfy.sampling.jobs import Job, cut

# A joined call must fit this many times over into free memory.
MEMORY_MARGIN = 1.5
# Cells times channels from which on it is asked whether the machine could hold a call at all.
LARGE_LATENT = 2**20
# Model options for patches that compare the lists. Where they have calls of their own, the
# negative's comes first; a call takes an entry of each that can share it, whatever memory there is.
NEGATIVE_FIRST, TOGETHER = "negative_first", "lists_together"
# In transformer_options: which list each entry is of, for all that could share the call, the newest
# first. Calls that memory alone kept apart have the same object.
CALL_GROUP = "call_group"
# There, too: the lists of the entries whose calls come after all of those.
WAITING = "lists_waiting"
# Starting value of the total weight: cells that no entry covers come out as 0, not as NaN.
NO_WEIGHT = 1e-37


def _shapes_of(jobs: Sequence[tuple[Job, int]]) -> dict[str, list[list[int]]]:
    shapes: dict[str, list[list[int]]] = {}
    for job, _ in jobs:
        for name, value in job.conditioning.items():
            shapes.setdefault(name, []).append(value.size())
    return shapes


def _take_alike(jobs: list[tuple[Job, int]], last_first: bool) -> list[tuple[Job, int]]:
    """Jobs that could share a call, newest first, taken off the list.

    Args:
        last_first: Those that fit the newest one in place of the oldest.
    """
    first = jobs[-1 if last_first else 0][0]
    places = [i for i in range(len(jobs)) if job_functions.can_concat_cond(jobs[i][0], first)]
    return [jobs.pop(index) for index in reversed(places)]


def _choose_batch(
    model: Any, alike: Sequence[tuple[Job, int]], device: Any, together: bool = False
) -> int:
    """How many of the jobs that could share a call do share the next one, from the first on: as
    many as fit into memory.

    Args:
        together: Take one of each list at least.
    """
    oldest = alike[-1][0]
    if oldest.input_x.numel() > LARGE_LATENT:
        _require_capacity(model, oldest, device)
    least = _one_of_each_list(alike) if together else 1
    if len(alike) == least or get_runtime().precision.deterministic:
        # A larger batch may round differently, and memory differs from day to day.
        return least
    free = memory.recent_free_memory(device)
    for share in range(1, len(alike) + 1):
        count = max(len(alike) // share, least)
        shape = [count * oldest.input_x.shape[0], *oldest.input_x.shape[1:]]
        needed = model.memory_required(shape, cond_shapes=_shapes_of(alike[:count]))
        if needed * MEMORY_MARGIN < free:
            return count
    return least


def _one_of_each_list(jobs: Sequence[tuple[Job, int]]) -> int:
    """How many of the jobs are needed, from the first on, to have all their lists."""
    lists = [index for _, index in jobs]
    return 1 + max(lists.index(name) for name in lists)


def _require_capacity(model: Any, job: Job, device: Any) -> None:
    """Refuse a call that the machine's memory could never hold, even alone.

    Raises:
        NotEnoughMemory: The estimate is above all there is.
    """
    shape = list(job.input_x.shape)
    memory.require_capacity(
        model.memory_required(shape, cond_shapes=_shapes_of([(job, 0)])),
        f"one call of the model on a latent of shape {tuple(shape)}",
        torch.device(device),
    )


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
        self.sums: tuple[Tensor, Tensor] | None = None  # of weighted results, of weights

    def add(self, result: Tensor, job: Job) -> None:
        if self.sums is None and self.only is None and _is_uniform(job):
            self.only = (result, job)
            return
        if self.only is not None:
            waiting, self.only = self.only, None
            self._add(*waiting)
        self._add(result, job)

    def _add(self, result: Tensor, job: Job) -> None:
        if self.sums is None:
            self.sums = (torch.zeros_like(self.x), torch.full_like(self.x, NO_WEIGHT))
        total, weight = self.sums
        cut(total, job.area).add_(result * job.mult)
        cut(weight, job.area).add_(job.mult)

    def mean(self) -> Tensor:
        if self.only is not None:
            return self.only[0]
        if self.sums is None:
            return torch.zeros_like(self.x)
        total, weight = self.sums
        return total.div_(weight)


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
            job = job_functions.get_area_and_mult(entry, x_in, timestep)
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
            found = job_functions.get_area_and_mult(entry, x_in, timestep)
            if found is not None:
                job = found._replace(mult=cut(mult, found.area))
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


def calc_cond_uncond_batch(
    model: Any,
    cond: Any,
    uncond: Any,
    x_in: Tensor,
    timestep: Tensor,
    model_options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """The older form of `calc_cond_batch` for two lists."""
    return tuple(calc_cond_batch(model, [cond, uncond], x_in, timestep, model_options))


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
    patcher: Any = getattr(model, "current_patcher", None)
    if patcher is not None:
        patcher.prepare_state(timestep)
    # The weights may still show another entry's hooks, so entries without any count too.
    hooked = any("hooks" in entry for entries in conds for entry in entries or ())
    shown = getattr(patcher, "current_hooks", None)
    hooked = hooked or (shown is not None and shown is not getattr(patcher, "forced_hooks", None))
    last_first, together = (
        bool(model_options.get(name, False)) for name in (NEGATIVE_FIRST, TOGETHER)
    )
    groups = _in_order(by_hooks, last_first)
    waiting = [index for _, jobs in groups for _, index in jobs]
    for hooks, jobs in groups:
        hook_options = patcher.apply_hooks(hooks=hooks) if hooked else {}
        while jobs:
            alike = _take_alike(jobs, last_first)
            lists = [index for _, index in alike]
            for index in lists:
                waiting.remove(index)
            options = {**hook_options, CALL_GROUP: lists, WAITING: waiting[:]}
            while alike:
                count = _choose_batch(model, alike, x_in.device, together)
                batch, alike = alike[:count], alike[count:]
                call = partial(_call_model, model, batch, timestep, model_options, options)
                outputs = call() if patcher is None else residency.run_or_make_room(patcher, call)
                for output, (job, index) in zip(outputs, batch):
                    results[index].add(output, job)
    return [result.mean() for result in results]


def _in_order(by_hooks: dict[Any, list[tuple[Job, int]]], last_first: bool) -> list[Any]:
    """Hook groups with their jobs.

    Args:
        last_first: Those that only have jobs of an earlier list come after the others.
    """
    groups = list(by_hooks.items())
    if last_first:
        groups.sort(key=lambda group: max(index for _, index in group[1]), reverse=True)
    return groups


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
    inputs = job_functions.cond_cat([job.conditioning for job in jobs])
    cond_or_uncond = [index for _, index in batch]
    options = _merged(hook_options, model_options.get("transformer_options", {}))
    _merge_patches(options, jobs[0].patches)
    options["cond_or_uncond"] = cond_or_uncond[:]
    options["uuids"] = [job.uuid for job in jobs]
    options["sigmas"] = timestep  # of one entry: patches may take it for a number
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
