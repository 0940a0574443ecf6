"""Schema-declared nodes for the corners that classic nodes have too."""

from __future__ import annotations

import asyncio
from typing import Any

from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder


class SchemaAdd(io.ComfyNode):
    """Adds, with a range on one input."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "TrialSchemaAdd",
            category="trial/schema",
            inputs=[io.Int.Input("a", min=0, max=100), io.Int.Input("b", default=1, optional=True)],
            outputs=[io.Int.Output("sum")],
        )

    @classmethod
    def execute(cls, a: int, b: int = 1) -> io.NodeOutput:
        return io.NodeOutput(a + b)


class SchemaShow(io.ComfyNode):
    """Shows a value as text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.AnyType.Input("value")]
        return io.Schema(
            "TrialSchemaShow", category="trial/schema", inputs=inputs, is_output_node=True
        )

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        return io.NodeOutput(ui=ui.PreviewText(str(value)))


class SchemaEither(io.ComfyNode):
    """Lazily one of two values; a coroutine chooses."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        kind = io.MatchType.Template("kind")
        return io.Schema(
            "TrialSchemaEither",
            category="trial/schema",
            inputs=[
                io.Boolean.Input("first"),
                io.MatchType.Input("a", kind, lazy=True),
                io.MatchType.Input("b", kind, lazy=True),
            ],
            outputs=[io.MatchType.Output(kind)],
        )

    @classmethod
    async def check_lazy_status(cls, first: bool, a: Any = None, b: Any = None) -> list[str]:
        await asyncio.sleep(0.005)
        name, value = ("a", a) if first else ("b", b)
        return [name] if value is None else []

    @classmethod
    def execute(cls, first: bool, a: Any = None, b: Any = None) -> io.NodeOutput:
        return io.NodeOutput(a if first else b)


class SchemaStamp(io.ComfyNode):
    """Runs again always if told to."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "TrialSchemaStamp",
            category="trial/schema",
            inputs=[io.Int.Input("value"), io.Boolean.Input("always")],
            outputs=[io.Int.Output()],
        )

    @classmethod
    def fingerprint_inputs(cls, value: int, always: bool) -> Any:
        return float("nan") if always else "same"

    @classmethod
    def execute(cls, value: int, always: bool) -> io.NodeOutput:
        return io.NodeOutput(value)


class SchemaChecked(io.ComfyNode):
    """Refuses odd numbers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "TrialSchemaChecked",
            category="trial/schema",
            inputs=[io.Int.Input("value", min=0, max=10)],
            outputs=[io.Int.Output()],
        )

    @classmethod
    async def validate_inputs(cls, value: int | None) -> bool | str:
        await asyncio.sleep(0)
        return value is None or value % 2 == 0 or "must be even"

    @classmethod
    async def execute(cls, value: int) -> io.NodeOutput:
        await asyncio.sleep(0.005)
        return io.NodeOutput(value)


class SchemaTwice(io.ComfyNode):
    """Expands; -1 blocks with a message."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "TrialSchemaTwice",
            category="trial/schema",
            inputs=[io.Int.Input("value", min=-1)],
            outputs=[io.Int.Output()],
            enable_expand=True,
        )

    @classmethod
    def execute(cls, value: int) -> io.NodeOutput:
        if value == -1:
            return io.NodeOutput(block_execution="nothing to double")
        if value == 0:
            return io.NodeOutput(ExecutionBlocker(None))
        build = GraphBuilder()
        added = build.node("TrialSchemaAdd", a=value, b=value)
        return io.NodeOutput(added.out(0), expand=build.finalize())


class SchemaDynamic(io.ComfyNode):
    """A growing list, a choice with inputs of its own, and lists out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        growing = io.Autogrow.TemplatePrefix(io.Int.Input("n"), "n", min=1, max=5)
        choices = [
            io.DynamicCombo.Option("sum", []),
            io.DynamicCombo.Option("scaled", [io.Int.Input("by", min=1)]),
        ]
        return io.Schema(
            "TrialSchemaDynamic",
            category="trial/schema",
            inputs=[io.Autogrow.Input("numbers", growing), io.DynamicCombo.Input("how", choices)],
            outputs=[io.Int.Output(is_output_list=True)],
        )

    @classmethod
    def execute(cls, numbers: dict[str, int], how: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput([n * how.get("by", 1) for n in numbers.values()])


class SchemaTotal(io.ComfyNode):
    """Takes a whole list, and its hidden values."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "TrialSchemaTotal",
            category="trial/schema",
            inputs=[io.Int.Input("values")],
            outputs=[io.String.Output()],
            is_input_list=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, values: list[int]) -> io.NodeOutput:
        hidden = cls.hidden
        return io.NodeOutput(
            f"{sum(values)} in {hidden.unique_id} of {sorted(hidden.prompt)} {hidden.extra_pnginfo}"
        )


class SchemaService(io.ComfyNode):
    """A node of a paid service."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "TrialSchemaService",
            category="trial/schema",
            inputs=[io.Int.Input("value")],
            outputs=[io.String.Output()],
            hidden=[io.Hidden.auth_token_comfy_org, io.Hidden.api_key_comfy_org],
            is_api_node=True,
        )

    @classmethod
    async def execute(cls, value: int) -> io.NodeOutput:
        await asyncio.sleep(0.005)
        return io.NodeOutput(f"{cls.hidden.auth_token_comfy_org}/{cls.hidden.api_key_comfy_org}")


NODES = (
    SchemaAdd, SchemaShow, SchemaEither, SchemaStamp, SchemaChecked, SchemaTwice, SchemaDynamic,
    SchemaTotal, SchemaService,
)  # fmt: skip
