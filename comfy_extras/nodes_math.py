"""Nodes that compute with numbers: a written formula, and other values as numbers."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

from simpleeval import DEFAULT_OPERATORS, InvalidExpression, SimpleEval

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

Number = int | float
LARGEST_BITS = 2048
"""Whole numbers of a formula stay below two to this power: far above any float, and a slip of the
pen such as `9 ** 9 ** 9` ends at once."""


def _bounded(compute: Callable[[Any, Any], Any], bits: Callable[[int, int], int]) -> Any:
    """An operation on numbers that refuses whole results of too many `bits`."""

    def apply(first: Any, second: Any) -> Any:
        for value in (first, second):
            if not isinstance(value, int | float):
                raise ValueError(f"a number was expected, found {value!r:.100}")
        whole = isinstance(first, int) and isinstance(second, int)
        if whole and bits(int(first), int(second)) > LARGEST_BITS:
            raise ValueError("a whole number in it grows too large")
        return compute(first, second)

    return apply


_power = _bounded(operator.pow, lambda base, power: base.bit_length() * max(power, 0))
_times = _bounded(operator.mul, lambda first, second: first.bit_length() + second.bit_length())
_shift = _bounded(operator.lshift, lambda value, places: value.bit_length() + places)


def _rounded(number: Number, digits: int | None = None) -> Number:
    """As Python's `round`, which takes for ever to find that a billion places before the point
    leave nothing of a whole number."""
    return round(number) if digits is None else round(number, max(digits, -LARGEST_BITS))


OPERATORS = DEFAULT_OPERATORS | {ast.Pow: _power, ast.Mult: _times, ast.LShift: _shift}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "abs": abs,
    "round": _rounded,
    "pow": _power,
    "sqrt": math.sqrt,
    "ceil": math.ceil,
    "floor": math.floor,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "int": int,
    "float": float,
}

NO_ARITHMETIC = (ast.Attribute, ast.JoinedStr, ast.FormattedValue)
"""What an evaluator allows that formulas of numbers have no use for: methods and texts, which can
fill the memory (`a.to_bytes(10 ** 10, "big")`)."""

CANNOT = (
    InvalidExpression, SyntaxError, ArithmeticError, ValueError, TypeError, LookupError,
    AttributeError, RecursionError, MemoryError,
)  # fmt: skip
"""What a formula that makes no sense ends in."""


def _literal(node: ast.Constant) -> Number:
    """A number as it is written."""
    if not isinstance(node.value, int | float):
        raise ValueError(f"a number was expected, found {node.value!r:.100}")
    return node.value


def _evaluator(names: dict[str, Any]) -> Any:
    """What computes formulas of numbers."""
    evaluator = SimpleEval(operators=OPERATORS, functions=FUNCTIONS, names=names)
    for kind in NO_ARITHMETIC:
        evaluator.nodes.pop(kind, None)
    evaluator.nodes[ast.Constant] = _literal
    return evaluator


def evaluate(expression: str, values: dict[str, Number]) -> Number:
    """Result of a formula.

    Args:
        expression: Python's notation for numbers, comparisons, choices and `FUNCTIONS`, in one or
            several lines.
        values: Numbers by name; all of them are also the list `values`.
    Raises:
        ValueError: It cannot be read or computed, or gives something else than a finite number.
    """
    if not expression.strip():
        raise ValueError("expression: expected a formula such as a + b, found nothing")
    names = {**values, "values": list(values.values())}
    shown = f"expression {expression.strip()[:200]!r}"
    try:
        # In brackets it may go on in the next line.
        formula = ast.parse(f"({expression}\n)", mode="eval").body
        result = _evaluator(names).eval(expression, previously_parsed=formula)
    except CANNOT as error:
        known = ", ".join(values) or "none"
        raise ValueError(
            f"{shown} cannot be computed: {error or type(error).__name__}; its values are {known}, "
            f"its functions {', '.join(FUNCTIONS)}"
        ) from error
    if not isinstance(result, int | float):
        raise ValueError(f"{shown}: expected a number, found {result!r:.100}")
    if not _is_finite(result):
        raise ValueError(f"{shown}: expected a finite number, the result is too large or none")
    return result


def _is_finite(number: Number) -> bool:
    """Whether a float can hold it."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


class MathExpression(io.ComfyNode):
    """Computes a formula of up to 26 values."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.MultiType.Input("value", [io.Float, io.Int, io.Boolean])
        letters = io.Autogrow.TemplateNames(value, names=list(ascii_lowercase), min=1)
        return io.Schema(
            node_id="ComfyMathExpression",
            display_name="Math Expression",
            category="math",
            inputs=[
                io.String.Input("expression", default="a + b", multiline=True),
                io.Autogrow.Input("values", template=letters),
            ],
            outputs=[
                io.Float.Output(display_name="FLOAT"),
                io.Int.Output(display_name="INT"),
                io.Boolean.Output(display_name="BOOL"),
            ],
        )

    @classmethod
    def execute(cls, expression: str, values: dict[str, Number]) -> io.NodeOutput:
        given = {name: value for name, value in values.items() if value is not None}
        result = evaluate(expression, given)
        return io.NodeOutput(float(result), int(result), bool(result))


class NumberConvert(io.ComfyNode):
    """Makes a number of a text, a switch or another number."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = [io.Int, io.Float, io.String, io.Boolean]
        return io.Schema(
            node_id="ComfyNumberConvert",
            display_name="Convert Number",
            category="math",
            inputs=[io.MultiType.Input("value", kinds)],
            outputs=[
                io.Float.Output(display_name="FLOAT"),
                io.Int.Output(display_name="INT"),
            ],
        )

    @classmethod
    def execute(cls, value: Number | str) -> io.NodeOutput:
        number = _number_in(value) if isinstance(value, str) else value
        if not isinstance(number, int | float) or not _is_finite(number):
            raise ValueError(f"value: expected a finite number, found {value!r:.100}")
        return io.NodeOutput(float(number), int(number))


def _number_in(text: str) -> Number:
    """The number that a text writes; whole ones are exact."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise ValueError(f"value: expected a number such as 12 or 3.5, found the text {text!r:.100}")


comfy_entrypoint = entrypoint_of(MathExpression, NumberConvert)
