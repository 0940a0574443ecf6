"""Text encoding of SDXL: CLIP ViT-L and OpenCLIP ViT-bigG, joined along the channels; Stable
Cascade: bigG alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfy.text_encoders.encoder import Chunk, SD1ClipModel, SDClipModel
from comfy.text_encoders.tokenizer import SD1Tokenizer, SDTokenizer

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


class SDXLClipGTokenizer(SDTokenizer):
    """CLIP's tokens, padded with token 0."""

    def __init__(
        self,
        tokenizer_path: str | None = None,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            tokenizer_path,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=1280,
            embedding_key="clip_g",
            tokenizer_data=tokenizer_data,
        )


class SDXLTokenizer:
    """Tokens of both encoders, under the names "g" and "l"."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        data = tokenizer_data or {}
        kind = data.get("clip_l_tokenizer_class", SDTokenizer)
        self.clip_l = kind(embedding_directory=embedding_directory, tokenizer_data=data)
        self.clip_g = SDXLClipGTokenizer(
            embedding_directory=embedding_directory, tokenizer_data=data
        )

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of weighted tokens by encoder name."""
        return {
            "g": self.clip_g.tokenize_with_weights(text, return_word_ids, **kwargs),
            "l": self.clip_l.tokenize_with_weights(text, return_word_ids, **kwargs),
        }

    def untokenize(
        self, token_weight_pair: Sequence[tuple[Any, ...]]
    ) -> list[tuple[tuple[Any, ...], str]]:
        """Each weighted token with its word piece."""
        return self.clip_g.untokenize(token_weight_pair)

    def state_dict(self) -> dict[str, Any]:
        """Nothing has to be saved with these encoders."""
        return {}


class SDXLClipModel(nn.Module):
    """Both encoders' states of layer -2 side by side; the pooled state is that of bigG."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        options = dict(model_options or {})
        kind = options.get("clip_l_class", SDClipModel)
        self.clip_l = kind(
            layer="hidden",
            layer_idx=-2,
            device=device,
            dtype=dtype,
            layer_norm_hidden_state=False,
            model_options={**options, "model_name": "clip_l"},
        )
        self.clip_g = SDXLClipG(device=device, dtype=dtype, model_options=options)
        self.dtypes = {dtype} if dtype is not None else set()

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """See SDClipModel; for both."""
        self.clip_l.set_clip_options(options)
        self.clip_g.set_clip_options(options)

    def reset_clip_options(self) -> None:
        """See SDClipModel; for both."""
        self.clip_g.reset_clip_options()
        self.clip_l.reset_clip_options()

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Tensor, Tensor | None]:
        """Conditioning ``[1, L, Dl + Dg]``; of unequal lengths the shorter counts."""
        g_out, g_pooled = self.clip_g.encode_token_weights(token_weight_pairs["g"])[:2]
        l_out = self.clip_l.encode_token_weights(token_weight_pairs["l"])[0]
        length = min(l_out.shape[1], g_out.shape[1])
        return torch.cat([l_out[:, :length], g_out[:, :length]], dim=-1), g_pooled

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the weights of one encoder: bigG is known by its layer 30."""
        if "text_model.encoder.layers.30.mlp.fc1.weight" in sd:
            return self.clip_g.load_sd(sd)
        return self.clip_l.load_sd(sd)


class SDXLRefinerClipModel(SD1ClipModel):
    """The refiner's encoding: bigG alone."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, dtype, model_options, clip_name="g", clip_model=SDXLClipG)


class StableCascadeClipGTokenizer(SDTokenizer):
    """CLIP's tokens, padded with the end token."""

    def __init__(
        self,
        tokenizer_path: str | None = None,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            tokenizer_path,
            pad_with_end=True,
            embedding_directory=embedding_directory,
            embedding_size=1280,
            embedding_key="clip_g",
            tokenizer_data=tokenizer_data,
        )


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
