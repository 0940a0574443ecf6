"""Nodes that report how far they are, by every door there is."""

from __future__ import annotations

from typing import Any

from PIL import Image

from comfy.utils import ProgressBar
from comfy_api.latest import ComfyAPI, ComfyAPISync
from server import PromptServer

INT = ("INT", {"default": 0})


class Steps:
    """A classic progress bar; `picture` sends a preview with each step."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "work"
    CATEGORY = "trial/progress"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": INT, "steps": INT, "picture": ("BOOLEAN", {"default": False})}
        }

    def work(self, value: int, steps: int, picture: bool) -> tuple[int]:
        progress = ProgressBar(steps)
        for step in range(steps):
            preview = ("JPEG", _picture(step), 64) if picture else None
            progress.update_absolute(step + 1, steps, preview)
        return (value,)


class StepsByApi(Steps):
    """The object for node authors, from a coroutine."""

    async def work(self, value: int, steps: int, picture: bool) -> tuple[int]:
        api = ComfyAPI()
        for step in range(steps):
            await api.execution.set_progress(
                step + 1, steps, preview_image=_picture(step) if picture else None
            )
        return (value,)


class StepsByApiSync(Steps):
    """Its twin for plain functions."""

    def work(self, value: int, steps: int, picture: bool) -> tuple[int]:
        api = ComfyAPISync()
        for step in range(steps):
            api.execution.set_progress(
                step + 1, steps, preview_image=_picture(step) if picture else None
            )
        return (value,)


class Tell:
    """Sends a line of text, and a message of its own type, to the owner of the prompt."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "tell"
    CATEGORY = "trial/progress"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": INT, "text": ("STRING",)},
            "hidden": {"own_id": "UNIQUE_ID"},
        }

    def tell(self, value: int, text: str, own_id: str) -> tuple[int]:
        server = PromptServer.instance
        server.send_progress_text(text, own_id)
        server.send_sync("trial.told", {"text": text, "broken": float("nan")}, server.client_id)
        return (value,)


def _picture(step: int) -> Image.Image:
    return Image.new("RGB", (96, 48), (step * 20 % 256, 128, 64))


NODES = (Steps, StepsByApi, StepsByApiSync, Tell)
