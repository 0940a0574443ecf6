"""Nodes that take texts out of JSON and write them to files."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any

import folder_paths
from comfy_api.internal.watched_file import watched_file
from comfy_api.latest import io, ui
from comfy_execution.context import check_interrupt
from comfy_extras.extension import entrypoint_of

FORMATS = ("txt", "csv", "md", "json")
OBJECT_START = re.compile(r"\{(?=[ \t\r\n]*[\"}])")
MOST_STARTS = 1000
"""Places where reading an object is tried; each try may take as long as the whole text."""


class JsonExtractString(io.ComfyNode):
    """Takes the value of a key out of the first JSON object of a text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="JsonExtractString",
            display_name="Extract Text from JSON",
            category="utils/string",
            description="Value of a key in the first JSON object of a text, or nothing.",
            inputs=[
                io.String.Input("json_string", multiline=True),
                io.String.Input("key", multiline=False),
            ],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, json_string: str, key: str) -> io.NodeOutput:
        value = _first_object(json_string).get(key)
        return io.NodeOutput("" if value is None else str(value))


def _first_object(text: str) -> dict[str, Any]:
    """The first JSON object in a text, whatever stands around it; empty if there is none.

    Raises:
        ValueError: Most of the text would have to be read too many times over to find it.
    """
    decoder = json.JSONDecoder()
    for count, start in enumerate(OBJECT_START.finditer(text)):
        check_interrupt()
        if count == MOST_STARTS:
            raise ValueError(
                f"json_string: an object could begin in more than {MOST_STARTS} places, and in the "
                "first of them none does that also ends; give a text with less before the object"
            )
        with contextlib.suppress(ValueError, RecursionError):
            found: dict[str, Any] = decoder.raw_decode(text, start.start())[0]
            return found
    return {}


class SaveText(io.ComfyNode):
    """Writes a text to the output folder, and hands it on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveText",
            display_name="Save Text",
            category="utils/string",
            description="Saves a text to the output folder; JSON is indented.",
            is_output_node=True,
            inputs=[
                io.String.Input("text", force_input=True),
                io.String.Input("filename_prefix", default="ComfyUI"),
                io.Combo.Input("format", options=list(FORMATS), default="txt"),
            ],
            outputs=[io.String.Output(display_name="text")],
        )

    @classmethod
    def execute(
        cls, text: str, filename_prefix: str = "ComfyUI", format: str = "txt"
    ) -> io.NodeOutput:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        file = f"{name}_{counter:05}.{format}"
        with watched_file(os.path.join(folder, file)) as target:
            target.write(_encoded(_indented(text) if format == "json" else text))
        saved = ui.SavedResult(file, subfolder, io.FolderType.output)
        return io.NodeOutput(text, ui={"text": [text], "files": [saved]})


def _indented(text: str) -> str:
    """JSON in several lines; other text as it is, and JSON whose numbers no float holds."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return text


def _encoded(text: str) -> bytes:
    """UTF-8.

    Raises:
        ValueError: It has halves of letters.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text: expected letters that a file can hold, found half a surrogate pair "
            f"({text[error.start]!r}) at place {error.start}; take it out before saving"
        ) from error


comfy_entrypoint = entrypoint_of(JsonExtractString, SaveText)
