"""Recognises the autoencoder of ACE-Step by the keys and shapes of its weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from comfy.ldm.ace.autoencoder import HOP, MusicDCAE
from comfy.ldm.ace.dcae import HEAD, DCAESizes, LevelSizes
from comfy.ldm.ace.vocoder import VocoderSizes
from comfy.vae.spec import AutoencoderSpec, unchanged
from comfy.weights import weight_norm
from comfy.weights.fill import IncompleteWeightsError
from comfy.weights.state_dict import count_parts

StateDict = Mapping[str, Tensor]

MARK = "vocoder.backbone.channel_layers.0.0.bias"
VOCODER_HEAD = "vocoder.head."
BYTES_A_SAMPLE, BYTES_A_CELL = 330, 87000  # values that live at once, of the full-size network


def detect_music_dcae(
    weights: StateDict, metadata: Mapping[str, str] | None
) -> AutoencoderSpec | None:
    """The deep compression autoencoder and the vocoder of ACE-Step."""
    del metadata
    if MARK not in weights:
        return None
    vocoder = vocoder_sizes(weights)
    if math.prod(vocoder.rates) != HOP:
        raise IncompleteWeightsError(
            f"the vocoder of ACE-Step makes {math.prod(vocoder.rates)} samples of a spectrum, "
            f"expected {HOP}; fetch the file again"
        )
    dcae = dcae_sizes(weights)
    cells = 1 << (len(dcae.encoder) - 1)  # of a spectrogram along a side of a latent's

    def memory_encode(shape: Sequence[int], dtype: torch.dtype) -> float:
        return float(BYTES_A_SAMPLE * shape[2] * dtype.itemsize)

    def memory_decode(shape: Sequence[int], dtype: torch.dtype) -> float:
        return float(BYTES_A_CELL * shape[2] * shape[3] * dtype.itemsize)

    return AutoencoderSpec(
        name="ACE-Step",
        build=functools.partial(MusicDCAE, dcae, vocoder),
        memory_encode=memory_encode,
        memory_decode=memory_decode,
        latent_channels=dcae.latent,
        latent_dim=2,
        of_sound=True,
        output_channels=dcae.channels,
        downscale_ratio=HOP * cells,
        upscale_ratio=HOP * cells,
        extra_1d_channel=vocoder.bands // cells,
        working_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        process_input=unchanged,
        process_output=unchanged,
        pad_channel_value="replicate",
        to_file=_to_file,
    )


def _to_file(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Files hold the weights of the vocoder's head in two parts, and no others."""
    head = {key: value for key, value in weights.items() if key.startswith(VOCODER_HEAD)}
    rest = {key: value for key, value in weights.items() if key not in head}
    return rest | weight_norm.parted(head)


def dcae_sizes(weights: StateDict) -> DCAESizes:
    """Sizes of the deep compression autoencoder."""
    encoder = _levels(weights, "dcae.encoder.down_blocks.", first=0)
    decoder = _levels(weights, "dcae.decoder.up_blocks.", first=1)
    latent, _, _, _ = weights["dcae.encoder.conv_out.weight"].shape
    reach = "attn.to_qkv_multiscale.0.proj_out.weight"
    head = next((value.shape[1] for key, value in weights.items() if key.endswith(reach)), HEAD)
    down = f"dcae.encoder.down_blocks.0.{encoder[0].layers}.conv.weight"
    up = "dcae.decoder.up_blocks.0.0.conv.weight"
    return DCAESizes(
        channels=weights["dcae.encoder.conv_in.weight"].shape[1],
        latent=latent,
        encoder=encoder,
        decoder=decoder,
        head=head,
        unshuffles=len(encoder) > 1 and weights[down].shape[0] != encoder[1].width,
        shuffles=len(decoder) > 1 and weights[up].shape[0] != decoder[0].width,
    )


def _levels(weights: StateDict, prefix: str, first: int) -> tuple[LevelSizes, ...]:
    """Sizes of the levels; all but the innermost have one part more that changes the sides.

    Args:
        first: Number of the first block in levels with that part.
    """
    count = max(1, count_parts(weights, prefix))
    levels = []
    for number in range(count):
        is_innermost = number + 1 == count
        place = f"{prefix}{number}."
        layers = count_parts(weights, place) - (0 if is_innermost else 1)
        block = f"{place}{0 if is_innermost else first}."
        queries = weights.get(f"{block}attn.to_q.weight")
        if queries is None:
            levels.append(LevelSizes(weights[f"{block}conv1.weight"].shape[0], layers))
            continue
        reaches = f"{block}attn.to_qkv_multiscale."
        kernels = tuple(
            weights[f"{reaches}{n}.proj_in.weight"].shape[-1]
            for n in range(count_parts(weights, reaches))
        )
        levels.append(LevelSizes(queries.shape[1], layers, kernels))
    return tuple(levels)


def vocoder_sizes(weights: StateDict) -> VocoderSizes:
    """Sizes of the vocoder. Kernels between levels are twice their rate, and dilations odd."""
    backbone = "vocoder.backbone."
    width, bands, _ = weights[MARK.replace("bias", "weight")].shape
    stages = count_parts(weights, f"{backbone}stages.")
    wider = [weights[f"{backbone}channel_layers.{n}.1.weight"].shape[0] for n in range(1, stages)]
    block = f"{backbone}stages.0.0."
    levels = max(1, count_parts(weights, f"{VOCODER_HEAD}ups."))
    kernels = tuple(weights[f"{VOCODER_HEAD}ups.{n}.weight"].shape[2] for n in range(levels))
    blocks = count_parts(weights, f"{VOCODER_HEAD}resblocks.") // levels
    pairs = count_parts(weights, f"{VOCODER_HEAD}resblocks.0.convs1.")
    return VocoderSizes(
        bands=bands,
        depths=tuple(count_parts(weights, f"{backbone}stages.{n}.") for n in range(stages)),
        widths=(width, *wider),
        kernel=weights[f"{block}dwconv.weight"].shape[2],
        inner=weights[f"{block}pwconv1.weight"].shape[0] // width,
        width=weights[f"{VOCODER_HEAD}conv_pre.weight"].shape[0],
        rates=tuple(kernel // 2 for kernel in kernels),
        kernels=kernels,
        block_kernels=tuple(
            weights[f"{VOCODER_HEAD}resblocks.{n}.convs1.0.weight"].shape[2] for n in range(blocks)
        ),
        dilations=tuple(2 * n + 1 for n in range(pairs)),
        first_kernel=weights[f"{VOCODER_HEAD}conv_pre.weight"].shape[2],
        last_kernel=weights[f"{VOCODER_HEAD}conv_post.weight"].shape[2],
    )
