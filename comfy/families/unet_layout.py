"""Reads the configuration of a Stable Diffusion UNet from the keys and shapes of its weights.

The layout numbers its blocks: `input_blocks.N` go down (0 is the first convolution),
`middle_block.N` stay, `output_blocks.N` come up. In each block, position 0 holds a residual block
or a resampling convolution and position 1 a transformer, if the block has one. Head counts and norm
groups leave no trace in shapes; families add them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from comfy.families.family import BrokenModelError

# Not in the weights and the same for every UNet of this layout.
CONSTANTS: dict[str, Any] = {
    "use_checkpoint": False,
    "image_size": 32,
    "use_spatial_transformer": True,
    "legacy": False,
}

NO_TEMPORAL_LAYERS = {"use_temporal_resblock": False, "use_temporal_attention": False}

# Video networks add temporal layers to the same blocks; these values go with them.
TEMPORAL_CONSTANTS: dict[str, Any] = {
    "extra_ff_mix_layer": True,
    "use_spatial_context": True,
    "merge_strategy": "learned_with_images",
    "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1],
    "use_temporal_resblock": True,
    "use_temporal_attention": True,
}


def read_unet_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the UNet whose keys start with `prefix`, or None if there is none.

    Raises:
        BrokenModelError: The layout is recognised but a shape that decides a size is missing or
            impossible.
    """
    if f"{prefix}input_blocks.0.0.weight" not in state_dict:
        return None
    return _UnetKeys(state_dict, prefix).config()


