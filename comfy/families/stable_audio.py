"""Stable Audio: text to sound of a length that is asked for, conditioned on T5 base."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import (
    BrokenModelError,
    ClipTarget,
    ModelFamily,
    StateDict,
    TransformerFamily,
    add_prefix,
    strip_prefixes,
)
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.audio.dit import FEED_FORWARD, AudioDiffusionTransformer
from comfy.text_encoders import t5_alone

MARK = "transformer.rotary_pos_emb.inv_freq"
HEAD = 64  # most channels of a head
USUAL_SIZES = {
    "io_channels": 64, "embed_dim": 1536, "cond_token_dim": 768, "global_cond_dim": 1536,
    "depth": 24, "num_heads": 24,
}  # fmt: skip
NUMBERS = ("seconds_start", "seconds_total")
CONDITIONERS = "conditioner.conditioners."
WAVES, PROJECTION, BIAS = (
    f"embedder.embedding.{part}" for part in ("0.weights", "1.weight", "1.bias")
)
LONGEST_S = 512.0  # seconds that the largest number stands for
CELLS_A_SECOND = 21.53
NEVER_USED = (".cross_attend_norm.beta", ".ff_norm.beta", ".pre_norm.beta")  # all zeros


def read_stable_audio_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the Stable Audio network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Stable Audio")
    width, channels = shapes["transformer.project_in.weight"]
    text_width = shapes["to_cond_embed.0.weight"][1]
    sizes = {
        "io_channels": channels,
        "embed_dim": width,
        "cond_token_dim": text_width,
        "global_cond_dim": shapes["to_global_embed.0.weight"][1],
        "depth": shapes.count("transformer.layers."),
        "num_heads": width // math.gcd(HEAD, width, text_width),
    }
    inner = shapes["transformer.layers.0.ff.ff.2.weight"][1]
    config: dict[str, Any] = {"audio_model": "dit1.0"}
    config.update({name: size for name, size in sizes.items() if size != USUAL_SIZES[name]})
    if inner != FEED_FORWARD * width:
        config["ff_dim"] = inner
    return config


class NumberConditioner(nn.Module):
    """A number as a vector: its share of the range, waves of that, and a projection.

    Args:
        weights: The three tensors of a file, by their keys behind the number's name.
    """

    def __init__(self, weights: Mapping[str, Tensor], largest: float = LONGEST_S) -> None:
        super().__init__()
        self.largest = largest
        self.waves, self.weight, self.bias = (
            nn.Parameter(weights[key].float(), requires_grad=False)
            for key in (WAVES, PROJECTION, BIAS)
        )

    def forward(self, number: float, device: Any) -> Tensor:
        """``[D]`` float32 on a device; numbers outside of the range count as its ends."""
        share = min(max(float(number), 0.0), self.largest) / self.largest
        angles = 2 * math.pi * share * self.waves.to(device)
        first = torch.tensor([share], dtype=torch.float32, device=device)
        waves = torch.cat([first, angles.sin(), angles.cos()])
        return functional.linear(waves, self.weight.to(device), self.bias.to(device))

    def saved(self) -> StateDict:
        """The tensors by the keys of a file."""
        return {WAVES: self.waves.data, PROJECTION: self.weight.data, BIAS: self.bias.data}


class StableAudioModel(BaseModel):
    """Text, and as two more tokens where the sound begins in how long a whole."""

    network = AudioDiffusionTransformer
    usual_type = ModelType.V_PREDICTION_CONTINUOUS

    def __init__(
        self,
        model_config: ModelFamily,
        seconds_start_embedder_weights: Mapping[str, Tensor],
        seconds_total_embedder_weights: Mapping[str, Tensor],
        model_type: ModelType | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device)
        self.seconds_start_embedder = NumberConditioner(seconds_start_embedder_weights)
        self.seconds_total_embedder = NumberConditioner(seconds_total_embedder_weights)

    def conditioning_widths(self) -> dict[str, int]:
        """Width of the text tokens."""
        usual = USUAL_SIZES["cond_token_dim"]
        return {"c_crossattn": int(self.model_config.unet_config.get("cond_token_dim", usual))}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text followed by both numbers, and the numbers alone for the whole sound."""
        device, noise = kwargs["device"], kwargs["noise"]
        total = kwargs.get("seconds_total", int(noise.shape[-1] / CELLS_A_SECOND))
        numbers = torch.stack(
            [
                self.seconds_start_embedder(kwargs.get("seconds_start", 0), device),
                self.seconds_total_embedder(total, device),
            ]
        )
        made: dict[str, Any] = {"global_embed": conds.CONDRegular(numbers.reshape(1, -1))}
        text = kwargs.get("cross_attn")
        if text is not None:
            tokens = numbers.to(text.dtype).expand(text.shape[0], -1, -1)
            made["c_crossattn"] = conds.CONDRegular(torch.cat([text.to(device), tokens], dim=1))
        return made

    def state_dict_for_saving(
        self,
        clip_state_dict: StateDict | None = None,
        vae_state_dict: StateDict | None = None,
        clip_vision_state_dict: StateDict | None = None,
    ) -> StateDict:
        """As every model, with the embedders of the numbers."""
        saved = super().state_dict_for_saving(
            clip_state_dict, vae_state_dict, clip_vision_state_dict
        )
        for name in NUMBERS:
            embedder: NumberConditioner = getattr(self, f"{name}_embedder")
            saved.update(add_prefix(embedder.saved(), f"{CONDITIONERS}{name}."))
        return saved


class StableAudio(TransformerFamily):
    """Stable Audio."""

    unet_config: dict[str, Any] = {"audio_model": "dit1.0"}
    read_config = staticmethod(read_stable_audio_config)
    sampling_settings = {"sigma_max": 500.0, "sigma_min": 0.03}
    latent_format: Any = latent_formats.StableAudio1
    vae_key_prefix = ["pretransform.model."]
    prediction = ModelType.V_PREDICTION_CONTINUOUS
    base_model = StableAudioModel

    def get_model(
        self, state_dict: StateDict, prefix: str = "", device: torch.device | str | None = None
    ) -> BaseModel:
        """The base model, with the embedders of numbers that stand beside the network.

        Raises:
            BrokenModelError: The file has none.
        """
        embedders: list[StateDict] = []
        for name in NUMBERS:
            weights = strip_prefixes(state_dict, [f"{CONDITIONERS}{name}."])
            missing = {WAVES, PROJECTION, BIAS} - weights.keys()
            if missing:
                raise BrokenModelError(
                    f"the file has the layout of Stable Audio, but {CONDITIONERS}{name}."
                    f"{min(missing)} is missing: take the whole checkpoint, not its network alone"
                )
            embedders.append(weights)
        start, total = embedders
        return StableAudioModel(self, start, total, self.model_type(state_dict, prefix), device)

    def process_unet_state_dict(self, state_dict: StateDict) -> StateDict:
        """Files of the training hold biases of norms that are no biases."""
        return {key: value for key, value in state_dict.items() if not key.endswith(NEVER_USED)}

    def process_unet_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Under the prefix of the published file."""
        return add_prefix(state_dict, "model.model.")

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """T5 base."""
        return ClipTarget(
            t5_alone.t5_alone_tokenizer(t5_alone.STABLE_AUDIO),
            t5_alone.t5_alone_clip(t5_alone.STABLE_AUDIO, t5_dtype(state_dict)),
        )
