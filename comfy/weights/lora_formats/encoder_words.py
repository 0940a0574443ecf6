"""Names of text encoders' weights in LoRA files, where no layout lists them.

A name has a prefix with the encoder's number, such as `text_encoder_2.` or `lora_te3_`, and the
name inside one encoder, with or without the parts that only wrap it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from comfy.weights.lora_formats.unet import NETWORK, WEIGHT

PREFIX = re.compile(
    r"^(?:base_model\.model\.|module\.)?"
    r"(?:text_encoders?|(?:lora|oft|lycoris)_(?:te|text_encoder)|te)_?(\d?)[._]"
)
INNER = re.compile(r"^(?:base_model_model_|transformer_|model_|language_model_|text_model_)+")
OLD_WORDS = ((r"_to_([qkv])$", r"_\1_proj"), (r"_to_out(?:_0)?$", "_out_proj"))
"""(pattern, words) for what early versions of diffusers called the layers of attention in CLIP."""

OF_LIBRARY = "base_model.model."
"""What PEFT puts before the names of a network that it saves alone."""

WORDLESS = ("clip_l", "clip_g", "clip_h")
"""Encoders that share their names; a number decides between them."""


class EncoderNames:
    """The weights of a text encoder, by encoder and name inside it.

    Args:
        known: File key -> target, as the layouts give it; what is no encoder's is left out.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.by_encoder: dict[str, dict[str, str]] = {}
        for target in known.values():
            if isinstance(target, str) and not target.startswith(NETWORK):
                encoder, _, name = target.removesuffix(WEIGHT).partition(".transformer.")
                if name:
                    self.by_encoder.setdefault(encoder, {})[_inner(name)] = target
        self.order = _in_order(self.by_encoder)

    def find(self, stem: str) -> str | None:
        """The weight a name of a file means, if it is one of these."""
        if not self.order:
            return None
        found = PREFIX.match(stem)
        if found is None:
            name = stem.removeprefix(OF_LIBRARY).removeprefix("lora_")
            encoder = next((e for e in self.order if re.match(rf"{re.escape(e)}[._]", name)), None)
            inside = name[len(encoder) + 1 :] if encoder else name
            if encoder is None and stem.startswith(OF_LIBRARY):  # trained without a pipeline
                encoder = self.order[0] if len(self.order) == 1 else self._only_one_with(name)
            elif encoder is None and re.match(r"text_model[._]", name) and len(self.order) == 1:
                encoder = self.order[0]
            return self._in(encoder, inside)
        name = stem[found.end() :]
        number = int(found[1] or 1)
        numbered = self.order[number - 1] if 0 < number <= len(self.order) else None
        return self._in(numbered, name) or self._in(self._only_one_with(name), name)

    def _in(self, encoder: str | None, name: str) -> str | None:
        names = self.by_encoder.get(encoder or "", {})
        inner = _inner(name)
        for pattern, words in (("$^", ""), *OLD_WORDS):
            target = names.get(re.sub(pattern, words, inner))
            if target is not None:
                return target
        return None

    def _only_one_with(self, name: str) -> str | None:
        """The one encoder with a name, unless others of its kind have the name in other sizes."""
        having = [encoder for encoder in self.order if self._in(encoder, name)]
        return having[0] if len(having) == 1 and having[0] not in WORDLESS else None


def _inner(name: str) -> str:
    """A name without what wraps it, underscored."""
    return INNER.sub("", name.replace(".", "_"))


def _in_order(encoders: Iterable[str]) -> list[str]:
    """Encoders as pipelines number them: CLIP-L, CLIP-G, T5, a language model; where there is no
    T5 the language model comes first."""
    names = list(encoders)
    clips = [name for name in ("clip_l", "clip_g", "clip_h") if name in names]
    t5 = [name for name in names if name == "t5xxl"]
    rest = sorted((n for n in names if n not in clips and n not in t5), key=_is_helper)
    return [*clips, *t5, *rest] if t5 else [*rest, *clips]


def _is_helper(encoder: str) -> bool:
    """Whether an encoder only reads what another one cannot, and so comes after it."""
    return encoder.startswith(("byt5", "mt5", "jina"))
