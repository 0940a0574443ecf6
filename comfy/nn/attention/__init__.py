"""Attention for every network: one table of back ends, one of them chosen once.

A network calls ``attention.optimized_attention(q, k, v, heads, ...)`` through this module, so that
a replaced function takes effect everywhere. Shapes: ``q [B, Lq, heads * D]``, ``k, v [B, Lk, heads
* D]`` -> ``[B, Lq, heads * D]``; with ``skip_reshape`` the inputs are ``[B, heads, L, D]``, with
``skip_output_reshape`` so is the output.

``transformer_options["optimized_attention_override"]``, a callable ``(function, q, k, v, heads,
**options)``, takes the place of the chosen function for one model.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from comfy.devices import precision
from comfy.nn.attention import kernels, optional
from comfy.nn.attention.shapes import expand_mask, merge_heads, repeat_key_heads, split_heads

logger = logging.getLogger(__name__)

Kernel = Callable[..., Tensor]
OVERRIDE_KEY = "optimized_attention_override"
INSIDE_KEY = "_inside_attn_wrapper"  # set while an override runs: it may call any function


class AttentionFunction(Protocol):
    """Public form of every attention function."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Backend:
    """One row of the table.

    Attributes:
        name: Public name, as in the command line and in ``REGISTERED_ATTENTION_FUNCTIONS``.
        function: Attention in its public form.
        is_available: Whether it can run at all on this machine (no device query before the call).
        automatic: Whether it may be chosen when nobody asked for it (it must be exact and
            everywhere correct).
        package: What is to be installed for it, if anything.
        modules: Names that the package is imported by; one of them is enough.
        load: Imports what it calls of the package.
    """

    name: str
    function: AttentionFunction
    is_available: Callable[[], bool]
    automatic: bool = False
    package: str = ""
    modules: tuple[str, ...] = ()
    load: Callable[[], object] | None = None

    @property
    def versions(self) -> dict[str, str]:
        """Versions of its package as installed, by module; empty without a package."""
        return optional.versions(self.modules)


@dataclass(frozen=True)
class AttentionPolicy:
    """What main decided from the arguments: a back end by name, or None for the best available."""

    backend: str | None = None


def wrap_attn(function: AttentionFunction) -> AttentionFunction:
    """Let ``transformer_options`` override an attention function; the plain one stays as
    ``__wrapped__``."""

    @functools.wraps(function)
    def overridable(*args: Any, **kwargs: Any) -> Tensor:
        options = kwargs.get("transformer_options")
        if options is not None and OVERRIDE_KEY in options and INSIDE_KEY not in kwargs:
            kwargs[INSIDE_KEY] = True
            return options[OVERRIDE_KEY](function, *args, **kwargs)
        return function(*args, **kwargs)

    return overridable


def _public(
    kernel: Kernel, name: str, upcasts: bool = False, approximate: bool = False
) -> AttentionFunction:
    """Give a kernel the public form: heads split and merged, masks expanded, precision raised if
    asked.

    The option ``low_precision_attention=False`` of a call asks for exact results: torch's kernel
    then stands in for one that is ``approximate``.
    """

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        low_precision_attention: bool = True,
        **_: Any,
    ) -> Tensor:
        if not skip_reshape:
            groups = k.shape[-1] * heads // q.shape[-1]
            q, k, v = split_heads(q, heads), split_heads(k, groups), split_heads(v, groups)
        if k.shape[1] != heads:
            k, v = repeat_key_heads(k, v, heads)
        if upcasts:
            wanted = precision.attention_precision(attn_precision, q.dtype) or q.dtype
            q, k = q.to(wanted), k.to(wanted)
        run = kernels.fused if approximate and not low_precision_attention else kernel
        out = kernels.in_batches(run, q, k, v, expand_mask(mask))
        return out if skip_output_reshape else merge_heads(out)

    attention.__name__ = attention.__qualname__ = name
    return wrap_attn(attention)


def _always() -> bool:
    return True


def _of_package(
    name: str,
    function: AttentionFunction,
    package: str,
    modules: tuple[str, ...],
    load: Callable[[], object],
) -> Backend:
    """A row for a package, which is available where one of its modules is."""

    def is_available() -> bool:
        return any(optional.is_installed(module) for module in modules)

    return Backend(name, function, is_available, package=package, modules=modules, load=load)


attention_pytorch = _public(kernels.fused, "attention_pytorch")
attention_basic = _public(kernels.basic, "attention_basic", upcasts=True)
attention_split = _public(kernels.split, "attention_split", upcasts=True)
attention_sub_quad = _public(kernels.sub_quadratic, "attention_sub_quad", upcasts=True)
attention_flash = _public(optional.flash, "attention_flash")
attention_sage = _public(optional.sage, "attention_sage", approximate=True)
attention_xformers = _public(optional.xformers, "attention_xformers")

