"""Stand-ins for the node classes that the recorded exchanges use."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder
from comfy_execution.progress import get_progress_state, make_progress_hook


def recorded_class(name: str, info: dict[str, Any], **attributes: Any) -> type:
    """A class with the recorded declaration of a built-in node."""
    members = {
        "INPUT_TYPES": classmethod(lambda cls: info["input"]),
        "RETURN_TYPES": tuple(info["output"]),
        "OUTPUT_NODE": info["output_node"],
        "FUNCTION": "run",
        "run": lambda self, **_: tuple(f"{name} {i}" for i in range(len(info["output"]))),
    }
    return type(name, (), members | attributes)


def saver(prefix: str, folder: str) -> Any:
    """The method of a node that shows one picture."""

    def run(self: Any, **_: Any) -> dict[str, Any]:
        name = f"{prefix}_00001_.png"
        return {"ui": {"images": [{"filename": name, "subfolder": "", "type": folder}]}}

    return run


class Stand:
    RETURN_TYPES: Any = ("IMAGE",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",)}}


class Slow(Stand):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "image": ("IMAGE",),
                "steps": ("INT", {}),
                "delay": ("FLOAT", {}),
                "preview": ("BOOLEAN", {}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return math.nan

    def run(
        self, image: Any, steps: int, delay: float, preview: bool, unique_id: str
    ) -> tuple[Any]:
        hook = make_progress_hook()
        for step in range(1, steps + 1):
            hook(step, steps, ("JPEG", "picture", 512) if preview else None)
        get_progress_state().send_text(unique_id, "progress text")
        return (image,)


class Raise(Stand):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",), "text": ("STRING", {})}}

    def run(self, image: Any, text: str) -> tuple[Any]:
        raise ValueError(f"test failure {text}")


class Expand(Stand):
    def run(self, image: Any) -> dict[str, Any]:
        build = GraphBuilder()
        inverted = build.node("ImageInvert", image=image)
        build.node("PreviewImage", images=inverted.out(0))
        return {"result": (inverted.out(0),), "expand": build.finalize()}


class Block(Stand):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",), "msg": ("STRING", {})}}

    def run(self, image: Any, msg: str) -> tuple[Any]:
        return (ExecutionBlocker(msg),)


class Async(Stand):
    async def run(self, image: Any) -> tuple[Any]:
        await asyncio.sleep(0)
        return (image,)


class Texts(Stand):
    """Stands for the schema-declared output node."""

    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        combo = {"default": "y", "multiselect": False, "options": ["x", "y"]}
        return {
            "required": {
                "image": ("IMAGE", {"tooltip": "<TOOLTIP>"}),
                "i": ("INT", {}),
                "s": ("STRING", {}),
                "b": ("BOOLEAN", {}),
                "c": ("COMBO", combo),
            }
        }

    def run(self, **_: Any) -> dict[str, Any]:
        return {"ui": {"text": ["hello"]}, "result": ("x",)}


class Validate(Stand):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "image": ("IMAGE",),
                "n": ("INT", {"min": 0, "max": 5}),
                "mode": (["a", "b"], {}),
                "flag": ("BOOLEAN", {}),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, n: int) -> bool | str:
        return "seven is not allowed" if n == 7 else True


class LoadImage:
    @classmethod
    def VALIDATE_INPUTS(cls, image: str) -> bool | str:
        return f"Invalid image file: {image}"


def trace_classes(object_info: dict[str, Any]) -> dict[str, type]:
    """All classes the exchanges use: recorded declarations and the Test* stand-ins."""
    special: dict[str, dict[str, Any]] = {
        "SaveImage": {"run": saver("t1", "output")},
        "PreviewImage": {"run": saver("ComfyUI_temp_<RAND5>", "temp")},
        "LoadImage": {"VALIDATE_INPUTS": LoadImage.__dict__["VALIDATE_INPUTS"]},
    }
    classes = {
        name: recorded_class(name, info, **special.get(name, {}))
        for name, info in object_info.items()
    }
    tests = {
        "Slow": Slow, "Raise": Raise, "Expand": Expand, "Block": Block, "Async": Async,
        "V3": Texts, "Validate": Validate,
    }  # fmt: skip
    return classes | {f"Test{name}": kind for name, kind in tests.items()}
