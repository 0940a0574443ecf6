"""Sampling a long latent in overlapping windows along one axis.

At each step every window is evaluated with its part of the latent and of the conditioning; the
results are averaged with weights. Solver and guider see one evaluation of the whole latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfy.conds import CONDWhole
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.patching.wrappers import WrappersMP
from comfy.sampling import window_parts
from comfy.sampling.noise import SEED_MASK
from comfy.sampling.window_parts import CHANNELS
from comfy.sampling.window_schedules import (
    ContextFuseMethod,
    ContextFuseMethods,
    ContextSchedule,
    match_weights_to_dim,
    relative_bias,
)

WRAPPER_KEY = "context_windows"

CondLists = list[list[dict[str, Any]] | None]


class IndexListContextWindow:
    """Frames of a latent by index.

    Args:
        index_list: Indices along the axis; they need not be in order or side by side.
        dim: The axis.
        total_frames: Length of the whole along it.

    Attributes:
        controls: Control nets with the window's hints, by the identity of the whole's.
    """

    def __init__(self, index_list: Sequence[int], dim: int = 0, total_frames: int = 0) -> None:
        self.index_list = list(index_list)
        self.context_length = len(self.index_list)
        self.dim, self.total_frames = dim, total_frames
        self.controls: dict[int, Any] = {}
        middle = min(self.index_list) + max(self.index_list)
        self.center_ratio = middle / (2 * total_frames) if total_frames else 0.0

    def _place(self, dim: int | None) -> tuple[Any, ...]:
        axis = self.dim if dim is None else dim
        return (*(slice(None),) * axis, self.index_list)

    def get_tensor(
        self,
        full: Tensor,
        device: Any = None,
        dim: int | None = None,
        retain_index_list: Sequence[int] = (),
    ) -> Tensor:
        """The window's part of a tensor.

        Args:
            retain_index_list: Frames of the whole that every window shows at the same places.
        """
        part = full[self._place(dim)]
        if retain_index_list:
            axis = self.dim if dim is None else dim
            place: tuple[Any, ...] = (*(slice(None),) * axis, list(retain_index_list))
            part[place] = full[place]
        return part if device is None else part.to(device)

    def add_window(self, full: Tensor, to_add: Tensor, dim: int | None = None) -> Tensor:
        """Add the window's part onto the whole, in place."""
        full[self._place(dim)] += to_add
        return full

    def get_region_index(self, num_regions: int) -> int:
        """Which of a number of equal parts of the whole the window's middle lies in."""
        return min(int(self.center_ratio * num_regions), num_regions - 1)


@dataclass
class ContextResults:
    """Estimates of one window."""

    window_idx: int
    sub_conds_out: list[Tensor]
    sub_conds: CondLists
    window: IndexListContextWindow


