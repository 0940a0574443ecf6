"""Constants, stub pictures and masks, arithmetic, and the node that shows what it gets."""

from __future__ import annotations

from typing import Any

import torch

INT = ("INT", {"default": 0, "min": -(10**12), "max": 10**12})
FLOAT = ("FLOAT", {"default": 0.0, "min": -1e6, "max": 1e6, "step": 0.01})
SIZE = ("INT", {"default": 32, "min": 8, "max": 512})
BATCH = ("INT", {"default": 1, "min": 1, "max": 64})


class Picture:
    """A stub picture, IMAGE [B, H, W, 3] in 0..1; `tag` makes equal ones different."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "paint"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        shades = ["black", "grey", "white", "noise"]
        return {
            "required": {"shade": (shades,), "width": SIZE, "height": SIZE, "count": BATCH},
            "optional": {"tag": INT},
        }

    def paint(self, shade: str, width: int, height: int, count: int, tag: int = 0) -> tuple[Any]:
        shape = (count, height, width, 3)
        if shade == "noise":
            return (torch.rand(shape),)
        return (torch.full(shape, {"black": 0.0, "grey": 0.5, "white": 1.0}[shade]),)


class Mask:
    """A stub mask [B, H, W] of one level in 0..1."""

    RETURN_TYPES = ("MASK",)
    FUNCTION = "paint"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        level = ("FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0})
        return {"required": {"level": level, "width": SIZE, "height": SIZE, "count": BATCH}}

    def paint(self, level: float, width: int, height: int, count: int) -> tuple[Any]:
        return (torch.full((count, height, width), level),)


class Int:
    """A whole number."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "give"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}}

    def give(self, value: Any) -> tuple[Any]:
        return (value,)


class Float(Int):
    """A real number."""

    RETURN_TYPES = ("FLOAT",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": FLOAT}}


class Text(Int):
    """A text; `choice` is a second input of combo type with options that are no text."""

    RETURN_TYPES = ("STRING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": ("STRING", {"default": ""})},
            "optional": {"choice": ([1, 2, "three"],)},
        }

    def give(self, value: str, choice: Any = None) -> tuple[str]:
        return (value if choice is None else f"{value}{choice}",)


class Add:
    """The sum of two whole numbers."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "add"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"a": INT, "b": INT}}

    def add(self, a: int, b: int) -> tuple[int]:
        return (a + b,)


class Less:
    """Whether a < b."""

    RETURN_TYPES = ("BOOLEAN",)
    FUNCTION = "compare"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"a": INT, "b": INT}}

    def compare(self, a: int, b: int) -> tuple[bool]:
        return (a < b,)


class Split:
    """Quotient and remainder: a node with two outputs."""

    RETURN_TYPES = ("INT", "INT")
    RETURN_NAMES = ("quotient", "remainder")
    FUNCTION = "split"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT, "by": INT}}

    def split(self, value: int, by: int) -> tuple[int, int]:
        return divmod(value, by)


class Calls:
    """How often this very instance was called: instances outlive a prompt."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "count"
    CATEGORY = "trial"

    def __init__(self) -> None:
        self.calls = 0

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}}

    def count(self, value: int) -> tuple[int]:
        self.calls += 1
        return (self.calls,)


class Show:
    """Shows what it gets, one entry for each item of a list."""

    RETURN_TYPES = ()
    FUNCTION = "show"
    OUTPUT_NODE = True
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict[str, str]) -> bool:
        return True

    def show(self, value: Any) -> dict[str, Any]:
        return {"ui": {"value": [plain(value)]}}


class ShowAndPass(Show):
    """An output node that others can be linked to."""

    RETURN_TYPES = ("INT",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}}

    def show(self, value: Any) -> dict[str, Any]:
        return {"ui": {"value": [value]}, "result": (value + 1,)}


class Hidden:
    """Shows the hidden values it was given."""

    RETURN_TYPES = ()
    FUNCTION = "show"
    OUTPUT_NODE = True
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": INT},
            "hidden": {
                "prompt": "PROMPT",
                "pnginfo": "EXTRA_PNGINFO",
                "own_id": "UNIQUE_ID",
                "graph": "DYNPROMPT",
                "unheard_of": "NO_SUCH_KIND",
            },
        }

    def show(
        self, value: int, prompt: Any, pnginfo: Any, own_id: Any, graph: Any, unheard_of: Any = 7
    ) -> dict[str, Any]:
        graph_facts = [
            graph.get_node(own_id)["class_type"],
            graph.get_parent_node_id(own_id),
            graph.get_real_node_id(own_id),
            graph.get_display_node_id(own_id),
            sorted(graph.all_node_ids()),
            sorted(graph.get_original_prompt()),
        ]
        return {"ui": {"value": [sorted(prompt), pnginfo, own_id, graph_facts, unheard_of]}}


class PaidService:
    """A node of a paid service: it is handed the account's secrets."""

    RETURN_TYPES = ()
    FUNCTION = "show"
    OUTPUT_NODE = True
    API_NODE = True
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": INT},
            "hidden": {"token": "AUTH_TOKEN_COMFY_ORG", "key": "API_KEY_COMFY_ORG"},
        }

    def show(self, value: int, token: str | None = None, key: str | None = None) -> dict[str, Any]:
        return {"ui": {"value": [token, key]}}


def plain(value: Any) -> Any:
    """A value as JSON can carry it; tensors as shape and mean."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "mean": round(float(value.mean()), 4)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


NODES = (
    Picture, Mask, Int, Float, Text, Add, Less, Split, Calls, Show, ShowAndPass, Hidden,
    PaidService,
)  # fmt: skip
