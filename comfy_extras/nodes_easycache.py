"""Skips model calls where the estimate changes little from step to step."""

from __future__ import annotations

from typing import Any

from comfy.patching.wrappers import WrappersMP
from comfy.sampling.step_cache import (
    CachedEstimate,
    CachedNetwork,
    CachedRun,
    EstimateBeginning,
    StepCache,
)
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

CATEGORY = "advanced/debug/model"


def cache_schema(node_id: str, description: str) -> io.Schema:
    """Declaration of a caching node."""

    def number(id: str, default: float, most: float, tooltip: str) -> io.Float.Input:
        return io.Float.Input(id, default=default, min=0.0, max=most, step=0.01, tooltip=tooltip)

    return io.Schema(
        node_id=node_id,
        display_name=node_id,
        description=description,
        category=CATEGORY,
        is_experimental=True,
        inputs=[
            io.Model.Input("model", tooltip="Model whose steps may be skipped."),
            number("reuse_threshold", 0.2, 3.0, "How much change is let pass before a real step."),
            number("start_percent", 0.15, 1.0, "Steps before this part are never skipped."),
            number("end_percent", 0.95, 1.0, "Steps after this part are never skipped."),
            io.Boolean.Input("verbose", default=False, tooltip="Log each decision."),
        ],
        outputs=[io.Model.Output(tooltip="The model with the cache.")],
    )


def cached(
    model: Any,
    reuse_threshold: float,
    start_percent: float,
    end_percent: float,
    verbose: bool,
    kind: str,
    wrapper: type,
) -> io.NodeOutput:
    """A view of the model with one cache, around the calls of a kind."""
    to_sigma = model.get_model_object("model_sampling").percent_to_sigma
    span = to_sigma(start_percent), to_sigma(end_percent)
    cache = StepCache(reuse_threshold, *span, verbose, watches_all=wrapper is CachedEstimate)
    view = model.clone()
    view.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "step_cache", CachedRun(cache))
    if wrapper is CachedNetwork:
        view.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "step_cache", EstimateBeginning(cache))
    view.add_wrapper_with_key(kind, "step_cache", wrapper(cache))
    return io.NodeOutput(view)


class EasyCache(io.ComfyNode):
    """Caches the network's output for each conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cache_schema("EasyCache", "Reuses outputs of the network where they change little.")

    @classmethod
    def execute(
        cls,
        model: Any,
        reuse_threshold: float,
        start_percent: float,
        end_percent: float,
        verbose: bool,
    ) -> io.NodeOutput:
        options = (reuse_threshold, start_percent, end_percent, verbose)
        return cached(model, *options, WrappersMP.DIFFUSION_MODEL, CachedNetwork)


class LazyCache(io.ComfyNode):
    """Caches the guided estimate as a whole; works with any model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cache_schema("LazyCache", "Reuses guided estimates where they change little.")

    @classmethod
    def execute(
        cls,
        model: Any,
        reuse_threshold: float,
        start_percent: float,
        end_percent: float,
        verbose: bool,
    ) -> io.NodeOutput:
        options = (reuse_threshold, start_percent, end_percent, verbose)
        return cached(model, *options, WrappersMP.PREDICT_NOISE, CachedEstimate)


comfy_entrypoint = entrypoint_of(EasyCache, LazyCache)
