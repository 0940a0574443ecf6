"""Checking constants against the declaration of an input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from comfy_execution import validation_errors as errors
from comfy_execution.graph_utils import is_link
from comfy_execution.spec import InputInfo


def _to_bool(value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("false", "no", "off", "0", ""):
        return False
    return bool(value)


def _to_float(value: Any) -> float:
    number = float(value)
    if math.isnan(number):
        raise ValueError("not a number (NaN) is no value for a FLOAT; send a number")
    return number


LEAST_ROUNDED = 2**53  # from here on doubles do not hold every whole number

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "INT": int,
    "FLOAT": _to_float,
    "STRING": str,
    "BOOLEAN": _to_bool,
}
"""How a constant becomes a value of the declared type."""


def fits(info: InputInfo, value: Any) -> bool:
    """Whether a constant is of the declared type and within its bounds as it stands: most are.

    False says nothing: `check_literal` knows.
    """
    kind, wanted = type(value), info.type
    if kind is int or kind is float:
        if wanted != ("INT" if kind is int else "FLOAT"):
            return False
        options = info.options
        try:
            return bool(options.get("min", value) <= value <= options.get("max", value))
        except TypeError:
            return False
    if kind is str:
        return wanted == "STRING" or (type(wanted) is list and value in wanted)
    return kind is bool and wanted == "BOOLEAN"


def check_literal(
    name: str, info: InputInfo, value: Any, check_values: bool
) -> tuple[Any, errors.Error | None]:
    """Converts a constant and checks its range or whether it is an option.

    Args:
        check_values: False if the node class checks range and options of this input itself.
    Returns:
        The value to keep in the prompt, and the error if there is one.
    """
    convert = CONVERSIONS.get(info.type) if isinstance(info.type, str) else None
    if isinstance(value, dict) and "__value__" in value:
        inner = value["__value__"]
        if convert is None and is_link(inner):
            return value, None  # unwrapped it would be taken for a link
        value = inner
    if convert is not None:
        written = value
        try:
            value = convert(value)
        except (ValueError, TypeError, OverflowError) as failure:
            return value, errors.not_convertible(name, info, value, failure)
        if convert is int:
            value = _as_meant(written, value, info.options)
    if not check_values:
        return value, None
    error = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        error = _range_error(name, info, value)
    if error is None and convert is None:  # inputs of these types have no list of options
        error = _option_error(name, info, value)
    return value, error


def _as_meant(written: Any, value: int, options: Mapping[str, Any]) -> int:
    """The bound of an input where a client that has doubles only has rounded it to a value beyond:
    browsers write the largest seed, 2**64 - 1, as 18446744073709552000, others as
    1.8446744073709552e19."""
    for bound in (options.get("min"), options.get("max")):
        if type(bound) is not int or abs(bound) < LEAST_ROUNDED:
            continue
        rounded = float(bound)
        if value == int(Decimal(repr(rounded))) or (type(written) is float and written == rounded):
            return bound
    return value


def _range_error(name: str, info: InputInfo, value: float) -> errors.Error | None:
    options = info.options
    least, most = options.get("min"), options.get("max")
    if isinstance(least, (int, float)) and value < least:
        return errors.out_of_range(name, info, value, "min")
    if isinstance(most, (int, float)) and value > most:
        return errors.out_of_range(name, info, value, "max")
    return None


def _option_error(name: str, info: InputInfo, value: Any) -> errors.Error | None:
    if isinstance(info.type, list):
        options: Any = info.type
    elif isinstance(info.type, str) and info.type == "COMBO":
        options = info.options.get("options", [])
        if not options and "remote" in info.options:
            return None  # only the browser knows them
    else:
        return None
    if info.options.get("multiselect") and isinstance(value, list):
        strangers = [item for item in value if item not in options]
        return errors.not_in_list(name, info, strangers[0], options) if strangers else None
    return None if value in options else errors.not_in_list(name, info, value, options)
