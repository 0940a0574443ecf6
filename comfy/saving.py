"""Writes a model, with text encoder and autoencoder if wanted, as one checkpoint file.

Shapes do not tell head and norm-group counts. Where they differ from what a loader would assume,
they are written to the file's header, so that small models load again (see `header_hints`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.devices import residency
from comfy.families.text_sizes import CHANNELS_PER_HEAD, ENCODERS
from comfy.weights.header_hints import KNOWN_HINTS
from comfy.weights.state_dict import save_torch_file

USUAL_NORM_GROUPS = 32


def save_checkpoint(
    output_path: str,
    model: Any,
    clip: Any = None,
    vae: Any = None,
    clip_vision: Any = None,
    metadata: Mapping[str, str] | None = None,
    extra_keys: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves the weights as their patches make them, in the layout of the model's family.

    Args:
        output_path: File to write; replaced only when complete.
        model: Model patcher.
        clip: CLIP or None.
        vae: VAE or None.
        clip_vision: Image encoder or None.
        metadata: Text for the file's header.
        extra_keys: Further tensors.
    """
    views = [model] if clip is None else [model, clip.load_model()]
    residency.load_models_gpu(views, force_patch_weights=True)
    tensors = model.model.state_dict_for_saving(
        None if clip is None else clip.get_sd(),
        None if vae is None else vae.get_sd(),
        None if clip_vision is None else clip_vision.get_sd(),
    )
    header = {**network_hints(model), **text_hints(clip), **autoencoder_hints(vae)}
    header.update(model.model.model_config.header())
    header.update(metadata or {})
    save_torch_file({**tensors, **(extra_keys or {})}, output_path, metadata=header)


def network_hints(model: Any) -> dict[str, str]:
    """Header entry with the network's counts that are not its family's usual ones."""
    config = model.model.model_config
    usual = {**config.unet_extra_config, "norm_num_groups": USUAL_NORM_GROUPS}
    counts = {name: config.unet_config.get(name) for name in KNOWN_HINTS["unet_config"]}
    return _entry(
        "unet_config",
        {
            name: count
            for name, count in counts.items()
            if count is not None and count > 0 and count != usual.get(name)
        },
    )


def text_hints(clip: Any) -> dict[str, str]:
    """Header entry with the heads of a text encoder that has not one per 64 channels."""
    for name in ENCODERS:
        encoder = getattr(clip.cond_stage_model, name, None) if clip is not None else None
        config = getattr(getattr(encoder, "transformer", None), "config", None)
        if config is None:
            continue
        if config.num_attention_heads != max(1, config.hidden_size // CHANNELS_PER_HEAD):
            return _entry("text_config", {"num_attention_heads": config.num_attention_heads})
    return {}


def autoencoder_hints(vae: Any) -> dict[str, str]:
    """Header entries with what shapes do not tell of an autoencoder, and its norm groups, if not
    32.
    """
    if vae is None:
        return {}
    config = getattr(vae.first_stage_model, "config", None)
    groups = getattr(config, "norm_num_groups", USUAL_NORM_GROUPS)
    unusual = {} if groups == USUAL_NORM_GROUPS else {"norm_num_groups": groups}
    return {**vae.spec.header, **_entry("vae_config", unusual)}


def _entry(section: str, counts: Mapping[str, int]) -> dict[str, str]:
    return {section: json.dumps(counts)} if counts else {}
