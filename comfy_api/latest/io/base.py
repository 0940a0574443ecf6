"""Inputs, outputs, and the socket types they belong to.

A socket type is a class with a type name (`io_type`) and two inner classes, `Input` and `Output`:
`Image.Input("picture")` declares an input named `picture` of type `IMAGE`. Each socket type owns
its own pair of inner classes, whose `Parent` attribute leads back to the type.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from comfy_api.latest.io.expansion import Expansion, Path
from comfy_api.latest.io.options import without_none


class HostType:
    """A class attribute that imports the class it stands for when it is first looked at.

    Schemas must load without torch, yet `io.Image.Type` is `torch.Tensor`.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


class Input:
    """One input of a node.

    Args:
        id: Name of the input in prompts and of the argument of `execute`; holds no dot.
        display_name: Label in the editor; the id if None.
        optional: Whether a prompt may leave the input out.
        tooltip: Help text in the editor.
        lazy: Whether the input is evaluated only when `check_lazy_status` asks for it.
        extra_dict: Further options, passed to the editor unchanged.
        raw_link: Whether the node receives the link `[node_id, output_index]` and not its value.
        advanced: Whether the editor hides the input among the advanced ones.
    """

    Parent: ClassVar[type[ComfyType]]

    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        extra_dict: Mapping[str, Any] | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ) -> None:
        self.id = id
        self.display_name = display_name
        self.optional = optional
        self.tooltip = tooltip
        self.lazy = lazy
        self.extra_dict = dict(extra_dict or {})
        self.rawLink = raw_link
        self.advanced = advanced

    @property
    def io_type(self) -> str:
        """Name of the socket type."""
        return self.get_io_type()

    @property
    def Type(self) -> Any:
        """The Python type of the values, for annotations."""
        return self.Parent.Type

    def get_io_type(self) -> str:
        """Name of the socket type as it stands in the node listing."""
        return self.Parent.io_type

    def get_all(self) -> list[Input]:
        """This input and those nested in it; the ids of all of them are checked by the schema."""
        return [self]

    def as_dict(self) -> dict[str, Any]:
        """The options of the input in the form of the node listing."""
        options = without_none(
            {
                "display_name": self.display_name,
                "tooltip": self.tooltip,
                "lazy": self.lazy,
                "rawLink": self.rawLink,
                "advanced": self.advanced,
            }
        )
        return options | without_none(self.extra_dict)

    def expand(self, into: Expansion, prefix: Path = ()) -> None:
        """Adds the plain inputs that this one stands for in a prompt: itself.

        Args:
            into: Collects them, and knows what the prompt holds.
            prefix: Ids of the dynamic inputs this one is nested in.
        """
        into.add((*prefix, self.id), self.get_io_type(), self.as_dict(), self.optional)

    def validate(self) -> None:
        """Raises ValueError if the declaration contradicts itself."""


class WidgetInput(Input):
    """An input that the editor can draw as a widget, with a default value.

    Args:
        default: Value of a new widget.
        socketless: Whether the widget offers no socket.
        widget_type: Another kind of widget than the type's own.
        force_input: Whether only the socket is shown, never the widget.
    """

    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        default: Any = None,
        socketless: bool | None = None,
        widget_type: str | None = None,
        force_input: bool | None = None,
        extra_dict: Mapping[str, Any] | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ) -> None:
        super().__init__(id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced)
        self.default = default
        self.socketless = socketless
        self.widget_type = widget_type
        self.force_input = force_input

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | without_none(
            {
                "default": self.default,
                "socketless": self.socketless,
                "widgetType": self.widget_type,
                "forceInput": self.force_input,
            }
        )


class Output:
    """One output of a node.

    Args:
        id: Name by which code can refer to the output; derived from index and type if None.
        display_name: Label in the editor; the id, or else the type, if None.
        tooltip: Help text in the editor.
        is_output_list: Whether the node returns a list whose items are handed on one by one.
    """

    Parent: ClassVar[type[ComfyType]]

    def __init__(
        self,
        id: str | None = None,
        display_name: str | None = None,
        tooltip: str | None = None,
        is_output_list: bool | None = False,
    ) -> None:
        self.id = id
        self.display_name = display_name or id
        self.tooltip = tooltip
        self.is_output_list = is_output_list

    @property
    def io_type(self) -> str:
        """Name of the socket type."""
        return self.get_io_type()

    @property
    def Type(self) -> Any:
        """The Python type of the values, for annotations."""
        return self.Parent.Type

    def get_io_type(self) -> str:
        """Name of the socket type as it stands in the node listing."""
        return self.Parent.io_type

    def as_dict(self) -> dict[str, Any]:
        """The output's own fields, without unset ones."""
        return without_none(
            {
                "display_name": self.display_name,
                "tooltip": self.tooltip,
                "is_output_list": self.is_output_list,
            }
        )

    def validate(self) -> None:
        """Raises ValueError if the declaration contradicts itself."""


class ComfyType:
    """Base of socket types. `Type` is the Python type of the values, `io_type` the type name."""

    Type: Any = Any
    io_type: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("Input", "Output"):
            inner = getattr(cls, name, None)
            if isinstance(inner, type):
                setattr(cls, name, _owned(inner, name, cls))


def _owned(inner: type, name: str, owner: type) -> type:
    """The inner class of `owner`: the one in its body, or a subclass of an inherited one."""
    if name not in owner.__dict__:
        namespace = {"__module__": owner.__module__, "__qualname__": f"{owner.__qualname__}.{name}"}
        inner = type(name, (inner,), namespace)
    inner.Parent = owner  # type: ignore[attr-defined]
    return inner


_Input: TypeAlias = Input  # the inner classes below have the same names
_Output: TypeAlias = Output


class ComfyTypeI(ComfyType):
    """A socket type that nodes only receive."""

    class Input(_Input):
        """Input of this type."""


class ComfyTypeIO(ComfyTypeI):
    """A socket type that nodes receive and return."""

    class Output(_Output):
        """Output of this type."""


TypeClass = TypeVar("TypeClass", bound=type[ComfyType])


def comfytype(io_type: str, **attributes: Any) -> Callable[[TypeClass], TypeClass]:
    """Class decorator that gives a socket type its name and, if wanted, further attributes.

    Args:
        io_type: Name of the type on sockets and in the node listing, such as `IMAGE`.
    """

    def decorate(cls: TypeClass) -> TypeClass:
        cls.io_type = io_type
        for name, value in attributes.items():
            setattr(cls, name, value)
        return cls

    return decorate


def Custom(io_type: str) -> type[ComfyTypeIO]:
    """A socket type for values that only some nodes know, such as `Custom("BASIC_PIPE")`."""
    made = type(io_type, (ComfyTypeIO,), {"io_type": io_type, "__module__": __name__})
    return cast(type[ComfyTypeIO], made)
