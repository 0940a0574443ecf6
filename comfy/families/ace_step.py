"""ACE-Step: text and lyrics to music, conditioned on UMT5-base."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import ClipTarget, ModelFamily, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.ace.lyrics import LyricSizes
from comfy.ldm.ace.model import CONV_WIDTH, ACEStepTransformer2DModel
from comfy.text_encoders.ace import AceT5Tokenizer, ace_clip
from comfy.text_encoders.lyrics import WANTED

MARK = "genre_embedder.weight"
HEAD = 128  # most channels of a head
THETA = 1000000.0
LONGEST = 32768  # tokens that the published network is made for
# What heads used in training only are told by in configurations.
TRAINING = {"ssl_encoder_depths": [8, 8], "ssl_names": ["mert", "m-hubert"]}


def read_ace_step_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the ACE-Step network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "ACE-Step")
    between, channels, rows, columns = shapes["proj_in.early_conv_layers.0.weight"]
    width = shapes["proj_in.early_conv_layers.2.weight"][0]
    head = math.gcd(HEAD, width)
    inner = shapes["transformer_blocks.0.ff.point_conv.conv.weight"][1]
    words, lyric_width = shapes["lyric_embs.weight"]
    projectors = range(shapes.count("projectors."))
    config: dict[str, Any] = {
        "audio_model": "ace",
        "attention_head_dim": head,
        "in_channels": channels,
        "inner_dim": width,
        "max_height": rows,
        "max_position": LONGEST,
        "max_width": LONGEST,
        "mlp_ratio": inner / width,
        "num_attention_heads": width // head,
        "num_layers": shapes.count("transformer_blocks."),
        "out_channels": shapes["final_layer.linear.weight"][0] // (rows * columns),
        "patch_size": [rows, columns],
        "rope_theta": THETA,
        "speaker_embedding_dim": shapes["speaker_embedder.weight"][1],
        "text_embedding_dim": shapes[MARK][1],
        "ssl_latent_dims": [shapes[f"projectors.{n}.4.weight"][0] for n in projectors],
        "lyric_encoder_vocab_size": words,
        "lyric_hidden_size": lyric_width,
        **TRAINING,
    }
    told = _lyric_sizes(shapes)
    if between != CONV_WIDTH * channels:
        told["conv_width"] = between
    if projectors and shapes["projectors.0.0.weight"][0] != 2 * width:
        told["ssl_width"] = shapes["projectors.0.0.weight"][0]
    return {**config, **told}


def _lyric_sizes(shapes: Shapes) -> dict[str, int]:
    """Sizes of the lyric encoder that are not the published one's."""
    usual, layer = LyricSizes(), "lyric_encoder.encoders.0."
    sizes = {
        "lyric_heads": (shapes[f"{layer}self_attn.pos_bias_u"][0], usual.heads),
        "lyric_layers": (shapes.count("lyric_encoder.encoders."), usual.layers),
        "lyric_inner": (shapes[f"{layer}feed_forward.w_1.weight"][0], usual.inner),
    }
    return {name: found for name, (found, published) in sizes.items() if found != published}


class ACEStepModel(BaseModel):
    """Text and lyrics, neither repeated to match others."""

    text_width = "text_embedding_dim"

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = ModelType.FLOW,
        device: torch.device | str | None = None,
    ) -> None:
        network = ACEStepTransformer2DModel
        super().__init__(model_config, model_type, device=device, unet_model=network)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text, the lyrics' tokens and how much they count."""
        made = super().extra_conds(**kwargs)
        strength = kwargs.get("lyrics_strength", 1.0)
        made["lyrics_strength"] = conds.CONDConstant(strength)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        lyrics = kwargs.get("conditioning_lyrics")
        if lyrics is not None:
            self._check_words(lyrics)
            made["lyric_token_idx"] = conds.CONDRegular(lyrics)
        return made

    def _check_words(self, lyrics: Tensor) -> None:
        known = self.model_config.unet_config["lyric_encoder_vocab_size"]
        highest = int(lyrics.max())
        if highest >= known:  # an accelerator would end the process
            raise ValueError(
                f"the lyrics have token {highest}, and this network knows {known}: their "
                f"vocabulary belongs to another model; {WANTED}"
            )


class ACEStep(TransformerFamily):
    """ACE-Step."""

    unet_config: dict[str, Any] = {"audio_model": "ace"}
    read_config = staticmethod(read_ace_step_config)
    sampling_settings = {"shift": 3.0}
    latent_format: Any = latent_formats.ACEAudio
    memory_usage_factor = 0.5
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    prediction = ModelType.FLOW
    base_model = ACEStepModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """UMT5-base and the tokens of lyrics."""
        return ClipTarget(AceT5Tokenizer, ace_clip(t5_dtype(state_dict)))
