"""Names of a LoRA file that are known ones under another prefix, or in another library's words.

Trainers write one network's names in many wrappings: `diffusion_model.`, `transformer.`,
`lora_unet_`, `base_model.model.`, or none, with dots or underscores. The layouts list what the
reference server reads; what they leave unread is looked up here by the name inside the wrapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from comfy.weights.lora_formats.unet import NETWORK

WRAPPINGS = re.compile(
    r"^(?:base_model\.model\.|model\.|module\.|_orig_mod\.|pipe\.|dit\.|diffusion_model\.|unet\.|"
    r"transformer\.|lora_unet_+|lycoris_|lora_transformer_|lora_prior_unet_)"
)
"""One prefix of those that trainers put before a network's own names."""

WORDS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "blocks_0_self_attn_q",  # Wan, under its names in diffusers
        (
            (r"_attn1_", "_self_attn_"),
            (r"_attn2_", "_cross_attn_"),
            (r"_attn_to_([qkv])$", r"_attn_\1"),
            (r"_attn_to_out_0$", "_attn_o"),
            (r"_attn_add_([kv])_proj$", r"_attn_\1_img"),
            (r"_ffn_net_0_proj$", "_ffn_0"),
            (r"_ffn_net_2$", "_ffn_2"),
            (r"^condition_embedder_(text|time)_embedder_linear_1$", r"\1_embedding_0"),
            (r"^condition_embedder_(text|time)_embedder_linear_2$", r"\1_embedding_2"),
            (r"^condition_embedder_time_proj$", "time_projection_1"),
            (r"^condition_embedder_image_embedder_ff_net_0_proj$", "img_emb_proj_1"),
            (r"^condition_embedder_image_embedder_ff_net_2$", "img_emb_proj_3"),
            (r"^proj_out$", "head_head"),
        ),
    ),
)
"""(bare name that tells the family, (pattern of their bare name, our words)...)."""


def bare(name: str) -> str:
    """A network's name without wrappings, underscored."""
    while True:
        inner = WRAPPINGS.sub("", name)
        if inner == name:
            return name.replace(".", "_")
        name = inner


def respelled(unread: Iterable[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Prefixes of unread file keys -> the weights they mean.

    Args:
        unread: Keys of the file no layout has a name for.
        known: File key -> target, as the layouts give it; only a network's weights are looked at.
    """
    targets: dict[str, Any] = {}
    for name, target in known.items():
        key = target if isinstance(target, str) else target[0]
        if key.startswith(NETWORK):
            same = targets.setdefault(bare(name), target)
            if same != target:  # two weights would have the name
                targets[bare(name)] = None
    found: dict[str, Any] = {}
    for key in unread:
        for stem in _stems(key):
            target = next((t for n in _in_our_words(bare(stem), targets) if (t := targets.get(n))),
                          None)  # fmt: skip
            if target is not None:
                found[stem] = target
                break
    return found


def _stems(key: str) -> Iterator[str]:
    """What may be the name before the adapter's own words, longest first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
        if key.endswith("_lora"):
            yield key.removesuffix("_lora")


def _in_our_words(name: str, targets: Mapping[str, Any]) -> Iterator[str]:
    yield name
    for of_family, rules in WORDS:
        if of_family in targets:
            for pattern, words in rules:
                name = re.sub(pattern, words, name)
            yield name
