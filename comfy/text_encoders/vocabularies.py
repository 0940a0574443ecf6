"""Where the word pieces of each text encoder are looked for, when its own file has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from comfy.text_encoders import (
    ace,
    ace15,
    hunyuan_video,
    hydit,
    jina_clip_2,
    lt,
    lumina2,
    mistral,
    omnigen2,
    ovis,
    pile_t5,
    qwen,
    qwen3_vl,
    qwen35,
    tekken,
    umt5,
)
from comfy.text_encoders.t5_pieces import DATA_ENTRY, EMBEDDED, find_pieces
from comfy.weights.gguf_text import VOCABULARY

# Encoder whose vocabulary is a file -> how it is looked for in some folders.
VOCABULARIES: dict[str, Callable[[Iterable[str]], str | None]] = {
    "t5xxl": find_pieces,
    "t5base": find_pieces,
    umt5.NAME: umt5.find_umt5_pieces,
    ace.NAME: umt5.find_umt5_pieces,
    pile_t5.NAME: pile_t5.find_pile_pieces,
    qwen.QWEN25_7B: qwen.find_qwen_pieces,
    qwen.QWEN3_4B: qwen.find_qwen_pieces,
    omnigen2.NAME: qwen.find_qwen_pieces,
    ace15.SMALL: qwen.find_qwen_pieces,
    ovis.NAME: qwen.find_qwen_pieces,
    qwen3_vl.NAME: qwen.find_qwen_pieces,
    qwen35.NAME: qwen35.find_pieces,
    mistral.NAME: tekken.find_tekken_pieces,
    hunyuan_video.NAME: hunyuan_video.find_llama_pieces,
    lumina2.GEMMA2_2B: lumina2.find_gemma_pieces,
    lumina2.GEMMA3_4B: lumina2.find_gemma_pieces,
    lt.GEMMA3_12B: lumina2.find_gemma_pieces,
    hydit.BERT: hydit.find_bert_pieces,
    hydit.MT5: hydit.find_mt5_pieces,
    jina_clip_2.NAME: jina_clip_2.find_jina_pieces,
}
# Tensors of bytes that are vocabularies, not weights.
EMBEDDED_NAMES = (EMBEDDED, tekken.EMBEDDED)


def vocabularies_of(
    encoders: Sequence[str | None], weights: Sequence[dict[str, Any]]
) -> dict[str, bytes]:
    """Tokenizer data out of the headers of GGUF files; taken from their weights.

    Args:
        encoders: Name of each encoder.
        weights: Tensors of each file.
    """
    found: dict[str, bytes] = {}
    for name, part in zip(encoders, weights):
        content = part.pop(VOCABULARY, None)
        if content is not None:
            found[f"{name}_vocabulary"] = content.numpy().tobytes()
            found.setdefault(DATA_ENTRY, found[f"{name}_vocabulary"])
    return found


def embedded_of(
    encoders: Sequence[str | None], weights: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Tokenizer data `<encoder>.spiece_model`: the vocabulary that each file holds of its own.

    Args:
        encoders: Name of each encoder.
        weights: Tensors of each file.
    """
    pairs = zip(encoders, weights)
    return {f"{name}.{EMBEDDED}": part[EMBEDDED] for name, part in pairs if EMBEDDED in part}


def vocabulary_beside(weights: Mapping[str, Any], folders: Iterable[str]) -> dict[str, Any]:
    """Tokenizer data that name vocabulary files for encoders among some weights.

    Each is under `<encoder>_vocabulary`, and the first under the entry that an encoder alone reads.
    Lyrics look for theirs when there are some, so that it may come later.
    """
    places = list(folders)
    encoders = {key.split(".")[0] for key in weights}
    paths = {name: find(places) for name, find in VOCABULARIES.items() if name in encoders}
    found: dict[str, Any] = {
        f"{name}_vocabulary": path for name, path in paths.items() if path is not None
    }
    if ace.NAME in encoders:
        found[ace.LYRIC_FOLDERS] = places
    first = next(iter(paths.values()), None)
    return found if first is None else {DATA_ENTRY: first, **found}
