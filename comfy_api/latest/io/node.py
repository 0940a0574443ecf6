"""The base class of schema nodes.

A node is a class that is never instantiated by its author: `define_schema` declares it, `execute`
runs it, both class methods. Each execution gets a locked subclass of its own, on which `hidden`
holds the hidden values, so executions that overlap share nothing by accident.

The class attributes of classic nodes (`RETURN_TYPES`, `FUNCTION`, `CATEGORY`...) and
`INPUT_TYPES` are there as well, derived from the schema: node packages inspect and call other
packages' nodes through them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from comfy_api.latest.io.dynamic import DynamicInput
from comfy_api.latest.io.hidden import HiddenHolder
from comfy_api.latest.io.node_spec import schema_spec
from comfy_api.latest.io.output import NodeOutput
from comfy_api.latest.io.schema import Schema
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.spec import NodeSpec


class FromSchema:
    """A class attribute that is read off the class's schema."""

    def __init__(self, read: Callable[[Schema], Any]) -> None:
        self.read = read

    def __get__(self, instance: object, owner: type[ComfyNode]) -> Any:
        return self.read(owner.KNOWN_SCHEMA())


class FunctionName:
    """The name of the method that runs a node, which depends on whether `execute` is async."""

    def __get__(self, instance: object, owner: type[ComfyNode]) -> str:
        return "EXECUTE_NORMALIZED_ASYNC" if owner.IS_ASYNC() else "EXECUTE_NORMALIZED"


@functools.cache
def _locked_metaclass(metaclass: type) -> type:
    """A metaclass like the one given whose classes refuse assignment of attributes."""

    def refuse(cls: type, name: str, _value: Any) -> None:
        raise AttributeError(
            f"cannot set '{name}' on {cls.__name__} while it executes: executions share no state "
            f"through cls; keep the value in a local variable or in an object the class holds"
        )

    def refuse_deletion(cls: type, name: str) -> None:
        refuse(cls, name, None)

    namespace = {"__setattr__": refuse, "__delattr__": refuse_deletion}
    return type(f"Locked{metaclass.__name__}", (metaclass,), namespace)


