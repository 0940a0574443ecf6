"""Progress of long loops, handed to whatever the composition root installed.

A loop owns a `ProgressBar`; the bar calls the one global hook with (value, total, preview,
node_id). Without a hook it counts silently. Standard library only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

ProgressHook = Callable[..., None]
"""hook(value, total, preview, node_id=None); preview is (format, image, max_size) or None."""

NoteHook = Callable[[str], None]
"""hook(text): shows text beside the node at work."""

PROGRESS_BAR_ENABLED = True
"""Whether samplers draw a console bar; custom nodes read and write it."""

PROGRESS_BAR_HOOK: ProgressHook | None = None
"""The installed hook, or None."""


NOTE_HOOK: NoteHook | None = None
"""The installed receiver of notes, or None."""


def set_note_hook(function: NoteHook | None) -> None:
    """Install the receiver of notes; None removes it."""
    global NOTE_HOOK
    NOTE_HOOK = function


def warn(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a warning, and show it beside the node at work to whoever started the prompt.

    For what the person at the graph can mend: a missing file, a latent that broke.
    """
    logger.warning(message, *values)
    note(message % values if values else message)


def note(text: str) -> None:
    """Show a text beside the node at work to whoever started the prompt."""
    if NOTE_HOOK is not None:
        NOTE_HOOK(text)


def set_progress_bar_enabled(enabled: bool) -> None:
    """Switch the console bars of samplers on or off."""
    global PROGRESS_BAR_ENABLED
    PROGRESS_BAR_ENABLED = enabled


def set_progress_bar_global_hook(function: ProgressHook | None) -> None:
    """Install the receiver of all progress; None removes it."""
    global PROGRESS_BAR_HOOK
    PROGRESS_BAR_HOOK = function


class ProgressBar:
    """Counts towards `total` and reports each change to the hook of its creation time.

    Args:
        total: Number of units of work.
        node_id: Node the work belongs to; None means the node being executed.
    """

    def __init__(self, total: int, node_id: str | None = None) -> None:
        self.total = total
        self.current: float = 0
        self.node_id = node_id
        self.hook = PROGRESS_BAR_HOOK

    def update_absolute(
        self, value: float, total: int | None = None, preview: Any | None = None
    ) -> None:
        """Set the counter to `value` (clamped to the total) and report it.

        Args:
            value: Units done so far.
            total: New total, when it has become known or changed.
            preview: (format, image, max_size) to show beside the number.
        """
        if total is not None:
            self.total = total
        self.current = min(value, self.total)
        if self.hook is not None:
            self.hook(self.current, self.total, preview, node_id=self.node_id)

    def update(self, value: float) -> None:
        """Advance the counter by `value` and report it."""
        self.update_absolute(self.current + value)
