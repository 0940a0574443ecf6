"""Runs a network's forward pass through the wrappers that custom nodes put around it.

Wrappers live in ``transformer_options["wrappers"][kind]``, a dict of key -> list of callables. Each
is called as ``wrapper(executor, *args, **kwargs)`` and goes on by calling ``executor(*args,
**kwargs)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WrapperExecutor:
    """A call with wrappers around it; a wrapper receives the executor of the rest.

    Attributes:
        original: The innermost function.
        class_obj: Object whose method `original` is, for wrappers that need it.
        wrappers: From the outermost to the innermost.
        idx: How many of them have been entered.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        class_obj: object,
        wrappers: list[Callable[..., Any]],
        idx: int,
    ) -> None:
        self.original = original
        self.class_obj = class_obj
        self.wrappers = wrappers.copy()
        self.idx = idx
        self.is_last = idx == len(wrappers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Go on to the next wrapper, or to the original after the last."""
        return self._next_executor().execute(*args, **kwargs)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapper at this place, or the original after the last."""
        if self.is_last:
            return self.original(*args, **kwargs)
        return self.wrappers[self.idx](self, *args, **kwargs)

    def _next_executor(self) -> WrapperExecutor:
        return type(self)(self.original, self.class_obj, self.wrappers, self.idx + 1)

    @classmethod
    def new_executor(
        cls, original: Callable[..., Any], wrappers: list[Callable[..., Any]], idx: int = 0
    ) -> WrapperExecutor:
        """An executor of a plain function."""
        return cls(original, None, wrappers, idx)

    @classmethod
    def new_class_executor(
        cls,
        original: Callable[..., Any],
        class_obj: object,
        wrappers: list[Callable[..., Any]],
        idx: int = 0,
    ) -> WrapperExecutor:
        """An executor of an object's method."""
        return cls(original, class_obj, wrappers, idx)


def run_wrapped(
    function: Callable[..., Any], owner: Any, kind: str, options: dict[str, Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Call ``function`` through the wrappers of one kind in ``options``, outermost first."""
    by_key = (options.get("wrappers") or {}).get(kind)
    if not by_key:
        return function(*args, **kwargs)
    wrappers = [wrapper for group in by_key.values() for wrapper in group]
    return WrapperExecutor(function, owner, wrappers, 0).execute(*args, **kwargs)
