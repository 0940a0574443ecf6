"""What the executor was given for every prompt, as one prompt's run needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from comfy_execution.breaker import CallGuard
from comfy_execution.inputs import InputLists
from comfy_execution.privacy import Privacy


@dataclass(frozen=True, slots=True)
class RunHooks:
    """What the executor was given for every prompt.

    Attributes:
        interruptions: Exception types that mean "somebody stopped this".
        memory_text: Called with what a node raised, once its frames are gone; returns the message
            if memory ran out, and may free some.
        ui_is_valid: Whether what a cached output node shows is still there.
        guard: Marks the time in which node code may be broken out of.
        see_inputs: Called with the values a node is about to get.
        peak_memory: Highest memory use in bytes up to now, or None.
        privacy: Which classes' results are not shared among users.
    """

    interruptions: tuple[type[BaseException], ...]
    memory_text: Callable[[BaseException], str | None] = lambda _: None
    ui_is_valid: Callable[[Mapping[str, Any]], bool] = lambda _: True
    guard: CallGuard = field(default_factory=CallGuard)
    see_inputs: Callable[[InputLists], None] = lambda _: None
    peak_memory: Callable[[], int | None] = lambda: None
    privacy: Privacy = field(default_factory=Privacy)

    def is_interruption(self, error: BaseException) -> bool:
        """Whether an exception is an interruption, or was raised because of one."""
        current: BaseException | None = error
        for _ in range(10):
            if current is None or isinstance(current, self.interruptions):
                break
            current = current.__cause__ or current.__context__
        return isinstance(current, self.interruptions)
