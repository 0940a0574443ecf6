"""Nodes that work on text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any

from comfy_api.latest import ComfyExtension, io
from comfy_execution.text_limit import require_text_fits, text_limit
from comfy_extras.regular_expressions import worked_out
from comfy_extras.text_templates import filled

CASES: dict[str, Callable[[str], str]] = {
    "UPPERCASE": str.upper,
    "lowercase": str.lower,
    "Capitalize": str.capitalize,
    "Title Case": str.title,
}
SIDES: dict[str, Callable[[str], str]] = {
    "Both": str.strip,
    "Left": str.lstrip,
    "Right": str.rstrip,
}
COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "Starts With": str.startswith,
    "Ends With": str.endswith,
    "Equal": str.__eq__,
}


def text(id: str) -> io.String.Input:
    """Declaration of a text of several lines."""
    return io.String.Input(id, multiline=True)


def switch(id: str, default: bool, optional: bool = False) -> io.Boolean.Input:
    """Declaration of an option that is on or off."""
    return io.Boolean.Input(id, default=default, optional=optional)


def schema(node_id: str, title: str, inputs: Sequence[io.Input], output: io.Output) -> io.Schema:
    """Declaration of a node of this module."""
    return io.Schema(
        node_id=node_id,
        display_name=title,
        category="utils/string",
        inputs=[*inputs],
        outputs=[output],
    )


def regex_flags(case_insensitive: bool, multiline: bool, dotall: bool) -> int:
    """Flags of a regular expression."""
    flags = re.IGNORECASE if case_insensitive else 0
    flags |= re.MULTILINE if multiline else 0
    return int(flags | (re.DOTALL if dotall else 0))


class StringConcatenate(io.ComfyNode):
    """Joins two texts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        delimiter = io.String.Input("delimiter", default="")
        inputs = [text("string_a"), text("string_b"), delimiter]
        return schema("StringConcatenate", "Concatenate", inputs, io.String.Output())

    @classmethod
    def execute(cls, string_a: str, string_b: str, delimiter: str) -> io.NodeOutput:
        return io.NodeOutput(delimiter.join((string_a, string_b)))


class StringSubstring(io.ComfyNode):
    """Cuts a piece out of a text, counted as Python does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [text("string"), io.Int.Input("start"), io.Int.Input("end")]
        return schema("StringSubstring", "Substring", inputs, io.String.Output())

    @classmethod
    def execute(cls, string: str, start: int, end: int) -> io.NodeOutput:
        return io.NodeOutput(string[start:end])


class StringLength(io.ComfyNode):
    """Number of characters."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "StringLength", "Length", [text("string")], io.Int.Output(display_name="length")
        )

    @classmethod
    def execute(cls, string: str) -> io.NodeOutput:
        return io.NodeOutput(len(string))


class CaseConverter(io.ComfyNode):
    """Changes capital letters."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [text("string"), io.Combo.Input("mode", options=list(CASES))]
        return schema("CaseConverter", "Case Converter", inputs, io.String.Output())

    @classmethod
    def execute(cls, string: str, mode: str) -> io.NodeOutput:
        return io.NodeOutput(CASES[mode](string))


class StringTrim(io.ComfyNode):
    """Removes blanks at the ends."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [text("string"), io.Combo.Input("mode", options=list(SIDES))]
        return schema("StringTrim", "Trim", inputs, io.String.Output())

    @classmethod
    def execute(cls, string: str, mode: str) -> io.NodeOutput:
        return io.NodeOutput(SIDES[mode](string))


class StringReplace(io.ComfyNode):
    """Replaces a piece of text wherever it stands."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [text("string"), text("find"), text("replace")]
        return schema("StringReplace", "Replace", inputs, io.String.Output())

    @classmethod
    def execute(cls, string: str, find: str, replace: str) -> io.NodeOutput:
        if len(replace) > len(find):
            added = string.count(find) * (len(replace) - len(find))
            require_text_fits(len(string) + added)
        return io.NodeOutput(string.replace(find, replace))


class StringContains(io.ComfyNode):
    """Whether a text holds another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [text("string"), text("substring"), switch("case_sensitive", True)]
        return schema(
            "StringContains", "Contains", inputs, io.Boolean.Output(display_name="contains")
        )

    @classmethod
    def execute(cls, string: str, substring: str, case_sensitive: bool) -> io.NodeOutput:
        if not case_sensitive:
            string, substring = string.lower(), substring.lower()
        return io.NodeOutput(substring in string)


