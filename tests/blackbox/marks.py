"""Prompts that say in a file that they run, and that go on when they are told to."""

from __future__ import annotations

from pathlib import Path

from comfy_execution.graph_utils import GraphBuilder
from tests.blackbox.client import graph


class Marks:
    """The file of a server under test."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.marks = base / "marks"

    def marked(self, value: int) -> int:
        """How often the node with this value has run."""
        text = self.marks.read_text() if self.marks.exists() else ""
        return text.splitlines().count(str(value))

    def mark(self, value: int, seconds: float = 0.0) -> GraphBuilder:
        """A graph that leaves a mark, sleeps, and shows its value."""
        g = graph()
        node = g.node("TrialMark", value=value, path=str(self.marks), seconds=seconds)
        g.node("TrialShow", id="shown", value=node.out(0))
        return g

    def held(self, value: int) -> GraphBuilder:
        """A graph that leaves a mark, waits until its value is released, and shows it.

        A test that acts while something runs needs no guess of how long that must last.
        """
        g = graph()
        mark = g.node("TrialMark", value=value, path=str(self.marks), seconds=0.0)
        wait = g.node("TrialHeld", id="wait", value=mark.out(0), path=str(self._gate(value)))
        g.node("TrialShow", id="shown", value=wait.out(0))
        return g

    def release(self, *values: int) -> None:
        """Lets the graphs with these values go on, now and whenever they run again."""
        for value in values:
            self._gate(value).touch()

    def _gate(self, value: int) -> Path:
        return self.base / f"go-{value}"
