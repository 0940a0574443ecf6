"""What guidance nodes share: the schema of a node that changes a model's guidance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from comfy import progress
from comfy.patching.options import create_model_options_clone
from comfy.sampling.step_cache import FURTHER
from comfy_api.latest import io

logger = logging.getLogger(__name__)

Facts = dict[str, Any]  # what guidance hooks are given; see the sampling code


def for_further_estimate(options: dict[str, Any], node: str) -> dict[str, Any]:
    """A copy of a run's options for one more estimate, beside those of the two lists.

    Args:
        node: What it is for.
    """
    further = create_model_options_clone(options)
    further.setdefault("transformer_options", {})[FURTHER] = node
    return further


# What a node left in a model's options -> which nodes do.
HOOKS = {
    "sampler_pre_cfg_function": "APG, TCFG, FreSca",
    "sampler_cfg_function": "RescaleCFG, RenormCFG, PerpNeg, video guidance by frame",
    "sampler_calc_cond_batch_function": "SkipLayerGuidanceDiTSimple",
}


def say_unasked(guider: Any, *names: str) -> None:
    """Say on the node which changes of a guider's model have no effect with this kind of guider.

    Args:
        names: Keys of `HOOKS` that the guider does not ask.
    """
    for name in names:
        if guider.model_patcher.model_options.get(name):
            progress.warn(
                logger,
                "a guidance node before this guider has no effect with it (one of the kind of %s): "
                "use CFGGuider with it, or take it out",
                HOOKS[name],
            )


def patched_model_schema(
    node_id: str, category: str, *inputs: io.Input, **options: Any
) -> io.Schema:
    """Declaration of a node from model to model, its output named `patched_model`."""
    return io.Schema(
        node_id=node_id,
        category=category,
        inputs=[io.Model.Input("model"), *inputs],
        outputs=[io.Model.Output(display_name="patched_model")],
        **options,
    )


def with_rule(model: Any, guide: Callable[[Facts], Tensor], needs_negative: bool = False) -> Any:
    """A view of the model whose two estimates are combined by `guide`.

    A model has one such rule; that an earlier node's no longer counts is said on the node.

    Args:
        guide: From the facts to x minus the guided estimate.
        needs_negative: Make the negative estimate at a scale of 1 too.
    """
    if "sampler_cfg_function" in model.model_options:
        progress.warn(
            logger,
            "an earlier node set a guidance rule (RescaleCFG, RenormCFG, PerpNeg, video guidance), "
            "and only the last of them acts: this one; take the other out, or use one that adds to "
            "guidance (APG, CFG-Zero*, CFGNorm)",
        )
    view = model.clone()
    view.set_model_sampler_cfg_function(guide, disable_cfg1_optimization=needs_negative)
    return view


def with_post_cfg(model: Any, change: Callable[[Facts], Tensor]) -> io.NodeOutput:
    """A view of the model whose guided estimate goes through `change`."""
    view = model.clone()
    view.set_model_sampler_post_cfg_function(change)
    return io.NodeOutput(view)


def with_pre_cfg(model: Any, change: Callable[[Facts], list[Tensor]]) -> io.NodeOutput:
    """A view of the model whose two estimates go through `change` before guidance.

    Nothing is changed where only one estimate was made.
    """

    def before(facts: Facts) -> list[Tensor]:
        conds = facts["conds_out"]
        both = len(conds) > 1 and all(cond is not None for cond in facts["conds"][:2])
        return change(facts) if both else conds

    view = model.clone()
    view.set_model_sampler_pre_cfg_function(before)
    return io.NodeOutput(view)


class Replacement:
    """What stands in for blocks of a network in a further estimate, and whether it was asked for.

    Args:
        function: The replacement.
        places: Which blocks, for the person at the graph.
    """

    def __init__(self, function: Callable[..., Any], places: str) -> None:
        self.function, self.places = function, places
        self._was_asked = self._was_judged = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._was_asked = True
        return self.function(*args, **kwargs)

    def say_if_unasked(self, estimate: Tensor) -> None:
        """Say, after the first estimate, that the network has none of the blocks.

        Args:
            estimate: What was made with it; zeros where no entry was active.
        """
        if self._was_judged or not bool(estimate.any()):
            return
        self._was_judged = True
        if not self._was_asked:
            progress.warn(
                logger,
                "a guidance node has no effect on this kind of model, which has none of the blocks "
                "it replaces (%s); choose others, or take the node out",
                self.places,
            )
