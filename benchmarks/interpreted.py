"""Attention packages without a GPU: their own Triton kernels, interpreted on the CPU.

    python benchmarks/attention.py --interpreted
    python benchmarks/quality.py --interpreted

Triton can run a kernel as Python, element for element as it is written, where the environment says
`TRITON_INTERPRET=1`. The packages hold tensors on the CPU off nevertheless; `accept_cpu_tensors`
lets them through, and the program's own back ends send them there. What is computed between such a
call and its result is the package's code; only CUDA kernels cannot be run so.

Each package and how it is installed without a compiler for GPUs (Triton comes with torch):

    sageattention 1.0.6   pip install --no-deps sageattention==1.0.6
    flash-attn 2.8.3      pip install --no-deps --no-build-isolation flash-attn==2.8.3
                          with FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE in the environment, and
                          FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE (needs wheel and setuptools)
    xformers 0.0.35       pip install --no-deps xformers==0.0.35

FlashAttention's Triton kernel is the one that it has for AMD's GPUs, xFormers' its split-K kernel
(head sizes that are powers of two). `VARIABLES` must stand in the environment at the start.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from comfy.nn.attention import optional

VARIABLES = {
    "TRITON_INTERPRET": "1",  # Triton: kernels are run as Python
    "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE",  # flash-attn: Triton in place of CUDA
    "XFORMERS_ENABLE_TRITON": "1",  # xFormers: Triton although no GPU is there
}


def accept_cpu_tensors() -> None:
    """Has back ends and installed packages take tensors on the CPU, for the rest of the process.

    Raises:
        SystemExit: The environment lacks a variable that the packages read when imported.
    """
    if any(os.environ.get(name) != value for name, value in VARIABLES.items()):
        wanted = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
        raise SystemExit(f"interpreted kernels need this in the environment: {wanted}")
    optional._is_on_accelerator = lambda _: True  # type: ignore[assignment]
    _mend_bfloat16()
    for module, change in (
        ("sageattention", _sage),
        ("flash_attn", _flash),
        ("xformers", _xformers),
    ):
        if optional.is_installed(module):
            change()


def _mend_bfloat16() -> None:
    """As on a GPU, products of bfloat16 are added in float32, and float32 is rounded to nearest.

    The interpreter of Triton 3.8 holds bfloat16 as bits, multiplies these as integers, and cuts.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, holder = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = torch.from_numpy(handle.data.astype("uint16")).view(torch.bfloat16)
        return holder(bits.float().numpy(), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        if wanted.scalar != tl.bfloat16:
            return cast(self, widened(source), wanted)
        rounded = torch.from_numpy(widened(source).data.astype("float32")).bfloat16()
        return holder(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


def _sage() -> None:
    """It asserts that its tensors are CUDA's: during its calls all tensors say so."""
    package: Any = importlib.import_module("sageattention")
    original = package.sageattn

    def sageattn(*args: Any, **kwargs: Any) -> Any:
        torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment, method-assign]
        try:
            return original(*args, **kwargs)
        finally:
            del torch.Tensor.is_cuda

    package.sageattn = sageattn


def _flash() -> None:
    """It asks Triton for the GPU when imported, and its operation is registered for CUDA only."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 80, 32)

        def get_benchmarker(self) -> Any:
            return None

    triton.runtime.driver.set_active(Driver())
    interface: Any = importlib.import_module("flash_attn.flash_attn_interface")
    forward = interface._flash_attn_forward
    forward.register_kernel("cpu")(forward._init_fn)


def _xformers() -> None:
    """It chooses among kernels by device: the one in Triton is left, and takes the CPU's."""
    dispatch: Any = importlib.import_module("xformers.ops.fmha.dispatch")
    split_k: Any = importlib.import_module("xformers.ops.fmha.triton_splitk")
    torch.cuda.get_device_capability = lambda *_: (8, 0)

    class Interpreted(split_k.FwOp):  # type: ignore[misc]
        SUPPORTED_DEVICES = {"cpu"}  # noqa: RUF012

        @classmethod
        def not_supported_reasons(cls, inputs: Any) -> list[str]:
            reasons = super().not_supported_reasons(inputs)
            return [reason for reason in reasons if not reason.startswith("bf16 is only")]

    dispatch._dispatch_fw_priority_list = lambda *_, **__: [Interpreted]
