"""Skip-layer guidance: away from an estimate of the network without some of its layers.

Source: Hyung et al. 2024 (STG), https://arxiv.org/abs/2411.18664, and the sampler of Stable
Diffusion 3.5.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from comfy.patching.options import create_model_options_clone, set_model_options_patch_replace
from comfy.sampling import batching
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.guidance import Facts, Replacement, for_further_estimate


def layers_of(text: str) -> list[int]:
    """The numbers in a text."""
    return [int(number) for number in re.findall(r"\d+", text)]


def unchanged(args: dict[str, Any], extra_args: dict[str, Any]) -> dict[str, Any]:
    """In place of a block: its inputs."""
    del extra_args
    return args


class Skipping:
    """Blocks that a further estimate goes without."""

    def __init__(self, double_layers: list[int], single_layers: list[int]) -> None:
        self.layers = {"double_block": double_layers, "single_block": single_layers}
        named = (f"{kind} {number}" for kind, layers in self.layers.items() for number in layers)
        self.replacement = Replacement(unchanged, ", ".join(named))

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """A copy of a run's options in which the blocks are skipped."""
        skipping = create_model_options_clone(options)
        for kind, layers in self.layers.items():
            for layer in layers:
                skipping = set_model_options_patch_replace(
                    skipping, self.replacement, "dit", kind, layer
                )
        return skipping


class Span:
    """A part of the sampling, in noise levels of a model."""

    def __init__(self, model: Any, start_percent: float, end_percent: float) -> None:
        to_sigma = model.get_model_object("model_sampling").percent_to_sigma
        self.start, self.end = to_sigma(start_percent), to_sigma(end_percent)

    def holds(self, sigma: Tensor) -> bool:
        """Whether the level of a step lies in it."""
        return self.end <= float(sigma[0]) <= self.start


def guided_by_skipping(
    model: Any,
    double_layers: list[int],
    single_layers: list[int],
    scale: float,
    span: Span,
    rescaling_scale: float,
) -> Any:
    """A view of the model that is guided away from itself without some layers."""
    skipping = Skipping(double_layers, single_layers)

    def change(facts: Facts) -> Tensor:
        guided = facts["denoised"]
        if scale <= 0 or not span.holds(facts["sigma"]):
            return guided
        options = for_further_estimate(facts["model_options"], "SkipLayerGuidance")
        options = skipping.options(options)
        (skipped,) = batching.calc_cond_batch(
            facts["model"], [facts["cond"]], facts["input"], facts["sigma"], options
        )
        skipping.replacement.say_if_unasked(skipped)
        guided = guided + (facts["cond_denoised"] - skipped) * scale
        spread = guided.std()
        if rescaling_scale != 0 and spread > 0:
            factor = facts["cond_denoised"].std() / spread
            guided = guided * (rescaling_scale * factor + (1 - rescaling_scale))
        return guided

    view = model.clone()
    view.set_model_sampler_post_cfg_function(change)
    return view


def layers_input(id: str) -> io.String.Input:
    """Declaration of a list of layer numbers."""
    return io.String.Input(id, default="7, 8, 9", multiline=False)


def percent_input(id: str, default: float) -> io.Float.Input:
    """Declaration of a part of the sampling."""
    return io.Float.Input(id, default=default, min=0.0, max=1.0, step=0.001)


class SkipLayerGuidanceDiT(io.ComfyNode):
    """Adds the difference to a further estimate, made without some layers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SkipLayerGuidanceDiT",
            category="advanced/guidance",
            description="Guides away from the estimate of the network without some layers.",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                layers_input("double_layers"),
                layers_input("single_layers"),
                io.Float.Input("scale", default=3.0, min=0.0, max=10.0, step=0.1),
                percent_input("start_percent", 0.01),
                percent_input("end_percent", 0.15),
                io.Float.Input("rescaling_scale", default=0.0, min=0.0, max=10.0, step=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        scale: float,
        start_percent: float,
        end_percent: float,
        double_layers: str = "",
        single_layers: str = "",
        rescaling_scale: float = 0,
    ) -> io.NodeOutput:
        double, single = layers_of(double_layers), layers_of(single_layers)
        if not double and not single:
            return io.NodeOutput(model)
        span = Span(model, start_percent, end_percent)
        return io.NodeOutput(
            guided_by_skipping(model, double, single, scale, span, rescaling_scale)
        )

    skip_guidance = execute


class SkipLayerGuidanceDiTSimple(io.ComfyNode):
    """Makes the negative estimate without some layers: no further estimate is needed, but for
    NAGuidance."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SkipLayerGuidanceDiTSimple",
            category="advanced/guidance",
            description="Makes the negative estimate without some layers.",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                layers_input("double_layers"),
                layers_input("single_layers"),
                percent_input("start_percent", 0.0),
                percent_input("end_percent", 1.0),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        start_percent: float,
        end_percent: float,
        double_layers: str = "",
        single_layers: str = "",
    ) -> io.NodeOutput:
        double, single = layers_of(double_layers), layers_of(single_layers)
        if not double and not single:
            return io.NodeOutput(model)
        span, skipping = Span(model, start_percent, end_percent), Skipping(double, single)

        def calculate(facts: Facts) -> list[Tensor]:
            conds, network, x = facts["conds"], facts["model"], facts["input"]
            sigma, options = facts["sigma"], facts["model_options"]
            if not span.holds(sigma) or len(conds) < 2 or conds[1] is None:
                return batching.calc_cond_batch(network, conds, x, sigma, options)
            if options.get(batching.NEGATIVE_FIRST):
                # The positive is led by what the whole network makes of the negative (NAG).
                positive, _ = batching.calc_cond_batch(network, conds, x, sigma, options)
                options = for_further_estimate(options, "SkipLayerGuidanceDiTSimple")
            else:
                (positive,) = batching.calc_cond_batch(network, conds[:1], x, sigma, options)
            _, negative = batching.calc_cond_batch(
                network, [None, conds[1]], x, sigma, skipping.options(options)
            )
            skipping.replacement.say_if_unasked(negative)
            return [positive, negative]

        view = model.clone()
        view.set_model_sampler_calc_cond_batch_function(calculate)
        return io.NodeOutput(view)

    skip_guidance = execute


comfy_entrypoint = entrypoint_of(SkipLayerGuidanceDiT, SkipLayerGuidanceDiTSimple)
