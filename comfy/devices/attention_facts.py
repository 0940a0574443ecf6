"""Which attention packages are there and allowed, for code that asks before it builds a network."""

from __future__ import annotations

import importlib.util

from comfy.devices.runtime import get_runtime, primary_device


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def xformers_enabled() -> bool:
    """Whether xformers attention may be used."""
    if get_runtime().precision.disable_xformers or primary_device().type != "cuda":
        return False
    return _installed("xformers")


def xformers_enabled_vae() -> bool:
    """Whether xformers attention may be used in autoencoders."""
    return xformers_enabled()


def pytorch_attention_enabled() -> bool:
    """Whether torch's fused attention is the one in use."""
    return get_runtime().precision.attention in (None, "pytorch")


def pytorch_attention_enabled_vae() -> bool:
    """Whether torch's fused attention is used in autoencoders."""
    return pytorch_attention_enabled()


def pytorch_attention_flash_attention() -> bool:
    """Whether torch's fused attention has a memory-saving kernel on the device."""
    return pytorch_attention_enabled() and primary_device().type != "cpu"


def sage_attention_enabled() -> bool:
    """Whether SageAttention was asked for."""
    return get_runtime().precision.attention == "sage"


def flash_attention_enabled() -> bool:
    """Whether FlashAttention was asked for."""
    return get_runtime().precision.attention == "flash"
