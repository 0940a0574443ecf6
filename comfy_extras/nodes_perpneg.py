"""Guidance in which the negative text takes away only what the positive one does not ask for.

Source: Armandpour et al. 2023, https://arxiv.org/abs/2304.04968.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy.devices import formulas
from comfy.sampling import batching, conditioning, guidance
from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import HOOKS, for_further_estimate, say_unasked, with_rule

Facts = dict[str, Any]


def perp_neg(
    x: Tensor,  # noqa: ARG001 - public signature
    noise_pred_pos: Tensor,
    noise_pred_neg: Tensor,
    noise_pred_nocond: Tensor,
    neg_scale: float,
    cond_scale: float,
) -> Tensor:
    """Guided estimate: the negative direction counts only across the positive one.

    That is the direction of the whole batch, as it has always been; by the paper an item's own.
    """
    positive = noise_pred_pos - noise_pred_nocond
    negative = noise_pred_neg - noise_pred_nocond
    product, square = (negative * positive).sum(), torch.norm(positive) ** 2
    if formulas.as_published():
        axes = tuple(range(1, positive.ndim))
        product, square = ((v * positive).sum(axes, keepdim=True) for v in (negative, positive))
    share = product / torch.where(square == 0, 1.0, square)
    along = share * positive
    return noise_pred_nocond + cond_scale * (positive - (negative - along) * neg_scale)


class PerpNeg(io.ComfyNode):
    """Perpendicular negative guidance on a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PerpNeg",
            display_name="Perp-Neg (DEPRECATED by PerpNegGuider)",
            category="_for_testing",
            is_experimental=True,
            is_deprecated=True,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("empty_conditioning"),
                io.Float.Input("neg_scale", default=1.0, min=0.0, max=100.0, step=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, empty_conditioning: Any, neg_scale: float) -> io.NodeOutput:
        empty = conditioning.convert_cond(empty_conditioning)

        def guide(facts: Facts) -> Tensor:
            x, network, options = facts["input"], facts["model"], facts["model_options"]
            ready = conditioning.encode_model_conds(
                network.extra_conds, empty, x, x.device, "negative"
            )
            options = for_further_estimate(options, "PerpNeg")
            (nothing,) = batching.calc_cond_batch(network, [ready], x, facts["sigma"], options)
            return x - perp_neg(
                x,
                facts["cond_denoised"],
                facts["uncond_denoised"],
                nothing,
                neg_scale,
                facts["cond_scale"],
            )

        # By the paper the negative text takes its share away at a scale of 1 too, where it has
        # always counted as zeros.
        return io.NodeOutput(with_rule(model, guide, needs_negative=formulas.as_published()))


class Guider_PerpNeg(guidance.CFGGuider):
    """Perpendicular negative guidance with three conditionings."""

    neg_scale = 1.0

    def set_conds(self, positive: Any, negative: Any, empty: Any) -> None:  # type: ignore[override]
        """The texts, and the conditioning of no text, which models take for a negative one."""
        empty = node_helpers.conditioning_set_values(empty, {"prompt_type": "negative"})
        conds = {"positive": positive, "negative": negative, "empty_negative_prompt": empty}
        self.inner_set_conds(conds)

    def set_cfg(self, cfg: float, neg_scale: float) -> None:  # type: ignore[override]
        """Guidance scale and the weight of the negative text."""
        self.cfg, self.neg_scale = cfg, neg_scale

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As of every guider."""
        say_unasked(self, *HOOKS)
        return super().sample(*args, **kwargs)

    def predict_noise(
        self,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,  # noqa: ARG002 - goes with the options
    ) -> Tensor:
        """Clean estimate."""
        options = model_options or {}
        names = ("positive", "negative", "empty_negative_prompt")
        conds = [self.conds.get(name) for name in names]
        positive, negative, nothing = batching.calc_cond_batch(
            self.inner_model, conds, x, timestep, options
        )
        guided = perp_neg(x, positive, negative, nothing, self.neg_scale, self.cfg)
        for change in options.get("sampler_post_cfg_function", []):
            guided = change(
                {
                    "denoised": guided,
                    "cond": conds[0],
                    "uncond": conds[1],
                    "empty_cond": conds[2],
                    "cond_scale": self.cfg,
                    "model": self.inner_model,
                    "cond_denoised": positive,
                    "uncond_denoised": negative,
                    "empty_cond_denoised": nothing,
                    "sigma": timestep,
                    "model_options": options,
                    "input": x,
                }
            )
        return guided


class PerpNegGuider(io.ComfyNode):
    """Perpendicular negative guidance as a guider."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PerpNegGuider",
            category="_for_testing",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.Conditioning.Input("empty_conditioning"),
                io.Float.Input("cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01),
                io.Float.Input("neg_scale", default=1.0, min=0.0, max=100.0, step=0.01),
            ],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: Any,
        negative: Any,
        empty_conditioning: Any,
        cfg: float,
        neg_scale: float,
    ) -> io.NodeOutput:
        guider = Guider_PerpNeg(model)
        guider.set_conds(positive, negative, empty_conditioning)
        guider.set_cfg(cfg, neg_scale)
        return io.NodeOutput(guider)


class PerpNegExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [PerpNeg, PerpNegGuider]


async def comfy_entrypoint() -> PerpNegExtension:
    """Called by the loader of built-in modules."""
    return PerpNegExtension()
