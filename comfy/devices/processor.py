"""What the processor is good at, and what networks that run on it are therefore given."""

from __future__ import annotations

import functools
import logging
import math
import os
import time

import torch

from comfy.devices import container

logger = logging.getLogger(__name__)

SIDE = 512
"""Rows and columns of the product that is timed: about a millisecond a core."""

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")

WORTHWHILE = 1.2
"""How many times as fast bfloat16 has to be: it costs accuracy."""


@functools.cache
def bf16_speed() -> float:
    """How many times as fast bfloat16 products are as float32 ones; timed once, 20 ms.

    Instructions alone do not tell: AMX is made for it, but an Intel server core whose AMX is hidden
    by a virtual machine has AVX512-BF16 and was measured at half the rate of float32.
    """
    wide = torch.full((SIDE, SIDE), 0.5)
    narrow = wide.bfloat16()
    best = {id(wide): float("inf"), id(narrow): float("inf")}
    with torch.inference_mode():
        for _ in range(5):
            for matrix in (wide, narrow):
                start = time.perf_counter()
                torch.mm(matrix, matrix)
                best[id(matrix)] = min(best[id(matrix)], time.perf_counter() - start)
    return best[id(wide)] / max(best[id(narrow)], 1e-9)


@functools.cache
def multiplies_bf16() -> bool:
    """Whether bfloat16 products are worth their rounding: an instruction for them, and speed."""
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(able.get(name) for name in BF16_INSTRUCTIONS) and bf16_speed() >= WORTHWHILE


def heed_cpu_limit() -> None:
    """Have torch compute with no more threads than the container has processors' worth of time.

    Threads beyond that are stopped in the middle of a product that the others then wait for.
    """
    limit = container.CONTAINER.cpu_limit()
    threads = None if limit is None else max(1, math.ceil(limit))
    if threads is None or "OMP_NUM_THREADS" in os.environ or threads >= torch.get_num_threads():
        return
    torch.set_num_threads(threads)
    logger.info("this container has %.1f processors: networks compute with %d threads",
                limit, threads)  # fmt: skip


def log_choices(tune: bool, bf16_if_fast: bool, bf16_forced: bool) -> None:
    """Say how networks are run on the processor, and how to have it otherwise.

    Args:
        tune: Layouts and products are chosen for speed.
        bf16_if_fast: bfloat16 was asked for where it is faster.
        bf16_forced: bfloat16 was asked for whatever it costs.
    """
    if tune:
        logger.info(
            "CPU networks: channels innermost, convolutions and attention of few positions as "
            "matrix products (--disable-cpu-tuning turns this off)"
        )
    else:
        logger.info("CPU networks: torch's usual layouts and kernels")
    if bf16_forced and not multiplies_bf16():
        logger.warning(
            "bfloat16 was asked for; this processor multiplies it %.1f x as fast as float32",
            bf16_speed(),
        )
    elif bf16_if_fast and not bf16_forced:
        chosen = "bfloat16" if multiplies_bf16() else "float32"
        logger.info(
            "CPU diffusion models compute in %s: bfloat16 products are %.1f x as fast as float32",
            chosen, bf16_speed(),
        )  # fmt: skip
