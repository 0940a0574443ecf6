"""Options of the computation: devices, memory, number types and kernels."""

from __future__ import annotations

import argparse

from comfy.options.kinds import (
    NO_EFFECT,
    FillAll,
    PerformanceFeature,
    amount,
    count,
    exclusive,
    member_of,
    switches,
)


def add_devices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--cuda-device", metavar="INDEX", help="Make only this device visible.")
    add(
        "--default-device",
        type=count,
        metavar="INDEX",
        help="Move this device to the front of the list.",
    )
    add("--directml", type=int, nargs="?", const=-1, default=None, help="DirectML. " + NO_EFFECT)
    add("--oneapi-device-selector", metavar="TEXT", help="Value for the oneAPI device selector.")
    add("--reserve-vram", type=amount, metavar="GB", help="Accelerator memory to leave free.")
    add(
        "--idle-unload",
        type=amount,
        metavar="SECONDS",
        help="Unload models that nobody used for this long (default: never).",
    )
    add(
        "--async-offload",
        type=count,
        nargs="?",
        const=2,
        default=None,
        metavar="STREAMS",
        help="Asynchronous weight transfer with this many streams (bare flag: 2).",
    )
    exclusive(
        group,
        ("--cuda-malloc", "Ask for the asynchronous CUDA allocator."),
        ("--disable-cuda-malloc", "Never use the asynchronous CUDA allocator."),
    )
    exclusive(
        group,
        ("--gpu-only", "Keep and run everything on the accelerator."),
        ("--highvram", "Leave models on the accelerator after use."),
        ("--normalvram", "Override an automatic low-memory choice."),
        ("--lowvram", "Hold the diffusion model partly off the accelerator."),
        ("--novram", "Hold as little as possible on the accelerator."),
        ("--cpu", "Run on the CPU."),
    )
    switches(
        group,
        ("--disable-ipex-optimize", NO_EFFECT),
        ("--disable-async-offload", "No asynchronous weight transfer."),
        ("--force-non-blocking", "Non-blocking transfers wherever a tensor allows it."),
        ("--disable-smart-memory", "Unload models after every prompt."),
        ("--disable-pinned-memory", "No page-locked host memory."),
        ("--disable-dynamic-vram", "Use the classic model patcher (residency per module)."),
        ("--enable-dynamic-vram", "Use the dynamic model patcher (residency per weight)."),
        ("--mmap-torch-files", "Memory-map pickle-format checkpoints."),
        ("--disable-mmap", "Read safetensors without memory mapping."),
        ("--disable-huge-pages", "Keep large weights in pages of the usual size."),
    )


def add_precision(group: argparse._ArgumentGroup) -> None:
    exclusive(
        group,
        ("--force-fp32", "float32 everywhere."),
        ("--force-fp16", "float16; also turns on --fp16-unet."),
    )
    unet = [
        f"--{kind}-unet"
        for kind in ("fp32", "fp64", "bf16", "fp16", "fp8_e4m3fn", "fp8_e5m2", "fp8_e8m0fnu")
    ]
    vae = [f"--{kind}-vae" for kind in ("fp16", "fp32", "bf16")]
    text = [f"--{kind}-text-enc" for kind in ("fp8_e4m3fn", "fp8_e5m2", "fp16", "fp32", "bf16")]
    exclusive(group, *((flag, "Number type of the diffusion model.") for flag in unet))
    exclusive(group, *((flag, "Number type of the VAE.") for flag in vae))
    exclusive(group, *((flag, "Storage type of text encoder weights.") for flag in text))
    exclusive(
        group,
        ("--use-split-cross-attention", "Force split attention."),
        ("--use-quad-cross-attention", "Force sub-quadratic attention."),
        ("--use-pytorch-cross-attention", "Force torch's fused attention."),
        ("--use-sage-attention", "Force SageAttention."),
        ("--use-flash-attention", "Force FlashAttention."),
        ("--use-xformers-attention", "Force xFormers' attention."),
    )
    exclusive(
        group,
        ("--force-upcast-attention", "Attention in float32."),
        ("--dont-upcast-attention", "Never upcast attention."),
    )
    group.add_argument(
        "--fast",
        nargs="*",
        type=member_of(PerformanceFeature),
        default=set(),
        action=FillAll,
        metavar="FEATURE",
        help="Speed options that may change results (bare: all).",
    )
    switches(
        group,
        ("--cpu-vae", "Run the VAE on the CPU."),
        ("--force-channels-last", "Channels-last memory layout for convolutions."),
        ("--supports-fp8-compute", "Assume that the device can compute in fp8."),
        ("--deterministic", "Prefer deterministic kernels."),
        (
            "--paper-formulas",
            "Published formulas also where today's pictures are made by others (RescaleCFG, FreSca "
            "and APG on videos, HyperTile, ...; docs/sampling.md lists them).",
        ),
        ("--disable-xformers", "Ignore xformers."),
        ("--disable-cpu-tuning", "CPU networks in torch's usual layouts and kernels only."),
    )
