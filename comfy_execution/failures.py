"""Turning whatever a node raised into words for the person who posted the prompt."""

from __future__ import annotations

import errno
import logging
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from comfy_execution.calls import NodeExitError
from comfy_execution.inputs import InputLists
from comfy_execution.misfits import is_own_refusal, misfit

logger = logging.getLogger(__name__)

LONGEST_TEXT = 2000

DISK_FULL = "The disk is full: delete files there, or start with other folders (--base-directory)."
FORBIDDEN = "The server may not use that file: mend its permissions, or take another folder."
SYSTEM_ADVICE = {
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: DISK_FULL,
    errno.EROFS: FORBIDDEN,
    errno.EACCES: FORBIDDEN,
    errno.EPERM: FORBIDDEN,
    errno.ENAMETOOLONG: "The file name is too long: shorten it (filename_prefix).",
    errno.EMFILE: "The server has too many files open: raise the limit (ulimit -n) and restart it.",
}
"""What to do where the system refuses a node's files."""

_PACKAGE = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a node did not finish.

    Attributes:
        node_id: The node that failed, possibly an expanded one.
        interrupted: Whether somebody stopped it; the other fields are then empty.
        exception_type: Qualified name of the class of what was raised.
        message: Text for people.
        traceback: Formatted frames, outermost first; then what was raised, where `message` puts
            that into other words.
        current_inputs: Input name -> printable values.
    """

    node_id: str
    interrupted: bool = False
    exception_type: str = ""
    message: str = ""
    traceback: tuple[str, ...] = ()
    current_inputs: dict[str, list[Any]] = field(default_factory=dict)


def full_type_name(klass: type) -> str:
    """Qualified class name, without the module for built-in classes."""
    module = klass.__module__
    return klass.__qualname__ if module == "builtins" else f"{module}.{klass.__qualname__}"


def describe_failure(
    node_id: str,
    error: BaseException,
    inputs: InputLists,
    memory_text: Callable[[BaseException], str | None] = lambda _: None,
    types: Mapping[str, Any] | None = None,
) -> Failure:
    """Describes an exception and lets go of what its frames hold.

    Args:
        error: What the node raised. Its frames are cleared, so that they keep no tensors alive.
        inputs: What the node was called with.
        types: Declared types of the inputs, as far as known.
        memory_text: Gives the message if memory ran out, else None. It may free memory: the
            frames are gone by then.
    """
    error = _as_raised(error)
    frames = _node_frames(error)
    message = raised = _text_of(error)
    cause = (
        _about_nothing(error, inputs)
        or _about_odd_tensor(error, inputs)
        or _about_other_kind(error, inputs, types or {})
    )
    if cause is not None:  # the words of Python are for those who read code
        message = cause
        frames += (f"{full_type_name(type(error))}: {raised}\n",)
    if isinstance(error, SystemExit):
        message = f"the node tried to end the server (SystemExit: {message})"
    release_frames(error)
    advice = _system_advice(error)
    return Failure(
        node_id,
        exception_type=full_type_name(type(error)),
        message=f"{_memory_message(memory_text, error) or message}\n{advice}",
        traceback=frames,
        current_inputs={
            name: [printable(value) for value in values] for name, values in inputs.items()
        },
    )


def _memory_message(
    memory_text: Callable[[BaseException], str | None], error: BaseException
) -> str | None:
    """What the hook says; its own failure must not hide the node's."""
    try:
        return memory_text(error)
    except Exception:
        logger.exception("it could not be found out whether memory ran out")
        return None


def _system_advice(error: BaseException) -> str:
    """What to do about a refusal of the system; "" for all else, and for errors that say it."""
    if not isinstance(error, OSError) or type(error).__module__ != "builtins":
        return ""
    return SYSTEM_ADVICE.get(error.errno or 0, "")


def _about_nothing(error: BaseException, inputs: InputLists) -> str | None:
    """Words for a node that was given None through a link and could not work with it."""
    if not isinstance(error, (AttributeError, TypeError)) or "NoneType" not in _text_of(error):
        return None
    empty = [name for name, values in inputs.items() if any(value is None for value in values)]
    if not empty:
        return None
    return (
        f"{', '.join(empty)}: expected a value, found none: the node it is linked to gave nothing "
        "there, as a checkpoint does for a part that its file lacks; connect another one"
    )


def _about_odd_tensor(error: BaseException, inputs: InputLists) -> str | None:
    """Words for a node whose code failed over a picture, mask or latent without any cells, or over
    one of several kinds."""
    if type(error).__module__ != "builtins" or isinstance(error, (OSError, ValueError)):
        return None
    for name, values in inputs.items():
        for value in values:
            tensor = value.get("samples") if isinstance(value, dict) else value
            if getattr(tensor, "is_nested", False):
                return (
                    f"{name}: expected the latent of one kind, found those of several together "
                    "(video and sound); take them apart before this node (LTXVSeparateAVLatent)"
                )
            shape = getattr(tensor, "shape", None)
            if isinstance(shape, tuple) and 0 in shape:
                return (
                    f"{name}: expected something with content, found a tensor of shape "
                    f"{tuple(shape)}; a node before this one cut off all there was"
                )
    return None


def _about_other_kind(
    error: BaseException, inputs: InputLists, types: Mapping[str, Any]
) -> str | None:
    """Words for a node whose code failed over what is not of the kind its input declares."""
    if type(error).__module__ != "builtins" or isinstance(error, OSError) or is_own_refusal(error):
        return None
    for name, values in inputs.items():
        for value in values:
            reason = misfit(types.get(name), value)
            if reason is not None:
                return f"{name}: {reason}; look at the node it is linked to, or link it to one"
    return None


def _as_raised(error: BaseException) -> BaseException:
    """What the node raised, where coroutines on the way had to wrap it."""
    cause = error.__cause__
    is_wrapped = isinstance(error, NodeExitError) or (
        isinstance(error, RuntimeError)
        and isinstance(cause, (StopIteration, StopAsyncIteration))
        and str(error) in ("coroutine raised StopIteration", "coroutine raised StopAsyncIteration")
    )
    return cause if is_wrapped and cause is not None else error


def _node_frames(error: BaseException) -> tuple[str, ...]:
    """Formatted frames from the node's own code on; all if the error is this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if not _is_own(frame.filename)), 0)
    return tuple(traceback.format_list(frames[first:]))


def _is_own(filename: str) -> bool:
    return os.path.dirname(filename) == _PACKAGE


def release_frames(error: BaseException) -> None:
    """Drops the local variables of the frames an exception came through, causes included."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        tb: TracebackType | None = current.__traceback__
        if tb is not None:
            traceback.clear_frames(tb)
        current.__traceback__ = None
        current = current.__cause__ or current.__context__


def printable(value: Any) -> Any:
    """A value as it may stand in an error: JSON scalars as they are, the rest as short text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    text = value if isinstance(value, str) else _text_of(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... ({len(text)} chars)"


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - foreign code; the report must not fail over it
        return f"<{type(value).__name__}, whose text failed: {type(error).__name__}>"
