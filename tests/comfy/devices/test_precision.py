"""Number types by device: float32 on the CPU, the table elsewhere; policies win."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy.devices import accelerators, memory, placement, precision
from comfy.devices.policies import MemoryPolicy, PrecisionPolicy, VRAMState
from comfy.devices.runtime import build_runtime, install_runtime
from tests.support.accelerator import simulated_accelerator

CPU = torch.device("cpu")
MPS = torch.device("mps")


def with_precision(**fields: Any) -> None:
    install_runtime(build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(**fields)))


def test_the_cpu_computes_in_float32() -> None:
    install_runtime(build_runtime(MemoryPolicy(cpu=True)))
    assert not precision.should_use_fp16()
    assert not precision.should_use_bf16()
    assert precision.unet_dtype(weight_dtype=torch.float16) == torch.float32
    assert precision.unet_manual_cast(torch.float16, CPU) == torch.float32
    assert precision.unet_manual_cast(torch.float32, CPU) is None
    assert precision.vae_dtype(CPU, [torch.bfloat16]) == torch.float32
    assert placement.vram_state() == VRAMState.DISABLED
    assert placement.get_torch_device() == CPU


def test_an_accelerator_uses_the_first_type_the_family_and_it_agree_on(accelerator: Any) -> None:
    device = placement.get_torch_device()
    assert device.type == accelerator.NAME
    assert precision.unet_dtype(weight_dtype=torch.float32) == torch.float16
    assert precision.unet_dtype(supported_dtypes=[torch.bfloat16]) == torch.bfloat16
    assert precision.unet_dtype(supported_dtypes=[torch.float32]) == torch.float32
    assert precision.unet_dtype(weight_dtype=torch.float8_e4m3fn) == torch.float8_e4m3fn
    assert precision.unet_manual_cast(torch.float8_e4m3fn, device) == torch.float16
    assert precision.unet_manual_cast(torch.bfloat16, device) is None
    assert placement.unet_offload_device() == CPU
    assert placement.vae_device() == device


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"unet_dtype": torch.float64}, torch.float64),
        ({"unet_dtype": torch.float8_e5m2}, torch.float8_e5m2),
        ({}, torch.float32),
    ],
)
def test_a_policy_wins_over_the_device(fields: dict[str, Any], expected: torch.dtype) -> None:
    with_precision(**fields)
    assert precision.unet_dtype() == expected


def test_types_of_other_parts_and_upcasts_follow_the_policy() -> None:
    with_precision(
        vae_dtype=torch.bfloat16, text_encoder_dtype=torch.float32, force_upcast_attention=True
    )
    assert precision.vae_dtype() == torch.bfloat16
    assert precision.text_encoder_dtype() == torch.float32
    upcast = precision.force_upcast_attention_dtype()
    assert upcast is not None
    assert upcast[torch.float16] == torch.float32
    with_precision()
    assert precision.force_upcast_attention_dtype() is None
    assert precision.text_encoder_dtype() == torch.float16


def test_capabilities_come_from_the_table() -> None:
    assert not precision.supports_dtype(MPS, torch.float64)
    assert not precision.supports_cast(MPS, torch.float8_e4m3fn)
    assert precision.supports_dtype(MPS, torch.float16)
    assert accelerators.accelerator_row(torch.device("xpu:0")).type == "xpu"
    assert accelerators.accelerator_row(torch.device("meta")).streams  # a type without a row


def test_a_type_a_device_cannot_hold_falls_back() -> None:
    assert precision.pick_weight_dtype(torch.float8_e4m3fn, torch.float16, CPU) == (
        torch.float8_e4m3fn
    )
    assert precision.pick_weight_dtype(torch.float8_e4m3fn, torch.float16, MPS) == torch.float16
    assert precision.pick_weight_dtype(torch.float32, torch.float16, CPU) == torch.float16
    assert precision.pick_weight_dtype(None, torch.bfloat16, CPU) == torch.bfloat16


def test_gpu_only_keeps_everything_on_the_device() -> None:
    with simulated_accelerator(gpu_only=True, vram_state=None) as fakegpu:
        device = torch.device(f"{fakegpu.NAME}:0")
        assert placement.vram_state() == VRAMState.HIGH_VRAM
        for ask in (
            placement.unet_offload_device, placement.text_encoder_offload_device,
            placement.vae_offload_device, placement.intermediate_device,
        ):  # fmt: skip
            assert ask() == device


def test_a_device_choice_is_resolved_or_refused(accelerator: Any) -> None:
    assert placement.resolve_device("default") is None
    assert placement.resolve_device("cpu") == CPU
    name = f"{accelerator.NAME}:0"
    assert placement.resolve_device(name) == torch.device(name)
    with pytest.raises(ValueError, match=r"known: default, cpu"):
        placement.resolve_device("cuda:7")


def test_memory_is_counted_with_what_the_allocator_keeps(accelerator: Any) -> None:
    device = placement.get_torch_device()
    accelerator.set_capacity(1 << 20)
    accelerator.set_external(1 << 18)
    assert memory.get_total_memory(device) == 1 << 20
    block = torch.empty(1 << 16, dtype=torch.uint8, device=device)
    assert memory.get_free_memory(device) == (1 << 20) - (1 << 18) - (1 << 16)
    del block
    free, cached = memory.get_free_memory(device, torch_free_too=True)
    assert (free, cached) == ((1 << 20) - (1 << 18), 1 << 16)
    memory.soft_empty_cache()
    assert memory.get_free_memory(device, torch_free_too=True)[1] == 0


def test_out_of_memory_is_told_from_other_errors() -> None:
    assert memory.is_oom(torch.OutOfMemoryError("full"))
    assert not memory.is_oom(ValueError("other"))
    memory.raise_non_oom(torch.OutOfMemoryError("full"))
    with pytest.raises(ValueError, match="other"):
        memory.raise_non_oom(ValueError("other"))
