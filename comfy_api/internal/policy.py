"""What the program was told about files that nodes save. Installed once, by main."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePolicy:
    """How nodes save files.

    Attributes:
        metadata: Whether files carry the prompt and workflow that made them.
    """

    metadata: bool = True


class _Installed:
    """The one place that holds the policy in force."""

    policy = SavePolicy()


def install_save_policy(policy: SavePolicy) -> None:
    """Puts a policy in force for all nodes."""
    _Installed.policy = policy


def save_policy() -> SavePolicy:
    """The policy in force; metadata is written unless main says otherwise."""
    return _Installed.policy
