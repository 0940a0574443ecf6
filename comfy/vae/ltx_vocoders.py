"""Recognises the vocoders of LTX-2 and LTX-2.3 by their weights, and by what headers tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.ldm.lightricks.vocoder import VocoderConfig
from comfy.ldm.lightricks.wide_vocoder import WideVocoderConfig
from comfy.weights.fill import IncompleteWeightsError
from comfy.weights.ltx_header import told_of
from comfy.weights.state_dict import count_parts

VOCODER = "vocoder."
FIRST, SECOND = f"{VOCODER}vocoder.", f"{VOCODER}bwe_generator."  # of LTX-2.3
AnyVocoderConfig = VocoderConfig | WideVocoderConfig
# What shapes do not tell of the published ones of LTX-2.3.
USUAL_FIRST = VocoderConfig(rates=(5, 2, 2, 2, 2, 2), kernels=(11, 4, 4, 4, 4, 4), end="clamp")
USUAL_SECOND = VocoderConfig(rates=(6, 5, 2, 2, 2), kernels=(12, 11, 4, 4, 4), end="none")


def vocoder_config(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> AnyVocoderConfig:
    """Sizes of the vocoder of a file; rates and dilations are the header's, or those published.

    Raises:
        KeyError: A weight that tells a size is missing.
        IncompleteWeightsError: Weights and header contradict each other.
    """
    if not any(key.startswith((FIRST, SECOND)) for key in weights):
        return _config(weights, VOCODER, told_of(metadata, "vocoder"), VocoderConfig())
    told = told_of(metadata, "vocoder", "bwe")
    bands, pitches = weights[f"{VOCODER}mel_stft.mel_basis"].shape
    first = _config(weights, FIRST, told_of(metadata, "vocoder", "vocoder"), USUAL_FIRST)
    second = _config(weights, SECOND, told, USUAL_SECOND)
    try:
        return WideVocoderConfig(
            first,
            second,
            hop=int(told.get("hop_length", WideVocoderConfig.hop)),
            window=2 * (pitches - 1),
            bands=bands,
        )
    except ValueError as error:
        raise IncompleteWeightsError(
            f"{error}; hops and rates are read from the file's header (config.vocoder.bwe)"
        ) from error


def _config(
    weights: Mapping[str, Tensor], prefix: str, told: Mapping[str, Any], usual: VocoderConfig
) -> VocoderConfig:
    """Sizes of one vocoder whose keys start with `prefix`."""
    levels = count_parts(weights, f"{prefix}ups.")
    blocks = count_parts(weights, f"{prefix}resblocks.") // max(1, levels)
    width, spectrum, _ = weights[f"{prefix}conv_pre.weight"].shape
    is_smooth = f"{prefix}act_post.act.alpha" in weights
    try:
        return VocoderConfig(
            spectrum=spectrum,
            width=width,
            sounds=weights[f"{prefix}conv_post.weight"].shape[0],
            rates=tuple(told.get("upsample_rates", usual.rates)),
            kernels=tuple(weights[f"{prefix}ups.{n}.weight"].shape[2] for n in range(levels)),
            block_kernels=tuple(
                weights[f"{prefix}resblocks.{n}.convs1.0.weight"].shape[2] for n in range(blocks)
            ),
            dilations=tuple(map(tuple, told.get("resblock_dilation_sizes", usual.dilations))),
            is_smooth=is_smooth,
            last_bias=not is_smooth or f"{prefix}conv_post.bias" in weights,
            end=_end(told, usual.end),
        )
    except ValueError as error:
        raise IncompleteWeightsError(
            f"{error}; its rates are read from the file's header (config.{prefix}upsample_rates)"
        ) from error


def _end(told: Mapping[str, Any], usual: str) -> str:
    """How a sound is kept in -1..1."""
    if not told.get("apply_final_activation", usual != "none"):
        return "none"
    return "tanh" if told.get("use_tanh_at_final", usual == "tanh") else "clamp"