class ComfyNode:
    """Base class of nodes: override `define_schema`, `execute` and, if need be, the other three."""

    RELATIVE_PYTHON_MODULE: ClassVar[str | None] = None
    SCHEMA: ClassVar[Schema | None] = None
    hidden: ClassVar[HiddenHolder] = HiddenHolder()
    _clone_of: ClassVar[type[ComfyNode] | None] = None
    _plain_clone: ClassVar[type[ComfyNode] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets a subclass be a classic node that only borrows from a schema node.

        Such a class declares `INPUT_TYPES` of its own and no schema; the executor then adapts it
        as it does classic classes.
        """
        super().__init_subclass__(**kwargs)
        if "INPUT_TYPES" in cls.__dict__ and "define_schema" not in cls.__dict__:
            cls.__node_spec__ = None  # type: ignore[method-assign, assignment]

    @classmethod
    def define_schema(cls) -> Schema:
        """Declares the node. Called for every listing and validation, so lists may change."""
        raise NotImplementedError(f"node class {cls.__name__} has no define_schema class method")

    @classmethod
    def execute(cls, *args: Any, **kwargs: Any) -> Any:
        """Runs the node; may be async. Arguments are the inputs by id, always given by keyword.

        `*args` is here for type checkers: to them an override may then name its arguments.

        Returns:
            NodeOutput, or what classic nodes return: a tuple, a dictionary, None.
        """
        raise NotImplementedError(f"node class {cls.__name__} has no execute class method")

    @classmethod
    def validate_inputs(cls, *args: Any, **kwargs: Any) -> bool | str:  # noqa: ARG003 - overriders
        """Accepts literal inputs (True) or refuses them with a text that says why.

        It gets the inputs it names; the built-in range checks leave those to it.
        """
        return True

    @classmethod
    def fingerprint_inputs(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG003 - for overriders
        """A value that differs whenever the node must run again although no input has changed."""
        return None

    @classmethod
    def check_lazy_status(cls, **kwargs: Any) -> list[str]:
        """Names of lazy inputs that are needed now; those not evaluated yet are None in kwargs.

        An input nested in a dynamic one is named with a dot: `images.image0`.
        """
        dynamic = {top.id for top in cls.KNOWN_SCHEMA().inputs if isinstance(top, DynamicInput)}
        names = [name for name, value in kwargs.items() if value is None]
        for name in dynamic & kwargs.keys():
            for inner, value in (kwargs[name] or {}).items():
                if value is None:
                    names.append(name if inner == name else f"{name}.{inner}")
        return names

    FUNCTION: Any = FunctionName()
    DESCRIPTION: Any = FromSchema(lambda schema: schema.description)
    CATEGORY: Any = FromSchema(lambda schema: schema.category)
    EXPERIMENTAL: Any = FromSchema(lambda schema: schema.is_experimental)
    DEPRECATED: Any = FromSchema(lambda schema: schema.is_deprecated)
    DEV_ONLY: Any = FromSchema(lambda schema: schema.is_dev_only)
    API_NODE: Any = FromSchema(lambda schema: schema.is_api_node)
    OUTPUT_NODE: Any = FromSchema(lambda schema: schema.is_output_node)
    INPUT_IS_LIST: Any = FromSchema(lambda schema: schema.is_input_list)
    NOT_IDEMPOTENT: Any = FromSchema(lambda schema: schema.not_idempotent)
    ACCEPT_ALL_INPUTS: Any = FromSchema(lambda schema: schema.accept_all_inputs)
    SEARCH_ALIASES: Any = FromSchema(lambda schema: list(schema.search_aliases))
    RETURN_TYPES: Any = FromSchema(
        lambda schema: tuple(output.get_io_type() for output in schema.outputs)
    )
    RETURN_NAMES: Any = FromSchema(lambda schema: tuple(schema.output_names()))
    OUTPUT_IS_LIST: Any = FromSchema(
        lambda schema: tuple(bool(output.is_output_list) for output in schema.outputs)
    )
    OUTPUT_TOOLTIPS: Any = FromSchema(
        lambda schema: tuple(output.tooltip for output in schema.outputs)
    )

    @classmethod
    def IS_ASYNC(cls) -> bool:
        """Whether `execute` is a coroutine function."""
        return inspect.iscoroutinefunction(cls.execute)

    @classmethod
    def GET_SCHEMA(cls) -> Schema:
        """A fresh schema, checked and completed; remembered for the derived attributes.

        Raises:
            ValueError: the schema contradicts itself; the text names node and input.
            TypeError: `define_schema` returned something else than a schema.
        """
        schema = cls.define_schema()
        if not isinstance(schema, Schema):
            raise TypeError(
                f"define_schema of {cls.__name__} returned {type(schema).__name__}; expected Schema"
            )
        schema.validate()
        schema.finalize()
        cls.GET_BASE_CLASS().SCHEMA = schema
        return schema

    @classmethod
    def KNOWN_SCHEMA(cls) -> Schema:
        """The schema as last made for this very class, made now if there is none."""
        known = cls.GET_BASE_CLASS().__dict__.get("SCHEMA")
        return known if isinstance(known, Schema) else cls.GET_SCHEMA()

    @classmethod
    def INPUT_TYPES(
        cls, include_hidden: bool = True, live_inputs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The inputs in sections `required`, `optional`, `hidden`, as classic nodes declare them.

        Args:
            live_inputs: The inputs of a prompt; dynamic inputs are then replaced by the plain ones
                this prompt uses, under dotted names.
        """
        schema = cls.GET_SCHEMA()
        sections = schema.input_types()
        if live_inputs is not None:
            expansion = schema.expand(live_inputs)
            sections = {**expansion.sections, "hidden": sections.get("hidden", {})}
        if not include_hidden or not sections.get("hidden"):
            sections.pop("hidden", None)
        return sections

    @classmethod
    def GET_NODE_INFO_V1(cls) -> dict[str, Any]:
        """The entry of the node listing."""
        return cls.GET_SCHEMA().node_info(cls.RELATIVE_PYTHON_MODULE or "nodes")

    @classmethod
    def GET_BASE_CLASS(cls) -> type[ComfyNode]:
        """The class as its author wrote it, also when called on an execution's clone."""
        return cls.__dict__.get("_clone_of") or cls

    @classmethod
    def PREPARE_CLASS_CLONE(cls, hidden: Mapping[Any, Any] | None) -> type[ComfyNode]:
        """A locked subclass for one execution.

        Args:
            hidden: Hidden values by name.
        """
        base = cls.GET_BASE_CLASS()
        shared = base.__dict__.get("_plain_clone")
        if not hidden and shared is not None:
            return cast(type[ComfyNode], shared)
        namespace = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "hidden": HiddenHolder.from_dict(hidden),
            "_clone_of": base,
        }
        metaclass: Any = type(base)
        clone: type[ComfyNode] = _locked_metaclass(metaclass)(base.__name__, (base,), namespace)
        if not hidden:  # with nothing on it and locked, one clone serves every execution
            base._plain_clone = clone
        return clone

    @classmethod
    def EXECUTE_NORMALIZED(cls, **kwargs: Any) -> NodeOutput:
        """Runs a node whose `execute` is a plain function; the result is always a NodeOutput."""
        return cls.NORMALIZE_OUTPUT(cls.execute(**kwargs))

    @classmethod
    async def EXECUTE_NORMALIZED_ASYNC(cls, **kwargs: Any) -> NodeOutput:
        """Runs a node whose `execute` is async; the result is always a NodeOutput."""
        return cls.NORMALIZE_OUTPUT(await cls.execute(**kwargs))

    @classmethod
    def __node_spec__(cls, class_type: str) -> NodeSpec:
        """The class in the executor's terms."""
        return schema_spec(class_type, cls.GET_BASE_CLASS())

    @classmethod
    def OVERRIDES(cls, name: str) -> bool:
        """Whether the author of the class wrote this method."""
        return inspect.getattr_static(cls, name) is not ComfyNode.__dict__[name]

    @classmethod
    def NORMALIZE_OUTPUT(cls, returned: Any) -> NodeOutput:
        """Whatever `execute` returned as a NodeOutput.

        Raises:
            TypeError: the value is of no kind a node may return.
            ValueError: a graph was returned but the schema does not allow expansion.
        """
        output = cls._AS_OUTPUT(returned)
        if output.expand is not None and not cls.KNOWN_SCHEMA().enable_expand:
            raise ValueError(
                f"node {cls.__name__} returned a graph to run in its place, but its schema does "
                f"not say enable_expand=True"
            )
        return output

    @classmethod
    def _AS_OUTPUT(cls, returned: Any) -> NodeOutput:
        if isinstance(returned, NodeOutput):
            return returned
        if returned is None:
            return NodeOutput()
        if isinstance(returned, ExecutionBlocker):
            return NodeOutput(*[returned] * len(cls.KNOWN_SCHEMA().outputs))
        if isinstance(returned, tuple):
            return NodeOutput(*returned)
        if isinstance(returned, Mapping):
            if isinstance(returned.get("result"), ExecutionBlocker):
                blocked = (returned["result"],) * len(cls.KNOWN_SCHEMA().outputs)
                returned = {**returned, "result": blocked}
            return NodeOutput.from_dict(returned)
        raise TypeError(
            f"execute of {cls.__name__} returned {type(returned).__name__}; expected NodeOutput, "
            f"a tuple with one value per output, a dictionary, or None"
        )
