"""What the tables of options are written with: kinds of values, actions and groups of switches."""

from __future__ import annotations

import argparse
import enum
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
NO_EFFECT = "Accepted so that existing launch scripts keep working; has no effect here."

Member = TypeVar("Member", bound=enum.Enum)


class LatentPreviewMethod(enum.Enum):
    """How the picture-in-progress of a sampler is made."""

    NoPreviews = "none"
    Auto = "auto"
    Latent2RGB = "latent2rgb"
    TAESD = "taesd"

    @classmethod
    def from_string(cls, value: str) -> LatentPreviewMethod | None:
        """Returns the member spelled `value` on the command line, or None."""
        return next((member for member in cls if member.value == value), None)


class PerformanceFeature(enum.Enum):
    """Opt-in speed options of `--fast` that may change results slightly."""

    Fp16Accumulation = "fp16_accumulation"
    Fp8MatrixMultiplication = "fp8_matrix_mult"
    CublasOps = "cublas_ops"
    AutoTune = "autotune"
    CpuBf16 = "cpu_bf16"


class FillAll(argparse.Action):
    """Stores the given enum members; the bare flag stores all of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002  argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, set(values) or set(PerformanceFeature))


class FreeMemory(argparse.Action):
    """Stores the first of up to two numbers of gigabytes; the bare flag stores 4."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if len(values) > 2:
            parser.error(f"{option_string} takes at most two numbers, got {len(values)}")
        setattr(namespace, self.dest, values[0] if values else 4.0)


class Verbosity(argparse.Action):
    """Stores the terminal's level, or that of a file named after it. The bare flag: DEBUG."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        level, *files = values or ["DEBUG"]
        if level not in LOG_LEVELS or len(files) > 1:
            parser.error(f"{option_string} takes a level ({', '.join(LOG_LEVELS)}) and a file")
        if files:
            namespace.log_files = [*namespace.log_files, (level, files[0])]
        else:
            setattr(namespace, self.dest, level)


def switches(group: argparse._ActionsContainer, *rows: tuple[str, str]) -> None:
    """Adds flags without a value: (flag, what it does)."""
    for flag, text in rows:
        group.add_argument(flag, action="store_true", help=text)


def exclusive(group: argparse._ActionsContainer, *rows: tuple[str, str]) -> None:
    """Adds flags of which at most one may be given: (flag, what it does)."""
    switches(group.add_mutually_exclusive_group(), *rows)


def readable_directory(text: str) -> str:
    """A folder that exists, as an absolute path."""
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not an existing directory; create it first")
    return str(folder.resolve())


def whole_number(name: str, expected: str, most: float = math.inf) -> Callable[[str], int]:
    """How a number from 0 on is read.

    Args:
        name: What it is, for errors.
        expected: Which numbers may stand there, in words.
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = -1
        if not 0 <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no {name}; expected {expected}")
        return number

    return read


def amount(text: str) -> float:
    """A finite number of whatever the option counts, from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount; expected a number from 0 on")
    return number


def member_of(kind: type[Member]) -> Callable[[str], Member]:
    """How one of the members of an enumeration is read, by its value."""

    def read(text: str) -> Member:
        try:
            return kind(text)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise argparse.ArgumentTypeError(f"expected one of {known}, found {text!r}") from None

    return read


count = whole_number("whole number", "0 or more")
port_number = whole_number("port", "0 (any free one) to 65535", 65535)
