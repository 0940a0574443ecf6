"""Inputs that stand for several: alternatives of type, growing lists, choices with inputs of
their own.

In a prompt the inputs nested in a dynamic one have dotted names (`images.image0`); `execute`
receives them as nested dictionaries. `expansion` does both translations; here are the
declarations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comfy_api.latest.io import base
from comfy_api.latest.io.base import ComfyType, ComfyTypeI, ComfyTypeIO, WidgetInput, comfytype
from comfy_api.latest.io.expansion import Expansion, Path
from comfy_api.latest.io.options import without_none
from comfy_api.latest.io.sockets import AnyType

MAX_NAMES = 100  # inputs that one growing list may have
MATCH_TYPE = "COMFY_MATCHTYPE_V3"


def declare(inputs: Sequence[base.Input]) -> dict[str, Any]:
    """Inputs as the sections of a node listing: `required`, always, and `optional`, if used."""
    sections: dict[str, Any] = {"required": {}}
    for declared in inputs:
        section = sections.setdefault("optional" if declared.optional else "required", {})
        section[declared.id] = (declared.get_io_type(), declared.as_dict())
    return sections


def check_ids(inputs: Sequence[base.Input], where: str) -> None:
    """Raises ValueError, naming `where`, if two inputs share an id or an id is unusable."""
    seen = set()
    for declared in inputs:
        if not declared.id or "." in declared.id:
            raise ValueError(f"{where}: input id '{declared.id}' is empty or holds a dot")
        if declared.id in seen:
            raise ValueError(
                f"{where}: two inputs have the id '{declared.id}'; each must be unique"
            )
        seen.add(declared.id)
        declared.validate()


class DynamicInput(base.Input):
    """An input that takes the place of a varying number of others."""

    def nested(self) -> list[base.Input]:
        """Every input that can appear below this one."""
        return []

    def get_all(self) -> list[base.Input]:
        return [self, *self.nested()]


@comfytype("COMFY_MULTITYPED_V3")
class MultiType(ComfyTypeI):
    """Any of several types."""

    class Input(base.Input):
        """A socket that accepts each of `types`.

        Args:
            id: Name, or a widget input that is shown while nothing is connected; its type comes
                first in the joined type name.
            types: Socket types, such as `[io.Image, io.Mask]`.
        """

        def __init__(
            self,
            id: str | WidgetInput,
            types: Sequence[type[ComfyType] | ComfyType],
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            self.input_override = id if isinstance(id, WidgetInput) else None
            if isinstance(id, WidgetInput):
                optional = optional or id.optional
                id = id.id
            super().__init__(
                id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced
            )
            self.io_types = list(types)

        def get_io_type(self) -> str:
            names = [kind.io_type for kind in self.io_types]
            if self.input_override is not None:
                names.insert(0, self.input_override.get_io_type())
            return ",".join(dict.fromkeys(names))

        def as_dict(self) -> dict[str, Any]:
            if self.input_override is None:
                return super().as_dict()
            return self.input_override.as_dict() | super().as_dict()

        def validate(self) -> None:
            if not self.io_types:
                raise ValueError(f"input '{self.id}' accepts no type; expected one type or more")


@comfytype(MATCH_TYPE)
class MatchType(ComfyTypeIO):
    """The same type on every input and output that names the same template."""

    class Template:
        """What must match.

        Args:
            template_id: Name shared by the inputs and outputs that have one type.
            allowed_types: One socket type or several; any type by default.
        """

        def __init__(
            self,
            template_id: str,
            allowed_types: type[ComfyType] | Sequence[type[ComfyType]] = AnyType,
        ) -> None:
            if isinstance(allowed_types, type):
                allowed_types = [allowed_types]
            if not allowed_types:
                raise ValueError(f"match-type template '{template_id}' allows no type")
            self.template_id = template_id
            self.allowed_types = list(allowed_types)

        def as_dict(self) -> dict[str, Any]:
            """The wire form."""
            allowed = ",".join(kind.io_type for kind in self.allowed_types)
            return {"template_id": self.template_id, "allowed_types": allowed}

    class Input(base.Input):
        """A socket whose type follows what is connected to the template."""

        def __init__(
            self,
            id: str,
            template: MatchType.Template,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced
            )
            self.template = template

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | {"template": self.template.as_dict()}

    class Output(base.Output):
        """An output whose type follows what is connected to the template."""

        def __init__(
            self,
            template: MatchType.Template,
            id: str | None = None,
            display_name: str | None = None,
            tooltip: str | None = None,
            is_output_list: bool | None = False,
        ) -> None:
            super().__init__(id, display_name, tooltip, is_output_list)
            self.template = template


class GrowthTemplate:
    """How the inputs of a growing list look and which names they have."""

    def __init__(self, input: base.Input, names: Sequence[str], min: int) -> None:
        if isinstance(input, DynamicInput):
            raise ValueError(f"a growing list cannot hold the dynamic input '{input.id}'")
        if not 0 <= min <= len(names) <= MAX_NAMES:
            raise ValueError(
                f"growing list of '{input.id}' has min {min} and {len(names)} names; "
                f"expected 0 <= min <= names <= {MAX_NAMES}"
            )
        dotted = [name for name in names if "." in name or not name]
        if dotted:
            raise ValueError(
                f"growing list of '{input.id}': names {dotted} are empty or hold a dot"
            )
        self.input = input
        self.cached_names = list(names)
        self.min = min

    def as_dict(self) -> dict[str, Any]:
        """The wire form."""
        return {"input": declare([self.input])}


@comfytype("COMFY_AUTOGROW_V3")
class Autogrow(ComfyTypeI):
    """A list of like inputs that offers a free one as long as there is room."""

    Type = dict[str, Any]

    class TemplatePrefix(GrowthTemplate):
        """Inputs `<prefix>0`, `<prefix>1`...: at most `max`; the first `min` must be set."""

        def __init__(self, input: base.Input, prefix: str, min: int = 1, max: int = 10) -> None:
            super().__init__(input, [f"{prefix}{index}" for index in range(max)], min)
            self.prefix = prefix
            self.max = max

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | {"prefix": self.prefix, "min": self.min, "max": self.max}

    class TemplateNames(GrowthTemplate):
        """Inputs with the names given, in this order; the first `min` of them must be set."""

        def __init__(self, input: base.Input, names: Sequence[str], min: int = 1) -> None:
            super().__init__(input, names, min)
            self.names = list(names)

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | {"names": self.names, "min": self.min}

    class Input(DynamicInput):
        """The whole list; `execute` receives a dictionary from name to value."""

        def __init__(
            self,
            id: str,
            template: GrowthTemplate,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced
            )
            self.template = template

        def nested(self) -> list[base.Input]:
            return [self.template.input]

        def expand(self, into: Expansion, prefix: Path = ()) -> None:
            path = (*prefix, self.id)
            into.containers.append(path)
            item, stem = self.template.input, ".".join(path)
            needed = 0 if self.optional or item.optional else self.template.min
            for index, name in enumerate(self.template.cached_names):
                if index < needed or f"{stem}.{name}" in into.live:
                    options = item.as_dict()
                    into.add((*path, name), item.get_io_type(), options, index >= needed)

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | {"template": self.template.as_dict()}


@comfytype("COMFY_DYNAMICCOMBO_V3")
class DynamicCombo(ComfyTypeI):
    """A choice that brings inputs of its own."""

    Type = dict[str, Any]

    class Option:
        """One choice: its key and the inputs that appear when it is chosen."""

        def __init__(self, key: str, inputs: Sequence[base.Input]) -> None:
            self.key = key
            self.inputs = list(inputs)

        def as_dict(self) -> dict[str, Any]:
            """The wire form."""
            return {"key": self.key, "inputs": declare(self.inputs)}

    class Input(DynamicInput):
        """The choice; `execute` receives a dictionary with the key under the input's own id."""

        def __init__(
            self,
            id: str,
            options: Sequence[DynamicCombo.Option],
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced
            )
            self.options = list(options)

        def nested(self) -> list[base.Input]:
            chosen = [declared for option in self.options for declared in option.inputs]
            return [below for top in chosen for below in top.get_all()]

        def expand(self, into: Expansion, prefix: Path = ()) -> None:
            path = (*prefix, self.id)
            options = base.Input.as_dict(self) | {"options": [row.key for row in self.options]}
            into.add(path, "COMBO", options, self.optional, inner=(self.id,))
            chosen = into.live.get(".".join(path))
            for row in self.options:
                if isinstance(chosen, str) and row.key == chosen:
                    for declared in row.inputs:
                        declared.expand(into, path)

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | {"options": [option.as_dict() for option in self.options]}

        def validate(self) -> None:
            keys = [option.key for option in self.options]
            if not keys or len(set(keys)) < len(keys):
                raise ValueError(
                    f"dynamic combo '{self.id}' has the keys {keys}; "
                    f"expected one or more, no two alike"
                )
            for option in self.options:  # the key arrives beside the inputs, under the combo's id
                where = f"option '{option.key}' of dynamic combo '{self.id}'"
                check_ids([base.Input(self.id), *option.inputs], where)


