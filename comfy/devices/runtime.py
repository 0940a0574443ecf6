"""The one object that public device functions act on: primary device and policies.

`main` installs a runtime built from the arguments; when nobody did, the first question builds one
from default policies. Building asks the device; importing does not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from comfy.devices import processor, reproducible
from comfy.devices.accelerators import accelerator_row, find_accelerator, with_index
from comfy.devices.policies import CPUState, MemoryPolicy, PrecisionPolicy, VRAMState

logger = logging.getLogger(__name__)


@dataclass
class Runtime:
    """Device facts and choices of this process.

    Attributes:
        device: Where diffusion models run.
        vram_state: Resolved from policy and device.
        pinned_bytes: Host memory that is page-locked now.
    """

    device: torch.device
    memory: MemoryPolicy
    precision: PrecisionPolicy
    vram_state: VRAMState
    pinned_bytes: int = 0

    @property
    def cpu_state(self) -> CPUState:
        """The processor kind of the primary device."""
        return {"cpu": CPUState.CPU, "mps": CPUState.MPS}.get(self.device.type, CPUState.GPU)


def build_runtime(
    memory: MemoryPolicy | None = None, precision: PrecisionPolicy | None = None
) -> Runtime:
    """Resolve policies against the machine.

    Raises:
        RuntimeError: The policy names a device that torch cannot use.
    """
    memory = memory or MemoryPolicy()
    precision = precision or PrecisionPolicy()
    reproducible.ask_for_equal_products()
    processor.heed_cpu_limit()
    device = _choose_device(memory)
    if device.type == "cpu":
        state = VRAMState.DISABLED
    elif memory.gpu_only:
        state = VRAMState.HIGH_VRAM
    elif memory.vram_state is not None:
        state = memory.vram_state
    else:
        unified = accelerator_row(device).unified_memory
        state = VRAMState.SHARED if unified else VRAMState.NORMAL_VRAM
    return Runtime(device, memory, precision, state)


def _choose_device(memory: MemoryPolicy) -> torch.device:
    if memory.cpu:
        return torch.device("cpu")
    if memory.device is not None:
        return with_index(memory.device)
    return find_accelerator() or torch.device("cpu")


def primary_device() -> torch.device:
    """The device diffusion models run on, as the public question answers it.

    Custom nodes that spread models over several devices replace that question; whatever means
    "the device" by default follows them by asking here.
    """
    from comfy.devices import placement  # asks this module

    return with_index(placement.get_torch_device())


_runtime: Runtime | None = None


def get_runtime() -> Runtime:
    """The installed runtime, or one built now from default policies."""
    global _runtime
    if _runtime is None:
        _runtime = build_runtime()
    return _runtime


def install_runtime(runtime: Runtime | None) -> None:
    """Make `runtime` the one public functions act on; None forgets it."""
    global _runtime
    _runtime = runtime
    wanted = runtime is not None and runtime.precision.deterministic
    if wanted != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wanted, warn_only=True)
