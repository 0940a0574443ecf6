"""Recognises autoencoders by the keys and shapes of their weights; each kind is one function and
one row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from comfy.ldm.autoencoder.kl import AutoencoderKL, PatchedAutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.autoencoder.pixels import PixelspaceConversionVAE
from comfy.ldm.autoencoder.temporal import TemporalAutoencoder
from comfy.ldm.hunyuan3d.vae import MOST_BYTES, GeoSizes, ShapeVAE
from comfy.ldm.taesd.model import TAESD
from comfy.ldm.wan.vae import WanVAE
from comfy.vae import packed_kinds
from comfy.vae.audio_kinds import detect_oobleck
from comfy.vae.cascade_kinds import detect_stage_a, detect_stage_c
from comfy.vae.mochi_kinds import detect_mochi
from comfy.vae.music_kinds import detect_music_dcae
from comfy.vae.spec import AutoencoderSpec, causal_ratios
from comfy.vae.taehv_kinds import detect_taehv
from comfy.vae.video_kinds import detect_cosmos, detect_hunyuan_video, detect_ltxv
from comfy.weights.fill import IncompleteWeightsError
from comfy.weights.header_hints import read_hints
from comfy.weights.state_dict import count_parts
from comfy.weights.weight_norm import joined

StateDict = Mapping[str, Tensor]
Metadata = Mapping[str, str] | None
USUAL_NORM_GROUPS = 32
PATCHED_MARK = "bn.running_mean"
TEMPORAL_MARK = "decoder.mid.block_1.mix_factor"
BASE_RESOLUTION = 1024  # any; only says at which level an attention sits


def _norm_groups(metadata: Metadata) -> int:
    """Norm groups from a file's header; 32, as everywhere, when it does not say."""
    return read_hints(metadata, "vae_config").get("norm_num_groups", USUAL_NORM_GROUPS)


