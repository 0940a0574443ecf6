"""The declaration of a node: what it is called, takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfy_api.latest.io.base import Input, Output
from comfy_api.latest.io.dynamic import DynamicInput, MatchType, check_ids, declare
from comfy_api.latest.io.expansion import Expansion
from comfy_api.latest.io.hidden import Hidden
from comfy_api.latest.io.options import without_none


@dataclass
class PriceBadgeDepends:
    """The inputs whose values a price is computed from."""

    widgets: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    input_groups: list[str] = field(default_factory=list)

    def as_dict(self, schema_inputs: Sequence[Input]) -> dict[str, Any]:
        """The wire form: each widget with its type, found among the node's inputs."""
        return {
            "widgets": [
                {"name": name, "type": _type_at(name, schema_inputs)} for name in self.widgets
            ],
            "inputs": list(self.inputs),
            "input_groups": list(self.input_groups),
        }


def _type_at(path: str, inputs: Sequence[Input]) -> str:
    """Type name of the input with this dotted name, or an empty text."""
    last = path.rsplit(".", 1)[-1]
    nested = [below for top in inputs for below in top.get_all()]
    return next((found.get_io_type() for found in nested if found.id == last), "")


@dataclass
class PriceBadge:
    """A price that the editor shows on a paid node: an expression over its inputs."""

    expr: str
    depends_on: PriceBadgeDepends = field(default_factory=PriceBadgeDepends)
    engine: str = "jsonata"

    def validate(self) -> None:
        """Raises ValueError if the expression is empty or its language unknown."""
        if self.engine != "jsonata":
            raise ValueError(f"price badge has the engine '{self.engine}'; expected 'jsonata'")
        if not self.expr.strip():
            raise ValueError("price badge has an empty expression")

    def as_dict(self, schema_inputs: Sequence[Input]) -> dict[str, Any]:
        """The wire form."""
        depends_on = self.depends_on.as_dict(schema_inputs)
        return {"engine": self.engine, "depends_on": depends_on, "expr": self.expr}


@dataclass
class Schema:
    """What a node is, as its `define_schema` returns it.

    Attributes:
        node_id: Unique name of the node in prompts.
        display_name: Name in the editor; the node id if None.
        category: Menu path, with slashes.
        inputs, outputs: In the order of the editor and, for outputs, of what `execute` returns.
        hidden: Values `execute` finds in `cls.hidden`.
        description: Help text.
        search_aliases: Other words under which a search finds the node.
        is_input_list: Whether `execute` receives every input as a list, all at once.
        is_output_node: Whether the node is worth running for its own sake, as saving nodes are.
        is_deprecated, is_experimental, is_dev_only, is_api_node: How the editor marks it.
        price_badge: Price shown by the editor.
        not_idempotent: Whether two nodes with equal inputs must not share one result.
        enable_expand: Whether `execute` may return a graph to run in the node's place.
        accept_all_inputs: Whether inputs that are not declared are handed to `execute` as well.
        essentials_category: Place in the editor's list of essential nodes.
        has_intermediate_output: Whether what the node shows is a step on the way, not a result.
    """

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_dev_only: bool = False
    is_api_node: bool = False
    price_badge: PriceBadge | None = None
    not_idempotent: bool = False
    enable_expand: bool = False
    accept_all_inputs: bool = False
    essentials_category: str | None = None
    has_intermediate_output: bool = False

    def validate(self) -> None:
        """Raises ValueError, naming the node, if the declaration contradicts itself."""
        where = f"schema of node '{self.node_id}'"
        if not self.node_id:
            raise ValueError("schema has an empty node_id; expected a unique name")
        check_ids(self.inputs, where)
        names = [output.id for output in self.outputs if output.id is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{where}: several outputs have the ids {twice}; each must be unique")
        for output in self.outputs:
            output.validate()
        if self.price_badge is not None:
            self.price_badge.validate()

    def finalize(self) -> None:
        """Fills in what follows from the rest: hidden values, ids of outputs. Idempotent."""
        implied: list[Hidden] = []
        if self.is_output_node:
            implied += [Hidden.prompt, Hidden.extra_pnginfo]
        if self.is_api_node:
            implied += [Hidden.auth_token_comfy_org, Hidden.api_key_comfy_org]
        self.hidden = list(dict.fromkeys([*(self.hidden or []), *implied]))
        self.inputs = list(self.inputs or [])
        self.outputs = list(self.outputs or [])
        for index, output in enumerate(self.outputs):
            if output.id is None:
                output.id = f"_{index}_{output.get_io_type()}_"

    def input_types(self) -> dict[str, Any]:
        """The inputs in sections, as the classic `INPUT_TYPES` returns them."""
        sections = declare(self.inputs)
        if self.hidden:
            sections["hidden"] = {hidden.name: (hidden.value,) for hidden in self.hidden}
        return sections

    def expand(self, live: Mapping[str, Any]) -> Expansion:
        """The plain inputs that a prompt with the inputs `live` uses."""
        expansion = Expansion(live)
        for declared in self.inputs:
            declared.expand(expansion)
        return expansion

    def is_dynamic(self) -> bool:
        """Whether the inputs depend on what a prompt holds."""
        return any(isinstance(declared, DynamicInput) for declared in self.inputs)

    def output_names(self) -> list[str]:
        """Labels of the outputs: display name, or else type."""
        return [output.display_name or output.get_io_type() for output in self.outputs]

    def node_info(self, python_module: str) -> dict[str, Any]:
        """The entry of the node listing.

        Args:
            python_module: Where the node comes from, such as `custom_nodes.<folder>`.
        """
        sections = self.input_types()
        info = {
            "input": sections,
            "input_order": {section: list(names) for section, names in sections.items()},
            "output": [output.get_io_type() for output in self.outputs],
            "output_is_list": [output.is_output_list for output in self.outputs],
            "output_name": self.output_names(),
            "output_tooltips": [output.tooltip for output in self.outputs],
            "output_matchtypes": self._match_types(),
            "name": self.node_id,
            "display_name": self.display_name,
            "description": self.description,
            "python_module": python_module,
            "category": self.category,
            "output_node": self.is_output_node,
            "deprecated": self.is_deprecated,
            "experimental": self.is_experimental,
            "api_node": self.is_api_node,
        }
        return info | self._rare_info()

    def _match_types(self) -> list[str | None] | None:
        """Template id for each output, None for those without; None if no output has one."""
        found = [
            output.template.template_id if isinstance(output, MatchType.Output) else None
            for output in self.outputs
        ]
        return found if any(found) else None

    def _rare_info(self) -> dict[str, Any]:
        """Keys that are sent only where they say something."""
        badge = self.price_badge.as_dict(self.inputs) if self.price_badge else None
        return without_none(
            {
                "is_input_list": self.is_input_list or None,
                "has_intermediate_output": self.has_intermediate_output or None,
                "dev_only": self.is_dev_only or None,
                "search_aliases": self.search_aliases or None,
                "essentials_category": self.essentials_category,
                "price_badge": badge,
            }
        )
