"""A node that saves pictures in the form, depth and colour space that are chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import folder_paths
from comfy_api.internal.watched_file import partial_file
from comfy_api.latest import io, ui
from comfy_api.latest.ui.metadata import workflow_texts
from comfy_execution.context import check_interrupt
from comfy_extras.images.picture_files import LIGHT, avif, png_16, write_exr

AVIF_DEPTHS = {"8-bit YUV420": 8, "10-bit YUV420": 10}


def _choice(id: str, options: list[str], tooltip: str | None = None) -> io.Combo.Input:
    return io.Combo.Input(id, options=options, default=options[0], tooltip=tooltip)


def _png() -> list[io.Input]:
    return [_choice("bit_depth", ["8-bit", "16-bit"]), _choice("input_color_space", ["sRGB"])]


def _exr() -> list[io.Input]:
    spaces = (
        "What the picture holds; the file holds scene light. sRGB: usual pictures; HDR: Rec.2020 "
        "with hybrid log-gamma; linear, linear ACEScg: light, written as it is."
    )
    return [
        _choice("bit_depth", ["16-bit float", "32-bit float"]),
        _choice("input_color_space", list(LIGHT), spaces),
    ]


def _avif() -> list[io.Input]:
    moving: list[io.Input] = [
        io.Float.Input("fps", default=6.0, min=0.01, max=1000.0, step=0.01),
        io.Int.Input("loop_count", default=0, min=0, max=1000, tooltip="0: for ever."),
    ]
    spaces = "Named in the file; HDR is BT.2020 with hybrid log-gamma, HDR PQ with PQ."
    modes = [
        io.DynamicCombo.Option("still images", []),
        io.DynamicCombo.Option("animated", moving),
    ]
    return [
        _choice("bit_depth", ["auto", *AVIF_DEPTHS], "auto: 8 bits for sRGB, 10 for HDR."),
        _choice("input_color_space", ["sRGB", "HDR", "HDR PQ"], spaces),
        io.Int.Input("crf", default=18, min=1, max=63, tooltip="Lower: better, larger files."),
        io.DynamicCombo.Input("save_mode", options=modes),
    ]


class SaveImageAdvanced(io.ComfyNode):
    """Writes pictures to the output folder in the form that is chosen, and hands them on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        formats = {"png": _png(), "exr": _exr(), "avif": _avif()}
        options = [io.DynamicCombo.Option(name, inputs) for name, inputs in formats.items()]
        return io.Schema(
            node_id="SaveImageAdvanced",
            display_name="Save Image (Advanced)",
            category="image",
            description="Saves pictures as PNG, OpenEXR (with their workflow inside) or AVIF.",
            is_output_node=True,
            inputs=[
                io.Image.Input("images"),
                io.String.Input("filename_prefix", default="ComfyUI"),
                io.DynamicCombo.Input("format", options=options),
            ],
            outputs=[io.Image.Output(display_name="images")],
        )

    @classmethod
    def execute(cls, images: Tensor, filename_prefix: str, format: dict[str, Any]) -> io.NodeOutput:
        kind = format["format"]
        if kind == "png" and format["bit_depth"] == "8-bit":
            shown = ui.ImageSaveHelper.get_save_images_ui(images, filename_prefix, cls)
            return io.NodeOutput(images, ui=shown)
        mode = format.get("save_mode", {}).get("save_mode")
        is_moving = mode == "animated" and len(images) > 1
        batches = [images] if is_moving else list(images.split(1))
        write = partial(WRITERS[kind], texts=workflow_texts(cls), **format)
        saved = _saved(batches, filename_prefix, kind, write)
        return io.NodeOutput(images, ui=ui.SavedImages(saved, is_animated=is_moving))


def _write_png(path: str, images: Tensor, texts: dict[str, str], **_: Any) -> None:
    Path(path).write_bytes(png_16(images[0], texts))


def _write_exr(
    path: str,
    images: Tensor,
    texts: dict[str, str],
    bit_depth: str,
    input_color_space: str,
    **_: Any,
) -> None:
    write_exr(path, images[0], input_color_space, bit_depth == "16-bit float", texts)


def _write_avif(
    path: str,
    images: Tensor,
    bit_depth: str,
    input_color_space: str,
    crf: int,
    save_mode: dict[str, Any],
    **_: Any,
) -> None:
    bits = AVIF_DEPTHS.get(bit_depth, 8 if input_color_space == "sRGB" else 10)
    rate, loops = save_mode.get("fps", 1.0), save_mode.get("loop_count", 0)
    Path(path).write_bytes(avif(images, input_color_space, bits, crf, rate, loops))


WRITERS: dict[str, Callable[..., None]] = {
    "png": _write_png,
    "exr": _write_exr,
    "avif": _write_avif,
}


def _saved(
    batches: list[Tensor], prefix: str, suffix: str, write: Callable[[str, Tensor], None]
) -> list[ui.SavedResult]:
    """Write each batch to a file of its own, under counted names."""
    if len(batches[0]) == 0:
        return []
    rows, columns = batches[0].shape[1:3]
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        prefix, folder_paths.get_output_directory(), columns, rows
    )
    results = []
    for number, batch in enumerate(batches):
        check_interrupt()
        file = f"{name.replace('%batch_num%', str(number))}_{counter + number:05}_.{suffix}"
        with partial_file(os.path.join(folder, file)) as part:
            write(str(part), batch)
        results.append(ui.SavedResult(file, subfolder, io.FolderType.output))
    return results