def kl_config(weights: StateDict, metadata: Metadata = None) -> AutoencoderConfig:
    """Sizes of a KL autoencoder from its weights (of the decoder alone, too)."""
    ch = weights["decoder.norm_out.weight"].shape[0]
    levels = count_parts(weights, "decoder.up.")
    widths = [weights[f"decoder.up.{n}.block.0.conv1.weight"].shape[0] for n in range(levels)]
    z_channels = weights["decoder.conv_in.weight"].shape[1]
    moments = weights.get("encoder.conv_out.weight")
    with_attention = [n for n in range(levels) if f"decoder.up.{n}.attn.0.q.weight" in weights]
    return AutoencoderConfig(
        ch=ch,
        ch_mult=tuple(width // ch for width in widths),
        num_res_blocks=count_parts(weights, "decoder.up.0.block.") - 1,
        z_channels=z_channels,
        in_channels=weights["encoder.conv_in.weight"].shape[1] if moments is not None else 3,
        out_ch=weights["decoder.conv_out.weight"].shape[0],
        double_z=moments is None or moments.shape[0] == 2 * z_channels,
        attn_resolutions=tuple(BASE_RESOLUTION >> n for n in with_attention),
        resolution=BASE_RESOLUTION,
        norm_num_groups=_norm_groups(metadata),
    )


def detect_kl(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The KL autoencoder of Stable Diffusion, SDXL, SD3 and Flux."""
    first = weights.get("decoder.conv_in.weight")
    if first is None or first.ndim != 4 or "decoder.mid.attn_1.q.weight" not in weights:
        return None
    if TEMPORAL_MARK in weights:
        return None
    if packed_kinds.PICTURE_MARK in weights:
        return None
    config = kl_config(weights, metadata)
    inner = weights.get("post_quant_conv.weight")
    embed_dim = None if inner is None else inner.shape[1]
    if PATCHED_MARK in weights and embed_dim is not None:
        return patched_kl(config, embed_dim)
    return AutoencoderSpec(
        name="AutoencoderKL",
        build=functools.partial(AutoencoderKL, config, embed_dim),
        memory_encode=kl_memory_encode,
        memory_decode=kl_memory_decode,
        latent_channels=config.z_channels if embed_dim is None else embed_dim,
        output_channels=config.out_ch,
        downscale_ratio=config.downscale_ratio,
        upscale_ratio=config.downscale_ratio,
    )


def patched_kl(config: AutoencoderConfig, embed_dim: int) -> AutoencoderSpec:
    """That of FLUX.2, four cells of whose latent are one."""
    patch = PatchedAutoencoderKL.patch

    def memory_decode(shape: Sequence[int], dtype: torch.dtype) -> float:
        return kl_memory_decode((*shape[:2], shape[2] * patch, shape[3] * patch), dtype)

    return AutoencoderSpec(
        name="AutoencoderKL of patches",
        build=functools.partial(PatchedAutoencoderKL, config, embed_dim),
        memory_encode=kl_memory_encode,
        memory_decode=memory_decode,
        latent_channels=embed_dim * patch**2,
        output_channels=config.out_ch,
        downscale_ratio=config.downscale_ratio * patch,
        upscale_ratio=config.downscale_ratio * patch,
        default_weights={"num_batches_tracked": torch.zeros_like},
    )


def detect_temporal(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The autoencoder of Stable Video Diffusion, whose batch is the time."""
    if TEMPORAL_MARK not in weights:
        return None
    config = kl_config(weights, metadata)
    return AutoencoderSpec(
        name="temporal AutoencoderKL",
        build=functools.partial(TemporalAutoencoder, config),
        memory_encode=kl_memory_encode,
        memory_decode=kl_memory_decode,
        latent_channels=config.z_channels,
        output_channels=config.out_ch,
        downscale_ratio=config.downscale_ratio,
        upscale_ratio=config.downscale_ratio,
    )


def kl_memory_encode(shape: Sequence[int], dtype: torch.dtype) -> float:
    """Bytes to encode a picture ``[B, 3, H, W]``; measured on the full-size network."""
    return 1767 * shape[2] * shape[3] * dtype.itemsize


def kl_memory_decode(shape: Sequence[int], dtype: torch.dtype) -> float:
    """Bytes to decode a latent ``[B, z, h, w]``, 64 pixels a cell; measured on the full-size
    network."""
    return 2178 * shape[2] * shape[3] * 64 * dtype.itemsize


def detect_taesd(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """TAESD, the small autoencoder for previews."""
    del metadata
    first = weights.get("taesd_decoder.1.weight")
    if first is None:
        return None
    channels = first.shape[1]
    return AutoencoderSpec(
        name="TAESD",
        build=functools.partial(TAESD, latent_channels=channels),
        memory_encode=kl_memory_encode,
        memory_decode=kl_memory_decode,
        latent_channels=channels,
        default_weights={"vae_scale": torch.ones_like, "vae_shift": torch.zeros_like},
    )


def detect_pixel_space(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:  # noqa: ARG001
    """No autoencoder at all, for models that work on pixels."""
    if "pixel_space_vae" not in weights:
        return None
    return AutoencoderSpec(
        name="pixel space",
        build=PixelspaceConversionVAE,
        memory_encode=picture_memory,
        memory_decode=picture_memory,
        latent_channels=3,
        downscale_ratio=1,
        upscale_ratio=1,
    )


def wan_config(weights: StateDict) -> dict[str, Any]:
    """Arguments of Wan's autoencoder from its weights."""
    dim, channels = weights["encoder.conv1.weight"].shape[:2]
    has_shortcuts = "encoder.downsamples.0.downsamples.0.residual.2.weight" in weights
    if has_shortcuts:
        levels = count_parts(weights, "encoder.downsamples.")
        roots = [f"encoder.downsamples.{n}.downsamples." for n in range(levels)]
        firsts = [f"{root}0." for root in roots]
        blocks = count_parts(weights, roots[-1])
        ends = [f"{root}{blocks}." for root in roots[:-1]]
    else:
        numbers = range(count_parts(weights, "encoder.downsamples."))
        layers = [f"encoder.downsamples.{n}." for n in numbers]
        ends = [layer for layer in layers if f"{layer}resample.1.weight" in weights]
        blocks = layers.index(ends[0])
        firsts = layers[:: blocks + 1]
    widths = [weights[f"{first}residual.2.weight"].shape[0] for first in firsts]
    patch = 2 if has_shortcuts else 1
    return {
        "dim": dim,
        "dec_dim": weights["decoder.head.0.gamma"].shape[0],
        "z_dim": weights["conv2.weight"].shape[0],
        "dim_mult": tuple(width // dim for width in widths),
        "num_res_blocks": blocks,
        "temperal_downsample": tuple(f"{end}time_conv.weight" in weights for end in ends),
        "image_channels": channels // patch**2,
        "patch": patch,
        "has_shortcuts": has_shortcuts,
    }


def detect_wan(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The causal video autoencoders of Wan 2.1 (Qwen-Image, too) and 2.2."""
    del metadata
    if "decoder.middle.0.residual.0.gamma" not in weights or "conv2.weight" not in weights:
        return None
    config = wan_config(weights)
    space = config["patch"] * 2 ** (len(config["dim_mult"]) - 1)
    time = 2 ** sum(config["temperal_downsample"])
    largest = config["dec_dim"] * WAN_COPIES // config["patch"] ** 2
    return AutoencoderSpec(
        name="Wan 2.2" if config["has_shortcuts"] else "Wan 2.1",
        build=functools.partial(WanVAE, **config),
        memory_encode=functools.partial(wan_memory, width=largest, cell=1, time=1),
        memory_decode=functools.partial(wan_memory, width=largest, cell=space, time=time),
        latent_channels=config["z_dim"],
        latent_dim=3,
        output_channels=config["image_channels"],
        **causal_ratios(time, space),
        working_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        pad_channel_value=None if config["has_shortcuts"] else 1.0,
    )


WAN_FRAMES = 4  # coded at a time
WAN_COPIES = 8  # of a layer's values at full size that live at once


def wan_memory(shape: Sequence[int], dtype: torch.dtype, width: int, cell: int, time: int) -> float:
    """Bytes for a video ``[B, C, T, H, W]`` of pixels or of cells: a few layers over some frames,
    and the pixels of all.
    """
    pixels = shape[0] * shape[3] * shape[4] * cell**2
    frames = shape[2] * time
    layers = min(WAN_FRAMES, frames) * width * dtype.itemsize
    return float(pixels * (layers + frames * 3 * 2 * dtype.itemsize))


SHAPE_MARK = "geo_decoder.cross_attn_decoder.ln_1.bias"
SHAPE_CHANNELS = 4  # what packages read; tokens have more
SHAPE_HEAD = 64  # channels of a head where no norm tells
SHAPE_GRID_BYTES = 3 * 4 * 257**3  # field, its copy with other axes and in 0..1, of a usual grid


def detect_shape(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The ShapeVAE of Hunyuan3D 2 (also 2.1 and turbo), which makes fields of tokens."""
    del metadata
    if SHAPE_MARK not in weights:
        return None
    geo, block = "geo_decoder.cross_attn_decoder.", "transformer.resblocks.0."
    width, channels = weights["post_kl.weight"].shape
    geo_width, waves = weights["geo_decoder.query_proj.weight"].shape
    head_norm = weights.get(f"{block}attn.attention.q_norm.weight")
    head = SHAPE_HEAD if head_norm is None else head_norm.shape[0]
    sizes = GeoSizes(
        geo_width,
        geo_width // head,
        weights[f"{geo}mlp.c_fc.weight"].shape[0],
        (waves // 3 - 1) // 2,
        "geo_decoder.ln_post.weight" in weights,
    )
    build = functools.partial(
        ShapeVAE,
        channels,
        width,
        width // head,
        weights[f"{block}mlp.c_fc.weight"].shape[0],
        count_parts(weights, "transformer.resblocks."),
        f"{block}attn.c_qkv.bias" in weights,
        sizes,
    )
    memory = functools.partial(shape_memory, width=width)
    return AutoencoderSpec(
        name="ShapeVAE",
        build=build,
        memory_encode=picture_memory,
        memory_decode=memory,
        latent_channels=SHAPE_CHANNELS,
        decoded_channels=channels,
        has_tiles=False,
        latent_dim=1,
        working_dtypes=(torch.float16, torch.bfloat16, torch.float32),
    )


def shape_memory(shape: Sequence[int], dtype: torch.dtype, width: int) -> float:
    """Bytes for tokens ``[B, C, L]``: a layer over them, one over points, and the grid."""
    tokens = shape[0] * shape[2] * width * 12 * dtype.itemsize
    return float(tokens + 3 * MOST_BYTES + shape[0] * SHAPE_GRID_BYTES)


def picture_memory(shape: Sequence[int], dtype: torch.dtype) -> float:
    """Bytes of one copy of a batch."""
    return float(math.prod(shape) * dtype.itemsize)


Detector = Callable[[StateDict, Metadata], AutoencoderSpec | None]

# Name -> how to recognise it; the first that does wins.
AUTOENCODERS: dict[str, Detector] = {
    "pixel_space": detect_pixel_space,
    "taesd": detect_taesd,
    "taehv": detect_taehv,
    "kl": detect_kl,
    "temporal": detect_temporal,
    "wan": detect_wan,
    "shape": detect_shape,
    "hunyuan_video": detect_hunyuan_video,
    "hunyuan_image": packed_kinds.detect_hunyuan_image,
    "hunyuan_video15": packed_kinds.detect_hunyuan_video15,
    "cosmos": detect_cosmos,
    "mochi": detect_mochi,
    "ltxv": detect_ltxv,
    "oobleck": detect_oobleck,
    "music_dcae": detect_music_dcae,
    "stage_a": detect_stage_a,
    "stage_c": detect_stage_c,
}


class _PartOfFile(dict[str, Tensor]):
    """Weights of which those that tell the sizes are to be there."""

    def __missing__(self, key: str) -> Tensor:
        raise IncompleteWeightsError(
            f"the autoencoder lacks {key}, which tells its size; fetch the file again"
        )


def detect_autoencoder(weights: StateDict, metadata: Metadata = None) -> AutoencoderSpec | None:
    """The kind of autoencoder some weights belong to; None when they belong to none.

    Raises:
        IncompleteWeightsError: They are of a known kind, but not all there.
    """
    part = _PartOfFile(joined(weights))
    for detect in AUTOENCODERS.values():
        spec = detect(part, metadata)
        if spec is not None:
            return spec
    return None


def custom_spec(config: Mapping[str, Any]) -> AutoencoderSpec:
    """A KL autoencoder of given ``ddconfig`` and ``embed_dim``, whatever its weights look like."""
    params = config.get("params", config)
    sizes = AutoencoderConfig.from_options(dict(params["ddconfig"]))
    embed_dim = params.get("embed_dim")
    return AutoencoderSpec(
        name="AutoencoderKL",
        build=functools.partial(AutoencoderKL, sizes, embed_dim),
        memory_encode=kl_memory_encode,
        memory_decode=kl_memory_decode,
        latent_channels=sizes.z_channels if embed_dim is None else embed_dim,
        downscale_ratio=sizes.downscale_ratio,
        upscale_ratio=sizes.downscale_ratio,
    )
