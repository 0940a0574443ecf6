"""Experiments: attention weights multiplied by numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

CATEGORY = "_for_testing/attention_experiments"


def factor_input(id: str) -> io.Float.Input:
    """Declaration of a factor."""
    return io.Float.Input(id, default=1.0, min=0.0, max=10.0, step=0.01)


def multiplied(patcher: Any, factor_of: Callable[[str], float | None]) -> Any:
    """A view whose weights are multiplied by a factor for each key; None leaves a weight alone."""
    view = patcher.clone()
    for key in patcher.model_state_dict():
        factor = factor_of(key)
        if factor is not None:
            view.add_patches({key: (None,)}, 0.0, factor)
    return view


def by_ending(factors: Mapping[str, float]) -> Callable[[str], float | None]:
    """The factor of the first ending that fits a key."""
    return lambda key: next((factors[end] for end in factors if key.endswith(end)), None)


def attention_factors(layer: str, q: float, k: float, v: float, out: float) -> dict[str, float]:
    """Factors by key ending for one attention of a UNet."""
    factors = {"to_q": q, "to_k": k, "to_v": v, "to_out.0": out}
    return {
        f"{layer}.{name}.{part}": factor
        for name, factor in factors.items()
        for part in ("weight", "bias")
    }


def unet_schema(node_id: str, *names: str) -> io.Schema:
    """Declaration of a node from model to model with factors."""
    return io.Schema(
        node_id=node_id,
        category=CATEGORY,
        is_experimental=True,
        inputs=[io.Model.Input("model"), *(factor_input(name) for name in names)],
        outputs=[io.Model.Output()],
    )


class UNetSelfAttentionMultiply(io.ComfyNode):
    """Multiplies the weights of self-attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return unet_schema("UNetSelfAttentionMultiply", "q", "k", "v", "out")

    @classmethod
    def execute(cls, model: Any, q: float, k: float, v: float, out: float) -> io.NodeOutput:
        return io.NodeOutput(multiplied(model, by_ending(attention_factors("attn1", q, k, v, out))))

    patch = execute


class UNetCrossAttentionMultiply(io.ComfyNode):
    """Multiplies the weights of cross-attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return unet_schema("UNetCrossAttentionMultiply", "q", "k", "v", "out")

    @classmethod
    def execute(cls, model: Any, q: float, k: float, v: float, out: float) -> io.NodeOutput:
        return io.NodeOutput(multiplied(model, by_ending(attention_factors("attn2", q, k, v, out))))

    patch = execute


class CLIPAttentionMultiply(io.ComfyNode):
    """Multiplies the attention weights of a text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPAttentionMultiply",
            category=CATEGORY,
            is_experimental=True,
            inputs=[
                io.Clip.Input("clip"),
                *(factor_input(name) for name in ("q", "k", "v", "out")),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, q: float, k: float, v: float, out: float) -> io.NodeOutput:
        factors = {
            f"self_attn.{name}.{part}": factor
            for name, factor in {"q_proj": q, "k_proj": k, "v_proj": v, "out_proj": out}.items()
            for part in ("weight", "bias")
        }
        view = clip.clone()
        view.patcher = multiplied(clip.patcher, by_ending(factors))
        return io.NodeOutput(view)

    patch = execute


class UNetTemporalAttentionMultiply(io.ComfyNode):
    """Multiplies the attention outputs of a video UNet, in space and in time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return unet_schema(
            "UNetTemporalAttentionMultiply",
            "self_structural",
            "self_temporal",
            "cross_structural",
            "cross_temporal",
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        self_structural: float,
        self_temporal: float,
        cross_structural: float,
        cross_temporal: float,
    ) -> io.NodeOutput:
        structural = {"attn1.to_out.0": self_structural, "attn2.to_out.0": cross_structural}
        temporal = {"attn1.to_out.0": self_temporal, "attn2.to_out.0": cross_temporal}

        def factor_of(key: str) -> float | None:
            factors = temporal if "time_stack" in key else structural
            layer = key.removesuffix(".weight").removesuffix(".bias")
            return next((factors[end] for end in factors if layer.endswith(end)), None)

        return io.NodeOutput(multiplied(model, factor_of))

    patch = execute


comfy_entrypoint = entrypoint_of(
    UNetSelfAttentionMultiply,
    UNetCrossAttentionMultiply,
    CLIPAttentionMultiply,
    UNetTemporalAttentionMultiply,
)
