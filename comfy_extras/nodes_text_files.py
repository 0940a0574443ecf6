"""Nodes that take texts out of JSON and write them to files."""

from __future__ import annotations

import json
import os
from typing import Any

import folder_paths
from comfy_api.internal.watched_file import watched_file
from comfy_api.latest import io, ui
from comfy_extras.extension import entrypoint_of

FORMATS = ("txt", "csv", "md", "json")


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
    """The first JSON object in a text, whatever stands around it; empty if there is none."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            found: dict[str, Any] = decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
        else:
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
            target.write((_indented(text) if format == "json" else text).encode("utf-8"))
        saved = ui.SavedResult(file, subfolder, io.FolderType.output)
        return io.NodeOutput(text, ui={"text": [text], "files": [saved]})


def _indented(text: str) -> str:
    """JSON in several lines; other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


comfy_entrypoint = entrypoint_of(JsonExtractString, SaveText)
