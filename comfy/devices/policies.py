"""Choices about memory and precision that are made once; nothing here asks a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch


class VRAMState(Enum):
    """How much of a model may stay on the accelerator."""

    DISABLED = 0
    """No accelerator: everything runs on the CPU."""
    NO_VRAM = 1
    """Keep next to nothing resident; stream every weight."""
    LOW_VRAM = 2
    """Keep part of the diffusion model resident."""
    NORMAL_VRAM = 3
    """Keep what fits, unload after use when room is needed."""
    HIGH_VRAM = 4
    """Leave models on the accelerator after use."""
    SHARED = 5
    """One memory for CPU and accelerator: moving saves nothing."""


class CPUState(Enum):
    """What kind of processor runs the networks."""

    GPU = 0
    CPU = 1
    MPS = 2


@dataclass(frozen=True)
class MemoryPolicy:
    """How device and host memory are used.

    Attributes:
        cpu: Run everything on the CPU.
        device: Primary device such as "cuda:1"; None takes the current accelerator.
        vram_state: None decides from the device (NORMAL_VRAM, SHARED or DISABLED).
        gpu_only: Keep text encoders, VAE and intermediate results on the accelerator too.
        reserve_vram_bytes: Accelerator bytes left to other programs; None is the platform's usual.
        async_offload_streams: Copy streams for streamed weights; None decides, 0 switches off.
        smart_memory: Keep models resident between prompts when memory allows.
        pinned_memory: Page-lock host copies of streamed weights.
        force_non_blocking: Use non-blocking copies wherever a tensor allows it.
        memory_map: Memory-map weight files instead of reading them.
        huge_pages: Ask the system for huge pages for large weights.
        dynamic_residency: Use the per-weight patcher as the core one; None decides.
        idle_unload_s: Unload models nobody used for this many seconds; None never.
    """

    cpu: bool = False
    device: str | None = None
    vram_state: VRAMState | None = None
    gpu_only: bool = False
    reserve_vram_bytes: int | None = None
    async_offload_streams: int | None = None
    smart_memory: bool = True
    pinned_memory: bool = True
    force_non_blocking: bool = False
    memory_map: bool = True
    huge_pages: bool = True
    dynamic_residency: bool | None = None
    idle_unload_s: float | None = None


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which number types networks compute and store in; None leaves the choice to the device."""

    force_fp32: bool = False
    force_fp16: bool = False
    unet_dtype: torch.dtype | None = None
    vae_dtype: torch.dtype | None = None
    text_encoder_dtype: torch.dtype | None = None
    cpu_vae: bool = False
    cpu_bf16: bool = False
    """Compute diffusion models in bfloat16 on a CPU that multiplies it natively."""
    force_channels_last: bool = False
    supports_fp8_compute: bool = False
    force_upcast_attention: bool = False
    dont_upcast_attention: bool = False
    deterministic: bool = False
    paper_formulas: bool = False
    """Published formulas also where the pictures that people have are made by others."""
    tune_cpu: bool = True
    """On the CPU: channels innermost, products instead of convolutions or fused attention where
    they are faster."""
    attention: str | None = None
    """Forced attention back end: split, sub_quad, pytorch, sage, flash; None decides."""
    disable_xformers: bool = False
    fast: frozenset[str] = field(default_factory=frozenset)
    """Opt-in speed options: fp16_accumulation, fp8_matrix_mult, cublas_ops, autotune."""
