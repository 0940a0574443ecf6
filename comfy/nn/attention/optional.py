"""Attention kernels of optional packages, imported when first used; all need a CUDA-like device.

Each function has the form of ``kernels``: ``q, k, v [B, heads, L, D]`` and a mask to ``[B, heads,
Lq, D]``; what it is given is not modified. Where a package cannot do what is asked (a mask, say, or
a tensor on the CPU), the fused kernel of torch does it: that is a limit of the package, noted once.
Where it was expected to and failed (an accelerator it was not built for), that is a warning, once.

Their interfaces are those of SageAttention 1.0.6, FlashAttention 2.8.3 and xFormers 0.0.35, whose
Triton kernels `benchmarks/attention.py --interpreted` runs through these functions.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling
from torch.nn import functional as F

from comfy.nn.attention import kernels

logger = logging.getLogger(__name__)

HALF = (torch.float16, torch.bfloat16)
SAGE_HEADS = (64, 96, 128)  # head sizes that version 1 has kernels for
SAGE_BLOCK = 64  # keys that its kernels take at a time
SAGE_LARGEST_VALUE = 512.0  # a block of such adds up to half of what float16 holds
LARGEST_HEAD = {"flash": 256, "sage": SAGE_HEADS[-1]}
LARGEST_SAGE = 2**31  # numbers of a tensor: version 1 counts in 32 bits, and would read elsewhere
MASK_ALIGNMENT = 8  # rows of a mask for xFormers begin at multiples of so many cells


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it.

    A folder that other packages put their modules into (`flash_attn` of FlashAttention 4) is none.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@functools.cache
def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of the packages that are installed, by name."""
    found = {}
    for package in packages:
        if is_installed(package):
            names = importlib.metadata.packages_distributions().get(package, [])
            found[package] = importlib.metadata.version(names[0]) if names else "unknown"
    return found


def flash_function() -> Callable[..., Any]:
    """Attention of the newest version that is installed; version 3 is a package of its own."""
    if is_installed("flash_attn_interface"):
        from flash_attn_interface import flash_attn_func as newer

        return newer
    from flash_attn import flash_attn_func

    return flash_attn_func


def sage_function() -> Callable[..., Any]:
    from sageattention import sageattn

    return sageattn


def xformers_function() -> Callable[..., Any]:
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention


