"""Which number type a network stores and computes in, per device, from the capability table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comfy.devices import accelerators, memory
from comfy.devices.runtime import get_runtime, primary_device

FLOAT8_TYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
    if hasattr(torch, name)
)
"""Storage types of eight bits that this torch knows."""

SUPPORTED = (torch.float16, torch.bfloat16, torch.float32)

UNKNOWN_PARAMS = 10**21
"""Weights assumed of a model whose size nobody knows: more than fit anywhere."""


def should_use_fp16(
    device: torch.device | None = None,
    model_params: int = 0,
    prioritize_performance: bool = True,
    manual_cast: bool = False,
) -> bool:
    """Whether a model should compute in float16.

    Args:
        device: Device; None is the primary one.
        model_params: Number of weights; matters on cards where float16 only saves memory.
        prioritize_performance: False also says yes where float16 saves memory but no time.
        manual_cast: The weights will be cast at use, so storage in float16 is enough.
    """
    policy = get_runtime().precision
    device = _device(device)
    if device.type == "cpu":
        return False
    if policy.force_fp16:
        return True
    if policy.force_fp32 or not accelerators.accelerator_row(device).fp16:
        return False
    if accelerators.has_fast_fp16(device):
        return True
    return manual_cast and _saves_memory(device, model_params, prioritize_performance)


def should_use_bf16(
    device: torch.device | None = None,
    model_params: int = 0,
    prioritize_performance: bool = True,
    manual_cast: bool = False,
) -> bool:
    """Whether a model should compute in bfloat16; arguments as in `should_use_fp16`."""
    policy = get_runtime().precision
    device = _device(device)
    if policy.force_fp32:
        return False
    if device.type == "cpu":
        return policy.cpu_bf16 and accelerators.cpu_multiplies_bf16()
    if accelerators.has_bf16(device):
        return True
    emulated = accelerators.compute_capability(device) is not None
    return emulated and manual_cast and _saves_memory(device, model_params, prioritize_performance)


def _device(device: torch.device | None) -> torch.device:
    return primary_device() if device is None else accelerators.with_index(device)


def _saves_memory(device: torch.device, model_params: int, prioritize_performance: bool) -> bool:
    """Whether half the bytes are worth having on a device that computes no faster in them."""
    room = memory.maximum_vram_for_weights(device)
    return not prioritize_performance or model_params * 4 > room


def supports_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device can compute in a type."""
    row = accelerators.accelerator_row(device)
    if dtype == torch.float32:
        return True
    if device.type == "cpu":
        return False
    if dtype == torch.float64:
        return row.fp64
    if dtype == torch.float16:
        return row.fp16
    return dtype == torch.bfloat16 and row.bf16 is not False


