"""What all control networks share: hint, strength, range, chaining and merging of residuals.

A control object belongs to a conditioning entry. Each step the sampler calls ``get_control``; the
residuals of a chain are added up, those of the earlier network last.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from comfy import progress
from comfy.devices import placement

logger = logging.getLogger(__name__)

Control = dict[str, list[Tensor | None]]
PICTURE_AXES = 4  # of latents: batch, channels, rows, columns
PARTS = ("input", "middle", "output")


class StrengthType(Enum):
    """How strength applies to a list of residuals: the same to all, or more to the later ones."""

    CONSTANT = 1
    LINEAR_UP = 2


def broadcast_image_to(tensor: Tensor, target_batch_size: int, batched_number: int) -> Tensor:
    """Repeat hints to the batch of a model call, which holds ``batched_number`` conditionings.

    A single hint is left as it is. Raises nothing: hints too many are dropped, too few are
    repeated.
    """
    if tensor.shape[0] == 1:
        return tensor
    per_cond = target_batch_size // batched_number
    tensor = tensor[:per_cond]
    if per_cond > tensor.shape[0]:
        repeats = -(-per_cond // tensor.shape[0])
        tensor = torch.cat([tensor] * repeats)[:per_cond]
    if tensor.shape[0] == target_batch_size:
        return tensor
    return torch.cat([tensor] * batched_number)


def no_preprocessing(hint: Tensor) -> Tensor:
    """For networks that take the hint as it is."""
    return hint


class ControlBase:
    """A control network with its hint; sub-classes say how residuals come about.

    Attributes:
        cond_hint_original: The hint as given, ``[B, C, H, W]`` in 0..1.
        cond_hint: The hint at the size of the current latent, made when first needed.
        strength, strength_type: Factor of the residuals.
        timestep_percent_range: Part of the sampling process in which it acts.
        timestep_range: The same as sigmas, while a run lasts.
        previous_controlnet: Earlier link of the chain.
        extra_args: More arguments for the network.
        extra_conds: Names of conditioning entries the network takes.
        compression_ratio, upscale_algorithm: Size of the hint relative to the latent; how it is
            reached.
        latent_format, vae: For networks that take latents as hints.
        global_average_pooling: Replace each residual by its mean over positions.
        concat_mask, extra_concat_orig, extra_concat: A mask joined to the hint's channels.
        preprocess_image: Applied to the resized hint.
        extra_hooks: Hooks that come with the network.
    """

    def __init__(self) -> None:
        self.cond_hint_original: Tensor | None = None
        self.cond_hint: Tensor | None = None
        self.strength = 1.0
        self.timestep_percent_range: tuple[float, float] = (0.0, 1.0)
        self.latent_format: Any = None
        self.vae: Any = None
        self.global_average_pooling = False
        self.timestep_range: tuple[float, float] | None = None
        self.compression_ratio = 8
        self.upscale_algorithm = "nearest-exact"
        self.extra_args: dict[str, Any] = {}
        self.previous_controlnet: ControlBase | None = None
        self.extra_conds: list[str] = []
        self.strength_type = StrengthType.CONSTANT
        self.concat_mask = False
        self.extra_concat_orig: list[Tensor] = []
        self.extra_concat: list[Tensor] | None = None
        self.extra_hooks: Any = None
        self.preprocess_image: Callable[[Tensor], Tensor] = no_preprocessing

    # -- set-up by nodes -------------------------------------------------------------------------

    def set_cond_hint(
        self,
        cond_hint: Tensor,
        strength: float = 1.0,
        timestep_percent_range: tuple[float, float] = (0.0, 1.0),
        vae: Any = None,
        extra_concat: Sequence[Tensor] = (),
    ) -> ControlBase:
        """Give the hint and how it acts; returns self."""
        self.cond_hint_original = cond_hint
        self.strength = strength
        self.timestep_percent_range = timestep_percent_range
        if self.latent_format is not None:
            if vae is None:
                progress.warn(
                    logger, "This control network needs a VAE; connect one to its apply node"
                )
            self.vae = vae
        self.extra_concat_orig = list(extra_concat)
        if self.concat_mask and not self.extra_concat_orig:
            self.extra_concat_orig.append(torch.tensor([[[[0.0]]]]))
        return self

    def set_previous_controlnet(self, controlnet: ControlBase | None) -> ControlBase:
        """Chain after another one; returns self."""
        self.previous_controlnet = controlnet
        return self

    def set_extra_arg(self, argument: str, value: Any = None) -> None:
        """Another argument for the network."""
        self.extra_args[argument] = value

    def copy(self) -> ControlBase:
        """A control object with its own hint and options, on the same network."""
        new = ControlBase()
        self.copy_to(new)
        return new

    def copy_to(self, c: ControlBase) -> None:
        """Give another object all options of this one (not the chain nor what belongs to a run)."""
        c.cond_hint_original = self.cond_hint_original
        c.strength = self.strength
        c.timestep_percent_range = self.timestep_percent_range
        c.global_average_pooling = self.global_average_pooling
        c.compression_ratio = self.compression_ratio
        c.upscale_algorithm = self.upscale_algorithm
        c.latent_format = self.latent_format
        c.extra_args = copy.copy(self.extra_args)
        c.vae = self.vae
        c.extra_conds = list(self.extra_conds)
        c.strength_type = self.strength_type
        c.concat_mask = self.concat_mask
        c.extra_concat_orig = list(self.extra_concat_orig)
        c.extra_hooks = self.extra_hooks.clone() if self.extra_hooks is not None else None
        c.preprocess_image = self.preprocess_image

    # -- a run -----------------------------------------------------------------------------------

    def pre_run(self, model: Any, percent_to_timestep_function: Callable[[float], float]) -> None:
        """Prepare for sampling with a base model."""
        start, end = self.timestep_percent_range
        self.timestep_range = (
            percent_to_timestep_function(start),
            percent_to_timestep_function(end),
        )
        if self.previous_controlnet is not None:
            self.previous_controlnet.pre_run(model, percent_to_timestep_function)

    def cleanup(self) -> None:
        """Forget what belongs to the run that is over."""
        if self.previous_controlnet is not None:
            self.previous_controlnet.cleanup()
        self.cond_hint = None
        self.extra_concat = None
        self.timestep_range = None

    def get_models(self) -> list[Any]:
        """Patchers of all networks of the chain."""
        return self.previous_controlnet.get_models() if self.previous_controlnet else []

    def get_extra_hooks(self) -> list[Any]:
        """Hooks of all networks of the chain."""
        own = [self.extra_hooks] if self.extra_hooks is not None else []
        before = self.previous_controlnet.get_extra_hooks() if self.previous_controlnet else []
        return own + before

    def inference_memory_requirements(self, dtype: torch.dtype) -> float:
        """Bytes the chain takes beside the weights its patchers report."""
        if self.previous_controlnet is None:
            return 0
        return self.previous_controlnet.inference_memory_requirements(dtype)

    def get_control(
        self,
        x_noisy: Tensor,
        t: Tensor,
        cond: dict[str, Any],
        batched_number: int,
        transformer_options: dict[str, Any],
    ) -> Control | None:
        """Residuals of the chain for one model call.

        Args:
            x_noisy: Latent batch, not scaled for the network.
            t: Sigma of each.
            cond: Conditioning tensors of the call.
            batched_number: Conditionings in the batch.
            transformer_options: Facts about the step.
        """
        earlier = self.earlier_control(x_noisy, t, cond, batched_number, transformer_options)
        return earlier

    def earlier_control(self, *args: Any) -> Control | None:
        """Residuals of the chain before this link."""
        if self.previous_controlnet is None:
            return None
        return self.previous_controlnet.get_control(*args)

    def is_idle(self, t: Tensor) -> bool:
        """Whether a step lies outside this network's range."""
        if self.timestep_range is None:
            return False
        start, end = self.timestep_range
        return bool(t[0] > start or t[0] < end)

    def parts_given(self) -> frozenset[str] | None:
        """Parts of a network that this link has residuals for; None where that is not known."""
        return None

    def check_pictures(self, x_noisy: Tensor) -> None:
        """Refuse latents of videos or sounds, which networks for pictures cannot see.

        Raises:
            ValueError: The latent has other axes.
        """
        if x_noisy.ndim != PICTURE_AXES:
            raise ValueError(
                f"control_net: expected the latent of a picture, of {PICTURE_AXES} axes, found one "
                f"of {x_noisy.ndim}: the ControlNet or adapter was made for another model"
            )

    def control_merge(
        self, control: Control, control_prev: Control | None, output_dtype: torch.dtype | None
    ) -> Control:
        """Apply strength to this network's residuals and add those of the chain before it."""
        merged: Control = {part: [] for part in PARTS}
        for part, residuals in control.items():
            scaled: dict[int, Tensor] = {}  # a tensor used in several places is scaled once
            for number, residual in enumerate(residuals):
                if residual is not None:
                    if id(residual) not in scaled:
                        scaled[id(residual)] = self._scale(residual, number, len(residuals))
                    residual = scaled[id(residual)]
                    if output_dtype is not None:
                        residual = residual.to(output_dtype)
                merged[part].append(residual)
        if control_prev is None:
            return merged
        for part in PARTS:
            own = merged[part]
            for number, before in enumerate(control_prev[part]):
                if number >= len(own):
                    own.append(before)
                elif before is not None:
                    now = own[number]
                    own[number] = before if now is None else before + now
        return merged

    def _scale(self, residual: Tensor, number: int, count: int) -> Tensor:
        if self.global_average_pooling:
            residual = residual.mean(dim=(2, 3), keepdim=True).expand_as(residual)
        if self.strength_type == StrengthType.LINEAR_UP:
            return residual * self.strength ** float(count - number)
        return residual * self.strength

    @property
    def offload_device(self) -> torch.device:
        """Where control networks rest."""
        return placement.unet_offload_device()
