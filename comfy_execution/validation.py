"""Is this prompt fit to run? Complete, typed, and without recursion.

Every node that an output needs is checked once, sources before consumers. An output is valid when
neither it nor anything it needs has an error. Constants are converted to the declared types in the
prompt itself. However large the prompt is, the event loop serves others meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from comfy_execution import blame, calls
from comfy_execution import validation_errors as errors
from comfy_execution.calls import Call
from comfy_execution.graph_utils import ExecutionBlocker, is_link
from comfy_execution.inputs import unwrap
from comfy_execution.literals import check_literal, fits
from comfy_execution.registry import Registry, SpecTable, installed
from comfy_execution.spec import InputInfo, NodeSpec
from comfy_execution.turns import Turns
from comfy_execution.types import accepts
from comfy_execution.wire import json_kind

MOST_CYCLES = 16
"""Cycles that are reported in full; of further ones only the node that closes them."""

Error = errors.Error
Prompt = dict[str, Any]


class ValidationResult(NamedTuple):
    """Outcome of a validation, in the order of the public function.

    Attributes:
        valid: Whether at least one output can run.
        error: The error object if not, else None.
        outputs: Ids of the output nodes that can run, in order of the prompt.
        node_errors: Node id -> {"errors", "dependent_outputs", "class_type"}.
    """

    valid: bool
    error: Error | None
    outputs: list[str]
    node_errors: dict[str, dict[str, Any]]


async def validate_prompt(
    prompt_id: str | None,
    prompt: Prompt,
    partial_execution_list: Sequence[str] | None = None,
    registry: Registry | None = None,
) -> ValidationResult:
    """Validates a prompt; constants in it are converted in place.

    Args:
        prompt_id: Its id, for nodes that ask.
        prompt: Node id -> node.
        partial_execution_list: Only these output nodes are to run; None means all.
        registry: Node classes; the installed ones if None.
    """
    return await _Validation(prompt_id or "", prompt, registry or installed()).run(
        partial_execution_list
    )


@dataclass
class _Validation:
    """One validation; node errors and types by node while it goes on."""

    prompt_id: str
    prompt: Prompt
    registry: Registry
    own_errors: dict[str, list[Error]] = field(default_factory=dict)
    _sound_links: dict[str, list[str]] = field(default_factory=dict)
    _received_types: dict[str, dict[str, Any]] = field(default_factory=dict)
    _checks: dict[str, _CustomCheck | None] = field(default_factory=dict)
    _specs: dict[str, NodeSpec] = field(default_factory=dict)  # by node id
    _turns: Turns = field(default_factory=Turns)

    async def run(self, targets: Sequence[str] | None) -> ValidationResult:
        """Checks everything; see validate_prompt."""
        malformed = await self._find_malformed()
        if malformed is not None:
            return ValidationResult(False, malformed, [], {})
        wanted = None if targets is None else {str(target) for target in targets}
        outputs = [
            node_id
            for node_id, spec in self._specs.items()
            if spec.is_output and (wanted is None or node_id in wanted)
        ]
        if not outputs:
            return ValidationResult(False, errors.no_outputs(), [], {})
        order, cycles = await self._order(outputs)
        for cycle in cycles:
            self._blame_cycle(cycle)
        for node_id in order:
            if self._check_values(node_id) and self._specs[node_id].validator is not None:
                await self._ask_class(node_id)
            if self._turns.due:
                await self._turns.give()
        return await self._conclude(outputs, order)

    # --- the prompt as a whole ----------------------------------------------------------------

    async def _find_malformed(self) -> Error | None:
        """The first error that makes the whole prompt unusable; finds the class of each node."""
        if isinstance(self.prompt.get("nodes"), list) and "links" in self.prompt:
            return errors.not_a_prompt(
                "this is a workflow in the editor's own format; use File > Export (API), or "
                "Workflow > Export (API), and send that"
            )
        specs = SpecTable(self.registry)
        for node_id, node in self.prompt.items():
            if not isinstance(node, dict):
                return errors.not_a_prompt(
                    f"node '{node_id}' is {json_kind(node)}; expected an object with "
                    "class_type and inputs"
                )
            class_type = node.get("class_type")
            if not isinstance(class_type, str):
                return errors.missing_class_type(node_id)
            spec = specs.get(class_type)
            if spec is None:
                meta = node.get("_meta")
                title = meta.get("title", class_type) if isinstance(meta, dict) else class_type
                return errors.unknown_class(node_id, class_type, title)
            self._specs[node_id] = spec
            if self._turns.due:
                await self._turns.give()
        return None

    async def _links(self, node_id: str) -> list[str]:
        """Nodes that a node is soundly linked to; its unsound links become its errors."""
        found = self._sound_links[node_id] = []
        try:
            await self._check_links(node_id, found)
        except Exception as error:  # noqa: BLE001 - foreign code: the class failed to answer
            self._blame(node_id, errors.exception_raised(error))
        return found

    def _blame(self, node_id: str, error: Error) -> None:
        self.own_errors.setdefault(node_id, []).append(error)

    async def _order(self, outputs: Sequence[str]) -> tuple[list[str], list[list[str]]]:
        """Nodes the outputs need, sources first; and the cycles among them."""
        order: list[str] = []
        cycles: list[list[str]] = []
        position: dict[str, int] = {}  # place on the current path, -1 once left
        path: list[str] = []
        for output in outputs:
            if output in position:
                continue
            stack = [(output, iter(await self._links(output)))]
            position[output] = 0
            path = [output]
            while stack:
                node_id, sources = stack[-1]
                source = next(sources, None)
                if source is None:
                    stack.pop()
                    path.pop()
                    position[node_id] = -1
                    order.append(node_id)
                elif source not in position:
                    position[source] = len(path)
                    path.append(source)
                    stack.append((source, iter(await self._links(source))))
                elif position[source] >= 0:
                    cycle = path[position[source] :] if len(cycles) < MOST_CYCLES else path[-1:]
                    cycles.append(cycle[::-1])
        return order, cycles

    def _blame_cycle(self, cycle: list[str]) -> None:
        classes = {node_id: self.prompt[node_id]["class_type"] for node_id in cycle}
        for node_id in cycle[: errors.MOST_CYCLE_NODES]:
            blamed = self.own_errors.setdefault(node_id, [])
            if not any(error["type"] == "dependency_cycle" for error in blamed):
                blamed.append(errors.dependency_cycle(node_id, cycle, classes))

    async def _conclude(self, outputs: Sequence[str], order: Sequence[str]) -> ValidationResult:
        """Sorts out which outputs can run, and what the errors of others hold up."""
        if not self.own_errors:
            return ValidationResult(True, None, list(outputs), {})
        links, at_fault = self._sound_links, self.own_errors
        good = await blame.sound_outputs(outputs, order, links, at_fault, self._turns)
        sound = set(good)
        failing = [output for output in outputs if output not in sound]
        dependents = await blame.dependent_outputs(failing, order, links, at_fault, self._turns)
        node_errors = {
            node_id: {
                "errors": found,
                "dependent_outputs": dependents[node_id],
                "class_type": self.prompt[node_id]["class_type"],
            }
            for node_id, found in self.own_errors.items()
        }
        if good:
            return ValidationResult(True, None, good, node_errors)
        of_outputs = [e for output in outputs for e in self.own_errors.get(output, ())]
        return ValidationResult(False, errors.outputs_failed(of_outputs), [], node_errors)

    # --- one node -----------------------------------------------------------------------------

    async def _check_links(self, node_id: str, sources: list[str]) -> None:
        """Checks the links of a node and collects the nodes behind sound ones."""
        node = self.prompt[node_id]
        spec, inputs = self._specs[node_id], node.get("inputs")
        if not isinstance(inputs, dict):
            return
        types = self._received_types[node_id] = {}
        lists = [(name, value) for name, value in inputs.items() if isinstance(value, list)]
        declared = spec.expand(inputs) if lists else {}
        for name, value in lists:
            info = declared.get(name)
            if info is None:
                if not is_link(value):
                    continue  # an unknown constant is ignored
                info = spec.find(name, inputs)
            error = self._link_error(name, info, value, types, self._custom_check(spec))
            if error is None:
                sources.append(value[0])
            else:
                self._blame(node_id, error)
            if self._turns.due:
                await self._turns.give()

    def _link_error(
        self,
        name: str,
        info: InputInfo,
        link: list[Any],
        received_types: dict[str, Any],
        custom: _CustomCheck | None,
    ) -> Error | None:
        if not is_link(link):
            return errors.bad_link(name, info, link)
        spec = self._specs.get(link[0])
        if spec is None:
            return errors.missing_source(name, info, link)
        slot = link[1]
        try:
            if slot != int(slot) or slot < 0:
                raise IndexError
            received = received_types[name] = spec.slot_type(int(slot))
        except (IndexError, KeyError):
            return errors.bad_slot(name, info, link, spec.class_type, spec.slot_count())
        takes_over = custom is not None and custom.takes_types
        if info.section is None or takes_over or accepts(received, info.type):
            return None
        return errors.type_mismatch(name, info, received, link)

    def _check_values(self, node_id: str) -> bool:
        """Checks the constants of a node; says whether its class could be asked about them."""
        try:
            for error in self._value_errors(node_id, self.prompt[node_id]):
                self._blame(node_id, error)
        except Exception as failure:  # noqa: BLE001 - foreign code: the class failed to answer
            self._blame_class(node_id, failure)
            return False
        return True

    def _blame_class(self, node_id: str, failure: Exception) -> None:
        """A class failed to answer; where its node has errors already, these are why."""
        if node_id not in self.own_errors:
            self._blame(node_id, errors.exception_raised(failure))

    def _value_errors(self, node_id: str, node: dict[str, Any]) -> list[Error]:
        spec, inputs = self._specs[node_id], node.get("inputs")
        if not isinstance(inputs, dict):
            return [errors.inputs_missing(node_id, type(inputs).__name__ if inputs else "nothing")]
        custom = self._custom_check(spec)
        found: list[Error] = []
        for name, info in spec.expand(inputs).items():
            if name not in inputs:
                if info.section == "required":
                    found.append(errors.required_input_missing(name, spec.shown_name(name)))
                continue
            value = inputs[name]
            if fits(info, value) or isinstance(value, list) or info.options.get("rawLink"):
                continue
            check_values = custom is None or not custom.takes(spec.argument_name(name))
            kept, error = check_literal(name, info, value, check_values)
            if kept is not value:
                inputs[name] = kept
            if error is not None:
                found.append(error)
        return found

    # --- the node class's own check -----------------------------------------------------------

    def _custom_check(self, spec: NodeSpec) -> _CustomCheck | None:
        if spec.validator is None:
            return None
        if spec.class_type not in self._checks:
            found = inspect.getfullargspec(getattr(spec.node_class, spec.validator))
            self._checks[spec.class_type] = _CustomCheck(
                frozenset(found.args) | frozenset(found.kwonlyargs), found.varkw is not None
            )
        return self._checks[spec.class_type]

    async def _ask_class(self, node_id: str) -> None:
        """Calls VALIDATE_INPUTS, and blames the node for what it refuses."""
        try:
            for error in await self._class_errors(node_id, self.prompt[node_id]):
                self._blame(node_id, error)
        except Exception as failure:  # noqa: BLE001 - foreign code: the class failed to answer
            self._blame_class(node_id, failure)

    async def _class_errors(self, node_id: str, node: Mapping[str, Any]) -> list[Error]:
        """What VALIDATE_INPUTS says of the constants it takes; links arrive as None."""
        spec, inputs = self._specs[node_id], node.get("inputs")
        custom = self._custom_check(spec)
        if custom is None or spec.validator is None or not isinstance(inputs, dict):
            return []
        values: dict[str, list[Any]] = {}
        for name, value in inputs.items():
            info = spec.find(name, inputs)
            if is_link(value) and not info.options.get("rawLink"):
                values[name] = [None]
            elif info.section is not None:
                values[name] = [unwrap(value)]
        if spec.hidden_as_arguments:
            hidden = {"UNIQUE_ID": node_id, "PROMPT": self.prompt}
            values |= {
                name: [hidden.get(kind) if isinstance(kind, str) else None]
                for name, kind in spec.hidden.items()
            }
        values = {
            name: value for name, value in values.items() if custom.takes(spec.argument_name(name))
        }
        arguments = values
        if custom.takes_types:
            arguments = values | {"input_types": [self._received_types.get(node_id, {})]}
        bound = spec.bind(spec.node_class, {}, inputs)
        answers = await calls._async_map_node_over_list(
            self.prompt_id, node_id, bound.target, arguments, spec.validator, False, None, None,
            Call(spec, bound),
        )  # fmt: skip
        answers = [await a if isinstance(a, asyncio.Future) else a for a in answers]
        return list(_refusals(arguments, answers))


@dataclass(frozen=True)
class _CustomCheck:
    """What a class's own check looks at, and so takes over from the built-in checks."""

    names: frozenset[str]
    takes_all: bool

    @property
    def takes_types(self) -> bool:
        return "input_types" in self.names

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.names


def _refusals(arguments: Iterable[str], answers: Sequence[Any]) -> Iterable[Error]:
    """One error for each input of a check that did not answer True."""
    for answer in answers:
        if answer is True or isinstance(answer, ExecutionBlocker):
            continue
        for name in arguments:
            yield errors.custom_check_failed(name, None if answer is False else str(answer))