def supports_cast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device can hold tensors of a type and cast them."""
    row = accelerators.accelerator_row(device)
    if dtype in FLOAT8_TYPES:
        return row.fp8_storage
    if dtype == torch.float64:
        return row.fp64
    return dtype in SUPPORTED


def get_supported_float8_types() -> list[torch.dtype]:
    """Storage types of eight bits that this torch knows."""
    return list(FLOAT8_TYPES)


def lora_compute_dtype(device: torch.device) -> torch.dtype:
    """The type in which a device multiplies the factors of a LoRA fastest."""
    return torch.float16 if should_use_fp16(device) else torch.float32


def supports_fp8_compute(device: torch.device | None = None) -> bool:
    """Whether matrix products in float8 may be used."""
    if get_runtime().precision.supports_fp8_compute:
        return True
    return accelerators.has_fp8_compute(_device(device))


def unet_dtype(
    device: torch.device | None = None,
    model_params: int = 0,
    supported_dtypes: Sequence[torch.dtype] = SUPPORTED,
    weight_dtype: torch.dtype | None = None,
) -> torch.dtype:
    """The type a diffusion model's weights are stored in.

    A float8 file stays as it is where products in float8 are possible or the wider weights would
    not fit; else its values, which are exact in the wider type, are widened once. A float16 file
    stays float16 where the device computes in it and the family tolerates it.

    Args:
        device: Device it will run on; None is the primary one.
        model_params: Number of weights; negative means unknown and many.
        supported_dtypes: Types the family computes well in, best first.
        weight_dtype: Type found in the file.
    """
    policy = get_runtime().precision
    device = _device(device)
    params = UNKNOWN_PARAMS if model_params < 0 else model_params
    if policy.unet_dtype is not None:
        return policy.unet_dtype
    if weight_dtype in FLOAT8_TYPES and supports_cast(device, weight_dtype):
        wide_bytes = params * torch.float16.itemsize
        if supports_fp8_compute(device) or wide_bytes > memory.maximum_vram_for_weights(device):
            return weight_dtype
    kept = weight_dtype == torch.float16 or "fp16_accumulation" in policy.fast
    if kept and torch.float16 in supported_dtypes and should_use_fp16(device, params):
        return torch.float16
    chosen = _first_usable(device, params, supported_dtypes, manual_cast=False)
    if chosen is None and device.type != "cpu":
        chosen = _first_usable(device, params, supported_dtypes, manual_cast=True)
    return chosen or torch.float32


def _first_usable(
    device: torch.device, model_params: int, candidates: Sequence[torch.dtype], manual_cast: bool
) -> torch.dtype | None:
    questions = {torch.float16: should_use_fp16, torch.bfloat16: should_use_bf16}
    for dtype in candidates:
        ask = questions.get(dtype)
        if ask is not None and ask(device, model_params, manual_cast=manual_cast):
            return dtype
    return None


def unet_manual_cast(
    weight_dtype: torch.dtype | None,
    inference_device: torch.device,
    supported_dtypes: Sequence[torch.dtype] = SUPPORTED,
) -> torch.dtype | None:
    """The type to cast weights to at use, or None when they compute as they are stored."""
    if weight_dtype in (torch.float32, torch.float64):
        return None
    if weight_dtype == torch.float16 and should_use_fp16(
        inference_device, prioritize_performance=False
    ):
        return None
    if weight_dtype == torch.bfloat16 and should_use_bf16(inference_device):
        return None
    if (
        "fp16_accumulation" in get_runtime().precision.fast
        and torch.float16 in supported_dtypes
        and should_use_fp16(inference_device)
    ):
        return torch.float16
    return _first_usable(inference_device, 0, supported_dtypes, manual_cast=False) or torch.float32


def vae_dtype(
    device: torch.device | None = None, allowed_dtypes: Sequence[torch.dtype] = ()
) -> torch.dtype:
    """The type an autoencoder computes in; `allowed_dtypes` are what it tolerates, best first."""
    chosen = get_runtime().precision.vae_dtype
    if chosen is not None:
        return chosen
    where = _device(device)
    for dtype in allowed_dtypes:
        if dtype == torch.float16 and should_use_fp16(where):
            return dtype
        if dtype == torch.bfloat16 and _has_bf16_convolutions(where):
            return dtype
    return torch.float32


def _has_bf16_convolutions(device: torch.device) -> bool:
    """Whether large convolutions in bfloat16 pay: neither on AMD cards nor on the CPU."""
    slow = device.type == "cpu" or accelerators.amd_architecture(device) is not None
    return should_use_bf16(device) and not slow


def text_encoder_dtype(device: torch.device | None = None) -> torch.dtype:  # noqa: ARG001
    """The type a text encoder's weights are stored in."""
    return get_runtime().precision.text_encoder_dtype or torch.float16


def pick_weight_dtype(
    dtype: torch.dtype | None, fallback_dtype: torch.dtype, device: torch.device | None = None
) -> torch.dtype:
    """`dtype` where the device can hold it, else `fallback_dtype`."""
    if dtype is None or dtype.itemsize > fallback_dtype.itemsize:
        return fallback_dtype
    return dtype if supports_cast(_device(device), dtype) else fallback_dtype


def float32_forced() -> bool:
    """Whether everything computes in float32."""
    return get_runtime().precision.force_fp32


def force_channels_last() -> bool:
    """Whether convolutions should use the channels-last layout."""
    return get_runtime().precision.force_channels_last


def tunes_cpu() -> bool:
    """Whether networks on the CPU may use layouts and products chosen for speed."""
    return get_runtime().precision.tune_cpu


def force_upcast_attention_dtype() -> dict[torch.dtype, torch.dtype] | None:
    """Types whose attention is computed in a wider one, or None."""
    precision = get_runtime().precision
    if precision.force_upcast_attention:
        return {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    return None


def attention_precision(asked: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    """Type of the scores of queries in ``dtype``, of which a network may have asked for a wider
    one; None leaves them as they are.
    """
    if get_runtime().precision.dont_upcast_attention:
        return None
    return (force_upcast_attention_dtype() or {}).get(dtype, asked)