class IndexListContextHandler:
    """Evaluates windows in place of the whole; goes into model_options["context_handler"].

    Args:
        context_schedule: Makes the windows of a step.
        fuse_method: Weights of a window's frames.
        context_length: Frames of a window.
        context_overlap: Frames two neighbours share.
        context_stride: Greatest spread of a window, as a power of two.
        closed_loop: The last frame is followed by the first.
        dim: Axis of the latent that is divided.
        freenoise: Start noise repeats shuffled parts of itself from window to window.
        cond_retain_index_list: Frames of conditioning that every window keeps.
    """

    def __init__(
        self,
        context_schedule: ContextSchedule,
        fuse_method: ContextFuseMethod,
        context_length: int = 1,
        context_overlap: int = 0,
        context_stride: int = 1,
        closed_loop: bool = False,
        dim: int = 0,
        freenoise: bool = False,
        cond_retain_index_list: Sequence[int] | str = (),
        split_conds_to_windows: bool = False,
    ) -> None:
        self.context_schedule, self.fuse_method = context_schedule, fuse_method
        self.context_length, self.context_overlap = context_length, context_overlap
        self.context_stride, self.closed_loop = context_stride, closed_loop
        self.dim, self.freenoise = dim, freenoise
        if isinstance(cond_retain_index_list, str):
            numbers = cond_retain_index_list.split(",")
            cond_retain_index_list = [int(number) for number in numbers if number.strip()]
        self.cond_retain_index_list = list(cond_retain_index_list)
        self.split_conds_to_windows = split_conds_to_windows
        self._step = 0
        self.callbacks: dict[str, Any] = {}

    def should_use_context(
        self, model: Any, conds: CondLists, x_in: Tensor, timestep: Tensor, model_options: Any
    ) -> bool:
        """Whether a latent is longer than a window."""
        del model, conds, timestep, model_options
        return x_in.size(self.dim) > self.context_length

    def set_step(self, timestep: Tensor, model_options: dict[str, Any]) -> None:
        """Learn which step of the run a noise level is."""
        levels = model_options["transformer_options"]["sample_sigmas"]
        near = torch.isclose(levels.to(timestep), timestep[0], rtol=1e-4).nonzero()
        # A level between two steps belongs to the step before it.
        self._step = int(near[0]) if len(near) else int((levels.to(timestep) > timestep[0]).sum())

    def get_context_windows(
        self, model: Any, x_in: Tensor, model_options: dict[str, Any]
    ) -> list[IndexListContextWindow]:
        """The windows of the step."""
        del model
        frames = x_in.size(self.dim)
        made = self.context_schedule.func(frames, self, model_options)
        return [IndexListContextWindow(window, self.dim, frames) for window in made]

    def _window_value(self, value: Any, x_in: Tensor, window: IndexListContextWindow) -> Any:
        """The window's part of a tensor or network input that has a frame for each of x_in's."""
        tensor = getattr(value, "cond", value)
        if not torch.is_tensor(tensor) or isinstance(value, CONDWhole):
            return value
        known, parts = getattr(value, "frame_axis", None), getattr(value, "parts", 1)
        if known is not None:
            tensor = tensor.unflatten(known, (-1, parts))
        axis = window_parts.frame_axis(tensor, x_in, self.dim, known)
        if axis is None:
            return value
        part = window.get_tensor(tensor, x_in.device, axis, self.cond_retain_index_list)
        if known is not None:
            part = part.flatten(known, known + 1)
        return part if torch.is_tensor(value) else value._copy_with(part)

    def _window_input(
        self, name: str, value: Any, x_in: Tensor, window: IndexListContextWindow
    ) -> Any:
        """As `_window_value`, for one input by name: one that counts the frames of the batch counts
        those of the window."""
        if name == window_parts.FRAME_COUNT and window.dim == window_parts.BATCH:
            return value._copy_with(window.context_length)
        return self._window_value(value, x_in, window)

    def get_resized_cond(
        self,
        cond_in: list[dict[str, Any]] | None,
        x_in: Tensor,
        window: IndexListContextWindow,
        device: Any = None,
    ) -> list[dict[str, Any]] | None:
        """Copies of the entries that see only the window; the entries are not changed."""
        del device
        if cond_in is None:
            return None
        chosen = cond_in
        if self.split_conds_to_windows and len(cond_in) > 1:
            chosen = [cond_in[window.get_region_index(len(cond_in))]]
        resized = []
        for entry in chosen:
            part = {}
            for name, value in entry.items():
                if name == "control":
                    part[name] = self.prepare_control_objects(value, x_in, window)
                elif name == "mask" and value is not None:
                    part[name] = window_parts.mask_of(value, x_in, window)
                elif isinstance(value, dict):
                    part[name] = {
                        k: self._window_input(k, v, x_in, window) for k, v in value.items()
                    }
                else:
                    part[name] = self._window_value(value, x_in, window)
            area = part.get("area")
            areas = [] if area is None else window_parts.areas_of(area, window)
            resized += [part] if area is None else [{**part, "area": one} for one in areas]
        return resized

    def prepare_control_objects(
        self, control: Any, x_in: Tensor, window: IndexListContextWindow
    ) -> Any:
        """A control net, and those before it, with the hints of the window."""
        return window_parts.control_of(control, x_in, window)

    def execute(
        self,
        calc_cond_batch: Callable[..., list[Tensor]],
        model: Any,
        conds: CondLists,
        x_in: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any],
    ) -> list[Tensor]:
        """Estimates of the whole latent, one per list, put together from windows."""
        self.set_step(timestep, model_options)
        windows = self.get_context_windows(model, x_in, model_options)
        conds_final = [torch.zeros_like(x_in) for _ in conds]
        relative = self.fuse_method.name == ContextFuseMethods.RELATIVE
        counts_final = [torch.full_like(x_in, 1.0 if relative else 0.0) for _ in conds]
        biases_final: list[list[float]] = [[0.0] * x_in.size(self.dim) for _ in conds]
        for number, window in enumerate(windows):
            results = self.evaluate_context_windows(
                calc_cond_batch, model, x_in, conds, timestep, [(number, window)], model_options
            )
            for result in results:
                self.combine_context_window_results(
                    x_in, result.sub_conds_out, result.sub_conds, result.window, result.window_idx,
                    len(windows), timestep, conds_final, counts_final, biases_final,
                )  # fmt: skip
        return [final.div_(count) for final, count in zip(conds_final, counts_final)]

    def evaluate_context_windows(
        self,
        calc_cond_batch: Callable[..., list[Tensor]],
        model: Any,
        x_in: Tensor,
        conds: CondLists,
        timestep: Tensor,
        enumerated_context_windows: Sequence[tuple[int, IndexListContextWindow]],
        model_options: dict[str, Any],
        device: Any = None,
        first_device: Any = None,
    ) -> list[ContextResults]:
        """Estimates of windows."""
        del first_device
        results = []
        for number, window in enumerated_context_windows:
            throw_exception_if_processing_interrupted()
            options = dict(model_options)
            options["transformer_options"] = {
                **model_options.get("transformer_options", {}), "context_window": window,
            }  # fmt: skip
            sub_x = window.get_tensor(x_in, device)
            sub_timestep = window.get_tensor(timestep, device, dim=0) if self.dim == 0 else timestep
            sub_conds = [self.get_resized_cond(cond, x_in, window, device) for cond in conds]
            out = calc_cond_batch(model, sub_conds, sub_x, sub_timestep, options)
            results.append(ContextResults(number, out, sub_conds, window))
        return results

    def combine_context_window_results(
        self,
        x_in: Tensor,
        sub_conds_out: list[Tensor],
        sub_conds: CondLists,
        window: IndexListContextWindow,
        window_idx: int,
        total_windows: int,
        timestep: Tensor,
        conds_final: list[Tensor],
        counts_final: list[Tensor],
        biases_final: list[list[float]],
    ) -> None:
        """Add a window's estimates to the whole, in place."""
        del sub_conds, window_idx, total_windows, timestep
        if self.fuse_method.func is None:
            for out, final, biases in zip(sub_conds_out, conds_final, biases_final):
                _blend_by_bias(final, out, biases, window)
            return
        weights = self.fuse_method.func(
            len(window.index_list), full_length=x_in.size(self.dim), idxs=window.index_list,
            context_overlap=self.context_overlap,
        )  # fmt: skip
        shaped = match_weights_to_dim(weights, x_in, self.dim)
        for out, final, count in zip(sub_conds_out, conds_final, counts_final):
            window.add_window(final, out * shaped)
            window.add_window(count, shaped.expand_as(out))


