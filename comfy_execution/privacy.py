"""Whose result it is, on servers whose users have files of their own.

A node that reads or writes the asker's files gives different results to different users, however
equal its inputs. Which classes do so is seen as they run: the host counts how often the asker's
folders were looked up. From then on the signatures of a class that did, and through links of all
that stand behind it, name the user, so no result of one user is ever given to another, while
models and everything else that is the same for all stays shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Privacy:
    """Classes whose results belong to whoever asked for them.

    Args:
        owner: Names the user whose prompt runs, or who asks; empty where all share everything.
        uses: Counts how often the owner's folders were looked up so far.
    """

    def __init__(
        self, owner: Callable[[], str] = lambda: "", uses: Callable[[], int] = lambda: 0
    ) -> None:
        self.owner = owner
        self.uses = uses
        self._classes: set[str] = set()

    def is_private(self, class_type: str) -> bool:
        """Whether results of this class are not shared among users."""
        return class_type in self._classes

    def make_private(self, class_type: str) -> bool:
        """Stops sharing results of a class; says whether they were shared until now."""
        was_shared = class_type not in self._classes
        self._classes.add(class_type)
        return was_shared

    def owner_of(self, class_type: str) -> str:
        """What a signature of a node of this class has to name beside its inputs."""
        return self.owner() if class_type in self._classes else ""


class Watch:
    """Sees, while one prompt runs, which classes are private."""

    def __init__(self, privacy: Privacy) -> None:
        self._privacy = privacy
        self._uses_before: dict[str, int] = {}
        self._holds_private: set[str] = set()

    def called(self, node_id: str) -> None:
        """A node is about to be called, perhaps again."""
        self._uses_before.setdefault(node_id, self._privacy.uses())

    def expanded(self, node_id: str, class_types: Iterable[str]) -> None:
        """A node's result is made of results of these classes."""
        if any(map(self._privacy.is_private, class_types)):
            self._holds_private.add(node_id)

    def ended(self, node_id: str, class_type: str) -> bool:
        """A node has its result; says whether its class is private from now on.

        Nodes that ran at the same time may be taken for one another: then too much is private.
        """
        has_used = self._privacy.uses() != self._uses_before.pop(node_id, 0)
        if not has_used and node_id not in self._holds_private:
            return False
        return self._privacy.make_private(class_type)
