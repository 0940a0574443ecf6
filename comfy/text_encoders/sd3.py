"""Text encoding of Stable Diffusion 3: CLIP ViT-L and bigG side by side, then T5-XXL; any
may be absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy.devices import placement
from comfy.text_encoders.encoder import Chunk, SDClipModel
from comfy.text_encoders.sdxl import SDXLClipG, SDXLClipGTokenizer
from comfy.text_encoders.several import (
    SeveralEncoders,
    SeveralTokenizers,
    clip_l_encoder,
    clip_l_tokenizer,
)
from comfy.text_encoders.t5_encoder import T5XXLModel, T5XXLTokenizer
from comfy.text_encoders.t5_pieces import pieces_source

WIDTH = 4096  # of a T5 token, to which those of CLIP are padded with zeros
L_WIDTH, G_WIDTH = 768, 1280
PARTS = ("clip_l", "clip_g", "t5xxl")


class SD3Tokenizer(SeveralTokenizers):
    """Tokens of all three encoders, under the names "g", "l" and "t5xxl"."""

    parts: ClassVar[dict[str, str]] = {"g": "clip_g", "l": "clip_l", "t5xxl": "t5xxl"}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        given = {"embedding_directory": embedding_directory, "tokenizer_data": tokenizer_data or {}}
        self.clip_l = clip_l_tokenizer(**given)
        self.clip_g = SDXLClipGTokenizer(**given)
        # An arrangement without T5 does not need its vocabulary.
        has_vocabulary = pieces_source(given["tokenizer_data"]) is not None
        has_t5 = any(".block." in key and "t5xxl." in key for key in given["tokenizer_data"])
        self.t5xxl = T5XXLTokenizer(**given) if has_vocabulary or has_t5 else None


class SD3ClipModel(SeveralEncoders):
    """The three encoders; an absent one counts as zeros."""

    parts: ClassVar[tuple[str, ...]] = PARTS

    def __init__(
        self,
        clip_l: bool = True,
        clip_g: bool = True,
        t5: bool = True,
        dtype_t5: torch.dtype | None = None,
        t5_attention_mask: bool = False,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype)
        options = dict(model_options or {})
        self.clip_l: SDClipModel | None = None
        self.clip_g: SDXLClipG | None = None
        self.t5xxl: T5XXLModel | None = None
        if clip_l:
            self.clip_l = clip_l_encoder(
                device,
                dtype,
                options,
                layer="hidden",
                layer_idx=-2,
                layer_norm_hidden_state=False,
                return_projected_pooled=False,
            )
        if clip_g:
            self.clip_g = SDXLClipG(device=device, dtype=dtype, model_options=options)
        if t5:
            t5_dtype = dtype_t5 or dtype
            self.t5_attention_mask = t5_attention_mask
            self.t5xxl = T5XXLModel(
                device=device,
                dtype=t5_dtype,
                attention_mask=t5_attention_mask,
                model_options=options,
            )

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Conditioning ``[1, L, 4096]``, pooled ``[1, Dl + Dg]`` and T5's attention mask if
        wanted."""
        resting = placement.intermediate_device()
        states, pooled = self._encode_clip(token_weight_pairs, resting)
        parts = [] if states is None else [states]
        extra: dict[str, Any] = {}
        if self.t5xxl is not None:
            t5_states, _, *told = self.t5xxl.encode_token_weights(token_weight_pairs["t5xxl"])
            parts.append(t5_states)
            extra = told[0] if told else {}
        if not parts:
            parts.append(torch.zeros(1, 77, WIDTH, device=resting))
        cond = torch.cat(parts, dim=-2)
        return (cond, pooled, extra) if extra else (cond, pooled)

    def _encode_clip(
        self, pairs: Mapping[str, Sequence[Chunk]], resting: torch.device
    ) -> tuple[Tensor | None, Tensor]:
        """States of the CLIP encoders side by side, padded to T5's width, and both pooled
        states."""
        l_pooled = torch.zeros(1, L_WIDTH, device=resting)
        g_pooled = torch.zeros(1, G_WIDTH, device=resting)
        states = l_states = g_states = None
        if not pairs["l"] and not pairs["g"]:  # no text for either: as if both were absent
            return None, torch.cat([l_pooled, g_pooled], dim=-1)
        if self.clip_l is not None:
            l_states, l_pooled = self.clip_l.encode_token_weights(pairs["l"])[:2]
            states = l_states
        if self.clip_g is not None:
            g_states, g_pooled = self.clip_g.encode_token_weights(pairs["g"])[:2]
            if l_states is None:
                states = nn.functional.pad(g_states, (L_WIDTH, 0))
            else:
                length = min(l_states.shape[1], g_states.shape[1])
                states = torch.cat([l_states[:, :length], g_states[:, :length]], dim=-1)
        if states is not None:
            states = nn.functional.pad(states, (0, WIDTH - states.shape[-1]))
        return states, torch.cat([l_pooled, g_pooled], dim=-1)


def sd3_clip(
    clip_l: bool = True,
    clip_g: bool = True,
    t5: bool = True,
    dtype_t5: torch.dtype | None = None,
    t5_attention_mask: bool = False,
) -> Callable[..., SD3ClipModel]:
    """A maker of the encoders that are there, with the arguments all encoder classes take."""
    return partial(SD3ClipModel, clip_l, clip_g, t5, dtype_t5, t5_attention_mask)
