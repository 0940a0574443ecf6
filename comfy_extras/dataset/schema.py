"""Declarations that the dataset nodes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

SEEDS = 2**64 - 1


def seed_input() -> io.Int.Input:
    """A seed of the order or the place."""
    return io.Int.Input("seed", default=0, min=0, max=SEEDS)


def numpy_seed(seed: int) -> int:
    """The seed as numpy takes it."""
    return seed % (2**32 - 1)


def image_schema(
    node_id: str, title: str, description: str, inputs: Sequence[io.Input], **facts: Any
) -> io.Schema:
    """Schema of a node from pictures to pictures."""
    as_list = facts.pop("is_output_list", False)
    return io.Schema(
        node_id=node_id,
        display_name=title,
        category="dataset/image",
        description=description,
        is_experimental=True,
        inputs=[io.Image.Input("images"), *inputs],
        outputs=[io.Image.Output(display_name="images", is_output_list=as_list)],
        **facts,
    )


def text_schema(
    node_id: str, title: str, description: str, inputs: Sequence[io.Input], **facts: Any
) -> io.Schema:
    """Schema of a node from texts to texts."""
    return io.Schema(
        node_id=node_id,
        display_name=title,
        category="dataset/text",
        description=description,
        is_experimental=True,
        inputs=[io.String.Input("texts"), *inputs],
        outputs=[io.String.Output(display_name="texts", is_output_list=None)],
        **facts,
    )


def only(value: Any) -> Any:
    """The one value of an input that arrives as a list."""
    return value[0] if isinstance(value, list) else value
