"""Schema nodes in the executor's terms.

The executor works with `NodeSpec`. This one differs from a classic class's in three ways: dynamic
inputs become the plain ones a prompt uses, values are nested just before the call, and what is
called is a locked class with the hidden values on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from comfy_api.latest.io.expansion import Expansion
from comfy_api.latest.io.output import NodeOutput
from comfy_api.latest.io.schema import Schema
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.lazy import lazy
from comfy_execution.spec import UNDECLARED, Bound, InputInfo, NodeSpec, Returned, read_entry

if TYPE_CHECKING:
    from comfy_api.latest.io.node import ComfyNode

ANY_INPUT = InputInfo("*", "optional", {})  # what a node that accepts all inputs says of a stranger


@dataclass(frozen=True)
class SchemaCall(Bound):
    """One execution of a schema node: its class with hidden values, and how values are nested."""

    expansion: Expansion | None = None

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        return values if self.expansion is None else self.expansion.nest(values)


class Use(NamedTuple):
    """The inputs of one node of a prompt. They are kept along, so that their id stays theirs."""

    inputs: Mapping[str, Any]
    expansion: Expansion
    infos: dict[str, InputInfo]


@dataclass(eq=False)
class SchemaSpec(NodeSpec):
    """A schema node, as one prompt sees it. `schema` is made once for each spec."""

    schema: Schema = field(default_factory=lambda: Schema(""))
    _uses: dict[int, Use] = field(default_factory=dict, repr=False)

    @lazy
    def hidden(self) -> dict[str, Any]:
        return {hidden.name: hidden.value for hidden in self.schema.hidden}

    @lazy
    def reads_graph(self) -> bool:
        kinds = set(self.hidden.values())
        if any(below.rawLink for top in self.schema.inputs for below in top.get_all()):
            return True
        return "DYNPROMPT" in kinds or ("PROMPT" in kinds and not self.is_output)

    @lazy
    def _is_dynamic(self) -> bool:
        return self.schema.is_dynamic()

    def _use(self, inputs: Mapping[str, Any]) -> Use:
        """How one node of the prompt uses the inputs; kept as long as the spec."""
        use = self._uses.get(id(inputs))
        if use is None:
            expansion = self.schema.expand(inputs)
            infos = {
                name: read_entry(entry, section)
                for section, entries in expansion.sections.items()
                for name, entry in entries.items()
            }
            use = self._uses[id(inputs)] = Use(inputs, expansion, infos)
        return use

    def expand(self, inputs: Mapping[str, Any]) -> dict[str, InputInfo]:
        return self._use(inputs).infos if self._is_dynamic else self.declared

    def find(self, name: str, inputs: Mapping[str, Any]) -> InputInfo:
        if self._is_dynamic:
            found = self._use(inputs).infos.get(name, UNDECLARED)
        else:
            found = super().find(name, inputs)
        if found is UNDECLARED and self.schema.accept_all_inputs:
            return ANY_INPUT
        return found

    def make_instance(self) -> type[ComfyNode]:
        node_class: type[ComfyNode] = self.node_class
        return node_class

    def bind(
        self, instance: type[ComfyNode], hidden: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> SchemaCall:
        wanted = {name: hidden.get(name) for name in self.hidden}
        target = instance.PREPARE_CLASS_CLONE(wanted)
        return SchemaCall(target, self._use(inputs).expansion if self._is_dynamic else None)

    def read_result(self, result: Any) -> Returned:
        if not isinstance(result, NodeOutput):  # a check, not an execution
            return super().read_result(result)
        values: Any = result.args or None
        if result.block_execution is not None:
            blocker = ExecutionBlocker(result.block_execution or None)
            values = (blocker,) * self.slot_count()
        expand = dict(result.expand) if result.expand is not None else None
        return Returned(values, result.ui_dict(), expand)

    def node_info(self) -> dict[str, Any]:
        """The entry of the node listing, under the name that prompts use."""
        info = self.schema.node_info(self.node_class.RELATIVE_PYTHON_MODULE or "nodes")
        return {**info, "name": self.class_type}


def schema_spec(class_type: str, node_class: type[ComfyNode]) -> SchemaSpec:
    """Adapts a schema node class.

    Raises:
        ValueError, TypeError: the schema is wrong; the text names node and input.
    """
    schema = node_class.GET_SCHEMA()
    has_lazy = any(below.lazy for top in schema.inputs for below in top.get_all())
    return SchemaSpec(
        class_type=class_type,
        node_class=node_class,
        declare=schema.input_types,
        function=node_class.FUNCTION,
        is_async=node_class.IS_ASYNC(),
        is_output=schema.is_output_node,
        input_is_list=schema.is_input_list,
        return_types=node_class.RETURN_TYPES,
        output_is_list=node_class.OUTPUT_IS_LIST,
        is_shareable=not schema.not_idempotent,
        lazy_check="check_lazy_status"
        if has_lazy or node_class.OVERRIDES("check_lazy_status")
        else None,
        fingerprint="fingerprint_inputs" if node_class.OVERRIDES("fingerprint_inputs") else None,
        validator="validate_inputs" if node_class.OVERRIDES("validate_inputs") else None,
        hidden_as_arguments=False,
        schema=schema,
    )
