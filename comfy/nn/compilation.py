"""Networks compiled block by block.

Compiling a whole network takes minutes and starts again with every size, patch or device change.
Here the blocks that a network repeats are compiled instead, each kind once per width: blocks of one
kind share their code, since their weights are arguments of it. Sizes are left open, so that one
bucket of code serves all batches above one, heights, widths and text lengths.

What cannot be compiled runs as it is: a block whose weights are streamed or patched at use, and a
transformer under custom patches, which change from step to step. When the compiler itself fails
(no C++ compiler, say) that is said once and the network goes on uncompiled.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from comfy import progress
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.nn import attention

logger = logging.getLogger(__name__)

MARK = "compiles_alone"
"""Class attribute of the blocks that are compiled one by one."""

MAX_VARIANTS = 128
"""Kinds of one block (widths, single item or batch, casting or not) that are kept compiled."""

TAKES = "the first run takes up to minutes (most on a CPU), the next ones seconds or less"
"""What the person at the graph is told about it."""

OPTIONS = "transformer_options"
CHANGING = ("patches", "patches_replace", attention.OVERRIDE_KEY)
"""Options under which a transformer is not compiled."""


def regions(network: nn.Module) -> list[nn.Module]:
    """The blocks to compile: marked ones, else those a list repeats, else the network itself."""
    marked: list[nn.Module] = []
    inside: set[int] = set()
    for module in network.modules():
        if getattr(type(module), MARK, False) and id(module) not in inside:
            marked.append(module)
            inside.update(id(part) for part in module.modules())
    return marked or _repeated(network) or [network]


def _repeated(network: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for module in network.modules():
        alike = isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
        if alike and len(list(module.children())) > 1:
            found.extend(module.children())
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


class Region:
    """One block and the code that may stand in for its forward.

    Attributes:
        block: The block; not changed.
        compiled: The compiled forward of its class, ``(block, *args)``.
    """

    def __init__(self, block: nn.Module, compiled: Callable[..., Any]) -> None:
        self.block, self.compiled = block, compiled
        self._layers = [part for part in block.modules() if hasattr(part, "comfy_cast_weights")]
        parameters = list(inspect.signature(type(block).forward).parameters)[1:]
        self.takes_options = OPTIONS in parameters
        self._place = parameters.index(OPTIONS) if self.takes_options else len(parameters)

    def is_compilable(self, patched: bool) -> bool:
        """Whether the block now computes with weights that lie ready, in its own way."""
        if "forward" in vars(self.block) or (patched and self.takes_options):
            return False
        return not any(
            layer.stream_plan is not None or layer.weight_function or layer.bias_function
            for layer in self._layers
        )

    def settled(self, args: tuple[Any, ...]) -> list[Any]:
        """Arguments in the form compiled code was made for; see `_settled` and `named`."""
        own = [_settled(value) for value in args]
        if len(own) > self._place:
            own[self._place] = _no_more_than_needed(own[self._place])
        return own

    def named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Named arguments likewise. Facts about the step, which change, are left out."""
        own = {name: _settled(value) for name, value in kwargs.items()}
        if self.takes_options and OPTIONS in own:
            own[OPTIONS] = _no_more_than_needed(own[OPTIONS])
        return own


def _settled(value: Any) -> Any:
    """A single item's stride along the batch is arbitrary, but would count as another kind."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[0] != 1:
        return value
    stride = (value.numel(), *value.stride()[1:])
    return value if stride == value.stride() else value.as_strided(value.shape, stride)


def _no_more_than_needed(options: Any) -> Any:
    """Blocks without patches read their options only for an attention function put in our place."""
    ours = getattr(attention.optimized_attention, "__module__", None) == attention.__name__
    return {} if ours and options is not None else options


class RegionalCompiler:
    """Compiles the blocks of a network as they are first used.

    Attributes:
        failure: Why the compiler failed; the network then runs uncompiled.
    """

    def __init__(self, **options: Any) -> None:
        """``options`` as `torch.compile` takes them; sizes are left open unless they say so."""
        self.options = {"dynamic": True, **options}
        self.failure: str | None = None
        self._network: nn.Module | None = None
        self._regions: list[Region] = []
        self._compiled: dict[type, Callable[..., Any]] = {}
        self._left_out: int | None = None

    @contextmanager
    def applied(self, network: nn.Module, options: dict[str, Any] | None = None) -> Iterator[None]:
        """Let a network's blocks run compiled within the context; afterwards it is as before.

        Args:
            network: The network; another one than before is taken apart anew.
            options: The ``transformer_options`` of the call.
        """
        if self.failure is not None:
            yield
            return
        if network is not self._network:
            self._network = network
            self._regions = [Region(block, self._of(type(block))) for block in regions(network)]
            self._left_out = None
            attention.selected()  # now: choosing says so, which compiled code cannot
            logger.info("Compiling %d blocks of %s", len(self._regions), type(network).__name__)
            progress.note(f"compiling {len(self._regions)} blocks: {TAKES}")
        patched = any((options or {}).get(name) for name in CHANGING)
        swapped = [region for region in self._regions if region.is_compilable(patched)]
        self._tell_left_out(len(self._regions) - len(swapped))
        with ExitStack() as undo:
            _leave_sizes_open(undo)
            for region in swapped:
                region.block.__dict__["forward"] = functools.partial(self._run, region)
                undo.callback(region.block.__dict__.pop, "forward", None)
            yield

    def _tell_left_out(self, count: int) -> None:
        """Say how many blocks run as they are, when that has changed."""
        if count == (self._left_out or 0):
            return
        self._left_out = count
        every = len(self._regions)
        why = "their weights are streamed or patched at use, or custom patches act on them"
        note = f"{count} of {every} blocks run uncompiled: {why}"
        logger.info("%s", note if count else f"all {every} blocks run compiled")
        if count == every:
            progress.note(note)

    def _of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        if kind not in self._compiled:
            self._compiled[kind] = torch.compile(kind.forward, **self.options)
        return self._compiled[kind]

    def _run(self, region: Region, *args: Any, **kwargs: Any) -> Any:
        throw_exception_if_processing_interrupted()
        forward = type(region.block).forward
        if self.failure is not None:
            return forward(region.block, *args, **kwargs)
        # The compiler must see the block as it is, not the call that led here.
        replaced = region.block.__dict__.pop("forward")
        try:
            return region.compiled(region.block, *region.settled(args), **region.named(kwargs))
        except torch._dynamo.exc.TorchDynamoException as error:
            self.failure = " ".join(str(error).strip().splitlines()[:2])
            note = f"Compiling {type(region.block).__name__} failed; the model runs uncompiled"
            logger.warning(
                "%s: %s. The inductor back end needs a C++ compiler (g++ or clang++) on the CPU, "
                "Triton on an accelerator", note, self.failure,
            )  # fmt: skip
            progress.note(f"{note}: {self.failure}")
            return forward(region.block, *args, **kwargs)
        finally:
            region.block.__dict__["forward"] = replaced


def _leave_sizes_open(stack: ExitStack) -> None:
    """Until the stack closes: equal sizes stay independent, and many kinds of block are kept."""
    from torch._dynamo import config as tracing
    from torch.fx.experimental import _config as symbols

    stack.enter_context(symbols.patch(use_duck_shape=False))  # type: ignore[attr-defined]
    stack.enter_context(
        tracing.patch(recompile_limit=MAX_VARIANTS, accumulated_recompile_limit=8 * MAX_VARIANTS)
    )