class _UnetKeys:
    """The keys of one UNet, indexed once so that questions about a block are cheap."""

    def __init__(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        self._state_dict = state_dict
        self._prefix = prefix
        self._keys = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a weight that this layout cannot do without."""
        try:
            return tuple(self._state_dict[self._prefix + key].shape)
        except KeyError:
            raise BrokenModelError(
                "the file has the layout of a Stable Diffusion UNet, but "
                f"{self._prefix + key} is missing; fetch the file again"
            ) from None

    def has(self, key: str) -> bool:
        return key in self._keys

    def config(self) -> dict[str, Any]:
        config = dict(CONSTANTS)
        config["adm_in_channels"] = None
        if self.has("label_emb.0.0.weight"):
            config["num_classes"] = "sequential"
            config["adm_in_channels"] = self.shape("label_emb.0.0.weight")[1]
        config["model_channels"], config["in_channels"] = self.shape("input_blocks.0.0.weight")[:2]
        config["out_channels"] = self.shape("out.2.weight")[0] if self.has("out.2.weight") else 4
        config.update(self._levels(config["model_channels"]))
        config["transformer_depth_output"] = self._output_depths()
        config["transformer_depth_middle"] = self._middle_depth()
        config.update(self._transformers())
        return config

    def _levels(self, model_channels: int) -> dict[str, Any]:
        """Residual blocks, channel multiple and transformer depths, level by level."""
        blocks_per_level = [0]
        channel_mult: list[int] = []
        depths: list[int] = []
        channels = model_channels
        for block in range(1, self._count("input_blocks.")):
            if self.has(f"input_blocks.{block}.0.op.weight"):
                channel_mult.append(channels // model_channels)
                blocks_per_level.append(0)
            elif self.has(f"input_blocks.{block}.0.in_layers.0.weight"):
                key = f"input_blocks.{block}.0.out_layers.3.weight"
                channels = self.shape(key)[0]
                self._require_multiple(key, channels, model_channels)
                blocks_per_level[-1] += 1
                depths.append(self._depth(f"input_blocks.{block}."))
        channel_mult.append(channels // model_channels)
        return {
            "num_res_blocks": blocks_per_level,
            "transformer_depth": depths,
            "channel_mult": channel_mult,
        }

    def _require_multiple(self, key: str, channels: int, model_channels: int) -> None:
        if channels % model_channels:
            raise BrokenModelError(
                f"{self._prefix + key} has {channels} output channels, which is not a multiple of "
                f"the {model_channels} channels of {self._prefix}input_blocks.0.0.weight"
            )

    def _output_depths(self) -> list[int]:
        """Transformer depth of each output block, in the order of the input blocks they mirror."""
        count = self._count("input_blocks.")
        depths = []
        for block in range(count):
            mirror = f"output_blocks.{count - 1 - block}."
            downsamples = self.has(f"input_blocks.{block}.0.op.weight")
            if downsamples or self.has(f"{mirror}0.in_layers.0.weight"):
                depths.append(self._depth(mirror))
        return depths

    def _middle_depth(self) -> int:
        """Transformer depth of the middle; -1: a residual block only, -2: no middle block at
        all.
        """
        if self.has("middle_block.1.proj_in.weight"):
            return self._count("middle_block.1.transformer_blocks.")
        return -1 if self.has("middle_block.0.in_layers.0.weight") else -2

    def _transformers(self) -> dict[str, Any]:
        """What the first transformer tells about all of them."""
        for block in range(self._count("input_blocks.")):
            at = f"input_blocks.{block}.1."
            if self._depth(f"input_blocks.{block}."):
                break
        else:
            return {
                "context_dim": None,
                "use_linear_in_transformer": False,
                **NO_TEMPORAL_LAYERS,
            }
        found: dict[str, Any] = {
            "context_dim": self.shape(f"{at}transformer_blocks.0.attn2.to_k.weight")[1],
            "use_linear_in_transformer": len(self.shape(f"{at}proj_in.weight")) == 2,
            **NO_TEMPORAL_LAYERS,
        }
        temporal = (f"{at}time_stack.0.", f"{at}time_mix_blocks.0.")
        if any(self.has(f"{layer}attn1.to_q.weight") for layer in temporal):
            found.update(TEMPORAL_CONSTANTS)
            crosses = any(self.has(f"{layer}attn2.to_q.weight") for layer in temporal)
            found["disable_temporal_crossattention"] = not crosses
        return found

    def _depth(self, block: str) -> int:
        """Transformer layers in a block such as `input_blocks.4.`."""
        return self._count(f"{block}1.transformer_blocks.")

    def _count(self, pattern: str) -> int:
        """How many consecutive numbers from 0 follow `pattern` in the keys."""
        return count_consecutive(self._keys, pattern)


def count_consecutive(keys: Iterable[str], pattern: str) -> int:
    """How many of pattern + "0.", pattern + "1.", ... start some key, until the first that does
    not."""
    number = re.compile(re.escape(pattern) + r"(\d+)\.")
    indices = {int(found[1]) for key in keys if (found := number.match(key))}
    count = 0
    while count in indices:
        count += 1
    return count


def count_blocks(state_dict_keys: Iterable[str], prefix_string: str) -> int:
    """How many of the prefixes made by filling in 0, 1, ... start some key, until the first none.

    Args:
        state_dict_keys: Keys.
        prefix_string: Prefix with one place to fill in, such as `blocks.{}.`.
    """
    keys = list(state_dict_keys)
    count = 0
    while any(key.startswith(prefix_string.format(count)) for key in keys):
        count += 1
    return count


def convert_config(unet_config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in the first form of the training code, with a number a block.

    There, transformers stand at the resolutions that `attention_resolutions` names, as deep as
    `transformer_depth` says for the level.
    """
    config = dict(unet_config)
    levels = len(config["channel_mult"])
    blocks = config["num_res_blocks"]
    config["num_res_blocks"] = [blocks] * levels if isinstance(blocks, int) else list(blocks)
    if "attention_resolutions" not in config:
        return config
    resolutions = config.pop("attention_resolutions")
    depth = config.get("transformer_depth", 1)
    depths = [depth] * levels if isinstance(depth, int) else list(depth)
    placed = [depths[level] if 2**level in resolutions else 0 for level in range(levels)]
    counts = list(zip(placed, config["num_res_blocks"]))
    config["transformer_depth"] = [d for d, count in counts for _ in range(count)]
    config["transformer_depth_output"] = [d for d, count in counts for _ in range(count + 1)]
    if config.get("transformer_depth_middle") is None:
        config["transformer_depth_middle"] = depths[-1]
    return config
