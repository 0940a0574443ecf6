"""The one description of a node class that validation and execution work with.

Node classes come in two generations: classic ones (class attributes and ``INPUT_TYPES``), adapted
here by ``spec_from_class``, and schema-declared ones, which bring their own ``NodeSpec`` through
the class method ``__node_spec__`` (see ``SchemaNode``). Nothing else in this package asks which
is which.

Type names, option lists and section dictionaries are handed on as the very objects the class
offers: packages subclass ``str``, ``dict`` and ``tuple`` to make wildcard types and open-ended
inputs and outputs, and those stop working once copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.lazy import lazy

Sections = Mapping[str, Mapping[str, Any]]


class InputInfo(NamedTuple):
    """Declaration of one input; all None when the class does not declare it."""

    type: Any
    section: str | None  # "required", "optional" or "hidden"
    options: Mapping[str, Any]


UNDECLARED = InputInfo(None, None, {})


@runtime_checkable
class SchemaNode(Protocol):
    """What a schema-declared node class offers in place of the classic attributes."""

    @classmethod
    def __node_spec__(cls, class_type: str) -> NodeSpec: ...


@dataclass(eq=False)
class NodeSpec:
    """A node class, as one prompt sees it; ``INPUT_TYPES`` is evaluated once for each spec.

    Attributes:
        class_type: Name in prompts.
        node_class: The class.
        declare: Returns the sections of inputs; called late and at most once by ``sections``.
        function: Name of the method that does the work.
        is_async: Whether that method is a coroutine function.
        is_output: Whether the node is worth running for its own sake.
        input_is_list: Whether the method takes whole lists.
        return_types: Type of each output; may be open-ended.
        output_is_list: For each output whether the node returns a list of values; may be short.
        is_shareable: Whether nodes with equal inputs may share one result.
        lazy_check, fingerprint, validator: Names of optional methods of the class.
        hidden_as_arguments: Whether hidden values are passed like inputs.
    """

    class_type: str
    node_class: Any
    declare: Callable[[], Sections]
    function: str
    is_async: bool = False
    is_output: bool = False
    input_is_list: bool = False
    return_types: Any = ()
    output_is_list: Sequence[bool] = ()
    is_shareable: bool = True
    lazy_check: str | None = None
    fingerprint: str | None = None
    validator: str | None = None
    hidden_as_arguments: bool = True
    _named: dict[str, InputInfo] = field(default_factory=dict, repr=False)

    @lazy
    def sections(self) -> Sections:
        """The sections of inputs as the class declares them."""
        return self.declare()

    @lazy
    def declared(self) -> dict[str, InputInfo]:
        """Required and optional inputs by name, in order; open-ended sections list what they do."""
        found: dict[str, InputInfo] = {}
        for section in ("required", "optional"):
            for name, entry in (self.sections.get(section) or {}).items():
                if name not in found:
                    found[name] = read_entry(entry, section)
        return found

    @lazy
    def hidden(self) -> dict[str, Any]:
        """Name -> kind of each hidden value, such as ``UNIQUE_ID``."""
        return dict(self.sections.get("hidden") or {})

    @lazy
    def takes_unique_id(self) -> bool:
        """Whether results depend on the id of the node."""
        return any(_is_kind(kind, "UNIQUE_ID") for kind in self.hidden.values())

    @lazy
    def reads_graph(self) -> bool:
        """Whether the node can learn of nodes it is not linked to, and so refer to them later."""
        kinds = list(self.hidden.values())
        if any(_is_kind(kind, "DYNPROMPT") for kind in kinds):
            return True
        if any(info.options.get("rawLink") for info in self.declared.values()):
            return True
        return not self.is_output and any(_is_kind(kind, "PROMPT") for kind in kinds)

    def expand(self, _inputs: Mapping[str, Any]) -> dict[str, InputInfo]:
        """Inputs this node has in a prompt that gives it these inputs; schemas may vary them."""
        return self.declared

    def find(self, name: str, _inputs: Mapping[str, Any]) -> InputInfo:
        """The declaration of one input, by item access on what the class offers."""
        info = self._named.get(name)
        if info is None:
            info = self._named[name] = find_input(self.sections, name)
        return info

    def link_info(self, name: str, inputs: Mapping[str, Any]) -> InputInfo:
        """The declaration of a linked input, asked for as the graph is walked."""
        return self.find(name, inputs)

    def shown_name(self, name: str) -> str:
        """An input's name in messages; nested inputs of schemas show the last part."""
        return name if self.hidden_as_arguments else name.rsplit(".", 1)[-1]

    def argument_name(self, name: str) -> str:
        """The argument in which an input's value arrives; schemas nest dotted names in one."""
        return name if self.hidden_as_arguments else name.split(".", 1)[0]

    def make_instance(self) -> Any:
        """The object whose method runs; kept between prompts for the same node id."""
        return self.node_class()

    def bind(
        self,
        instance: Any,
        _hidden: Mapping[str, Any],
        _inputs: Mapping[str, Any],
    ) -> Bound:
        """What to call for one execution.

        Args:
            instance: From ``make_instance``, or the class for checks that need no object.
            _hidden: Values by name for everything in ``self.hidden`` that the host knows.
            _inputs: The node's inputs in the prompt; schemas nest dotted names by them.
        """
        return Bound(instance)

    def read_result(self, result: Any) -> Returned:
        """What one call returned, in one form for both generations."""
        if isinstance(result, dict):
            values = result.get("result")
            found = Returned(values, result.get("ui"), result.get("expand"))
        else:
            found = Returned(result)
        if isinstance(found.values, ExecutionBlocker):
            return found._replace(values=(found.values,) * self.slot_count())
        return found

    def slot_count(self) -> int:
        """Number of declared outputs."""
        return len(self.return_types)

    def slot_type(self, index: int) -> Any:
        """Type of an output.

        Raises:
            IndexError: the class has no such output; open-ended classes have all.
        """
        return self.return_types[index]

    def returns_list(self, index: int) -> bool:
        """Whether the output is a list whose items are handed on one by one."""
        flags = self.output_is_list
        return bool(flags[index]) if index < len(flags) else False


