"""Runs a network's forward pass through the wrappers that custom nodes put around it.

Wrappers live in ``transformer_options["wrappers"][kind]``, a dict of key -> list of callables. Each
is called as ``wrapper(executor, *args, **kwargs)`` and goes on by calling ``executor(*args,
**kwargs)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WrapperExecutor:
    """What a wrapper is given: calling it runs the next wrapper, or the wrapped function after the
    last.

    Attributes:
        original: The wrapped function.
        class_obj: Object it belongs to.
        wrappers: All wrappers, outermost first.
        idx: Position of the next wrapper.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        class_obj: Any = None,
        wrappers: list[Callable[..., Any]] | None = None,
        idx: int = 0,
    ) -> None:
        self.original, self.class_obj = original, class_obj
        self.wrappers, self.idx = list(wrappers or ()), idx

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.execute(*args, **kwargs)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rest of the chain."""
        if self.idx == len(self.wrappers):
            return self.original(*args, **kwargs)
        rest = WrapperExecutor(self.original, self.class_obj, self.wrappers, self.idx + 1)
        return self.wrappers[self.idx](rest, *args, **kwargs)


def run_wrapped(
    function: Callable[..., Any], owner: Any, kind: str, options: dict[str, Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Call ``function`` through the wrappers of one kind in ``options``, outermost first."""
    by_key = (options.get("wrappers") or {}).get(kind)
    if not by_key:
        return function(*args, **kwargs)
    wrappers = [wrapper for group in by_key.values() for wrapper in group]
    return WrapperExecutor(function, owner, wrappers).execute(*args, **kwargs)
