"""A network made ready for gradients: blocks that are computed twice to save memory, and weights
that may be kept for the way back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from comfy.nn.compilation import regions


@contextmanager
def recomputed(network: nn.Module) -> Iterator[None]:
    """Within the context the network's blocks keep their inputs only, and are computed again on
    the way back."""
    with ExitStack() as undo:
        for block in regions(network):
            before = block.__dict__.get("forward")
            forward = block.forward
            block.__dict__["forward"] = functools.partial(_recomputed_call, forward)
            undo.callback(_put_back, block, before)
        yield


def _recomputed_call(forward: Any, *args: Any, **kwargs: Any) -> Any:
    # Options change from block to block, but must be the same when a block is computed again.
    args = tuple(dict(value) if isinstance(value, dict) else value for value in args)
    kwargs = {
        name: dict(value) if isinstance(value, dict) else value for name, value in kwargs.items()
    }
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _put_back(block: nn.Module, before: Any) -> None:
    if before is None:
        block.__dict__.pop("forward", None)
    else:
        block.__dict__["forward"] = before


@contextmanager
def kept_for_gradients(model: nn.Module) -> Iterator[None]:
    """Within the context parameters and buffers of a model are tensors that may be kept.

    What was made in inference mode may not: torch refuses to remember it for the way back. Weights
    that functions change make copies of their own, so they are left alone.
    """
    with ExitStack() as undo:
        for module in model.modules():
            changed = {
                name for name in ("weight", "bias") if getattr(module, f"{name}_function", None)
            }
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or name in changed or not tensor.is_inference():
                        continue
                    undo.callback(table.__setitem__, name, tensor)
                    copy = tensor.detach().clone()
                    is_parameter = table is module._parameters
                    table[name] = nn.Parameter(copy, requires_grad=False) if is_parameter else copy
        yield
