"""Hypernetworks: small networks that change the keys and values of attention.

A file holds, by context width, two stacks of layers (for keys and for values) and how they were
built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import folder_paths
from comfy import progress
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.state_dict import load_torch_file
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

logger = logging.getLogger(__name__)

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "leakyrelu": nn.LeakyReLU,
    "elu": nn.ELU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softsign": nn.Softsign,
    "mish": nn.Mish,
}
LINEAR = "linear"


def stack_of_layers(weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> nn.Sequential:
    """The layers of one stack, filled.

    Args:
        weights: `linear.<n>.weight` and `.bias`, and those of norms between them, in order.
        facts: `activation_func`, `is_layer_norm` and `activate_output` of the file.
    """
    activation = facts.get("activation_func") or LINEAR
    matrices = [key for key in weights if key.endswith(".weight") and weights[key].ndim == 2]
    norms = iter([key for key in weights if key.endswith(".weight") and weights[key].ndim == 1])
    layers: list[nn.Module] = []
    for place, key in enumerate(matrices):
        rows, columns = weights[key].shape
        layers.append(_filled(nn.Linear(columns, rows, device="meta"), weights, key))
        is_last = place == len(matrices) - 1
        if activation != LINEAR and (not is_last or facts.get("activate_output", False)):
            layers.append(ACTIVATIONS[activation]())
        if facts.get("is_layer_norm", False):
            norm = next(norms, None)
            if norm is not None:
                layers.append(_filled(nn.LayerNorm(rows, device="meta"), weights, norm))
    return nn.Sequential(*layers).requires_grad_(False)


def _filled(layer: nn.Module, weights: Mapping[str, Tensor], key: str) -> nn.Module:
    bias = key.removesuffix("weight") + "bias"
    layer.load_state_dict({"weight": weights[key], "bias": weights[bias]}, assign=True)
    return layer


class Hypernetwork:
    """An attention patch that adds the stacks' results to keys and values.

    Args:
        stacks: Context width -> (stack for keys, stack for values).
        strength: Factor of what is added.
    """

    def __init__(self, stacks: dict[int, tuple[nn.Module, nn.Module]], strength: float) -> None:
        self.stacks = stacks
        self.strength = strength

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        del extra_options
        if k.shape[-1] not in self.stacks:
            return q, k, v
        for_keys, for_values = (stack.to(k) for stack in self.stacks[k.shape[-1]])
        return q, k + for_keys(k) * self.strength, v + for_values(v) * self.strength


def load_hypernetwork_patch(path: str, strength: float) -> Hypernetwork:
    """The patch of a hypernetwork file.

    Raises:
        WeightFileError: The file is no hypernetwork, or is built in a way that is not known.
    """
    content = load_torch_file(path, safe_load=True)
    activation = content.get("activation_func") or LINEAR
    if activation not in ACTIVATIONS:
        raise WeightFileError(
            path, f"unknown activation {activation!r}", f"known: {', '.join(ACTIVATIONS)}"
        )
    stacks: dict[int, tuple[nn.Module, nn.Module]] = {}
    for width, pair in content.items():
        if width.isdigit() and isinstance(pair, (list, tuple)) and len(pair) == 2:
            try:
                stacks[int(width)] = (
                    stack_of_layers(pair[0], content),
                    stack_of_layers(pair[1], content),
                )
            except (AttributeError, KeyError, RuntimeError) as error:
                raise WeightFileError(
                    path, f"the layers for width {width} do not fit together ({error})"
                ) from error
    if not stacks:
        found = contents_in_words(sorted(content))
        raise WeightFileError(
            path, f"no hypernetwork: it holds {found}", "choose a file of models/hypernetworks"
        )
    return Hypernetwork(stacks, strength)


def attention_widths(network: nn.Module) -> set[int]:
    """What the attentions of a UNet take: widths of pictures and texts; none in other networks."""
    return {
        layer.in_features
        for name, layer in network.named_modules()
        if name.endswith(".to_k") and isinstance(layer, nn.Linear)
    }


class HypernetworkLoader(io.ComfyNode):
    """Adds a hypernetwork to a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HypernetworkLoader",
            category="loaders",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input(
                    "hypernetwork_name", options=folder_paths.get_filename_list("hypernetworks")
                ),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, hypernetwork_name: str, strength: float) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("hypernetworks", hypernetwork_name)
        patch = load_hypernetwork_patch(path, strength)
        if not patch.stacks.keys() & attention_widths(model.model.diffusion_model):
            progress.warn(
                logger,
                "%s has no effect on this model: it changes attentions of width %s",
                hypernetwork_name,
                ", ".join(map(str, sorted(patch.stacks))),
            )
        view = model.clone()
        view.set_model_attn1_patch(patch)
        view.set_model_attn2_patch(patch)
        return io.NodeOutput(view)

    load_hypernetwork = execute


comfy_entrypoint = entrypoint_of(HypernetworkLoader)
