"""Text encoding of SDXL: CLIP ViT-L and OpenCLIP ViT-bigG, joined along the channels; Stable
Cascade: bigG alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy.text_encoders.encoder import Chunk, SD1ClipModel, SDClipModel
from comfy.text_encoders.several import (
    SeveralEncoders,
    SeveralTokenizers,
    clip_l_encoder,
    clip_l_tokenizer,
)
from comfy.text_encoders.tokenizer import OpenClipTokenizer, SD1Tokenizer

CLIP_G_CONFIG: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
}


class SDXLClipG(SDClipModel):
    """CLIP ViT-bigG: padding is token 0, the state of layer -2 is taken as it is."""

    def __init__(
        self,
        device: Any = "cpu",
        max_length: int = 77,
        freeze: bool = True,
        layer: str = "penultimate",
        layer_idx: int | None = None,
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        if layer == "penultimate":
            layer, layer_idx = "hidden", -2
        super().__init__(
            device=device,
            max_length=max_length,
            freeze=freeze,
            layer=layer,
            layer_idx=layer_idx,
            textmodel_json_config=CLIP_G_CONFIG,
            dtype=dtype,
            special_tokens={"start": 49406, "end": 49407, "pad": 0},
            return_projected_pooled=True,
            layer_norm_hidden_state=False,
            model_options={**(model_options or {}), "model_name": "clip_g"},
        )


class SDXLClipGTokenizer(OpenClipTokenizer):
    """CLIP's tokens, padded with token 0."""

    encoder_name = "clip_g"
    width = 1280


class SDXLTokenizer(SeveralTokenizers):
    """Tokens of both encoders, under the names "g" and "l"."""

    parts: ClassVar[dict[str, str]] = {"g": "clip_g", "l": "clip_l"}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        given = {"embedding_directory": embedding_directory, "tokenizer_data": tokenizer_data or {}}
        self.clip_l = clip_l_tokenizer(**given)
        self.clip_g = SDXLClipGTokenizer(**given)


class SDXLClipModel(SeveralEncoders):
    """Both encoders' states of layer -2 side by side; the pooled state is that of bigG."""

    parts: ClassVar[tuple[str, ...]] = ("clip_g", "clip_l")

    def __init__(
        self,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype)
        self.clip_l = clip_l_encoder(
            device,
            dtype,
            model_options,
            layer="hidden",
            layer_idx=-2,
            layer_norm_hidden_state=False,
        )
        self.clip_g = SDXLClipG(device=device, dtype=dtype, model_options=model_options)

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Tensor, Tensor | None]:
        """Conditioning ``[1, L, Dl + Dg]``; of unequal lengths the shorter counts."""
        g_out, g_pooled = self.clip_g.encode_token_weights(token_weight_pairs["g"])[:2]
        l_out = self.clip_l.encode_token_weights(token_weight_pairs["l"])[0]
        length = min(l_out.shape[1], g_out.shape[1])
        return torch.cat([l_out[:, :length], g_out[:, :length]], dim=-1), g_pooled


class SDXLRefinerClipModel(SD1ClipModel):
    """The refiner's encoding: bigG alone."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, dtype, model_options, clip_name="g", clip_model=SDXLClipG)


class StableCascadeClipGTokenizer(OpenClipTokenizer):
    """CLIP's tokens, padded with the end token."""

    encoder_name = "clip_g"
    width = 1280
    pads_with_end = True


class StableCascadeTokenizer(SD1Tokenizer):
    """Tokens under the name "g"."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, "g", StableCascadeClipGTokenizer)


class StableCascadeClipG(SDClipModel):
    """bigG as Stable Cascade uses it: last layer, padding masked, pooled state projected."""

    def __init__(
        self,
        device: Any = "cpu",
        max_length: int = 77,
        freeze: bool = True,
        layer: str = "hidden",
        layer_idx: int | None = -1,
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            max_length=max_length,
            freeze=freeze,
            layer=layer,
            layer_idx=layer_idx,
            textmodel_json_config=CLIP_G_CONFIG,
            dtype=dtype,
            special_tokens={"start": 49406, "end": 49407, "pad": 49407},
            return_projected_pooled=True,
            layer_norm_hidden_state=False,
            enable_attention_masks=True,
            model_options={**(model_options or {}), "model_name": "clip_g"},
        )


class StableCascadeClipModel(SD1ClipModel):
    """The encoder under the name ``clip_g``."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, dtype, model_options, clip_name="g", clip_model=StableCascadeClipG)
