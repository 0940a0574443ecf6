"""Which device each kind of network runs on and rests on.

Custom nodes replace several of these functions, so callers inside the project use
`placement.unet_offload_device()`, never a bound name.
"""

from __future__ import annotations

import torch

from comfy.devices import accelerators, memory, precision
from comfy.devices.policies import CPUState, VRAMState
from comfy.devices.runtime import get_runtime

CPU = torch.device("cpu")


def get_torch_device() -> torch.device:
    """The device diffusion models run on."""
    return get_runtime().device


def get_all_torch_devices(exclude_current: bool = False) -> list[torch.device]:
    """All accelerators, or the CPU on a machine without one."""
    current = get_torch_device()
    devices = accelerators.accelerator_devices() if current.type != "cpu" else [CPU]
    return [d for d in devices if not (exclude_current and d == current)]


def resolve_device(choice: str | None) -> torch.device | None:
    """The device a loader's `device` widget means; None for "default".

    Raises:
        ValueError: No such device on this machine.
    """
    if choice in (None, "default", "main_device"):
        return None
    if choice == "cpu":
        return CPU
    known = {str(d): d for d in accelerators.accelerator_devices()}
    if choice in known:
        return known[choice]
    raise ValueError(f"unknown device '{choice}'; known: default, cpu, {', '.join(known)}")


def device_choices() -> list[str]:
    """What the `device` widget of a loader offers; accelerators by name where there are several."""
    several = get_all_torch_devices()
    named = [str(d) for d in several] if len(several) > 1 else []
    return ["default", "cpu", *named]


def placed(choice: str | None) -> dict[str, torch.device]:
    """`load_device` and `offload_device` that a choice means; empty where policies decide.

    Raises:
        ValueError: No such device on this machine.
    """
    device = resolve_device(choice)
    if device is None:
        return {}
    stays = device.type == "cpu" or get_runtime().vram_state == VRAMState.HIGH_VRAM
    return {"load_device": device, "offload_device": device if stays else CPU}


def get_torch_device_name(device: torch.device | str) -> str:
    """A device's name for logs and /system_stats."""
    if not isinstance(device, torch.device):
        return str(device)
    if device.type == "cpu":
        return "cpu"
    return f"{device} {accelerators.device_name(device)}"


def _rest_device(stays: bool) -> torch.device:
    return get_torch_device() if stays else CPU


def unet_offload_device() -> torch.device:
    """Where diffusion models rest."""
    return _rest_device(get_runtime().vram_state == VRAMState.HIGH_VRAM)


def unet_inital_load_device(  # the spelling is public
    parameters: int,  # noqa: ARG001 - public signature
    dtype: torch.dtype,  # noqa: ARG001 - public signature
) -> torch.device:
    """Where a diffusion model's weights are created.

    Args:
        parameters: Number of weights.
        dtype: Type they will be stored in.
    """
    runtime = get_runtime()
    if runtime.vram_state in (VRAMState.HIGH_VRAM, VRAMState.SHARED):
        return get_torch_device()
    return CPU


def text_encoder_device() -> torch.device:
    """Where text encoders run."""
    runtime = get_runtime()
    if runtime.memory.gpu_only:
        return get_torch_device()
    roomy = runtime.vram_state in (VRAMState.HIGH_VRAM, VRAMState.NORMAL_VRAM)
    if roomy and precision.should_use_fp16(prioritize_performance=False):
        return get_torch_device()
    return CPU


def text_encoder_offload_device() -> torch.device:
    """Where text encoders rest."""
    return _rest_device(get_runtime().memory.gpu_only)


def text_encoder_initial_device(
    load_device: torch.device, offload_device: torch.device, model_size: int = 0
) -> torch.device:
    """Where a text encoder of `model_size` bytes is created."""
    if load_device == offload_device or model_size <= memory.GIB:
        return offload_device
    if accelerators.accelerator_row(load_device).unified_memory:
        return load_device
    return offload_device


def vae_device() -> torch.device:
    """Where autoencoders run."""
    return CPU if get_runtime().precision.cpu_vae else get_torch_device()


def vae_offload_device() -> torch.device:
    """Where autoencoders rest."""
    return _rest_device(get_runtime().memory.gpu_only)


def intermediate_device() -> torch.device:
    """Where latents and images wait between nodes."""
    return _rest_device(get_runtime().memory.gpu_only)


def intermediate_dtype() -> torch.dtype:
    """Type of latents and images between nodes."""
    return torch.float32


def get_autocast_device(dev: torch.device) -> str:
    """Type name to give torch.autocast."""
    return str(getattr(dev, "type", "cuda"))


def is_device_type(device: object, type: str) -> bool:
    """Whether `device` is a torch device of the named type."""
    return getattr(device, "type", None) == type


def is_device_cpu(device: object) -> bool:
    """Whether `device` is the CPU."""
    return is_device_type(device, "cpu")


def is_device_mps(device: object) -> bool:
    """Whether `device` is Apple's GPU."""
    return is_device_type(device, "mps")


def is_device_xpu(device: object) -> bool:
    """Whether `device` is an Intel GPU."""
    return is_device_type(device, "xpu")


def is_device_cuda(device: object) -> bool:
    """Whether `device` is addressed through torch.cuda."""
    return is_device_type(device, "cuda")


def is_intel_xpu() -> bool:
    """Whether diffusion models run on an Intel GPU."""
    return is_device_xpu(get_torch_device())


def is_ascend_npu() -> bool:
    """Whether diffusion models run on an Ascend NPU."""
    return is_device_type(get_torch_device(), "npu")


def is_mlu() -> bool:
    """Whether diffusion models run on a Cambricon MLU."""
    return is_device_type(get_torch_device(), "mlu")


def is_directml_enabled() -> bool:
    """Whether diffusion models run through DirectML."""
    return is_device_type(get_torch_device(), "privateuseone")


def is_nvidia() -> bool:
    """Whether diffusion models run on an NVIDIA card."""
    return is_device_cuda(get_torch_device()) and torch.version.cuda is not None


def is_amd() -> bool:
    """Whether diffusion models run on an AMD card."""
    return is_device_cuda(get_torch_device()) and torch.version.hip is not None


def cpu_mode() -> bool:
    """Whether everything runs on the CPU."""
    return is_device_cpu(get_torch_device())


def mps_mode() -> bool:
    """Whether diffusion models run on Apple's GPU."""
    return is_device_mps(get_torch_device())


def lowvram_available() -> bool:
    """Whether models may be resident in part: always, since streaming asks no special device."""
    return True


def vram_state() -> VRAMState:
    """The resolved VRAM state."""
    return get_runtime().vram_state


def cpu_state() -> CPUState:
    """The kind of processor that runs networks."""
    return get_runtime().cpu_state


def smart_memory_disabled() -> bool:
    """Whether models are unloaded after every prompt."""
    return not get_runtime().memory.smart_memory


def in_training() -> bool:
    """Whether a training node holds the models: never, this server only infers."""
    return False
