"""VAE: what a node gets on a VAE socket: pictures to latents and back, whole or in tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import interrupt, progress
from comfy.devices import memory, placement, precision, residency
from comfy.devices.heap import HEAP, LARGEST_OF_FEATURES
from comfy.ops.encoded import state_dict_for_file
from comfy.patching.patcher import ModelPatcher
from comfy.vae import unsupported
from comfy.vae.cascade_kinds import in_place_of_both
from comfy.vae.finite import cause_of, check_latent, is_finite
from comfy.vae.kinds import custom_spec, detect_autoencoder
from comfy.vae.pixels import COLOURS, cropped_to_cells, in_colours, with_channels
from comfy.vae.spec import AutoencoderSpec
from comfy.vae.tiled import TiledCoding
from comfy.weights.contents import contents_in_words
from comfy.weights.diffusers_vae import convert_vae_state_dict, is_diffusers_vae
from comfy.weights.fill import UnknownWeightsError, fill
from comfy.weights.layout import arrange_convolutions
from comfy.weights.marks import cannot_run
from comfy.weights.weight_norm import joined

SOUND_AXES = 3

ESTIMATE_TO_TRUTH = 3.0
"""How far the estimates of memory, made for headroom on devices, lie above what a run takes."""

logger = logging.getLogger(__name__)

StateDict = Mapping[str, Tensor]


class VAE(TiledCoding):
    """An autoencoder, in the types and on the devices the policies choose.

    Pictures are ``[B, H, W, C]`` in 0..1 (video: ``[B, T, H, W, C]``), latents ``[B, C, h, w]``
    (``[B, C, T, h, w]``).

    Attributes:
        first_stage_model: The network.
        patcher: The patcher around it.
        device, output_device: Where it runs; where results go.
        vae_dtype: Type it computes in.
        downscale_ratio, upscale_ratio: Pixels per latent cell; for video (function of frames,
            ratio, ratio).
        latent_channels, latent_dim, output_channels: Shape of latents and pictures.
        audio_sample_rate: Samples a second, of an autoencoder of sounds.
        memory_used_encode, memory_used_decode: ``(shape, dtype)`` -> bytes of a run.
        disable_offload: Never stream its weights.
    """

    def __init__(
        self,
        sd: StateDict | None = None,
        device: torch.device | None = None,
        config: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Recognise weights and build their network.

        Args:
            sd: Weights by key, without a checkpoint's prefix.
            device: Where to run; the policy's choice by default.
            config: ``ddconfig`` and ``embed_dim`` of a KL autoencoder, instead of recognising one.
            dtype: Type to compute in; the policy's choice by default.
            metadata: The file's header, for what shapes do not tell.
        Raises:
            UnknownWeightsError: The weights are of no known kind.
            IncompleteWeightsError: They are not all there.
        """
        weights = in_place_of_both(joined(sd or {}))
        if is_diffusers_vae(weights):
            weights = convert_vae_state_dict(weights)
        for inner in ("encoder.quant_conv.", "decoder.post_quant_conv."):  # another spelling
            plain = inner.partition(".")[2]
            weights = {
                plain + key.removeprefix(inner) if key.startswith(inner) else key: value
                for key, value in weights.items()
            }
        spec = custom_spec(config) if config is not None else detect_autoencoder(weights, metadata)
        if spec is None:
            name = unsupported.name_of(weights)
            if name is not None:
                raise UnknownWeightsError(cannot_run(f"the autoencoder of {name}"))
            raise UnknownWeightsError(
                f"no autoencoder was recognised: found {contents_in_words(list(weights))}"
            )
        self._adopt(spec)
        self.device: torch.device = placement.vae_device() if device is None else device
        self.vae_dtype: torch.dtype = dtype or precision.vae_dtype(self.device, spec.working_dtypes)
        self.output_device: torch.device = placement.intermediate_device()
        model = spec.build(dtype=self.vae_dtype, device="meta" if weights else None)
        arrange_convolutions(model, self.device)
        if weights:
            fill(model, weights, f"autoencoder ({spec.name})", spec.default_weights)
        self.first_stage_model: Any = model.eval()  # an nn.Module with encode and decode
        self.patcher = ModelPatcher(model, self.device, placement.vae_offload_device())
        self.size: int | None = None
        self.disable_offload = False
        logger.info("Autoencoder %s: weights in %s", spec.name, str(self.vae_dtype)[6:])

    def _adopt(self, spec: AutoencoderSpec) -> None:
        """Take over the facts as the attributes nodes read and change."""
        self.spec = spec
        self.latent_channels, self.latent_dim = spec.latent_channels, spec.latent_dim
        self.output_channels = spec.output_channels
        self.downscale_ratio, self.upscale_ratio = spec.downscale_ratio, spec.upscale_ratio
        self.downscale_index_formula = spec.downscale_index_formula
        self.upscale_index_formula = spec.upscale_index_formula
        self.memory_used_encode: Callable[..., float] = spec.memory_encode
        self.memory_used_decode: Callable[..., float] = spec.memory_decode
        self.process_input: Callable[[Tensor], Tensor] = spec.process_input
        self.process_output: Callable[[Tensor], Tensor] = spec.process_output
        self.working_dtypes = list(spec.working_dtypes)
        self.not_video, self.crop_input = spec.not_video, spec.crop_input
        self.pad_channel_value = spec.pad_channel_value
        self.extra_1d_channel = spec.extra_1d_channel
        self.audio_sample_rate = spec.sample_rate

    # -- facts -----------------------------------------------------------------------------------

    def throw_exception_if_invalid(self) -> None:
        """Raise ValueError when there is no network (somebody took it away)."""
        if self.first_stage_model is None:
            raise ValueError("this VAE has no network; load one with a Load VAE node")

    def model_size(self) -> int:
        """Bytes of the weights."""
        if self.size is None:
            self.size = memory.module_size(self.first_stage_model)
        return self.size

    def get_sd(self) -> dict[str, Tensor]:
        """Weights by key."""
        return self.spec.to_file(state_dict_for_file(self.first_stage_model))

    def spacial_compression_encode(self) -> Any:
        """Pixels per latent cell along a side, when encoding."""
        return _spatial(self.downscale_ratio)

    def spacial_compression_decode(self) -> Any:
        """Pixels per latent cell along a side, when decoding."""
        return _spatial(self.upscale_ratio)

    def temporal_compression_decode(self) -> int | None:
        """Frames per latent frame; None without a time axis."""
        if not isinstance(self.upscale_ratio, tuple) or not callable(self.upscale_ratio[0]):
            return None
        return round(self.upscale_ratio[0](8192) / 8192)

    def vae_encode_crop_pixels(self, pixels: Tensor) -> Tensor:
        """Cut pictures to a multiple of the ratio, equally on both sides."""
        if not self.crop_input:
            return pixels
        return cropped_to_cells(pixels, self.spacial_compression_encode())

    # -- whole -----------------------------------------------------------------------------------

    def decode(self, samples_in: Tensor, vae_options: Mapping[str, Any] | None = None) -> Tensor:
        """Pictures of latents; in tiles when memory runs out."""
        self.throw_exception_if_invalid()
        samples_in = self._latent_without_time(samples_in)
        self._check_channels(samples_in)

        def whole() -> Tensor:
            self._require_capacity(self.memory_used_decode, samples_in[:1].shape, "decoding")
            self._load(self.memory_used_decode(samples_in.shape, self.vae_dtype))
            run = self._decoder(vae_options or {})
            batch = self._batch_size(self.memory_used_decode, samples_in[:1].shape)
            return _in_batches(samples_in, batch, lambda part: self.process_output(run(part)))

        def tiles() -> Tensor:
            return self._decode_in_default_tiles(samples_in)

        smaller = tiles if self.spec.has_tiles else None
        with HEAP.keeping_up_to(LARGEST_OF_FEATURES):
            return residency.run_or_make_room(self.patcher, whole, smaller).movedim(1, -1)

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Latents of pictures; in tiles when memory runs out."""
        self.throw_exception_if_invalid()
        pixels = self._pixels_in(pixel_samples)

        def whole() -> Tensor:
            self._require_capacity(self.memory_used_encode, pixels[:1].shape, "encoding")
            self._load(self.memory_used_encode(pixels.shape, self.vae_dtype))
            batch = self._batch_size(self.memory_used_encode, pixels[:1].shape)
            return _in_batches(pixels, batch, self._encoder())

        with HEAP.keeping_up_to(LARGEST_OF_FEATURES):
            return residency.run_or_make_room(
                self.patcher, whole, lambda: self._encode_in_default_tiles(pixels)
            )

    # -- in tiles --------------------------------------------------------------------------------

    def decode_tiled(
        self,
        samples: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """Pictures of latents, tile by tile; sizes in latent cells."""
        self.throw_exception_if_invalid()
        if not self.spec.has_tiles:
            raise ValueError(
                f"the latents of {self.spec.name} are sets and cannot be cut into tiles; decode "
                "them whole, shapes with VAEDecodeHunyuan3D"
            )
        samples = self._latent_without_time(samples)
        self._check_channels(samples)
        self._load(self.memory_used_decode(samples.shape, self.vae_dtype))
        dims = samples.ndim - 2
        given = _given(tile_x=tile_x, tile_y=tile_y, overlap=overlap)
        if dims == 1 or self.extra_1d_channel is not None:
            given.pop("tile_y", None)
            pixels = self.decode_tiled_1d(samples, **given)
        elif dims == 2:
            pixels = self.decode_tiled_(samples, **given)
        else:
            given["overlap"] = _video_overlap(overlap, overlap_t)
            if tile_t is not None:
                given["tile_t"] = max(2, tile_t)
            pixels = self.decode_tiled_3d(samples, **given)
        return pixels.movedim(1, -1)

    def encode_tiled(
        self,
        pixel_samples: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """Latents of pictures, tile by tile; sizes in pixels."""
        self.throw_exception_if_invalid()
        pixels = self._pixels_in(pixel_samples)
        self._load(self.memory_used_encode(pixels.shape, self.vae_dtype))
        given = _given(tile_x=tile_x, tile_y=tile_y, overlap=overlap)
        if self.latent_dim == 1 or self.extra_1d_channel is not None:
            given.pop("tile_y", None)
            return self.encode_tiled_1d(pixels, **given)
        if self.latent_dim == 2:
            return self.encode_tiled_(pixels, **given)
        frames, tile, shared = self._times(pixels.shape[2], tile_t, overlap_t)
        given["overlap"] = _video_overlap(overlap, shared)
        return self.encode_tiled_3d(pixels[:, :, :frames], tile_t=tile, **given)

    # -- parts -----------------------------------------------------------------------------------

    def _load(self, required: float) -> None:
        residency.load_models_gpu(
            [self.patcher], memory_required=required, force_full_load=self.disable_offload
        )

    def _require_capacity(self, estimate: Callable[..., float], shape: Any, verb: str) -> None:
        """Refuse a piece that the machine could never hold, so that tiles are taken instead."""
        needed = estimate(shape, self.vae_dtype) / ESTIMATE_TO_TRUTH
        name = f"{verb} shape {tuple(shape)} in one piece"
        memory.require_capacity(needed, name, torch.device(self.device))

    def _batch_size(self, estimate: Callable[..., float], shape: Any) -> int:
        """How many pictures of a shape fit beside the weights."""
        free = self.patcher.get_free_memory(self.device)
        return max(1, int(free / max(1, estimate(shape, self.vae_dtype))))

    def _latent_without_time(self, samples: Tensor) -> Tensor:
        """First frame of a video latent for an autoencoder of pictures."""
        return samples[:, :, 0] if self.latent_dim == 2 and samples.ndim == 5 else samples

    def _check_channels(self, samples: Tensor) -> None:
        wanted = self.spec.decoded_channels or self.latent_channels
        if samples.ndim < 3:
            raise ValueError(
                f"expected a latent [batch, {wanted}, ...], found a tensor of "
                f"{samples.ndim} axes, shape {tuple(samples.shape)}: it is no latent"
            )
        if samples.shape[1] != wanted:
            raise ValueError(
                f"the latent has {samples.shape[1]} channels, this VAE decodes "
                f"{wanted}: it belongs to another model"
            )

    def _pixels_in(self, pixels: Tensor) -> Tensor:
        """Pictures as the network takes them: without alpha, cut to size, channels first, time
        axis if it has one.

        Raises:
            ValueError: They are smaller than a latent cell, or no sound for an autoencoder of that.
        """
        if self.spec.of_sound and pixels.ndim != SOUND_AXES:
            raise ValueError(
                f"{self.spec.name} encodes sound [batch, samples, channels], found a tensor of "
                f"shape {tuple(pixels.shape)}; connect a sound to VAEEncodeAudio"
            )
        if self.output_channels == COLOURS:
            pixels = in_colours(pixels)
        else:
            pixels = with_channels(pixels, self.output_channels, self.pad_channel_value)
        whole = self.vae_encode_crop_pixels(pixels)
        if 0 in whole.shape:
            raise ValueError(
                f"pictures of shape {tuple(pixels.shape)} are too small to encode: each side needs "
                f"at least {self.spacial_compression_encode()} pixels; enlarge them"
            )
        pixels = whole.movedim(-1, 1)
        if self.latent_dim == 3 and pixels.ndim < 5:
            pixels = pixels.unsqueeze(2) if self.not_video else pixels.movedim(1, 0)[None]
        return pixels

    def _run(self, part: Tensor) -> Tensor:
        return part.to(device=self.device, dtype=self.vae_dtype)

    def _decoder(self, options: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
        """Latents to raw pictures, float32 on the output device; NaN is retried or an error."""

        def decode(part: Tensor) -> Tensor:
            interrupt.throw_exception_if_processing_interrupted()
            out = self._decode_once(part, options)
            return out if is_finite(out) else self._decode_again(part, options)

        return decode

    def _decode_once(self, part: Tensor, options: Mapping[str, Any]) -> Tensor:
        out: Tensor = self.first_stage_model.decode(self._run(part), **options)
        return out.to(self.output_device).float()

    def _decode_again(self, part: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Once more in float32, when a lower precision may be what gave NaN."""
        check_latent(part)
        if self.vae_dtype != torch.float32:
            self._widen()
            self._load(self.memory_used_decode(part.shape, self.vae_dtype))
            out = self._decode_once(part, options)
            if is_finite(out):
                return out
        raise cause_of(part, lambda latent: self._decode_once(latent, options))

    def _widen(self) -> None:
        """Compute in float32 from now on, and say so."""
        progress.warn(
            logger, "Decoding in %s gave NaN; decoding in float32 from now on", self.vae_dtype
        )
        self.vae_dtype = torch.float32
        self.patcher.detach()  # what rests is widened, so that the next load brings it so
        self.first_stage_model.to(torch.float32)
        self.patcher.size, self.size = 0, None

    def _encoder(self) -> Callable[[Tensor], Tensor]:
        """Pictures to latents, float32 on the output device."""

        def encode(part: Tensor) -> Tensor:
            interrupt.throw_exception_if_processing_interrupted()
            pixels = self._run(self.process_input(part))
            return self.first_stage_model.encode(pixels).to(self.output_device).float()

        return encode


def _spatial(ratio: Any) -> Any:
    """The ratio along height and width."""
    return ratio[-1] if isinstance(ratio, tuple) else ratio


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _video_overlap(overlap: int | None, overlap_t: int | None) -> tuple[int, int, int]:
    """Overlap along time, height and width."""
    space = 8 if overlap is None else overlap
    return (1 if overlap_t is None else max(1, overlap_t), space, space)


def _in_batches(x: Tensor, size: int, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Results of a function over slices of a batch, in one tensor that is filled as they come."""
    if size >= x.shape[0]:
        return run(x)
    out: Tensor | None = None
    for start in range(0, x.shape[0], size):
        part = run(x[start : start + size])
        if out is None:
            out = part.new_empty((x.shape[0], *part.shape[1:]))
        out[start : start + size] = part
    assert out is not None
    return out