class StringCompare(io.ComfyNode):
    """Compares two texts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            text("string_a"),
            text("string_b"),
            io.Combo.Input("mode", options=list(COMPARISONS)),
            switch("case_sensitive", True),
        ]
        return schema("StringCompare", "Compare", inputs, io.Boolean.Output())

    @classmethod
    def execute(
        cls, string_a: str, string_b: str, mode: str, case_sensitive: bool
    ) -> io.NodeOutput:
        if not case_sensitive:
            string_a, string_b = string_a.lower(), string_b.lower()
        return io.NodeOutput(COMPARISONS[mode](string_a, string_b))


class RegexMatch(io.ComfyNode):
    """Whether a regular expression is found in a text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            text("string"),
            text("regex_pattern"),
            switch("case_insensitive", True),
            switch("multiline", False),
            switch("dotall", False),
        ]
        return schema(
            "RegexMatch", "Regex Match", inputs, io.Boolean.Output(display_name="matches")
        )

    @classmethod
    def execute(
        cls,
        string: str,
        regex_pattern: str,
        case_insensitive: bool,
        multiline: bool,
        dotall: bool,
    ) -> io.NodeOutput:
        flags = regex_flags(case_insensitive, multiline, dotall)
        return io.NodeOutput(worked_out(regex_pattern, string, task="match", flags=flags))


class RegexExtract(io.ComfyNode):
    """What a regular expression finds, or one of its groups."""

    MODES = ("First Match", "All Matches", "First Group", "All Groups")

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            text("string"),
            text("regex_pattern"),
            io.Combo.Input("mode", options=list(cls.MODES)),
            switch("case_insensitive", True),
            switch("multiline", False),
            switch("dotall", False),
            io.Int.Input("group_index", default=1, min=0, max=100),
        ]
        return schema("RegexExtract", "Regex Extract", inputs, io.String.Output())

    @classmethod
    def execute(
        cls,
        string: str,
        regex_pattern: str,
        mode: str,
        case_insensitive: bool,
        multiline: bool,
        dotall: bool,
        group_index: int,
    ) -> io.NodeOutput:
        flags = regex_flags(case_insensitive, multiline, dotall)
        found = worked_out(
            regex_pattern, string, task="extract", flags=flags, mode=mode, group=group_index
        )
        return io.NodeOutput(found)


class RegexReplace(io.ComfyNode):
    """Replaces what a regular expression finds."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            text("string"),
            text("regex_pattern"),
            text("replace"),
            switch("case_insensitive", True, optional=True),
            switch("multiline", False, optional=True),
            switch("dotall", False, optional=True),
            io.Int.Input(
                "count",
                default=0,
                min=0,
                max=100,
                optional=True,
                tooltip="How many are replaced; 0 means all.",
            ),
        ]
        return schema("RegexReplace", "Regex Replace", inputs, io.String.Output())

    @classmethod
    def execute(
        cls,
        string: str,
        regex_pattern: str,
        replace: str,
        case_insensitive: bool = True,
        multiline: bool = False,
        dotall: bool = False,
        count: int = 0,
    ) -> io.NodeOutput:
        flags = regex_flags(case_insensitive, multiline, dotall)
        replaced = worked_out(
            regex_pattern,
            string,
            task="replace",
            flags=flags,
            replace=replace,
            count=count,
            most=text_limit(),
        )
        return io.NodeOutput(replaced)


class StringFormat(io.ComfyNode):
    """Puts values into a text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = list(ascii_lowercase)
        values = io.Autogrow.TemplateNames(io.AnyType.Input("value"), names=names, min=0)
        places = io.String.Input(
            "f_string", default="{a}", multiline=True,
            tooltip="{a} is the value a, {a:.3f} the same with three digits, {{ a brace.",
        )  # fmt: skip
        inputs = [io.Autogrow.Input("values", template=values), places]
        return schema("StringFormat", "Format Text", inputs, io.String.Output())

    @classmethod
    def execute(cls, f_string: str, values: dict[str, Any] | None = None) -> io.NodeOutput:
        return io.NodeOutput(filled(f_string, values or {}))


class StringExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            StringConcatenate,
            StringSubstring,
            StringLength,
            CaseConverter,
            StringTrim,
            StringReplace,
            StringContains,
            StringCompare,
            RegexMatch,
            RegexExtract,
            RegexReplace,
            StringFormat,
        ]


async def comfy_entrypoint() -> StringExtension:
    """Called by the loader of built-in modules."""
    return StringExtension()
