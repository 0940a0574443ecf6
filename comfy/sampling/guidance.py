"""Guidance: which conditionings steer a run, and how their estimates are combined.

A guider owns the conditioning lists and the model's lifetime around a run; to the solver it is the
callable ``guider(x, sigma, model_options, seed) -> denoised``. Classifier-free guidance (Ho and
Salimans 2022, https://arxiv.org/abs/2207.12598) extrapolates from the negative to the positive
estimate: ``uncond + cond_scale * (cond - uncond)``. Hooks in `model_options` replace or refine it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from comfy import nested_tensor
from comfy.devices import residency
from comfy.nn.wrappers import run_wrapped
from comfy.patching.options import create_model_options_clone
from comfy.sampling import batching, checks, conditioning, masks, preparation


def cfg_function(
    model: Any,
    cond_pred: Tensor,
    uncond_pred: Tensor,
    cond_scale: float | Tensor,
    x: Tensor,
    timestep: Tensor,
    model_options: dict[str, Any] | None = None,
    cond: Any = None,
    uncond: Any = None,
) -> Tensor:
    """Combine two estimates; the hooks `sampler_cfg_function` and `sampler_post_cfg_function`
    apply.

    Args:
        cond_pred: Estimate of the positive list [B, C, ...].
        uncond_pred: Estimate of the negative list, shaped alike; zeros if it was not evaluated.
        cond_scale: One number, or a tensor that is stretched to theirs.
        x: Noisy latent the estimates were made from.
        timestep: Sigma [B].
    """
    options = model_options or {}
    shared = {
        "cond_scale": cond_scale, "input": x, "sigma": timestep, "model": model,
        "model_options": options, "cond_denoised": cond_pred, "uncond_denoised": uncond_pred,
    }  # fmt: skip
    replacement = options.get("sampler_cfg_function")
    if replacement is not None:
        noise_like = {
            "cond": x - cond_pred, "uncond": x - uncond_pred, "timestep": timestep,
            "input_cond": cond, "input_uncond": uncond,
        }  # fmt: skip
        denoised = x - replacement({**shared, **noise_like})
    else:
        denoised = uncond_pred + (cond_pred - uncond_pred) * cond_scale
    for hook in options.get("sampler_post_cfg_function", ()):
        denoised = hook({**shared, "denoised": denoised, "cond": cond, "uncond": uncond})
    return denoised


def sampling_function(
    model: Any,
    x: Tensor,
    timestep: Tensor,
    uncond: Any,
    cond: Any,
    cond_scale: float | Tensor,
    model_options: dict[str, Any] | None = None,
    seed: int | None = None,  # noqa: ARG001 - public signature
) -> Tensor:
    """Guided estimate of x at one noise level.

    At a scale of 1 the negative list cannot matter and is not evaluated, unless an option
    (`disable_cfg1_optimization`) asks for it.
    """
    options = model_options if model_options is not None else {}
    is_one = not isinstance(cond_scale, Tensor) and math.isclose(cond_scale, 1.0)
    unneeded = is_one and not options.get("disable_cfg1_optimization", False)
    conds = [cond, None if unneeded else uncond]
    shared = {
        "conds": conds, "input": x, "sigma": timestep, "model": model, "model_options": options,
    }  # fmt: skip
    calculate = options.get("sampler_calc_cond_batch_function")
    if calculate is not None:
        out = calculate(shared)
    else:
        out = batching.calc_cond_batch(model, conds, x, timestep, options)
    for hook in options.get("sampler_pre_cfg_function", ()):
        out = hook({**shared, "conds_out": out, "cond_scale": cond_scale, "timestep": timestep})
    return cfg_function(
        model, out[0], out[1], cond_scale, x, timestep, options, cond=cond, uncond=conds[1]
    )


class CFGGuider:
    """Classifier-free guidance with one positive and one negative conditioning list.

    Subclasses override `predict_noise`, and `set_conds` when they have other lists.

    Args:
        model_patcher: A MODEL.

    Attributes:
        original_conds: Converted lists by name, untouched by runs.
        cfg: Guidance scale.
        has_one_scale: Whether `cfg` is all there is to set.
        model_options: Options of the next run; the patcher's until a run clones them.
        inner_model, conds, loaded_models: Base model, processed lists and loaded models; they exist
            only while `sample` runs.
    """

    inner_model: Any
    conds: dict[str, conditioning.CondList]
    has_one_scale = True

    def __init__(self, model_patcher: Any) -> None:
        self.model_patcher = model_patcher
        self.model_options: dict[str, Any] = model_patcher.model_options
        self.original_conds: dict[str, conditioning.CondList] = {}
        self.cfg = 1.0

    def set_conds(self, positive: Any, negative: Any) -> None:
        """Choose both lists, in the graph's form [[tensor, options], ...]."""
        self.inner_set_conds({"positive": positive, "negative": negative})

    def set_cfg(self, cfg: float) -> None:
        """Choose the guidance scale."""
        self.cfg = cfg

    def inner_set_conds(self, conds: dict[str, Any]) -> None:
        """Choose lists by name."""
        for name, entries in conds.items():
            self.original_conds[name] = conditioning.convert_cond(entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.outer_predict_noise(*args, **kwargs)

    def outer_predict_noise(
        self,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """`predict_noise` inside the wrappers of kind "predict_noise"."""
        options = self.model_options.get("transformer_options", {})
        arguments = (x, timestep, model_options or {}, seed)
        return run_wrapped(self.predict_noise, self, "predict_noise", options, *arguments)

    def predict_noise(
        self,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Guided clean estimate (despite the public name) of x at sigma `timestep` [B]."""
        return sampling_function(
            self.inner_model, x, timestep, self.conds.get("negative"), self.conds.get("positive"),
            self.cfg, model_options=model_options, seed=seed,
        )  # fmt: skip

    def inner_sample(
        self,
        noise: Tensor,
        latent_image: Tensor,
        device: Any,
        sampler: Any,
        sigmas: Tensor,
        denoise_mask: Tensor | None,
        callback: Callable[..., None] | None,
        disable_pbar: bool,
        seed: int | None,
        latent_shapes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Sample with a loaded model, all tensors on its device.

        Returns:
            Latent in the autoencoder's scale, float32.
        """
        if len(latent_shapes or ()) < 2:  # several are packed into one line
            checks.check_axes(self.inner_model, noise, self.model_options)
        else:
            checks.check_parts(self.inner_model, latent_shapes or (), self.model_options)
        # An empty latent stays zero: the scale's shift would turn it into a grey picture.
        if latent_image is not None and torch.count_nonzero(latent_image) > 0:
            latent_image = self.inner_model.process_latent_in(latent_image)
        self.conds = conditioning.process_conds(
            self.inner_model, noise, self.conds, device, latent_image, denoise_mask, seed,
            latent_shapes=latent_shapes,
        )  # fmt: skip
        checks.check_widths(self.inner_model, self.conds, self.model_options)
        checks.warn_of_broken_conditioning(self.conds)
        checks.warn_of_unread_patches(self.inner_model, self.model_options)
        checks.warn_of_unread_controls(self.inner_model, self.conds, self.model_options)
        options = create_model_options_clone(self.model_options)
        options.setdefault("transformer_options", {})["sample_sigmas"] = sigmas
        extra_args = {"model_options": options, "seed": seed}
        samples = run_wrapped(
            sampler.sample, sampler, "sampler_sample", options["transformer_options"],
            self, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar,
        )  # fmt: skip
        return self.inner_model.process_latent_out(samples.to(torch.float32))

    def outer_sample(
        self,
        noise: Tensor,
        latent_image: Tensor,
        sampler: Any,
        sigmas: Tensor,
        denoise_mask: Tensor | None = None,
        callback: Callable[..., None] | None = None,
        disable_pbar: bool = False,
        seed: int | None = None,
        latent_shapes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Load the models, sample, and let go of them again, also after an error."""
        self.inner_model, self.conds, self.loaded_models = preparation.prepare_sampling(
            self.model_patcher, noise.shape, self.conds, self.model_options
        )
        device, conds = self.model_patcher.load_device, self.conds

        def run() -> Tensor:
            self.conds = conds  # as they were given, also for a second try
            mask = denoise_mask
            if mask is not None:
                mask = masks.prepare_mask(mask, noise.shape, device)
            return self.inner_sample(
                noise.to(device), latent_image.to(device), device, sampler, sigmas.to(device), mask,
                callback, disable_pbar, seed, latent_shapes=latent_shapes,
            )  # fmt: skip

        try:
            preparation.cast_to_load_options(
                self.model_options, device=device, dtype=self.model_patcher.model_dtype()
            )
            self.model_patcher.pre_run()
            return residency.run_or_make_room(self.model_patcher, run)
        finally:
            self.model_patcher.cleanup()
            preparation.cleanup_models(self.conds, self.loaded_models)
            del self.inner_model
            del self.loaded_models

    def sample(
        self,
        noise: Any,
        latent_image: Any,
        sampler: Any,
        sigmas: Tensor,
        denoise_mask: Any = None,
        callback: Callable[..., None] | None = None,
        disable_pbar: bool = False,
        seed: int | None = None,
    ) -> Any:
        """Run a sampler over the levels, starting from noise and a latent.

        Args:
            noise: [B, C, ...] or nested, unit variance (zeros to add none).
            latent_image: Like noise, in the autoencoder's scale; zeros for none.
            sampler: A `samplers.Sampler`.
            sigmas: [steps + 1], descending; an empty list returns the latent unchanged.
            denoise_mask: 1 where the latent may change; any size, nested like the latent.
            callback: callback(step, denoised, x, total_steps).
            seed: Seeds the step noise.
        Returns:
            Latent like latent_image.
        Raises:
            ValueError: The latent does not fit the model or the noise.
        """
        sigmas = checks.levels_of(sigmas)
        if sigmas.shape[-1] == 0:
            return latent_image
        nested = getattr(latent_image, "is_nested", False)
        shapes: list[Any] | None = None
        if nested:
            checks.check_members(latent_image.unbind())
            checks.check_windows(self.model_options, len(latent_image.unbind()))
            noise, shapes = nested_tensor.pack(noise.unbind())
            latent_image, _ = nested_tensor.pack(latent_image.unbind())
            if denoise_mask is not None:
                denoise_mask = _packed_masks(denoise_mask, shapes)
            if callback is not None:
                callback = _unpacking(callback, shapes)
        checks.check_latent(self.model_patcher, noise, latent_image)
        checks.warn_if_not_finite(latent_image, "latent given to the sampler")
        if torch.is_tensor(denoise_mask):
            checks.warn_if_not_finite(denoise_mask, "noise mask")
        with preparation.run_of(self):
            options = self.model_options.get("transformer_options", {})
            output = run_wrapped(
                self.outer_sample, self, "outer_sample", options,
                noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed,
                latent_shapes=shapes or [latent_image.shape],
            )  # fmt: skip
        checks.warn_if_not_finite(output, "latent made by the sampler")
        if nested:
            return nested_tensor.NestedTensor(nested_tensor.unpack(output, shapes))
        return output


def _unpacking(
    callback: Callable[..., None], shapes: Sequence[Sequence[int]]
) -> Callable[..., None]:
    """A callback that is given the members of a packed latent as a nested one."""

    def members(packed: Tensor) -> Any:
        return nested_tensor.NestedTensor(nested_tensor.unpack(packed, shapes))

    return lambda step, denoised, x, total: callback(step, members(denoised), members(x), total)


def _packed_masks(denoise_mask: Any, shapes: Sequence[Sequence[int]]) -> Tensor:
    """Masks of the members of a nested latent, packed like it; missing ones change everything."""
    if getattr(denoise_mask, "is_nested", False):
        given = list(denoise_mask.unbind())[: len(shapes)]
    else:
        given = [denoise_mask]
    members = [masks.prepare_mask(mask, shape, mask.device) for mask, shape in zip(given, shapes)]
    members += [torch.ones(tuple(shape)) for shape in shapes[len(members) :]]
    return nested_tensor.pack([member.cpu() for member in members])[0]