@comfytype("COMFY_DYNAMICSLOT_V3")
class DynamicSlot(ComfyTypeI):
    """A socket that brings inputs of its own as soon as something is connected."""

    Type = dict[str, Any]

    class Input(DynamicInput):
        """The socket, never required; `execute` receives its value under the slot's own id."""

        def __init__(
            self,
            slot: base.Input,
            inputs: Sequence[base.Input],
            display_name: str | None = None,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            if isinstance(slot, DynamicInput):
                raise ValueError(f"the slot '{slot.id}' is itself dynamic; expected a plain input")
            super().__init__(
                slot.id, display_name or slot.display_name, True, tooltip or slot.tooltip,
                slot.lazy if lazy is None else lazy, extra_dict, raw_link, advanced,
            )  # fmt: skip
            self.slot = slot
            self.inputs = list(inputs)
            self.force_input: bool | None = None
            if isinstance(slot, WidgetInput):  # a widget would count as connected from the start
                slot.force_input = True
                self.force_input = True

        def nested(self) -> list[base.Input]:
            return [below for top in self.inputs for below in top.get_all()]

        def validate(self) -> None:
            check_ids([self.slot, *self.inputs], f"dynamic slot '{self.id}'")

        def expand(self, into: Expansion, prefix: Path = ()) -> None:
            path = (*prefix, self.id)
            options = self.slot.as_dict() | base.Input.as_dict(self)
            into.add(path, self.slot.get_io_type(), options, True, inner=(self.id,))
            if ".".join(path) in into.live:
                for declared in self.inputs:
                    declared.expand(into, path)

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | without_none(
                {
                    "slotType": self.slot.get_io_type(),
                    "inputs": declare(self.inputs),
                    "forceInput": self.force_input,
                }
            )
