"""Text encoding of LTX-2 and 2.3: all states of Gemma 3 12B, projected and read by two connectors.

Source: HaCohen et al. 2026, https://arxiv.org/abs/2601.03233.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.devices import placement
from comfy.ldm.lightricks.connectors import Connectors, ConnectorsConfig
from comfy.ldm.llm.gemma_vl import Gemma3VL
from comfy.text_encoders.encoder import Chunk
from comfy.text_encoders.language_model import LanguageModel
from comfy.text_encoders.lumina2 import GEMMA3_CONFIG, PAD, START, GemmaTokenizer
from comfy.text_encoders.tokenizer import TokenizerAlone

GEMMA3_12B, CONNECTORS = "gemma3_12b", "ltx2_connectors"
WIDTH, LAYERS = 3840, 48
CONFIG: dict[str, Any] = {
    **GEMMA3_CONFIG, "hidden_size": WIDTH, "intermediate_size": 15360, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
COPIES = 3  # of all states of a text that live at once
# Keys of the connectors, and what stands before them in checkpoints.
PARTS = (
    "text_embedding_projection.",
    "video_embeddings_connector.",
    "audio_embeddings_connector.",
)
# One projection for both, or one each.
MARKS = tuple(f"{PARTS[0]}{name}.weight" for name in ("aggregate_embed", "video_aggregate_embed"))
PREFIXES = ("", "model.diffusion_model.", f"text_encoders.{CONNECTORS}.transformer.")


def connector_keys(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The connectors among the tensors of a file, by their own keys; None if there are none."""
    found = {
        key.removeprefix(prefix): value
        for prefix in PREFIXES
        for key, value in state_dict.items()
        if key.startswith(tuple(prefix + part for part in PARTS))
    }
    return found if any(mark in found for mark in MARKS) else None


class Gemma3_12BTokenizer(GemmaTokenizer):
    """Gemma 3's; weights in parentheses have no meaning for it."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(WIDTH, GEMMA3_12B, embedding_directory, tokenizer_data, True)


class LTXAVGemmaTokenizer(TokenizerAlone):
    """Gemma 3's tokens under the encoder's name."""

    encoder_name = GEMMA3_12B
    pieces = Gemma3_12BTokenizer


class Gemma3_12BModel(LanguageModel):
    """Gemma 3 12B: the states of its tokens, and those after each layer."""

    encoder_name = GEMMA3_12B
    sizes = CONFIG
    network = Gemma3VL
    reads = ("all", None)
    ids: ClassVar[dict[str, int]] = {"start": START, "pad": PAD}


class HeldConnectors(nn.Module):
    """The connectors, held as encoders are."""

    def __init__(self, dtype: Any, device: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        config = ConnectorsConfig.from_options(options.get(f"{CONNECTORS}_model_config") or {})
        operations = options.get("custom_operations") or ops.manual_cast
        self.transformer = Connectors(config, dtype, device, operations)


class LTXAVTEModel(nn.Module):
    """Gemma and the connectors.

    Attributes:
        dtypes: Types in which weights are kept.
    """

    def __init__(
        self,
        dtype_llm: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        options, kept = model_options or {}, dtype_llm or dtype
        kind = options.get(f"{GEMMA3_12B}_class", Gemma3_12BModel)
        self.gemma3_12b = kind(device=device, dtype=kept, model_options=options)
        self.ltx2_connectors = HeldConnectors(kept, device, options)
        self.dtypes = {one for one in (dtype, dtype_llm) if one is not None}

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """See SDClipModel; all layers count, so a person's choice of one changes nothing."""
        self.gemma3_12b.set_clip_options(options)

    def reset_clip_options(self) -> None:
        """See SDClipModel."""
        self.gemma3_12b.reset_clip_options()

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Conditioning ``[1, 1024 or more, D]``, for the video and for the sound side by side, and
        no pooled state; all of it is to be seen."""
        states, pooled, extra = self.gemma3_12b.encode_token_weights(token_weight_pairs[GEMMA3_12B])
        seen = extra["attention_mask"][0].to(states.device).bool()
        table = self.gemma3_12b.transformer.get_input_embeddings()
        device = self.gemma3_12b.execution_device or table.weight.device
        made = self.ltx2_connectors.transformer(states[:, :, seen].to(device))
        return made.to(placement.intermediate_device()), pooled, {}

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the weights of Gemma, or of the connectors, known by their keys."""
        own = connector_keys(sd)
        if own is None:
            return self.gemma3_12b.load_sd(sd)
        return self.ltx2_connectors.transformer.load_state_dict(own, strict=False)

    def memory_estimation_function(
        self, tokens: Mapping[str, Sequence[Chunk]], device: Any = None
    ) -> float:
        """Bytes beside the weights: all states of a text, and a projection in float32."""
        del device
        length = sum(len(chunk) for chunk in tokens[GEMMA3_12B])
        config = self.ltx2_connectors.transformer.config
        values = COPIES * length * config.states + config.states * config.width
        return float(values * torch.float32.itemsize)


def ltxav_te(dtype_llm: torch.dtype | None = None) -> Callable[..., LTXAVTEModel]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return partial(LTXAVTEModel, dtype_llm)
