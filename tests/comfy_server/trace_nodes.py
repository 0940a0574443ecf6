"""Torch-free stand-ins for the nodes of the recorded exchanges."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from PIL import Image

from comfy_execution.context import check_interrupt
from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder
from comfy_execution.progress import make_progress_hook
from comfy_server import PromptServer

STEP = threading.Semaphore(0)  # one permit lets TestSlow take one step
PICTURE = Image.new("RGB", (8, 8), (250, 0, 0))

report = make_progress_hook()


class _Node:
    RETURN_TYPES: Any = ("IMAGE",)
    FUNCTION = "run"
    CATEGORY = "test"
    INPUTS: tuple[tuple[str, Any], ...] = (("image", ("IMAGE",)),)
    HIDDEN: tuple[tuple[str, str], ...] = ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        sections: dict[str, Any] = {"required": dict(cls.INPUTS)}
        if cls.HIDDEN:
            sections["hidden"] = dict(cls.HIDDEN)
        return sections


class EmptyImage(_Node):
    INPUTS = (
        ("width", ("INT", {"default": 512, "min": 1, "max": 16384, "step": 1})),
        ("height", ("INT", {"default": 512, "min": 1, "max": 16384, "step": 1})),
        ("batch_size", ("INT", {"default": 1, "min": 1, "max": 4096})),
        ("color", ("INT", {"default": 0, "min": 0, "max": 0xFFFFFF, "step": 1})),
    )

    def run(self, **sizes: int) -> tuple[Any]:
        return (PICTURE,)


class ImageInvert(_Node):
    def run(self, image: Any) -> tuple[Any]:
        return (image,)


class _Saver(_Node):
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    counts: ClassVar[dict[str, int]] = {}

    def save(self, name: str, kind: str) -> dict[str, Any]:
        self.counts[name] = self.counts.get(name, 0) + 1
        item = {"filename": f"{name}_{self.counts[name]:05}_.png", "subfolder": "", "type": kind}
        return {"ui": {"images": [item]}}


class SaveImage(_Saver):
    INPUTS = (
        ("images", ("IMAGE",)),
        ("filename_prefix", ("STRING", {"default": "ComfyUI"})),
    )

    def run(self, images: Any, filename_prefix: str) -> dict[str, Any]:
        return self.save(filename_prefix, "output")


class PreviewImage(_Saver):
    INPUTS = (("images", ("IMAGE",)),)
    numbers: ClassVar[Iterator[int]] = itertools.count(10_000)

    def __init__(self) -> None:
        self.number = next(self.numbers)

    def run(self, images: Any) -> dict[str, Any]:
        return self.save(f"ComfyUI_temp_{self.number}", "temp")


class SaveImageWebsocket(_Node):
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS = (("images", ("IMAGE",)),)

    def run(self, images: Any) -> dict[str, Any]:
        report(0, 1, ("PNG", images, None))
        return {}


class TestSlow(_Node):
    __test__ = False
    INPUTS = (
        ("image", ("IMAGE",)),
        ("steps", ("INT", {"default": 3})),
        ("delay", ("FLOAT", {"default": 0.1})),
        ("preview", ("BOOLEAN", {"default": False})),
    )
    HIDDEN = (("unique_id", "UNIQUE_ID"),)

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")  # runs every time

    def run(
        self, image: Any, steps: int, delay: float, preview: bool, unique_id: str
    ) -> tuple[Any]:
        for step in range(1, steps + 1):
            while not STEP.acquire(timeout=0.005):
                check_interrupt()
            report(step, steps, ("JPEG", image, 512) if preview else None)
        server = PromptServer.instance
        server.send_progress_text("progress text", unique_id, server.client_id)
        return (image,)


class TestRaise(_Node):
    __test__ = False
    INPUTS = (
        ("image", ("IMAGE",)),
        ("text", ("STRING",)),
    )

    def run(self, image: Any, text: str) -> tuple[Any]:
        raise ValueError(f"test failure {text}")


class TestExpand(_Node):
    __test__ = False

    def run(self, image: Any) -> dict[str, Any]:
        graph = GraphBuilder()
        inverted = graph.node("ImageInvert", image=image)
        graph.node("PreviewImage", images=inverted.out(0))
        return {"result": (inverted.out(0),), "expand": graph.finalize()}


class TestBlock(_Node):
    __test__ = False
    INPUTS = (
        ("image", ("IMAGE",)),
        ("msg", ("STRING",)),
    )

    def run(self, image: Any, msg: str) -> tuple[Any]:
        return (ExecutionBlocker(msg),)


class TestAsync(_Node):
    __test__ = False

    async def run(self, image: Any) -> tuple[Any]:
        await asyncio.sleep(0.02)
        return (image,)


class TestV3(_Node):
    """An output node that shows text; the schema form has its own tests."""

    __test__ = False
    OUTPUT_NODE = True
    INPUTS = (
        ("image", ("IMAGE",)),
        ("i", ("INT",)),
        ("s", ("STRING",)),
        ("b", ("BOOLEAN",)),
        ("c", ("COMBO", {"options": ["x", "y"]})),
    )

    def run(self, image: Any, i: int, s: str, b: bool, c: str) -> dict[str, Any]:
        return {"ui": {"text": ["hello"]}, "result": (image,)}


class TestValidate(_Node):
    __test__ = False
    INPUTS = (
        ("image", ("IMAGE",)),
        ("n", ("INT", {"default": 1})),
        ("mode", (["a", "b"],)),
        ("flag", ("BOOLEAN",)),
    )

    @classmethod
    def VALIDATE_INPUTS(cls, n: int) -> bool | str:
        return "seven is not allowed" if n == 7 else True

    def run(self, image: Any, n: int, mode: str, flag: bool) -> tuple[Any]:
        return (image,)


NODES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        EmptyImage,
        ImageInvert,
        SaveImage,
        PreviewImage,
        SaveImageWebsocket,
        TestSlow,
        TestRaise,
        TestExpand,
        TestBlock,
        TestAsync,
        TestV3,
        TestValidate,
    )
}
