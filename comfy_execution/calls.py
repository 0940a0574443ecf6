"""Calling a node: once for each item of its input lists, and joining what comes back."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CoroutineType
from types import coroutine as coroutine_function
from typing import Any, NamedTuple

from comfy_execution.breaker import CallGuard
from comfy_execution.context import check_interrupt
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.inputs import InputLists
from comfy_execution.spec import Bound, NodeSpec, Returned, spec_from_class
from comfy_execution.wire import require_json

BlockCallback = Callable[[ExecutionBlocker], ExecutionBlocker]


class InvalidOutputError(TypeError):
    """A node returned something that is no result."""


class NodeExitError(Exception):
    """An async node tried to end the process; the cause is its SystemExit or KeyboardInterrupt."""


class Call(NamedTuple):
    """How one execution of a node is to be called and read."""

    spec: NodeSpec
    bound: Bound
    guard: CallGuard | None = None


@dataclass(slots=True)
class Outcome:
    """What all calls of a node gave together.

    Attributes:
        outputs: For each output the list of its values; not meant while ``subgraphs`` is set.
        ui: What to show, lists joined by kind; empty if nothing.
        subgraphs: For each call (graph or None, values); set when at least one call expanded.
    """

    outputs: list[list[Any]] = field(default_factory=list)
    ui: dict[str, list[Any]] = field(default_factory=dict)
    subgraphs: list[tuple[dict[str, Any] | None, Any]] | None = None


async def _async_map_node_over_list(
    prompt_id: str,  # noqa: ARG001 - for the packages that wrap this
    unique_id: str,  # noqa: ARG001 - likewise
    obj: Any,
    input_data_all: InputLists,
    func: str,
    allow_interrupt: bool = False,
    execution_block_cb: BlockCallback | None = None,
    pre_execute_cb: Callable[[int], None] | None = None,
    v3_data: Call | None = None,
) -> list[Any]:
    """Calls a method once for each place in its input lists; short lists repeat their last value.

    Packages wrap this function, so name and order of parameters are public.

    Args:
        prompt_id, unique_id: Where this happens.
        obj: Instance or class that has the method.
        input_data_all: Input name -> list of values. With ``INPUT_IS_LIST`` there is one call, with
            the lists themselves.
        func: Name of the method; it may be a coroutine function.
        allow_interrupt: Whether an interruption is looked for before each call.
        execution_block_cb: Called with the blocker found among the inputs of a call; what it
            returns takes the place of the result.
        pre_execute_cb: Called with the index of each call before it.
        v3_data: How to call and read; derived from obj if None.
    Returns:
        One result for each call: a value, a blocker, or a task that is not done yet.
    """
    call = v3_data or Call(spec_from_class("", _class_of(obj)), Bound(obj))
    results: list[Any] = []
    for index, values in enumerate(_slices(input_data_all, call.spec.input_is_list)):
        blocker = _find_blocker(values, call.spec.input_is_list)
        if blocker is not None:
            results.append(execution_block_cb(blocker) if execution_block_cb else blocker)
            continue
        if allow_interrupt:
            check_interrupt()
        if pre_execute_cb is not None:
            pre_execute_cb(index)
        method = getattr(call.bound.target, func)
        result = guarded(method, call.bound.arguments(values), call.guard)
        if isinstance(result, CoroutineType):
            task = asyncio.ensure_future(_contained(result, call.guard or CallGuard()))
            await asyncio.sleep(0)  # short coroutines end here and cost no waiting
            result = task.result() if task.done() else task
        results.append(result)
    return results


async def get_output_data(
    prompt_id: str,
    unique_id: str,
    obj: Any,
    input_data_all: InputLists,
    execution_block_cb: BlockCallback | None = None,
    pre_execute_cb: Callable[[int], None] | None = None,
    v3_data: Call | None = None,
) -> tuple[Any, dict[str, Any], bool, bool]:
    """Runs a node.

    Returns:
        (outputs, ui, whether a call expanded, whether tasks are not done). With tasks the first
        item holds the results and tasks of the calls; with expansion it holds (graph, values).
    """
    call = v3_data or Call(spec_from_class("", _class_of(obj)), Bound(obj))
    results = await _async_map_node_over_list(
        prompt_id, unique_id, obj, input_data_all, call.spec.function, True,
        execution_block_cb, pre_execute_cb, call,
    )  # fmt: skip
    if any(isinstance(result, asyncio.Future) for result in results):
        return results, {}, False, True
    outcome = read_results(results, call.spec)
    if outcome.subgraphs is not None:
        return outcome.subgraphs, outcome.ui, True, False
    return outcome.outputs, outcome.ui, False, False


def read_results(results: Sequence[Any], spec: NodeSpec) -> Outcome:
    """Joins the results of all calls of a node.

    Raises:
        InvalidOutputError: a call returned nothing usable.
        NotJsonError: a UI value is not JSON.
    """
    calls = [spec.read_result(result) for result in results]
    for call in calls:
        _require_forms(call, spec)
    outcome = Outcome(ui=_join_ui([call.ui for call in calls if call.ui], spec))
    if any(call.expand is not None for call in calls):
        outcome.subgraphs = [(call.expand, call.values) for call in calls]
        return outcome
    values = [_checked(call, spec) for call in calls]
    outcome.outputs = merge_values([given for given in values if given is not None], spec)
    return outcome


def merge_values(results: Sequence[Any], spec: NodeSpec) -> list[list[Any]]:
    """Turns values by call into values by output; list outputs are joined.

    Raises:
        InvalidOutputError: a list output is not a list, or a call returned too few values.
    """
    if not results:
        return []
    count = len(results[0])
    if len(results) == 1 and not spec.output_is_list:
        return [[value] for value in results[0]]
    merged: list[list[Any]] = []
    for index in range(count):
        column: list[Any] = []
        for given in results:
            if index >= len(given):
                raise InvalidOutputError(
                    f"{spec.class_type} returned {len(given)} outputs in one call and {count} in "
                    "another; each call must return the same number"
                )
            value = given[index]
            if not spec.returns_list(index) or isinstance(value, ExecutionBlocker):
                column.append(value)
                continue
            try:
                column.extend(value)
            except TypeError:
                raise InvalidOutputError(
                    f"output {index} of {spec.class_type} is declared as a list (OUTPUT_IS_LIST) "
                    f"but a {type(value).__name__} was returned"
                ) from None
        merged.append(column)
    return merged


def guarded(function: Callable[..., Any], values: dict[str, Any], guard: CallGuard | None) -> Any:
    """Calls node code, which may be broken out of while it runs."""
    if guard is None:
        return function(**values)
    guard.enter()
    try:
        return function(**values)
    finally:
        guard.leave()


def _slices(inputs: InputLists, input_is_list: bool) -> list[dict[str, Any]]:
    """Keyword arguments of each call."""
    if input_is_list or not inputs:
        return [dict(inputs)]
    count = max(map(len, inputs.values()))
    if count == 1:
        return [{name: values[0] for name, values in inputs.items()}]
    return [
        {name: values[min(index, len(values) - 1)] for name, values in inputs.items()}
        for index in range(count)
    ]


def _find_blocker(values: Mapping[str, Any], input_is_list: bool) -> ExecutionBlocker | None:
    for value in values.values():
        if isinstance(value, ExecutionBlocker):
            return value
        if input_is_list:
            for item in value:
                if isinstance(item, ExecutionBlocker):
                    return item
    return None


async def _contained(coroutine: CoroutineType[Any, Any, Any], guard: CallGuard) -> Any:
    """Awaits a node; asyncio would end its loop over an exception that means to end the process."""
    try:
        return await _guarded_steps(coroutine, guard)
    except (KeyboardInterrupt, SystemExit) as error:
        raise NodeExitError(str(error)) from error


@coroutine_function
def _guarded_steps(
    coroutine: CoroutineType[Any, Any, Any], guard: CallGuard
) -> Generator[Any, Any, Any]:
    """Drives a coroutine step by step: between two awaits it may be broken out of."""
    advance: Callable[[], Any] = functools.partial(coroutine.send, None)
    while True:
        guard.enter()
        try:
            waited_for = advance()
        except StopIteration as end:
            return end.value
        finally:
            guard.leave()
        try:
            value = yield waited_for
            advance = functools.partial(coroutine.send, value)
        except BaseException as error:  # noqa: BLE001 - handed on: the coroutine decides
            advance = functools.partial(coroutine.throw, error)


def _require_forms(call: Returned, spec: NodeSpec) -> None:
    """Whether what a call shows, and the graph it puts in its place, have a usable form."""
    if call.ui is not None and not isinstance(call.ui, Mapping):
        raise InvalidOutputError(
            f"{spec.class_type}.{spec.function} returned a {type(call.ui).__name__} as ui; "
            'expected a dict of lists, such as {"text": ["shown"]}'
        )
    if call.expand is None:
        return
    nodes = call.expand.values() if isinstance(call.expand, dict) else [None]
    if not all(isinstance(n, dict) and isinstance(n.get("class_type"), str) for n in nodes):
        raise InvalidOutputError(
            f"{spec.class_type}.{spec.function} returned something else than a graph as expand; "
            "expected a dict of node id to {class_type, inputs}, as GraphBuilder.finalize() gives"
        )


def _checked(call: Returned, spec: NodeSpec) -> Any:
    """The values of a call, None if it gave none because it only shows something."""
    if call.values is None:
        if call.ui is None and spec.slot_count():
            raise InvalidOutputError(
                f"{spec.class_type}.{spec.function} returned None; expected a tuple of "
                f"{spec.slot_count()} values"
            )
        return None
    if not hasattr(call.values, "__len__") or not hasattr(call.values, "__getitem__"):
        raise InvalidOutputError(
            f"{spec.class_type}.{spec.function} returned a {type(call.values).__name__}; expected "
            f"a tuple of {spec.slot_count()} values, such as (value,)"
        )
    return call.values


def _join_ui(shown: Sequence[Mapping[str, Any]], spec: NodeSpec) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for ui in shown:
        for kind, values in ui.items():
            plain = require_json(values, f"ui value {kind!r} of {spec.class_type}")
            joined.setdefault(kind, []).extend(plain if isinstance(plain, list) else [plain])
    return joined


def _class_of(obj: Any) -> Any:
    return obj if inspect.isclass(obj) else type(obj)
