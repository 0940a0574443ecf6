"""Nodes between which a part of the graph runs several times."""

from __future__ import annotations

import uuid
from typing import Any

from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_extras import loops
from comfy_extras.extension import entrypoint_of

CATEGORY = "logic/loops"
MOST_TERMINATIONS = 50
LARGEST = 0xFFFFFFFFFFFFFFFF
Values = list[Any]


def ways() -> io.DynamicCombo.Input:
    """How rounds are counted."""
    count = io.Int.Input("num_iterations", default=4, min=0)
    steps = [
        io.Int.Input("start_iteration_index", default=0, min=-LARGEST, max=LARGEST),
        io.Int.Input(
            "max_iteration",
            default=4,
            min=-LARGEST,
            max=LARGEST,
            tooltip="The first index that is not reached.",
        ),
        io.Int.Input("step", default=1, min=1),
    ]
    items = io.AnyType.Input("list", tooltip="One round for each of its items.")
    options = [
        io.DynamicCombo.Option("simple", [count]),
        io.DynamicCombo.Option("For", steps),
        io.DynamicCombo.Option("List", [items]),
    ]
    return io.DynamicCombo.Input("mode", options=options, tooltip="How rounds are counted.")


def round_of(mode: dict[str, Values], number: int, value: Values | None) -> io.NodeOutput:
    """What a round has: its index, whether it is the first, the last, its item and value.

    Args:
        mode: The way of counting and its inputs, each as a list.
        number: Of the round, from 0.
        value: What the round before handed on.
    """
    kind = mode["mode"][0]
    items: Values | None = None
    if kind == "List":
        items = mode.get("list") or []
        indices = range(len(items))
    elif kind == "For":
        names = ("start_iteration_index", "max_iteration", "step")
        first, end, step = (mode[name][0] for name in names)
        if step < 1:
            raise ValueError(f"step: expected 1 or more, found {step}")
        indices = range(first, end, step)
    else:
        indices = range(mode["num_iterations"][0])
    if not indices:
        nothing = ExecutionBlocker(None)
        return io.NodeOutput(nothing, nothing, True, nothing, [nothing])
    item = None if items is None else items[number]
    is_first, is_last = number == 0, number == len(indices) - 1
    return io.NodeOutput(indices[number], is_first, is_last, item, value or [None])


class StartLoop(io.ComfyNode):
    """Where a loop begins."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.AnyType.Input(
            "initial_iteration_value", optional=True, tooltip="The value of the first round."
        )
        return cls.schema("StartLoop", "Start Loop", [value])

    @classmethod
    def schema(cls, node_id: str, title: str, more: list[io.Input], **options: Any) -> io.Schema:
        """Declaration of the first round of a loop, or of the later ones."""
        return io.Schema(
            node_id=node_id,
            display_name=title,
            category=CATEGORY,
            description="What follows runs again and again, up to the End Loop node.",
            is_input_list=True,
            inputs=[
                ways(),
                io.Boolean.Input(
                    "cache_iterations",
                    default=False,
                    tooltip="Reuse the rounds of an earlier run whose inputs did not change.",
                ),
                io.Int.Input(
                    "parent_iteration",
                    optional=True,
                    force_input=True,
                    tooltip="The iteration_index of the loop around this one.",
                ),
                *more,
            ],
            outputs=[
                io.Int.Output(display_name="iteration_index"),
                io.Boolean.Output(display_name="is_first"),
                io.Boolean.Output(display_name="is_last"),
                io.AnyType.Output(display_name="list_item"),
                io.AnyType.Output(display_name="current_iteration_value", is_output_list=True),
            ],
            **options,
        )

    @classmethod
    def fingerprint_inputs(cls, cache_iterations: Any = None, **kwargs: Any) -> str:
        """Differs in every run, unless rounds of earlier runs may be reused."""
        del kwargs
        return "kept" if cache_iterations in (True, [True]) else uuid.uuid4().hex

    @classmethod
    def execute(
        cls,
        mode: dict[str, Values],
        cache_iterations: list[bool],
        parent_iteration: list[int] | None = None,
        initial_iteration_value: Values | None = None,
    ) -> io.NodeOutput:
        del cache_iterations, parent_iteration
        return round_of(mode, 0, initial_iteration_value)


class LoopRound(StartLoop):
    """Where a later round of a loop begins; loops put it into the graph."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        more = [io.Int.Input("turn"), io.AnyType.Input(loops.FROM_ROUND_BEFORE, optional=True)]
        return cls.schema(loops.ROUND, "Loop Round", more, is_dev_only=True)

    @classmethod
    def execute(  # type: ignore[override]
        cls,
        mode: dict[str, Values],
        cache_iterations: list[bool],
        turn: list[int],
        parent_iteration: list[int] | None = None,
        value: Values | None = None,
    ) -> io.NodeOutput:
        del cache_iterations, parent_iteration
        return round_of(mode, turn[0], value)


