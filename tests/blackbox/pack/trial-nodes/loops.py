"""Loops by expansion: while, for, and collecting what each turn gave."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph_utils import GraphBuilder, is_link

SLOTS = 3
VALUES = tuple(f"value{index}" for index in range(SLOTS))
ANY = ("*",)


def between(start: str, end: str, graph: Any) -> list[str]:
    """Nodes on a way from start to end, both included."""
    consumers: dict[str, set[str]] = {}
    seen, stack = {end}, [end]
    while stack:
        current = stack.pop()
        for given in graph.get_node(current)["inputs"].values():
            if is_link(given):
                consumers.setdefault(given[0], set()).add(current)
                if given[0] not in seen:
                    seen.add(given[0])
                    stack.append(given[0])
    found, stack = {start: None, end: None}, [start]
    while stack:
        for consumer in consumers.get(stack.pop(), ()):
            if consumer not in found:
                found[consumer] = None
                stack.append(consumer)
    return list(found)


class WhileOpen:
    """Where a turn of the loop begins."""

    RETURN_TYPES = ("FLOW", *("*" for _ in VALUES))
    FUNCTION = "begin"
    CATEGORY = "trial/loops"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"optional": dict.fromkeys(VALUES, ANY)}

    def begin(self, **values: Any) -> tuple[Any, ...]:
        return ("flow", *map(values.get, VALUES))


class WhileClose:
    """Ends the loop, or puts another turn in its own place: a copy of what lies between."""

    RETURN_TYPES = tuple("*" for _ in VALUES)
    FUNCTION = "end"
    CATEGORY = "trial/loops"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"flow": ("FLOW", {"rawLink": True}), "go_on": ("BOOLEAN",)},
            "optional": dict.fromkeys(VALUES, ANY),
            "hidden": {"graph": "DYNPROMPT", "own_id": "UNIQUE_ID"},
        }

    def end(self, flow: Any, go_on: bool, graph: Any, own_id: str, **values: Any) -> Any:
        if not go_on:
            return tuple(map(values.get, VALUES))
        body = between(flow[0], own_id, graph)
        build = GraphBuilder()
        for old_id in body:
            local_id = "close" if old_id == own_id else old_id
            copy = build.node(graph.get_node(old_id)["class_type"], local_id)
            copy.set_override_display_id(old_id)
        for old_id in body:
            copy = build.lookup_node("close" if old_id == own_id else old_id)
            for name, given in graph.get_node(old_id)["inputs"].items():
                if is_link(given) and given[0] in body:
                    given = build.lookup_node(given[0]).out(given[1])
                copy.set_input(name, given)
        for name in VALUES:
            build.lookup_node(flow[0]).set_input(name, values.get(name))
        closing = build.lookup_node("close")
        return {
            "result": tuple(closing.out(index) for index in range(SLOTS)),
            "expand": build.finalize(),
        }


class ForOpen:
    """Begins a loop of `count` turns; outputs flow, turns left, and the values."""

    RETURN_TYPES = ("FLOW", "INT", *("*" for _ in VALUES[1:]))
    FUNCTION = "begin"
    CATEGORY = "trial/loops"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"count": ("INT", {"default": 1, "min": 1, "max": 2**40})},
            "optional": dict.fromkeys(VALUES[1:], ANY),
            "hidden": {VALUES[0]: ANY},  # turns left: not for people, but linked by the loop
        }

    def begin(self, count: int, **values: Any) -> dict[str, Any]:
        left = count if values.get(VALUES[0]) is None else values[VALUES[0]]
        build = GraphBuilder()
        given = {name: values.get(name) for name in VALUES[1:] if values.get(name) is not None}
        start = build.node("TrialWhileOpen", value0=left, **given)
        outputs = (start.out(index) for index in range(2, SLOTS + 1))
        return {"result": ("flow", left, *outputs), "expand": build.finalize()}


class ForClose:
    """Ends a loop that ForOpen began."""

    RETURN_TYPES = tuple("*" for _ in VALUES[1:])
    FUNCTION = "end"
    CATEGORY = "trial/loops"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"flow": ("FLOW", {"rawLink": True})},
            "optional": {name: ("*", {"rawLink": True}) for name in VALUES[1:]},
        }

    def end(self, flow: Any, **values: Any) -> dict[str, Any]:
        build = GraphBuilder()
        left = build.node("TrialAdd", a=[flow[0], 1], b=-1)
        go_on = build.node("TrialLess", a=0, b=left.out(0))
        given = {name: value for name, value in values.items() if value is not None}
        close = build.node(
            "TrialWhileClose", flow=list(flow), go_on=go_on.out(0), value0=left.out(0), **given
        )
        result = tuple(close.out(index) for index in range(1, SLOTS))
        return {"result": result, "expand": build.finalize()}


class Collect:
    """Adds an item to what was collected before, if anything was."""

    RETURN_TYPES = ("COLLECTION",)
    FUNCTION = "collect"
    CATEGORY = "trial/loops"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"item": ANY}, "optional": {"before": ("COLLECTION",)}}

    def collect(self, item: Any, before: list[Any] | None = None) -> tuple[list[Any]]:
        return ([*(before or ()), item],)


class Unpack:
    """The items of a collection, one by one."""

    RETURN_TYPES = ("*",)
    OUTPUT_IS_LIST = (True,)
    FUNCTION = "unpack"
    CATEGORY = "trial/loops"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"collection": ("COLLECTION",)}}

    def unpack(self, collection: list[Any]) -> tuple[list[Any]]:
        return (collection,)


class Pack(Unpack):
    """Makes a collection of a list."""

    RETURN_TYPES = ("COLLECTION",)
    OUTPUT_IS_LIST = (False,)
    INPUT_IS_LIST = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"collection": ANY}}


NODES = (WhileOpen, WhileClose, ForOpen, ForClose, Collect, Unpack, Pack)
