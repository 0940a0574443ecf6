"""Nodes that change the captions of a training set, one by one."""

from __future__ import annotations

from comfy_api.latest import io
from comfy_extras.dataset.schema import text_schema


class TextToLowercase(io.ComfyNode):
    """Small letters."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return text_schema("TextToLowercase", "Text to Lowercase", "Makes all letters small.", [])

    @classmethod
    def execute(cls, texts: str) -> io.NodeOutput:
        return io.NodeOutput(texts.lower())


class TextToUppercase(io.ComfyNode):
    """Capital letters."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return text_schema("TextToUppercase", "Text to Uppercase", "Makes all letters capital.", [])

    @classmethod
    def execute(cls, texts: str) -> io.NodeOutput:
        return io.NodeOutput(texts.upper())


class TruncateText(io.ComfyNode):
    """Texts of limited length."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        limit = io.Int.Input(
            "max_length", default=77, min=1, max=10000, tooltip="Characters that are kept."
        )
        return text_schema("TruncateText", "Truncate Text", "Cuts texts off.", [limit])

    @classmethod
    def execute(cls, texts: str, max_length: int) -> io.NodeOutput:
        return io.NodeOutput(texts[:max_length])


class AddTextPrefix(io.ComfyNode):
    """Words before every text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        words = io.String.Input("prefix", default="")
        return text_schema("AddTextPrefix", "Add Text Prefix", "Puts words before texts.", [words])

    @classmethod
    def execute(cls, texts: str, prefix: str) -> io.NodeOutput:
        return io.NodeOutput(prefix + texts)


class AddTextSuffix(io.ComfyNode):
    """Words after every text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        words = io.String.Input("suffix", default="")
        return text_schema("AddTextSuffix", "Add Text Suffix", "Puts words behind texts.", [words])

    @classmethod
    def execute(cls, texts: str, suffix: str) -> io.NodeOutput:
        return io.NodeOutput(texts + suffix)


class ReplaceText(io.ComfyNode):
    """Other words for some."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        words = [io.String.Input("find", default=""), io.String.Input("replace", default="")]
        return text_schema("ReplaceText", "Replace Text", "Replaces words in texts.", words)

    @classmethod
    def execute(cls, texts: str, find: str, replace: str) -> io.NodeOutput:
        return io.NodeOutput(texts.replace(find, replace) if find else texts)


class StripWhitespace(io.ComfyNode):
    """Texts without blanks at their ends."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        about = "Takes blanks off both ends."
        return text_schema("StripWhitespace", "Strip Whitespace", about, [])

    @classmethod
    def execute(cls, texts: str) -> io.NodeOutput:
        return io.NodeOutput(texts.strip())


class MergeTextLists(io.ComfyNode):
    """One list of the texts of all inputs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        about = "Gathers all texts in one list."
        return text_schema("MergeTextLists", "Merge Text Lists", about, [], is_input_list=True)

    @classmethod
    def execute(cls, texts: list[str]) -> io.NodeOutput:
        return io.NodeOutput(texts)


NODES: tuple[type[io.ComfyNode], ...] = (
    TextToLowercase,
    TextToUppercase,
    TruncateText,
    AddTextPrefix,
    AddTextSuffix,
    ReplaceText,
    StripWhitespace,
    MergeTextLists,
)