def end_schema(node_id: str, title: str, more: list[io.Input], **options: Any) -> io.Schema:
    """Declaration of the end of the first round of a loop, or of each."""
    ending = io.AnyType.Input("termination")
    endings = io.Autogrow.TemplatePrefix(ending, "termination", min=0, max=MOST_TERMINATIONS)
    return io.Schema(
        node_id=node_id,
        display_name=title,
        category=CATEGORY,
        description="Where a loop ends, and what comes out of it.",
        is_input_list=True,
        enable_expand=True,
        hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
        inputs=[
            io.Boolean.Input(
                "accumulate",
                default=False,
                tooltip="Give the values of all rounds, not only those of the last.",
            ),
            io.AnyType.Input("output_value", optional=True, tooltip="What comes out."),
            io.AnyType.Input(
                "next_iteration_value",
                optional=True,
                tooltip="The current_iteration_value of the next round; it stays the same without.",
            ),
            io.Autogrow.Input(
                "terminations",
                template=endings,
                optional=True,
                tooltip="What else runs in each round.",
            ),
            *more,
        ],
        outputs=[io.AnyType.Output(display_name="outputs", is_output_list=True)],
        **options,
    )


class EndLoop(io.ComfyNode):
    """Where a loop ends."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return end_schema("EndLoop", "End Loop", [])

    @classmethod
    def execute(cls, **kwargs: Any) -> io.NodeOutput:
        del kwargs  # the first turn takes them
        graph, result = loops.first_turn(cls.hidden.dynprompt, str(cls.hidden.unique_id))
        return io.NodeOutput(result, expand=graph)


class LoopTurn(io.ComfyNode):
    """Between two rounds of a loop: gives what came out or goes on; loops put it into the graph."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        more = [
            io.String.Input("start"),
            io.String.Input("end"),
            io.Int.Input("turn"),
            io.Boolean.Input("is_last"),
            io.AnyType.Input("earlier", optional=True),
        ]
        return end_schema(loops.TURN, "Loop Turn", more, is_dev_only=True)

    @classmethod
    def execute(
        cls,
        accumulate: list[bool],
        start: list[str],
        end: list[str],
        turn: list[int],
        is_last: list[bool],
        output_value: Values | None = None,
        earlier: Values | None = None,
        **kwargs: Any,
    ) -> io.NodeOutput:
        del kwargs
        if is_last[0]:
            before = (earlier or []) if accumulate[0] else []
            return io.NodeOutput([*before, *(output_value or [])])
        prompt, name = cls.hidden.dynprompt, str(cls.hidden.unique_id)
        graph, result = loops.next_turn(
            prompt, name, (start[0], end[0]), turn[0] + 1, gathers=accumulate[0]
        )
        return io.NodeOutput(result, expand=graph)


comfy_entrypoint = entrypoint_of(StartLoop, LoopRound, EndLoop, LoopTurn)
