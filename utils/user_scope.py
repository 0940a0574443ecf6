"""Whose folders are meant, where users have folders of their own.

A scope belongs to a request or to the run of a prompt. `folder_paths` has these functions as its
own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class _Scope:
    """The user who asks or whose prompt runs.

    Attributes:
        user_id: None for somebody whose folders are the roots.
        before_save: Called before a file gets a name; raises OSError if there is no room.
        uses: How often the user's folders were asked for.
    """

    user_id: str | None
    before_save: Callable[[], None]
    uses: int = 0


_scope: ContextVar[_Scope | None] = ContextVar("scope", default=None)


@contextlib.contextmanager
def user_scope(
    user_id: str | None, before_save: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, output, input and temp are the sub-folders of one user; None leaves them alone.

    Args:
        before_save: Called before a file of this user gets a name; may raise OSError.
    """
    outer = _scope.get()
    user_id = user_id or (outer.user_id if outer is not None else None)
    token = _scope.set(_Scope(user_id, before_save))
    try:
        yield
    finally:
        _scope.reset(token)


def scoped(directory: str) -> str:
    """The part of a directory that belongs to the user in scope; all of it without one."""
    scope = _scope.get()
    if scope is None:
        return directory
    scope.uses += 1
    return os.path.join(directory, scope.user_id) if scope.user_id else directory


def scoped_user() -> str:
    """Whose folders these are inside `user_scope`: a user's, or `*` for the roots; else empty."""
    scope = _scope.get()
    return "" if scope is None else scope.user_id or "*"


def scope_uses() -> int:
    """How often output, input or temp were asked for inside this `user_scope`."""
    scope = _scope.get()
    return 0 if scope is None else scope.uses


def require_room() -> None:
    """Raises OSError if the user in scope may not save further files."""
    scope = _scope.get()
    if scope is not None:
        scope.before_save()
