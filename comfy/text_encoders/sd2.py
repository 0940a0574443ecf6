"""Text encoding of Stable Diffusion 2.x: OpenCLIP ViT-H/14, its last layer but one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel
from comfy.text_encoders.tokenizer import OpenClipTokenizer, SD1Tokenizer

CLIP_H_CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}


WITHOUT_LAST = CLIP_H_CONFIG["num_hidden_layers"] - 1
"""Layers in files that leave out the last one, since nothing is made of its state."""


class SD2ClipHModel(SDClipModel):
    """CLIP ViT-H: padding is token 0, and the state of layer -2 is normalised.

    Layers are counted from the end of the whole encoder, also where a file leaves out the last.
    """

    def __init__(
        self,
        arch: str = "ViT-H-14",
        device: Any = "cpu",
        max_length: int = 77,
        freeze: bool = True,
        layer: str = "penultimate",
        layer_idx: int | None = None,
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        del arch  # there is one
        if layer == "penultimate":
            layer, layer_idx = "hidden", -2
        options = {"model_name": "clip_h", **(model_options or {})}
        config = options.get("clip_h_model_config") or {}
        self.lacks_last = config.get("num_hidden_layers") == WITHOUT_LAST
        super().__init__(
            device=device,
            max_length=max_length,
            freeze=freeze,
            layer=layer,
            layer_idx=layer_idx,
            textmodel_json_config=CLIP_H_CONFIG,
            dtype=dtype,
            special_tokens={"start": 49406, "end": 49407, "pad": 0},
            return_projected_pooled=True,
            model_options=options,
        )

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """As the base; the last two layers are one where a file leaves out the last."""
        layer = options.get("layer")
        if self.lacks_last and layer is not None and layer < 0:
            options = {**options, "layer": min(layer + 1, -1)}
        super().set_clip_options(options)


class SD2ClipHTokenizer(OpenClipTokenizer):
    """CLIP's tokens, padded with token 0."""

    encoder_name = "clip_h"
    width = 1024


class SD2Tokenizer(SD1Tokenizer):
    """Tokens under the name "h"."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, "h", SD2ClipHTokenizer)


class SD2ClipModel(SD1ClipModel):
    """The encoder under the name ``clip_h``."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, dtype, model_options, clip_name="h", clip_model=SD2ClipHModel)
