"""Views of one model with another of the same architecture mixed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from comfy.ops.encoded import EncodedWeight

NETWORK = "diffusion_model."
NOT_MERGED = (".position_ids", ".logit_scale")  # numbers that are no learned weights of the mix
ALIKE = 0.92
"""Share of the smaller model's weights that fit the other: Stable Diffusion 1 and 2 have 0.907,
models of one architecture for other inputs (inpainting, pictures to video) 0.94 and more."""

Strengths = Callable[[str], tuple[float, float]]


def merged_model(model1: Any, model2: Any, strengths: Strengths) -> tuple[Any]:
    """A view of the first model with the second mixed in.

    Args:
        strengths: Key -> (factor of the second model's weight, factor of the first one's).

    Raises:
        ValueError: The models are of different architectures.
    """
    others = model2.get_key_patches(NETWORK)
    check_alike("model", (model1, model2), model1.get_key_patches(NETWORK), others)
    view = model1.clone()
    for key, patch in others.items():
        second, first = strengths(key)
        view.add_patches({key: patch}, second, first)
    return (view,)


def merged_clip(clip1: Any, clip2: Any, second: float, first: float) -> tuple[Any]:
    """A view of the first text encoder with the second mixed in.

    Raises:
        ValueError: They have no part in common.
    """
    others = clip2.get_key_patches()
    encoders = (clip1.cond_stage_model, clip2.cond_stage_model)
    check_alike("clip", encoders, clip1.get_key_patches(), others)
    view = clip1.clone()
    mixed = {key: patch for key, patch in others.items() if not key.endswith(NOT_MERGED)}
    view.add_patches(mixed, second, first)
    return (view,)


def check_alike(
    name: str, owners: tuple[Any, Any], own: dict[str, Any], others: dict[str, Any]
) -> None:
    """Refuse to mix what is of different architectures: most weights would be left out.

    Args:
        name: Of the inputs, without their number.
        owners: Whose weights they are, for the message.
        own: The first one's weights and patches by key, as `get_key_patches` gives them.
        others: The second one's.

    Raises:
        ValueError: The networks are of two kinds, or too few weights have the name and shape of
            one of the other side.
    """
    fitting = sum(key in own and _shape(own[key]) == _shape(others[key]) for key in others)
    fewer = min(len(own), len(others))
    if related(*owners) and fewer and fitting >= ALIKE * fewer:
        return
    kinds = [family_of(owner) for owner in owners]
    found = f"{fitting} weights fit each other" if related(*owners) else (
        f"{fitting} weights have names and sizes alike, but the networks compute other things"
    )  # fmt: skip
    raise ValueError(
        f"{name}1 ({kinds[0]}, {len(own)} weights) and {name}2 ({kinds[1]}, {len(others)} "
        f"weights) cannot be mixed: {found}, expected those of one "
        "architecture and size; connect two models of one family"
    )


def related(first: Any, second: Any) -> bool:
    """Whether two models have networks of one kind, or of kinds that derive from one.

    Networks of two architectures may name their weights alike, as FLUX and HunyuanVideo do.
    """
    kinds = [_kinds(owner) for owner in (first, second)]
    return not all(kinds) or bool(kinds[0] & kinds[1])


def _kinds(owner: Any) -> set[type]:
    """Classes of a model's network; none for what has no network, such as text encoders."""
    network = getattr(getattr(owner, "model", None), "diffusion_model", None)
    return set() if network is None else {*type(network).__mro__} - {nn.Module, object}


def family_of(owner: Any) -> str:
    """What a model (or the module of a text encoder) is, for messages."""
    model = getattr(owner, "model", owner)
    return type(getattr(model, "model_config", model)).__name__


def _shape(patches: Any) -> Any:
    """Of a weight, decoded, with its patches."""
    weight, *convert = patches[0]
    layer = getattr(convert[0], "__self__", None) if convert else None
    if isinstance(layer, EncodedWeight):  # the layer that decodes it knows its size
        return layer.decoded_shape()
    return getattr(weight, "shape", None)
