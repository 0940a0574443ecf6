"""Language models as text encoders: their states are the conditioning.

What tells one from another are facts of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from comfy.ldm.llm.model import DecoderLLM
from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel


class LanguageModel(SDClipModel):
    """A language model; it normalises no states, and padding is hidden from the text.

    Attributes:
        encoder_name: Its name in files and model options.
        sizes: Sizes where weights do not tell them; None: those of the network.
        network: Class of the network.
        reads: Which states are taken, as `SDClipModel` has ``layer`` and ``layer_idx``.
        ids: Token ids by role.
        tells_mask: Whether it tells which states are of text.
        zeroes_padding: Whether the other states are zero.
    """

    encoder_name: ClassVar[str]
    sizes: ClassVar[Mapping[str, Any] | None] = None
    network: ClassVar[Any] = DecoderLLM
    reads: ClassVar[tuple[str, int | None]] = ("last", None)
    ids: ClassVar[Mapping[str, int]]
    tells_mask: ClassVar[bool] = True
    zeroes_padding: ClassVar[bool] = False

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        layer, layer_idx = self.reads
        super().__init__(
            device=device,
            layer=layer,
            layer_idx=layer_idx,
            textmodel_json_config=self.sizes,
            dtype=dtype,
            special_tokens=self.ids,
            layer_norm_hidden_state=False,
            model_class=self.network,
            enable_attention_masks=True,
            zero_out_masked=self.zeroes_padding,
            return_attention_masks=self.tells_mask,
            model_options={**(model_options or {}), "model_name": self.encoder_name},
        )


class LanguageModelAlone(SD1ClipModel):
    """A language model that is the only encoder, under its name.

    Attributes:
        encoder: Its class.
    """

    encoder: ClassVar[type[LanguageModel]]

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        name = self.encoder.encoder_name
        super().__init__(
            device, dtype, model_options, clip_name=name, clip_model=self.encoder, name=name
        )
