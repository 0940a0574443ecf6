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
    assert precision.unet_dtype(weight_dtype=torch.float8_e4m3fn) == torch.float8_e4m3fn  # (9, 0)
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


# -- the policy, card by card ------------------------------------------------------------------

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn
SD, FLUX, BF16_ONLY = (FP16, FP32), (BF16, FP16, FP32), (BF16, FP32)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card by capability, name and GiB, as `torch.device("cuda:5")`."""

    def make(capability: tuple[int, int] | None, gib: float = 24.0, name: str = "") -> torch.device:
        device = torch.device("cuda:5")
        install_runtime(build_runtime(MemoryPolicy(cpu=True, reserve_vram_bytes=0)))
        for ask in (
            accelerators.has_fast_fp16,
            accelerators.has_bf16,
            accelerators.has_fp8_compute,
        ):
            ask.cache_clear()
        monkeypatch.setattr(accelerators, "compute_capability", lambda _: capability)
        monkeypatch.setattr(accelerators, "device_name", lambda _: name)
        monkeypatch.setattr(memory, "_device_free_total", lambda _: (int(gib * 2**30),) * 2)
        monkeypatch.setattr(memory, "_allocator_stats", lambda _, *names: [0] * len(names))
        return device

    yield make
    for ask in (accelerators.has_fast_fp16, accelerators.has_bf16, accelerators.has_fp8_compute):
        ask.cache_clear()


@pytest.mark.parametrize(
    ("capability", "gib", "name", "billions", "supported", "file", "storage", "cast"),
    [
        ((8, 6), 24, "RTX 3090", 2.6, SD, FP16, FP16, None),
        ((8, 6), 24, "RTX 3090", 2.6, SD, FP32, FP16, None),
        ((8, 6), 24, "RTX 3090", 12, FLUX, BF16, BF16, None),
        ((8, 6), 24, "RTX 3090", 12, FLUX, FP16, FP16, None),  # the file's type is kept
        ((8, 6), 24, "RTX 3090", 12, FLUX, FP8, FP8, BF16),  # 24 GB in bfloat16 would not fit
        ((8, 6), 24, "RTX 3090", 2, FLUX, FP8, BF16, None),  # fits: widened once, not at each use
        ((8, 9), 24, "RTX 4090", 2, FLUX, FP8, FP8, BF16),  # multiplies float8 itself
        ((8, 6), 8, "RTX 3060 Ti", 12, FLUX, BF16, BF16, None),
        ((7, 5), 8, "RTX 2080", 2.6, SD, FP16, FP16, None),
        ((7, 5), 8, "RTX 2080", 12, FLUX, BF16, FP16, None),
        ((7, 5), 8, "RTX 2080", 12, BF16_ONLY, BF16, BF16, FP32),  # stored, not computed, in it
        ((7, 5), 8, "RTX 2080", 0.5, BF16_ONLY, BF16, FP32, None),
        ((7, 5), 6, "GeForce GTX 1660 Ti", 0.9, SD, FP16, FP32, None),
        ((7, 5), 6, "GeForce GTX 1660 Ti", 2.6, SD, FP16, FP16, FP32),
        ((6, 1), 8, "GeForce GTX 1080", 2.6, SD, FP16, FP16, FP32),
    ],
)
def test_storage_and_computation_follow_card_and_file(
    card: Any, capability: Any, gib: float, name: str, billions: float,
    supported: Any, file: Any, storage: Any, cast: Any,
) -> None:  # fmt: skip
    device = card(capability, gib, name)
    got = precision.unet_dtype(device, int(billions * 1e9), supported, file)
    assert got == storage
    assert precision.unet_manual_cast(got, device, supported) == cast


def test_autoencoders_take_the_first_type_that_pays(card: Any) -> None:
    assert precision.vae_dtype(card((8, 6)), [BF16, FP32]) == BF16
    assert precision.vae_dtype(card((7, 5)), [BF16, FP32]) == FP32
    assert precision.vae_dtype(card((7, 5)), [FP16, BF16]) == FP16


def test_old_amd_and_apple_systems_do_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda:6")
    monkeypatch.setattr(accelerators, "compute_capability", lambda _: None)
    for architecture, able in (("gfx1030", False), ("gfx1100", True)):
        accelerators.has_bf16.cache_clear()
        monkeypatch.setattr(accelerators, "amd_architecture", lambda _, name=architecture: name)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        assert accelerators.has_bf16(card) is able
        assert precision.vae_dtype(card, [BF16, FP32]) == FP32
    for version, able in (((13, 6), False), ((14, 0), True)):
        accelerators.has_bf16.cache_clear()
        monkeypatch.setattr(accelerators, "macos_version", lambda v=version: v)
        assert accelerators.has_bf16(MPS) is able
    accelerators.has_bf16.cache_clear()


def test_a_file_in_float8_is_widened_where_it_cannot_be_held() -> None:
    with_precision()
    assert precision.unet_dtype(MPS, 10**10, SD, FP8) == FP16


def test_the_cpu_computes_in_bfloat16_only_when_asked_and_able(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for able, asked in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(accelerators, "cpu_multiplies_bf16", lambda able=able: able)
        with_precision(cpu_bf16=asked)
        expected = BF16 if able and asked else FP32
        assert precision.unet_dtype(CPU, 10**9, FLUX, FP16) == expected
        assert precision.unet_manual_cast(FP16, CPU, FLUX) == expected
        assert precision.vae_dtype(CPU, [BF16, FP32]) == FP32


def test_flags_force_types(card: Any) -> None:
    device = card((8, 6))
    install_runtime(build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(force_fp32=True)))
    assert precision.unet_dtype(device, 10**9, FLUX, BF16) == FP32
    install_runtime(build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(force_fp16=True)))
    assert precision.unet_dtype(device, 10**9, SD, FP32) == FP16
    fast = PrecisionPolicy(fast=frozenset({"fp16_accumulation"}))
    install_runtime(build_runtime(MemoryPolicy(cpu=True), fast))
    assert precision.unet_dtype(device, 10**9, FLUX, BF16) == FP16
    assert precision.unet_manual_cast(FP8, device, FLUX) == FP16


def test_copies_to_the_cpu_are_always_waited_for(accelerator: Any) -> None:
    from comfy.devices import casting

    device = placement.get_torch_device()
    assert casting.device_supports_non_blocking(device)
    assert not casting.device_supports_non_blocking(CPU)
    with simulated_accelerator(force_non_blocking=True):
        assert not casting.device_supports_non_blocking(CPU)


def test_a_device_that_cannot_tell_what_is_free_is_asked_for_its_size(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("this device does not support querying the available memory")

    device = placement.get_torch_device()
    accelerator.set_capacity(1 << 20)
    held = torch.empty(1000, dtype=torch.uint8, device=device)
    total = accelerators.device_module(device).mem_get_info(device)[1]
    monkeypatch.setattr(accelerators.device_module(device), "mem_get_info", refuse, raising=False)
    monkeypatch.setattr(
        accelerators.device_module(device), "get_device_properties",
        lambda _: type("P", (), {"total_memory": total}), raising=False,
    )  # fmt: skip
    assert memory.get_total_memory(device) == total
    assert memory.get_free_memory(device) == total - held.nbytes


def test_memory_errors_of_every_back_end_are_known() -> None:
    assert memory.is_oom(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert memory.is_oom(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert memory.is_oom(MemoryError())
    assert not memory.is_oom(RuntimeError("shape mismatch"))

    class Unprintable(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert not memory.is_oom(Unprintable())