# Order is preference among the automatic ones. Sage is approximate, the others no better than
# torch's own kernels where both run, so those are used only when asked for.
BACKENDS: tuple[Backend, ...] = (
    Backend("pytorch", attention_pytorch, _always, automatic=True),
    Backend("sub_quad", attention_sub_quad, _always),
    Backend("split", attention_split, _always),
    _of_package(
        "flash",
        attention_flash,
        "flash-attn",
        ("flash_attn", "flash_attn_interface"),
        optional.flash_function,
    ),
    _of_package(
        "sage", attention_sage, "sageattention", ("sageattention",), optional.sage_function
    ),
    _of_package(
        "xformers", attention_xformers, "xformers", ("xformers",), optional.xformers_function
    ),
)

# Public table: name -> function; custom nodes add to it and look things up in it. Functions of
# packages that are installed join at the start (importing a module looks for none).
REGISTERED_ATTENTION_FUNCTIONS: dict[str, AttentionFunction] = {
    row.name: row.function for row in BACKENDS if row.is_available is _always
}


class _Choice:
    """The policy in force and the back end it led to (decided at the first call)."""

    def __init__(self) -> None:
        self.policy = AttentionPolicy()
        self.backend: Backend | None = None


_choice = _Choice()


def configure(policy: AttentionPolicy) -> None:
    """Install the policy main built; raises ValueError for an unknown or unavailable back end, and
    for one whose package cannot be imported."""
    backend = choose(policy)
    _register_packages()
    _choice.policy, _choice.backend = policy, backend
    packages = ", ".join(f"{name} {version}" for name, version in backend.versions.items())
    logger.info("Attention: %s%s", backend.name, packages and f" ({packages})")


def _register_packages() -> None:
    for row in BACKENDS:
        if row.name not in REGISTERED_ATTENTION_FUNCTIONS and row.is_available():
            REGISTERED_ATTENTION_FUNCTIONS[row.name] = row.function


def choose(policy: AttentionPolicy) -> Backend:
    """The back end a policy asks for, or the first automatic one that is available."""
    if policy.backend is None:
        return next(row for row in BACKENDS if row.automatic and row.is_available())
    for row in BACKENDS:
        if row.name == policy.backend:
            if not row.is_available():
                raise ValueError(
                    f"attention back end {row.name!r} is not available: its package {row.package} "
                    "is not installed; install it, or choose another"
                )
            _load(row)
            return row
    known = ", ".join(row.name for row in BACKENDS)
    raise ValueError(f"unknown attention back end {policy.backend!r}; known: {known}")


def _load(row: Backend) -> None:
    """Import the package of a back end that was asked for."""
    try:
        if row.load is not None:
            row.load()
    except Exception as error:  # what an installed package lacks it tells by errors of any kind
        raise ValueError(
            f"attention back end {row.name!r} is not available: its package {row.package} is "
            f"installed but cannot be imported ({type(error).__name__}: {error}); install one that "
            f"was built for this torch ({torch.__version__}), or choose another back end"
        ) from error


def selected() -> Backend:
    """The back end in force; chosen on first use."""
    if _choice.backend is None:
        configure(_choice.policy)
    assert _choice.backend is not None
    return _choice.backend


@wrap_attn
def optimized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention by the back end in force; see the module for shapes."""
    function = selected().function.__wrapped__  # type: ignore[attr-defined]
    return function(
        q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs
    )


@wrap_attn
def optimized_attention_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """As optimized_attention, under the name asked for when a mask is given (every back end takes
    masks)."""
    function = selected().function.__wrapped__  # type: ignore[attr-defined]
    return function(
        q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs
    )


def optimized_attention_for_device(
    device: torch.device, mask: bool = False, small_input: bool = False
) -> AttentionFunction:
    """The attention function for a device and kind of input; small inputs gain nothing from
    chunking."""
    del device
    if small_input:
        return attention_pytorch
    return optimized_attention_masked if mask else optimized_attention


def register_attention_function(name: str, function: AttentionFunction) -> None:
    """Add a function to the public table; a name that is taken is left as it is, with a warning."""
    if name in REGISTERED_ATTENTION_FUNCTIONS:
        logger.warning("Attention function %r is already registered; the first one stays", name)
        return
    REGISTERED_ATTENTION_FUNCTIONS[name] = function


def get_attention_function(name: str, default: Any = ...) -> Any:
    """A function of the public table by name; "optimized" is the one in force.

    Raises KeyError when the name is unknown and no default was given.
    """
    if name == "optimized":
        return optimized_attention
    _register_packages()
    if name in REGISTERED_ATTENTION_FUNCTIONS:
        return REGISTERED_ATTENTION_FUNCTIONS[name]
    if default is ...:
        known = ", ".join(REGISTERED_ATTENTION_FUNCTIONS)
        raise KeyError(f"unknown attention function {name!r}; known: {known}")
    return default