@functools.cache
def _imported(load: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A package's function; of one that cannot be imported a function that says why.

    A broken package is not tried again at each call: that can take as long as the first time.
    """
    try:
        return load()
    except Exception as error:  # noqa: BLE001 - see _instead
        reason = f"it cannot be imported ({type(error).__name__}: {error})"

    def fails(*_: Any, **__: Any) -> Any:
        raise ImportError(reason)

    return fails


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """FlashAttention 2 or 3: no mask, half precision only, head sizes up to 256."""
    if _is_beyond("flash", q, k, v, mask):
        return kernels.fused(q, k, v, mask)
    try:
        attend = _imported(flash_function)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    except Exception as error:  # noqa: BLE001 - see _instead
        return _instead("flash_attn", error, q, k, v, mask)
    if isinstance(out, tuple):  # the first releases of version 3 add the normalisers
        out = out[0]
    return out.transpose(1, 2)


def sage(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """SageAttention (8-bit scores): no mask, half precision, head sizes up to 128."""
    if _is_beyond("sage", q, k, v, mask):
        return kernels.fused(q, k, v, mask)
    try:
        if k.shape[2] % SAGE_BLOCK and _counts_padding(q.device):
            _note_once("sage", f"counts of keys that {SAGE_BLOCK} does not divide")
            return kernels.fused(q, k, v, mask)
        with torch.cuda.device_of(q):  # Triton starts kernels on the device in force
            return _sage(q, k, v)
    except Exception as error:  # noqa: BLE001 - see _instead
        return _instead("sageattention", error, q, k, v, mask)


def _sage(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call that versions 1 and 2 both take.

    Heads are padded to a size that version 1 has. The mean of the keys, which does not change the
    result and spoils 8-bit numbers, is taken off here: version 1 would change the caller's keys.
    Values are made small: they are added in float16, where a block of large ones is infinite.
    """
    dim = q.shape[-1]
    extra = next(size for size in SAGE_HEADS if size >= dim) - dim
    smooth = k - k.mean(dim=2, keepdim=True)
    scale = _power_above(v, SAGE_LARGEST_VALUE)
    q, k, v = (F.pad(x, (0, extra)) if extra else x for x in (q, smooth, v / scale))
    options = {"tensor_layout": "HND", "is_causal": False, "smooth_k": False}
    attend = _imported(sage_function)
    out: Tensor = attend(*_with_dense_channels(q, k, v), sm_scale=dim**-0.5, **options)
    return out[..., :dim] * scale


def _power_above(x: Tensor, largest: float) -> Tensor:
    """For each item and head the least power of two, from one, that divides x to below `largest`.

    `largest` is a power of two itself, so that dividing and multiplying changes no digit.
    """
    exponent = torch.frexp(x.abs().amax(dim=(2, 3), keepdim=True).float() / largest).exponent
    return torch.exp2(exponent.clamp(min=0)).to(x.dtype)


def _with_dense_channels(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose channels lie side by side, as SageAttention and xFormers ask."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


@functools.lru_cache(maxsize=8)
def _counts_padding(device: torch.device) -> bool:
    """Whether SageAttention takes the padding of its last block of keys for keys.

    Version 1 does: with 77 keys of 128 its results are off by a quarter. Where weights add up to
    one, values that are all one come out as one.
    """
    x = torch.linspace(-1, 1, SAGE_HEADS[0], device=device, dtype=torch.float16)
    keys = torch.outer(torch.linspace(-1, 1, SAGE_BLOCK // 2, device=device, dtype=x.dtype), x)
    out = _sage(keys[None, None], keys[None, None], torch.ones_like(keys)[None, None])
    return bool((out - 1).abs().max() > 0.05)


def xformers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """xFormers' memory-efficient attention; masks are made additive, and aligned as it asks."""
    if _is_on_cpu("xformers", q):
        return kernels.fused(q, k, v, mask)
    try:
        bias = None if mask is None else aligned_bias(mask, q, k.shape[2])
        rows = (x.transpose(1, 2) for x in _with_dense_channels(q, k, v))
        out = _imported(xformers_function)(*rows, attn_bias=bias)
    except Exception as error:  # noqa: BLE001 - see _instead
        return _instead("xformers", error, q, k, v, mask)
    return out.transpose(1, 2)


def aligned_bias(mask: Tensor, q: Tensor, keys: int) -> Tensor:
    """A mask as numbers to add, ``[B, heads, Lq, keys]``, a view of rows of aligned length.

    What is shared by items, heads or queries stays shared: a mask of all queries and keys takes as
    much memory again, not that for each head.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
    width = -(-keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    bias = q.new_zeros((*mask.shape[:3], width))[..., :keys].copy_(mask)
    return bias.expand(*q.shape[:3], keys)


def _is_on_accelerator(q: Tensor) -> bool:
    return q.device.type != "cpu"


def _is_on_cpu(kernel: str, q: Tensor) -> bool:
    if _is_on_accelerator(q):
        return False
    _note_once(kernel, "tensors on the CPU")
    return True


def _is_beyond(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a call is outside what a kernel does; said once."""
    if _is_on_cpu(kernel, q):
        return True
    largest = LARGEST_HEAD[kernel]
    sage = kernel == "sage"  # its kernels have no backward pass, which no error tells
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    limits = (
        (mask is not None, "masks"),
        (q.dtype not in HALF, f"numbers of type {q.dtype}"),
        (q.shape[-1] > largest, f"heads of more than {largest} channels"),
        (q.shape[-1] != v.shape[-1], "values of other widths than queries"),
        (k.shape[2] == 0, "empty keys"),
        (sage and trains, "gradients"),
        (sage and max(q.numel(), k.numel()) >= LARGEST_SAGE, "tensors of 2^31 numbers"),
    )
    reason = next((what for is_so, what in limits if is_so), None)
    if reason is not None:
        _note_once(kernel, reason)
    return reason is not None


def _instead(
    package: str, error: Exception, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """Torch's kernel after a package failed; a lack of memory is passed on.

    Any kind of error counts: the packages refuse what they cannot do by assertions, by errors of
    value and type, and by those of the compilers they start.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _warn_once(package, " ".join(str(error).split()) or type(error).__name__)
    return kernels.fused(q, k, v, mask)


def _warn_once(package: str, reason: str) -> None:
    kind = f"{package} {re.sub('0x[0-9a-f]+|[0-9]+', '#', reason)}"
    if kind not in _told():
        _told().add(kind)
        logger.warning("%s failed, so torch's attention is used in its place: %s", package, reason)


@functools.cache
def _told() -> set[str]:
    """Failures that were warned of, less their numbers: each shape has its own."""
    return set()


def _note_once(kernel: str, reason: str) -> None:
    if not compiling():  # code that is traced cannot log
        _note(kernel, reason)


@functools.lru_cache(maxsize=64)
def _note(kernel: str, reason: str) -> None:
    logger.info("Attention %s does not take %s: torch's attention does these", kernel, reason)
