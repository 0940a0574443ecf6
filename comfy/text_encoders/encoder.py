"""SDClipModel: a text tower that takes weighted tokens and gives conditioning.

Weighting: when any weight differs from 1, the empty text is encoded in the same batch and the state
z_j at each position is moved along the line from the empty text's state e_j: ``e_j + (z_j - e_j) *
w_j``. Chunks are joined along the tokens; the pooled state is the first chunk's and stays
unweighted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.devices import placement
from comfy.ldm.clip.text import CLIPTextModel
from comfy.text_encoders import weighting
from comfy.text_encoders.token_embedding import SpecialTokens, embed_tokens
from comfy.weights.assign import assign_weights

logger = logging.getLogger(__name__)

Chunk = Sequence[tuple[Any, ...]]  # (token, weight[, word])
LAYERS = ("last", "pooled", "hidden", "all")


def gen_empty_tokens(special_tokens: Mapping[str, Any], length: int) -> list[Any]:
    """Tokens of the empty text, ``length`` of them: start, end, padding."""
    start, end = special_tokens.get("start"), special_tokens.get("end")
    tokens = [token for token in (start, end) if token is not None]
    return tokens + [special_tokens.get("pad")] * (length - len(tokens))


class ClipTokenWeightEncoder:
    """Applies the weights of tokens to what ``encode`` gives; mixed into encoders."""

    special_tokens: Mapping[str, Any]
    weight_interpretation: str = weighting.DEFAULT
    encode: Callable[[list[list[Any]]], tuple[Any, ...]]
    """States ``[chunks, L, D]``, pooled states ``[chunks, D]`` or None, optionally extras."""

    def gen_empty_tokens(self, special_tokens: Mapping[str, Any], length: int) -> list[Any]:
        """Tokens of the empty text, from whose states weights move those of a text."""
        return gen_empty_tokens(special_tokens, length)

    def encode_token_weights(self, token_weight_pairs: Sequence[Chunk]) -> tuple[Any, ...]:
        """Conditioning ``[1, chunks * L, D]`` and pooled ``[1, D]`` of weighted chunks, with extras
        if any."""
        tokens = [[pair[0] for pair in chunk] for chunk in token_weight_pairs]
        count = len(tokens)
        is_weighted = any(pair[1] != 1.0 for chunk in token_weight_pairs for pair in chunk)
        if is_weighted or count == 0:
            length = max((len(chunk) for chunk in tokens), default=0)
            tokens.append(self.gen_empty_tokens(self.special_tokens, length))

        states, pooled, *extras = self.encode(tokens)
        first_pooled = pooled[0:1] if pooled is not None else None
        if count == 0:
            joined = states[-1:]
        else:
            if is_weighted:
                weights = [[pair[1] for pair in chunk] for chunk in token_weight_pairs]
                states = weighting.weight_states(
                    self.weight_interpretation, states[:count], states[-1], weights
                )
            joined = states[:count].flatten(0, 1)[None]
        resting = placement.intermediate_device()
        if first_pooled is not None:
            first_pooled = first_pooled.to(resting)
        result: tuple[Any, ...] = (joined.to(resting), first_pooled)
        if extras:
            result += (_join_extras(extras[0], max(count, 1)),)
        return result


def _join_extras(extras: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Extras of all chunks as those of one long text."""
    joined = dict(extras)
    if joined.get("attention_mask") is not None:
        joined["attention_mask"] = joined["attention_mask"][:count].flatten()[None]
    return joined


