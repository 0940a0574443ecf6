"""Nodes that save moving pictures and vector graphics."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from torch import Tensor

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import io, ui


class SaveAnimatedWEBP(io.ComfyNode):
    """Saves a batch of pictures as a moving WebP."""

    METHODS = {"default": 4, "fastest": 0, "slowest": 6}  # noqa: RUF012 - a constant

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveAnimatedWEBP",
            category="image/animation",
            inputs=[
                io.Image.Input("images"),
                io.String.Input("filename_prefix", default="ComfyUI"),
                io.Float.Input("fps", default=6.0, min=0.01, max=1000.0, step=0.01),
                io.Boolean.Input("lossless", default=True),
                io.Int.Input("quality", default=80, min=0, max=100),
                io.Combo.Input("method", options=list(cls.METHODS)),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        images: Tensor,
        fps: float,
        filename_prefix: str,
        lossless: bool,
        quality: int,
        method: str,
    ) -> io.NodeOutput:
        saved = ui.ImageSaveHelper.get_save_animated_webp_ui(
            images=images,
            filename_prefix=filename_prefix,
            cls=cls,
            fps=fps,
            lossless=lossless,
            quality=quality,
            method=cls.METHODS[method],
        )
        return io.NodeOutput(ui=saved)


class SaveAnimatedPNG(io.ComfyNode):
    """Saves a batch of pictures as a moving PNG."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveAnimatedPNG",
            category="image/animation",
            inputs=[
                io.Image.Input("images"),
                io.String.Input("filename_prefix", default="ComfyUI"),
                io.Float.Input("fps", default=6.0, min=0.01, max=1000.0, step=0.01),
                io.Int.Input("compress_level", default=4, min=0, max=9),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, images: Tensor, fps: float, compress_level: int, filename_prefix: str = "ComfyUI"
    ) -> io.NodeOutput:
        saved = ui.ImageSaveHelper.get_save_animated_png_ui(
            images=images,
            filename_prefix=filename_prefix,
            cls=cls,
            fps=fps,
            compress_level=compress_level,
        )
        return io.NodeOutput(ui=saved)


class SaveSVGNode(io.ComfyNode):
    """Saves vector graphics with the workflow inside."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveSVGNode",
            category="image/save",
            description="Saves SVG pictures to the output folder.",
            inputs=[
                io.SVG.Input("svg"),
                io.String.Input("filename_prefix", default="svg/ComfyUI"),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, svg: Any, filename_prefix: str) -> io.NodeOutput:
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        metadata = svg_metadata(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        results: list[ui.SavedResult] = []
        for number, data in enumerate(svg.data):
            stem = filename.replace("%batch_num%", str(number))
            file = f"{stem}_{counter + number:05}_.svg"
            with open(os.path.join(folder, file), "wb") as target:
                target.write(with_svg_metadata(data.getvalue(), metadata))
            results.append(ui.SavedResult(file, subfolder, io.FolderType.output))
        return io.NodeOutput(ui={"images": results})

    save_svg = execute


def svg_metadata(prompt: Any, extra: dict[str, Any] | None) -> str | None:
    """The metadata element of a saved SVG, or None when metadata are switched off or absent."""
    if args.disable_metadata:
        return None
    content: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
    content.update(extra or {})
    if not content:
        return None
    text = json.dumps(content, indent=4).replace("]]>", "]]]]><![CDATA[>")
    return f"<metadata>\n<![CDATA[\n{text}\n]]>\n</metadata>\n"


def with_svg_metadata(svg: bytes, metadata: str | None) -> bytes:
    """The SVG with the element right after its opening tag; unchanged if it has none."""
    opening = re.search(rb"<svg\b[^<>]*>", svg)
    if metadata is None or opening is None:
        return svg
    end = opening.end()
    return svg[:end] + b"\n" + metadata.encode("utf-8") + svg[end:]