@dataclass(frozen=True)
class Bound:
    """One execution's call target: an object or class that has the methods."""

    target: Any

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments from input values by name; schemas nest dotted names here."""
        return values


class Returned(NamedTuple):
    """What one call of a node gave back.

    Attributes:
        values: One value for each output, or None.
        ui: What to show, by kind; or None.
        expand: A graph in API format to run in the node's place; links among ``values`` lead into
            it. Or None.
    """

    values: Any = None
    ui: Mapping[str, Any] | None = None
    expand: dict[str, dict[str, Any]] | None = None


class ClassicSpec(NodeSpec):
    """A classic class; linked inputs are looked up the way such classes can recognise.

    Some packages look at the call stack in ``INPUT_TYPES`` and offer open-ended inputs only while
    two callers named ``get_input_info`` examine links: the method here and the function in it.
    """

    def link_info(self, name: str, _inputs: Mapping[str, Any]) -> InputInfo:
        info = self._linked.get(name)
        if info is None:
            info = self._linked[name] = self.get_input_info(name)
        return info

    def get_input_info(self, name: str) -> InputInfo:
        """The declaration of a linked input as the class gives it to the graph walk."""

        def get_input_info() -> Sections:
            sections: Sections = self.node_class.INPUT_TYPES()
            return sections

        if self._link_sections is None:
            self._link_sections = get_input_info()
        return find_input(self._link_sections, name)

    @lazy
    def _linked(self) -> dict[str, InputInfo]:
        return {}

    _link_sections: Sections | None = None


def get_input_info(
    class_def: Any, input_name: str, valid_inputs: Sections | None = None
) -> tuple[Any, str | None, Mapping[str, Any]]:
    """Type, section and options of one input of a classic class; (None, None, {}) if undeclared."""
    sections = valid_inputs or class_def.INPUT_TYPES()
    found = find_input(sections, input_name)
    return found.type, found.section, found.options


def find_input(sections: Sections, name: str) -> InputInfo:
    """Looks a name up by ``in`` and item access, so that open-ended sections can answer."""
    for section in ("required", "optional", "hidden"):
        entries = sections.get(section)
        if entries is not None and name in entries:
            return read_entry(entries[name], section)
    return UNDECLARED


def read_entry(entry: Any, section: str) -> InputInfo:
    """An input's entry in any accepted form: (type,), (type, options), a list, or a bare type."""
    # the plain types come first: asking an abstract class takes long
    if type(entry) is tuple and len(entry) == 2 and type(entry[1]) is dict:
        return InputInfo(entry[0], section, entry[1])
    if isinstance(entry, str) or not isinstance(entry, (tuple, list, Sequence)):
        return InputInfo(entry, section, {})
    options = entry[1] if len(entry) > 1 and isinstance(entry[1], (dict, Mapping)) else {}
    return InputInfo(entry[0] if len(entry) else None, section, options)


def spec_from_class(class_type: str, node_class: Any) -> NodeSpec:
    """Adapts a node class of either generation.

    Raises:
        AttributeError: a classic class lacks ``FUNCTION`` or ``INPUT_TYPES``.
    """
    own_spec = getattr(node_class, "__node_spec__", None)
    if own_spec is not None:
        spec: NodeSpec = own_spec(class_type)
        return spec
    function = str(getattr(node_class, "FUNCTION", None) or _missing(node_class, "FUNCTION"))
    if not hasattr(node_class, "INPUT_TYPES"):
        _missing(node_class, "INPUT_TYPES")
    return ClassicSpec(
        class_type=class_type,
        node_class=node_class,
        declare=node_class.INPUT_TYPES,
        function=function,
        is_async=inspect.iscoroutinefunction(getattr(node_class, function, None)),
        is_output=bool(getattr(node_class, "OUTPUT_NODE", False)),
        input_is_list=bool(getattr(node_class, "INPUT_IS_LIST", False)),
        return_types=getattr(node_class, "RETURN_TYPES", ()),
        output_is_list=getattr(node_class, "OUTPUT_IS_LIST", ()),
        is_shareable=not getattr(node_class, "NOT_IDEMPOTENT", False),
        lazy_check=_method(node_class, "check_lazy_status"),
        fingerprint=_method(node_class, "IS_CHANGED"),
        validator=_method(node_class, "VALIDATE_INPUTS"),
    )


def _method(node_class: Any, name: str) -> str | None:
    return name if hasattr(node_class, name) else None


def _missing(node_class: Any, attribute: str) -> str:
    raise AttributeError(
        f"node class {node_class!r} has no {attribute}; a classic node class needs INPUT_TYPES, "
        "RETURN_TYPES and FUNCTION"
    )


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, str) and value == kind
