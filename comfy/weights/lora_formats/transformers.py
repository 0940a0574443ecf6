"""LoRA keys of diffusion transformers: which library's names, under which trainer's prefixes.

Families are told apart by keys only they have, so that a small model of a family is treated like
a large one. A row of `LIBRARY_NAMES` maps diffusers names; a row of `OWN_NAMES` repeats our own
names under other prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from comfy.weights import diffusers_transformers as names
from comfy.weights.lora_formats.unet import NETWORK, WEIGHT


class LibraryNames(NamedTuple):
    """diffusers names of one family.

    Attributes:
        only_keys: Weights that together tell the family.
        to_diffusers: Its map of diffusers names.
        dotted: Patterns around the name as it is.
        flat: Patterns around the name with underscores.
    """

    only_keys: tuple[str, ...]
    to_diffusers: Callable[[Mapping[str, Any], str], dict[str, Any]]
    dotted: tuple[str, ...]
    flat: tuple[str, ...] = ()


LIBRARY_NAMES = (
    LibraryNames(
        ("joint_blocks.0.x_block.attn.qkv.weight",),
        names.mmdit_to_diffusers,
        ("transformer.{}", "base_model.model.{}"),
        ("lora_transformer_{}", "lycoris_{}"),
    ),
    LibraryNames(
        ("double_layers.0.attn.w1q.weight",), names.auraflow_to_diffusers, ("transformer.{}",)
    ),
    LibraryNames(
        ("blocks.0.cross_attn.kv_linear.weight",),
        names.pixart_to_diffusers,
        ("transformer.{}", "base_model.model.{}", "unet.base_model.model.{}"),
    ),
    LibraryNames(
        ("double_blocks.0.img_attn.norm.key_norm.scale", "txt_in.weight"),
        names.flux_to_diffusers,
        ("transformer.{}",),
        ("lora_transformer_{}", "lycoris_{}"),
    ),
    LibraryNames(
        ("cap_embedder.1.weight",),
        names.z_image_to_diffusers,
        ("diffusion_model.{}", "transformer.{}"),
        ("lycoris_{}",),
    ),
)

OWN_NAMES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("clip_txt_mapper.weight", (), ("lora_prior_unet_{}",)),  # Stable Cascade
    ("clip_mapper.weight", (), ("lora_prior_unet_{}",)),
    ("mlp_t5.0.weight", ("base_model.model.{}",), ()),  # HunyuanDiT
    ("t5_yproj.weight", ("{}",), ()),  # Mochi
    ("caption_projection.0.linear.weight", ("transformer.{}",), ("lycoris_{}",)),  # HiDream
    ("genre_embedder.weight", ("{}",), ()),  # ACE-Step
    ("decoder.time_embed_r.linear_1.weight", ("{}", "base_model.model.{}"), ()),  # ACE-Step 1.5
    ("time_caption_embed.timestep_embedder.linear_1.bias", ("{}",), ()),  # OmniGen2
    ("txt_norm.weight", ("{}", "transformer.{}"), ("lycoris_{}",)),  # Qwen-Image
    ("visual_transformer_blocks.0.cross_attention.key_norm.weight", ("{}", "transformer.{}"), ()),
)
"""(key only the family has, patterns around the name, patterns around the underscored name)."""


def library_names(keys: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of a transformer under its diffusers names."""
    found: dict[str, Any] = {}
    for row in LIBRARY_NAMES:
        if any(NETWORK + key not in keys for key in row.only_keys):
            continue
        for theirs, target in row.to_diffusers(config, NETWORK).items():
            if theirs.endswith(WEIGHT):
                stem = theirs[: -len(WEIGHT)]
                for pattern in row.dotted:
                    found[pattern.format(stem)] = target
                for pattern in row.flat:
                    found[pattern.format(stem.replace(".", "_"))] = target
        break
    return found


def prefixed_own_names(keys: Collection[str], _config: Mapping[str, Any]) -> dict[str, str]:
    """Weights of a transformer under our own names with the family's usual prefixes."""
    found: dict[str, str] = {}
    for only_key, dotted, flat in OWN_NAMES:
        if NETWORK + only_key not in keys:
            continue
        for key in keys:
            if key.startswith(NETWORK) and key.endswith(WEIGHT):
                stem = key[len(NETWORK) : -len(WEIGHT)]
                found |= {pattern.format(stem): key for pattern in dotted}
                found |= {pattern.format(stem.replace(".", "_")): key for pattern in flat}
    return found


def flux_packed_names(keys: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Query, key and value rows of FLUX single blocks, which some files change apart."""
    size = 3 * config.get("hidden_size", 0)
    found: dict[str, Any] = {}
    for index in range(config.get("depth_single_blocks", 0)):
        layer = f"{NETWORK}single_blocks.{index}.linear1"
        if NETWORK + "txt_in.weight" in keys and f"{layer}.weight" in keys:
            found[f"{layer}_qkv"] = (f"{layer}.weight", (0, 0, size))
    return found


ACE_STEP_LIBRARY = (
    ("q_proj", "to_q"),
    ("k_proj", "to_k"),
    ("v_proj", "to_v"),
    ("o_proj", "to_out.0"),
)


def ace_step_decoder_names(keys: Collection[str], _config: Mapping[str, Any]) -> dict[str, str]:
    """Weights of the decoder of ACE-Step 1.5, of which trainers see nothing else, and under the
    names of diffusers.
    """
    found: dict[str, str] = {}
    decoder = f"{NETWORK}decoder."
    if f"{decoder}time_embed_r.linear_1.weight" not in keys:
        return found
    for key in keys:
        if key.startswith(decoder) and key.endswith(WEIGHT):
            stem = key[len(decoder) : -len(WEIGHT)]
            theirs = stem
            for own, library in ACE_STEP_LIBRARY:
                theirs = theirs.replace(own, library)
            found |= {f"base_model.model.{stem}": key, f"transformer.{theirs}": key}
    return found


HUNYUAN_SPELLINGS = (
    ("_mod.lin", "_mod.linear"),
    ("modulation.lin", "modulation.linear"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_proj"),
    ("mlp.0", "mlp.fc1"),
    ("mlp.2", "mlp.fc2"),
)
"""(end of our name, end of the name in the authors' code)."""


def hunyuan_video_names(keys: Collection[str], _config: Mapping[str, Any]) -> dict[str, str]:
    """Weights of HunyuanVideo under the names of its authors' code."""
    of_video = any(
        NETWORK + key in keys for key in ("vector_in.in_layer.weight", "vision_in.proj.0.weight")
    )
    if (
        NETWORK + "txt_in.individual_token_refiner.blocks.0.norm1.weight" not in keys
        or not of_video
    ):
        return {}
    found: dict[str, str] = {}
    for key in keys:
        if not (key.startswith(NETWORK) and key.endswith(WEIGHT)):
            continue
        stem = key[len(NETWORK) : -len(WEIGHT)]
        for ours, theirs in HUNYUAN_SPELLINGS:
            if stem.endswith(ours):
                stem = stem[: -len(ours)] + theirs
                break
        found[f"transformer.{stem}"] = key
        found[NETWORK + stem] = key
    return found
