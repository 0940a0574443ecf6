"""Nodes that make guiders: how a sampler's steps follow the texts."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

import node_helpers
from comfy.sampling import batching, guidance
from comfy_api.latest import io
from comfy_extras.guidance import say_unasked

GUIDERS = "sampling/custom_sampling/guiders"


def cfg_input(id: str) -> io.Float.Input:
    """Declaration of a guidance scale."""
    return io.Float.Input(id, default=8.0, min=0.0, max=100.0, step=0.1, round=0.01)


class Guider_Basic(guidance.CFGGuider):
    """Guidance by one conditioning, without a negative one."""

    def set_conds(self, positive: Any) -> None:  # type: ignore[override]
        """The one conditioning."""
        self.inner_set_conds({"positive": positive})


class BasicGuider(io.ComfyNode):
    """Guidance by one conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BasicGuider",
            category=GUIDERS,
            inputs=[io.Model.Input("model"), io.Conditioning.Input("conditioning")],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(cls, model: Any, conditioning: Any) -> io.NodeOutput:
        guider = Guider_Basic(model)
        guider.set_conds(conditioning)
        return io.NodeOutput(guider)

    get_guider = execute


class CFGGuider(io.ComfyNode):
    """Classifier-free guidance."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CFGGuider",
            category=GUIDERS,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                cfg_input("cfg"),
            ],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(cls, model: Any, positive: Any, negative: Any, cfg: float) -> io.NodeOutput:
        guider = guidance.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
        return io.NodeOutput(guider)

    get_guider = execute


class Guider_DualCFG(guidance.CFGGuider):
    """Guidance by two conditionings and a negative one.

    regular: negative + (middle - negative) * cfg2 + (positive - middle) * cfg1;
    nested: the result of (positive, middle) at cfg1 guided against the negative one at cfg2.
    Guidance hooks of the model act on the first of these differences that is made: between negative
    and middle, or between middle and positive; the other one is plain.
    """

    cfg1, cfg2, nested = 1.0, 1.0, False
    has_one_scale = False

    def set_cfg(self, cfg1: float, cfg2: float, nested: bool = False) -> None:  # type: ignore[override]
        """Scale between the two conditionings, and between the second and the negative one."""
        self.cfg1, self.cfg2, self.nested = cfg1, cfg2, nested

    def set_conds(self, positive: Any, middle: Any, negative: Any) -> None:  # type: ignore[override]
        """The three conditionings; models take the middle one for a negative text."""
        middle = node_helpers.conditioning_set_values(middle, {"prompt_type": "negative"})
        conds = {"positive": positive, "middle": middle, "negative": negative}
        self.inner_set_conds(conds)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As of every guider."""
        say_unasked(self, "sampler_pre_cfg_function", "sampler_calc_cond_batch_function")
        return super().sample(*args, **kwargs)

    def predict_noise(
        self,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,  # noqa: ARG002 - goes with the options
    ) -> Tensor:
        """Clean estimate under both scales."""
        options = model_options or {}
        conds = [self.conds.get(name) for name in ("negative", "middle", "positive")]
        may_skip = options.get("disable_cfg1_optimization", False) is False
        if not self.nested and math.isclose(self.cfg2, 1.0) and may_skip:
            conds[0] = None
            if math.isclose(self.cfg1, 1.0):
                conds[1] = None
        network = self.inner_model
        negative, middle, positive = batching.calc_cond_batch(network, conds, x, timestep, options)
        if self.nested:
            inner = guidance.cfg_function(
                network, positive, middle, self.cfg1, x, timestep, options,
                cond=conds[2], uncond=conds[1],
            )  # fmt: skip
            return negative + (inner - negative) * self.cfg2
        outer = guidance.cfg_function(
            network, middle, negative, self.cfg2, x, timestep, options,
            cond=conds[1], uncond=conds[0],
        )  # fmt: skip
        return outer + (positive - middle) * self.cfg1


class DualCFGGuider(io.ComfyNode):
    """Guidance by two conditionings and a negative one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DualCFGGuider",
            category=GUIDERS,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("cond1"),
                io.Conditioning.Input("cond2"),
                io.Conditioning.Input("negative"),
                cfg_input("cfg_conds"),
                cfg_input("cfg_cond2_negative"),
                io.Combo.Input("style", options=["regular", "nested"]),
            ],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        cond1: Any,
        cond2: Any,
        negative: Any,
        cfg_conds: float,
        cfg_cond2_negative: float,
        style: str,
    ) -> io.NodeOutput:
        guider = Guider_DualCFG(model)
        guider.set_conds(cond1, cond2, negative)
        guider.set_cfg(cfg_conds, cfg_cond2_negative, nested=style == "nested")
        return io.NodeOutput(guider)

    get_guider = execute
