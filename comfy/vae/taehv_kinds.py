"""Recognises TAEHV, the small autoencoders of videos, and what each was trained for; see `kinds`.

Shapes tell sizes, but not the latent space: files for HunyuanVideo and Wan 2.1 have the same. Their
names tell, which a loader hands over in place of a header, or else the precision: the first was
published in float16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.ldm.taesd.video import COLOURS, PIECE_PIXELS, TAEHV
from comfy.vae.spec import AutoencoderSpec, causal_ratios, to_unit_range, unchanged

StateDict = Mapping[str, Tensor]
Metadata = Mapping[str, str] | None

MARK = "decoder.22.bias"
NAME_HINT = "taehv_name"
"""Header entry with a key of `TRAINED`."""
STAGES = (7, 13, 19)  # places of the layers that grow time in a decoder
POOLS = (2, 7, 12)  # places of the layers that pool it in an encoder
ENDS = (1, 8, 14, 20)  # convolutions that set the widths of a decoder
SPACE = 8  # pixels along a side of a cell, before patches
COPIES = 8  # of the widest layer's values at full size that live at once, with headroom


@dataclass(frozen=True)
class Training:
    """What shapes do not tell.

    Attributes:
        latent_format: Latent space of the model it stands in for.
        takes_raw: Whether it was trained on latents as the model's autoencoder makes them, not as
            the model sees them.
        decodes_only: Whether its encoder makes nothing that its decoder reads.
        is_signed, leak: See `TAEHV`.
    """

    latent_format: Callable[[], latent_formats.LatentFormat]
    takes_raw: bool = False
    decodes_only: bool = False
    is_signed: bool = False
    leak: float = 0.0


# Names of files -> how they were trained.
TRAINED: dict[str, Training] = {
    "taehv": Training(latent_formats.HunyuanVideo),
    "taew2_1": Training(latent_formats.Wan21),
    "taew2_2": Training(latent_formats.Wan22),
    "lighttaew2_1": Training(latent_formats.Wan21),
    "lighttaew2_2": Training(latent_formats.Wan22, takes_raw=True, decodes_only=True),
    "lighttaehy1_5": Training(
        latent_formats.HunyuanVideo15, decodes_only=True, is_signed=True, leak=0.2
    ),
}
UNKNOWN = Training(latent_formats.LatentFormat, takes_raw=True)
BY_CHANNELS = {16: "lighttaew2_1", 48: "lighttaew2_2", 32: "lighttaehy1_5"}
HALF_PRECISION_NAME = "taehv"


def name_hint(file: str) -> dict[str, str]:
    """Header entry that a file's name stands for; empty if the name says nothing."""
    stem = PurePath(file.replace("\\", "/")).name.split(".")[0]
    return {NAME_HINT: stem} if stem in TRAINED else {}


def detect_taehv(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """A small autoencoder of videos, for Wan, HunyuanVideo and others."""
    if MARK not in weights:
        return None
    channels = weights["decoder.1.weight"].shape[1]
    name = _training_name(channels, weights["decoder.1.weight"].dtype, metadata)
    training = TRAINED.get(name, UNKNOWN)
    grows = [_ratio(weights[f"decoder.{place}.conv.weight"]) for place in STAGES]
    pools = [_ratio(weights[f"encoder.{place}.conv.weight"]) for place in POOLS]
    widths = [weights[f"decoder.{place}.weight"].shape[0] for place in ENDS]
    patch = round((weights[MARK].shape[0] / COLOURS) ** 0.5)
    time, pooled, space = 2 ** sum(grows), 2 ** sum(pools), SPACE * patch
    build = functools.partial(
        TAEHV,
        channels,
        encoder_time_downscale=pools,
        decoder_time_upscale=grows,
        latent_format=None if training.takes_raw else training.latent_format,
        patch_size=patch,
        widths=widths,
        encoder_width=weights["encoder.0.weight"].shape[0],
        leak=training.leak,
        is_signed=training.is_signed,
    )
    memory = functools.partial(taehv_memory, width=max(widths[2:]) // patch**2)
    return AutoencoderSpec(
        name=f"TAEHV ({name})" if name else "TAEHV",
        build=build,
        memory_encode=functools.partial(memory, cell=1, time=1),
        memory_decode=functools.partial(memory, cell=space, time=time),
        latent_channels=channels,
        latent_dim=3,
        **causal_ratios(time, space, pooled),
        process_input=functools.partial(_refuse, name) if training.decodes_only else unchanged,
        process_output=to_unit_range if training.is_signed else unchanged,
        header={NAME_HINT: name} if name else {},
    )


def _training_name(channels: int, dtype: torch.dtype, metadata: Metadata) -> str:
    """What a file is by its header or name, if that can be, and else by its weights; empty for
    others.
    """
    named = (metadata or {}).get(NAME_HINT, "")
    if named in TRAINED and TRAINED[named].latent_format().latent_channels == channels:
        return named
    if channels == latent_formats.HunyuanVideo.latent_channels and dtype == torch.float16:
        return HALF_PRECISION_NAME
    return BY_CHANNELS.get(channels, "")


def _ratio(weight: Tensor) -> bool:
    """Whether a layer of a stage changes the number of frames."""
    return max(weight.shape[:2]) > min(weight.shape[:2])


def _refuse(name: str, pixels: Tensor) -> Tensor:
    """Raise NotImplementedError: the latents of `pixels` would not be those of the model."""
    raise NotImplementedError(
        f"{name} was trained to decode only, not to encode pictures (found {tuple(pixels.shape)}); "
        "encode with the model's own autoencoder"
    )


def taehv_memory(
    shape: Sequence[int], dtype: torch.dtype, width: int, cell: int, time: int
) -> float:
    """Bytes for a video ``[B, C, T, H, W]`` of pixels or of cells: a few layers over a piece, and
    the pixels of all.
    """
    area = shape[0] * shape[3] * shape[4] * cell**2
    pixels = area * shape[2] * time
    piece = min(pixels, max(PIECE_PIXELS, area * 4))
    return float((piece * width * COPIES + pixels * COLOURS * 2) * dtype.itemsize)
