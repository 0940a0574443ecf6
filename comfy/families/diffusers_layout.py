"""UNet files as the diffusers library names their weights: configuration, and the usual names.

Levels are `down_blocks.N` going down and `up_blocks.N` coming up, in each `resnets.M` and, where
the level has them, `attentions.M`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.families.family import BrokenModelError, StateDict
from comfy.families.unet_layout import CONSTANTS, NO_TEMPORAL_LAYERS, count_consecutive
from comfy.weights.diffusers_unet import unet_to_diffusers

MARKS = ("conv_in.weight", "down_blocks.0.resnets.0.conv1.weight")
VECTOR_KEYS = ("add_embedding.linear_1.weight", "class_embedding.linear_1.weight")


def read_config(state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Configuration of a UNet in this layout, in the form of `read_unet_config`; None for others.

    Raises:
        BrokenModelError: The layout is recognised, but a weight that decides a size is missing.
    """
    if any(mark not in state_dict for mark in MARKS):
        return None
    return _DiffusersKeys(state_dict).config()


def read_encoder_config(state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """As `read_config`, for a network that has the way down and the middle only, as ControlNets
    have: the configuration says nothing of outputs.
    """
    if any(mark not in state_dict for mark in MARKS):
        return None
    return _DiffusersKeys(state_dict).encoder_config()


def to_native(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> StateDict:
    """The weights under the names of the original checkpoints; unknown ones keep theirs."""
    names = unet_to_diffusers(config)
    return {names.get(key, key): value for key, value in state_dict.items()}


class _DiffusersKeys:
    """Questions to the keys of one network."""

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        self._state_dict = state_dict

    def shape(self, key: str) -> tuple[int, ...]:
        if key not in self._state_dict:
            raise BrokenModelError(f"the UNet lacks {key}; fetch the file again")
        return tuple(self._state_dict[key].shape)

    def config(self) -> dict[str, Any]:
        """Configuration of a whole UNet."""
        config = self.encoder_config()
        return {
            **config,
            "out_channels": self.shape("conv_out.weight")[0],
            "transformer_depth_output": self._output_depths(config["num_res_blocks"]),
        }

    def encoder_config(self) -> dict[str, Any]:
        """Configuration of the way down and the middle."""
        model_channels, in_channels = self.shape("conv_in.weight")[:2]
        levels = range(count_consecutive(self._state_dict, "down_blocks."))
        blocks = [self._count(f"down_blocks.{level}.resnets.") for level in levels]
        widths = [self.shape(f"down_blocks.{n}.resnets.0.conv2.weight")[0] for n in levels]
        vector = next((key for key in VECTOR_KEYS if key in self._state_dict), None)
        config: dict[str, Any] = {
            **CONSTANTS,
            "adm_in_channels": None if vector is None else self.shape(vector)[1],
            "in_channels": in_channels,
            "model_channels": model_channels,
            "num_res_blocks": blocks,
            "channel_mult": [width // model_channels for width in widths],
            "transformer_depth": [
                self._depth(f"down_blocks.{level}", index)
                for level in levels
                for index in range(blocks[level])
            ],
            "transformer_depth_middle": self._middle_depth(),
            **self._first_transformer(),
        }
        if vector is not None:
            config["num_classes"] = "sequential"
        return config

    def _output_depths(self, blocks: list[int]) -> list[int]:
        """Transformer depth of each block coming up, in the order of the blocks they mirror."""
        last = len(blocks) - 1
        return [
            self._depth(f"up_blocks.{last - level}", index)
            for level, count in enumerate(blocks)
            for index in range(count, -1, -1)
        ]

    def _middle_depth(self) -> int:
        """Transformer depth of the middle; -1: residual blocks only, -2: no middle at all."""
        if "mid_block.attentions.0.proj_in.weight" in self._state_dict:
            return self._depth("mid_block", 0)
        return -1 if "mid_block.resnets.0.conv1.weight" in self._state_dict else -2

    def _first_transformer(self) -> dict[str, Any]:
        """What one transformer tells about all of them."""
        ending = "transformer_blocks.0.attn2.to_k.weight"
        key = next((key for key in self._state_dict if key.endswith(ending)), None)
        if key is None:
            found: dict[str, Any] = {"context_dim": None, "use_linear_in_transformer": False}
        else:
            projection = self.shape(f"{key.removesuffix(ending)}proj_in.weight")
            found = {
                "context_dim": self.shape(key)[1],
                "use_linear_in_transformer": len(projection) == 2,
            }
        return {**found, **NO_TEMPORAL_LAYERS}

    def _depth(self, block: str, index: int) -> int:
        return self._count(f"{block}.attentions.{index}.transformer_blocks.")

    def _count(self, pattern: str) -> int:
        return count_consecutive(self._state_dict, pattern)
