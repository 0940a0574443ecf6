"""Normalised attention guidance: the negative text counts inside the attention, so that it also
works for models that run without classifier-free guidance.

Source: Chen et al. 2025, https://arxiv.org/abs/2505.21179, section 3.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from comfy import progress
from comfy.nn.patches import CROSS_OUTPUT
from comfy.patching.wrappers import CallbacksMP, WrappersMP
from comfy.sampling.batching import CALL_GROUP, NEGATIVE_FIRST, TOGETHER, WAITING
from comfy.sampling.step_cache import FURTHER
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

logger = logging.getLogger(__name__)

LEAST_NORM = 1e-6
POSITIVE, NEGATIVE = 0, 1  # lists, as `cond_or_uncond` numbers them


def normalized(
    positive: Tensor, negative: Tensor, scale: float, alpha: float, tau: float
) -> Tensor:
    """Attention results [B, L, D] of the positive text, led away from those of the negative one.

    Args:
        scale: How far: 1 is the positive result itself.
        alpha: Share of the led result in the end, 0..1.
        tau: Greatest L1 norm of a led token, in norms of its positive one.
    """
    led = positive * scale - negative * (scale - 1.0)
    norm = positive.abs().sum(-1, keepdim=True).clamp_min(LEAST_NORM)
    ratio = led.abs().sum(-1, keepdim=True).clamp_min(LEAST_NORM) / norm
    led = led * (ratio.clamp(max=tau) / ratio)
    return led * alpha + positive * (1.0 - alpha)


class AttentionGuidance:
    """Patches of attention outputs with the settings of a node.

    The paper has one picture that looks at either text. Where the negative text has no estimate to
    make (at a scale of 1), both parts of a call get the led result, so that they show one picture
    in the next layer too. Else, and where texts of very different lengths cannot share a call, each
    has a picture of its own. Results of a negative's call are kept, in order, until the positive's
    at the same noise level. Of several negatives that could share a call the newest one counts,
    whether memory lets them or not.
    """

    def __init__(self, scale: float, alpha: float, tau: float) -> None:
        self.settings = (scale, alpha, tau)
        self.one_picture = False
        self._warned = False
        self._call: Any = None  # the list that names the parts of the call in progress
        self._place = 0  # of the next attention in it
        self._group: Any = None  # the list that names all entries that could share the call
        self._continues = False  # the call before was of the same ones
        self._is_awaited = False  # a positive that could not share it comes later
        self._kept: list[Tensor] = []
        self._kept_sigma: float | None = None

    def forget(self, *_: Any) -> None:
        """Let go of what a run left."""
        self._call = self._group = self._kept_sigma = None
        self._kept = []

    def estimate(
        self,
        executor: Any,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wrapper of kind "predict_noise": learns whether the negative's estimate is of use."""
        self.one_picture = math.isclose(getattr(executor.class_obj, "cfg", 1.0), 1.0)
        options = {**model_options, NEGATIVE_FIRST: True, TOGETHER: self.one_picture}
        return executor(x, timestep, options, *args, **kwargs)

    def cross(self, out: Tensor, extra_options: dict[str, Any]) -> Tensor:
        """Output of a cross-attention; the batch holds one part for each conditioning entry."""
        if FURTHER in extra_options:  # the estimate of another guidance, not of the two texts
            return out
        order = extra_options["cond_or_uncond"]
        self._follow(order, extra_options)
        parts = list(out.chunk(len(order)))
        negative = self._negative(parts, order)
        if POSITIVE not in order:
            return out
        if negative is None or negative.shape != parts[0].shape:
            self._warn()
            return out
        for place, which in enumerate(order):
            if which == POSITIVE:
                parts[place] = normalized(parts[place], negative.to(out), *self.settings)
        if self.one_picture and NEGATIVE in order:
            parts[order.index(NEGATIVE)] = parts[order.index(POSITIVE)]
        return torch.cat(parts)

    def joint(self, out: Tensor, extra_options: dict[str, Any]) -> Tensor:
        """Output of an attention over text and picture together; only the picture's tokens are
        led. Self-attention of a picture alone is left as it is."""
        span = extra_options.get("img_slice")
        if span is None:
            return out
        led = self.cross(out[:, span[0] : span[1]], extra_options)
        return torch.cat([out[:, : span[0]], led, out[:, span[1] :]], dim=1)

    def _follow(self, order: list[int], extra_options: dict[str, Any]) -> None:
        """Notice a new model call and which attention of it this is."""
        if order is self._call:
            self._place += 1
            return
        self._call, self._place = order, 0
        group = extra_options.get(CALL_GROUP, order)
        self._continues, self._group = group is self._group, group
        self._is_awaited = POSITIVE in extra_options.get(WAITING, ())
        sigmas = extra_options.get("sigmas")
        sigma = None if sigmas is None else float(sigmas[0])
        if not self._continues and (NEGATIVE in order or sigma != self._kept_sigma):
            self._kept, self._kept_sigma = [], sigma

    def _negative(self, parts: list[Tensor], order: list[int]) -> Tensor | None:
        """The negative text's result here: of this call, or of one before."""
        is_kept = self._place < len(self._kept)
        if NEGATIVE in order and not (self._continues and is_kept):
            negative = parts[order.index(NEGATIVE)]
            if POSITIVE not in order or len(order) < len(self._group) or self._is_awaited:
                self._kept.append(negative.cpu())  # the device may have no room for all
            return negative
        return self._kept[self._place] if is_kept else None

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            progress.warn(
                logger,
                "normalised attention guidance had no effect in a call: there was no negative text "
                "for the same area; give the negative conditioning the areas of the positive one",
            )


class NAGuidance(io.ComfyNode):
    """Guidance by the negative text inside the attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def number(
            id: str, default: float, least: float, most: float, step: float, tip: str
        ) -> Any:
            return io.Float.Input(id, default=default, min=least, max=most, step=step, tooltip=tip)

        return io.Schema(
            node_id="NAGuidance",
            display_name="Normalized Attention Guidance",
            category="advanced/guidance",
            description="Lets the negative text count in models that run at a guidance of 1.",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                number("nag_scale", 5.0, 0.0, 50.0, 0.1, "How strongly; 1 changes nothing."),
                number("nag_alpha", 0.5, 0.0, 1.0, 0.01, "Share of the guided result."),
                number("nag_tau", 1.5, 1.0, 10.0, 0.01, "Greatest growth of a token."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, nag_scale: float, nag_alpha: float, nag_tau: float
    ) -> io.NodeOutput:
        guidance = AttentionGuidance(nag_scale, nag_alpha, nag_tau)
        view = model.clone()
        read = getattr(view.get_model_object("diffusion_model"), "reads_patches", None)
        view.set_model_attn1_output_patch(guidance.joint)
        if read is None or CROSS_OUTPUT in read:
            view.set_model_attn2_output_patch(guidance.cross)
        view.model_options["disable_cfg1_optimization"] = True
        view.add_wrapper(WrappersMP.PREDICT_NOISE, guidance.estimate)
        view.add_callback(CallbacksMP.ON_CLEANUP, guidance.forget)
        return io.NodeOutput(view)


comfy_entrypoint = entrypoint_of(NAGuidance)
