"""Devices, precision and residency, under the names custom nodes import.

Longer than a re-export usually is: it names the most used module of the public interface.
"""
# ruff: noqa: F401

from comfy.devices import accelerators, attention_facts, memory, placement, precision
from comfy.devices.attention_facts import (
    flash_attention_enabled,
    pytorch_attention_enabled,
    pytorch_attention_enabled_vae,
    pytorch_attention_flash_attention,
    sage_attention_enabled,
    xformers_enabled,
    xformers_enabled_vae,
)
from comfy.devices.casting import (
    cast_to,
    cast_to_device,
    current_stream,
    device_supports_non_blocking,
)
from comfy.devices.loaded_model import LoadedModel
from comfy.devices.memory import (
    EXTRA_RESERVED_VRAM,
    MIN_WEIGHT_MEMORY_RATIO,
    OOM_EXCEPTION,
    dtype_size,
    extra_reserved_memory,
    get_free_memory,
    get_total_memory,
    is_oom,
    maximum_vram_for_weights,
    minimum_inference_memory,
    module_size,
    raise_non_oom,
    soft_empty_cache,
)
from comfy.devices.placement import (
    cpu_mode,
    get_all_torch_devices,
    get_autocast_device,
    get_torch_device,
    get_torch_device_name,
    in_training,
    intermediate_device,
    intermediate_dtype,
    is_amd,
    is_ascend_npu,
    is_device_cpu,
    is_device_cuda,
    is_device_mps,
    is_device_type,
    is_device_xpu,
    is_directml_enabled,
    is_intel_xpu,
    is_mlu,
    is_nvidia,
    mps_mode,
    text_encoder_device,
    text_encoder_initial_device,
    text_encoder_offload_device,
    unet_inital_load_device,
    unet_offload_device,
    vae_device,
    vae_offload_device,
)
from comfy.devices.policies import CPUState, VRAMState
from comfy.devices.precision import (
    FLOAT8_TYPES,
    force_channels_last,
    force_upcast_attention_dtype,
    get_supported_float8_types,
    lora_compute_dtype,
    pick_weight_dtype,
    should_use_bf16,
    should_use_fp16,
    supports_cast,
    supports_dtype,
    supports_fp8_compute,
    text_encoder_dtype,
    unet_dtype,
    unet_manual_cast,
    vae_dtype,
)
from comfy.devices.residency import (
    cleanup_models,
    cleanup_models_gc,
    current_loaded_models,
    free_memory,
    load_model_gpu,
    load_models_gpu,
    loaded_models,
    offloaded_memory,
    unload_all_models,
    unload_model_clones,
    use_more_memory,
)
from comfy.interrupt import (
    InterruptProcessingException,
    interrupt_current_processing,
    processing_interrupted,
    throw_exception_if_processing_interrupted,
)
from comfy.public import write_through

write_through(
    __name__,
    {
        "vram_state": placement.vram_state,
        "cpu_state": placement.cpu_state,
        "DISABLE_SMART_MEMORY": placement.smart_memory_disabled,
        "xpu_available": placement.is_intel_xpu,
        "directml_enabled": placement.is_directml_enabled,
        "XFORMERS_IS_AVAILABLE": attention_facts.xformers_enabled,
        "XFORMERS_ENABLED_VAE": attention_facts.xformers_enabled_vae,
        "ENABLE_PYTORCH_ATTENTION": attention_facts.pytorch_attention_enabled,
        "FORCE_FP32": precision.float32_forced,
        "lowvram_available": placement.lowvram_available,
        "torch_version": accelerators.torch_version,
        "torch_version_numeric": accelerators.torch_version_numeric,
        "total_vram": memory.total_vram_mib,
        "total_ram": memory.total_ram_mib,
    },
    EXTRA_RESERVED_VRAM="comfy.devices.memory",
    MIN_WEIGHT_MEMORY_RATIO="comfy.devices.memory",
    OOM_EXCEPTION="comfy.devices.memory",
    FLOAT8_TYPES="comfy.devices.precision",
    current_loaded_models="comfy.devices.residency",
)