def _blend_by_bias(
    final: Tensor, out: Tensor, biases: list[float], window: IndexListContextWindow
) -> None:
    """Running mean of each frame, weighted by how near it is to the middle of its window."""
    first, last = window.index_list[0], window.index_list[-1]
    for place, frame in enumerate(window.index_list):
        bias = relative_bias(frame, first, last)
        total = biases[frame] + bias
        mixed = final.select(window.dim, frame) * (biases[frame] / total)
        mixed = mixed + out.select(window.dim, place) * (bias / total)
        final.select(window.dim, frame).copy_(mixed)
        biases[frame] = total


def apply_freenoise(
    noise: Tensor, dim: int, context_length: int, context_overlap: int, seed: int
) -> Tensor:
    """Noise whose windows repeat shuffled parts of the first one, so that they agree.

    Source: Qiu et al. 2023, https://arxiv.org/abs/2310.15169, section 3.2.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed & SEED_MASK)
    frames, delta = noise.size(dim), context_length - context_overlap
    noise = noise.clone()
    if delta <= 0:
        return noise
    for start in range(0, frames - context_length, delta):
        target = start + context_length
        count = min(delta, frames - target)  # the last group ends with the frames
        order = torch.randperm(count, generator=generator) + start
        source = noise.index_select(dim, order.to(noise.device))
        noise.narrow(dim, target, count).copy_(source)
    return noise


def _prepare_sampling_wrapper(
    executor: Any, model: Any, noise_shape: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """Memory is estimated for a window, not for the whole.

    Raises:
        ValueError: The latent has no such axis, or it is that of the channels.
    """
    options = kwargs.get("model_options") or {}
    handler = options.get("context_handler")
    if handler is not None:
        shape = list(noise_shape)
        if handler.dim == CHANNELS or handler.dim >= len(shape):
            raise ValueError(
                f"dim: expected an axis of the latent (shape {tuple(shape)}) to cut context "
                f"windows from, other than its channels ({CHANNELS}), found {handler.dim}"
            )
        shape[handler.dim] = min(shape[handler.dim], handler.context_length)
        noise_shape = shape
    return executor(model, noise_shape, *args, **kwargs)


def create_prepare_sampling_wrapper(model: Any) -> None:
    """Have the memory of a model's runs estimated for a window."""
    model.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER_KEY, _prepare_sampling_wrapper)


def _sampler_sample_wrapper(
    executor: Any,
    guider: Any,
    sigmas: Tensor,
    extra_args: dict[str, Any],
    callback: Any,
    noise: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    handler = extra_args.get("model_options", {}).get("context_handler")
    if handler is not None and handler.freenoise:
        noise = apply_freenoise(
            noise, handler.dim, handler.context_length, handler.context_overlap,
            extra_args.get("seed") or 0,
        )  # fmt: skip
    return executor(guider, sigmas, extra_args, callback, noise, *args, **kwargs)


def create_sampler_sample_wrapper(model: Any) -> None:
    """Have the start noise of a model's runs repeat itself from window to window."""
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, _sampler_sample_wrapper)