class SDClipModel(nn.Module, ClipTokenWeightEncoder):
    """One text encoder.

    Attributes:
        transformer: The network.
        num_layers: Its number of layers.
        max_length: Tokens of a chunk.
        special_tokens: Ids by role: start, end, pad.
        layer: Which state is the conditioning: "last", "hidden" (of layer_idx), "pooled" or "all".
        logit_scale: Kept because files carry it.
    """

    LAYERS: ClassVar[list[str]] = list(LAYERS)

    def __init__(
        self,
        device: Any = "cpu",
        max_length: int = 77,
        freeze: bool = True,
        layer: str = "last",
        layer_idx: int | None = None,
        textmodel_json_config: str | Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        model_class: Any = CLIPTextModel,
        special_tokens: Mapping[str, Any] | None = None,
        layer_norm_hidden_state: bool = True,
        enable_attention_masks: bool = False,
        zero_out_masked: bool = False,
        return_projected_pooled: bool = False,
        return_attention_masks: bool = False,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if layer not in LAYERS:
            raise ValueError(f"unknown layer {layer!r}; known: {', '.join(LAYERS)}")
        options = model_options or {}
        config = _read_config(textmodel_json_config)
        config.update(options.get(f"{options.get('model_name', 'clip_l')}_model_config") or {})
        operations = options.get("custom_operations") or ops.manual_cast
        self.operations = operations
        self.transformer = model_class(config, dtype, device, operations)
        self.num_layers: int = self.transformer.num_layers
        self.max_length = max_length
        if freeze:
            self.freeze()
        self.special_tokens = dict(special_tokens or {"start": 49406, "end": 49407, "pad": 49407})
        self.logit_scale = nn.Parameter(torch.tensor(4.6055, device=device), requires_grad=False)
        self.enable_attention_masks = enable_attention_masks
        self.zero_out_masked = zero_out_masked
        self.layer_norm_hidden_state = layer_norm_hidden_state
        self.return_attention_masks = return_attention_masks
        self.execution_device: torch.device | None = None
        self.layer, self.layer_idx = layer, None
        self.return_projected_pooled = return_projected_pooled
        if layer == "hidden":
            if layer_idx is None or abs(layer_idx) > self.num_layers:
                raise ValueError(
                    f"layer {layer_idx} of an encoder with {self.num_layers} layers was asked for"
                )
            self.set_clip_options({"layer": layer_idx})
        self.options_default = (self.layer, self.layer_idx, self.return_projected_pooled)

    def freeze(self) -> None:
        """Switch to inference: no gradients, no dropout."""
        self.transformer.eval()
        for parameter in self.parameters():
            parameter.requires_grad = False

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """Set ``layer`` (negative from the end), ``projected_pooled`` and ``execution_device``."""
        self.execution_device = options.get("execution_device", self.execution_device)
        self.weight_interpretation = options.get(
            "weight_interpretation", self.weight_interpretation
        )
        layer_idx = options.get("layer", self.layer_idx)
        self.return_projected_pooled = options.get("projected_pooled", self.return_projected_pooled)
        if self.layer == "all":
            return
        if layer_idx is None or abs(layer_idx) > self.num_layers:
            self.layer = "last"
        else:
            self.layer, self.layer_idx = "hidden", layer_idx

    def reset_clip_options(self) -> None:
        """Back to the options the encoder was made with."""
        self.layer, self.layer_idx, self.return_projected_pooled = self.options_default
        self.execution_device = None
        self.weight_interpretation = weighting.DEFAULT

    def encode(self, tokens: list[list[Any]]) -> tuple[Any, ...]:
        """States, pooled states and extras of chunks of tokens (ids or embedding rows)."""
        return self(tokens)

    def forward(self, tokens: list[list[Any]]) -> tuple[Any, ...]:
        table = self.transformer.get_input_embeddings()
        device = self.execution_device or table.weight.device
        text = embed_tokens(
            tokens,
            table,
            device,
            SpecialTokens(self.special_tokens.get("end"), self.special_tokens.get("pad")),
            getattr(self.transformer, "preprocess_embed", None),
        )
        outputs = self.transformer(
            None,
            text.attention_mask if self.enable_attention_masks else None,
            embeds=text.embeds,
            num_tokens=text.num_tokens,
            intermediate_output="all" if self.layer == "all" else self.layer_idx,
            final_layer_norm_intermediate=self.layer_norm_hidden_state,
            dtype=torch.float32,
            embeds_info=text.info,
        )
        states = outputs[0] if self.layer == "last" else outputs[1]
        states = states.float()
        if self.zero_out_masked:
            states = states * text.attention_mask[..., None].to(device=device, dtype=states.dtype)
        pooled = self._pooled(outputs)
        if self.return_attention_masks:
            return states, pooled, {"attention_mask": text.attention_mask}
        return states, pooled

    def _pooled(self, outputs: Sequence[Any]) -> Tensor | None:
        """The pooled state, projected or not, where the network has one."""
        projected = outputs[2] if len(outputs) > 2 else None
        plain = outputs[3] if len(outputs) > 3 else None
        pooled = plain if plain is not None and not self.return_projected_pooled else projected
        return None if pooled is None else pooled.float()

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the network's weights, given without prefix; returns missing and unexpected keys."""
        return assign_weights(self.transformer, dict(sd))


def _read_config(source: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration as a dict: given as one, as the path of a JSON file, or not at all
    (defaults)."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    return json.loads(Path(source).read_text(encoding="utf-8"))


class SD1ClipModel(nn.Module):
    """A model's text encoding when it has one encoder, held under its name (``clip_l``)."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
        clip_name: str = "l",
        clip_model: Any = SDClipModel,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.clip_name = clip_name
        self.clip = f"clip_{clip_name}" if name is None else name
        options = {**(model_options or {}), "model_name": self.clip}
        kind = options.get(f"{self.clip}_class", clip_model)
        setattr(self, self.clip, kind(device=device, dtype=dtype, model_options=options, **kwargs))
        self.dtypes = {dtype} if dtype is not None else set()

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """See SDClipModel."""
        getattr(self, self.clip).set_clip_options(options)

    def reset_clip_options(self) -> None:
        """See SDClipModel."""
        getattr(self, self.clip).reset_clip_options()

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Conditioning of the tokens under this encoder's name."""
        return getattr(self, self.clip).encode_token_weights(token_weight_pairs[self.clip_name])

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the encoder's weights."""
        return getattr(self, self.clip).load_sd(sd)


def keeping(
    model: Callable[..., nn.Module], kept: torch.dtype | None = None
) -> Callable[..., nn.Module]:
    """Maker of an encoder whose weights are kept in a given type (None: as asked for)."""

    def make(
        device: Any = "cpu", dtype: Any = None, model_options: Mapping[str, Any] | None = None
    ) -> nn.Module:
        return model(device, kept or dtype, model_options)

    return make
