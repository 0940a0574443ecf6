"""A node that chooses by what function a model attends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from comfy import progress
from comfy.nn.attention import OVERRIDE_KEY, attention_pytorch
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

logger = logging.getLogger(__name__)

PYTORCH, KITCHEN = "pytorch attention", "comfy kitchen attention"


def by_torch(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Torch's attention in place of `function`."""
    del function
    return attention_pytorch(*args, **kwargs)


class ModelAttentionBackend(io.ComfyNode):
    """Chooses the attention of one model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ModelAttentionBackend",
            display_name="Model Attention Backend",
            category="advanced/model",
            description="Chooses the attention of one model, whatever the server was started with.",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input(
                    "attention",
                    options=[PYTORCH, KITCHEN],
                    default=PYTORCH,
                    tooltip="Attention in eight bits is not here: torch's, which is exact, takes "
                    "its place.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: Any, attention: str) -> io.NodeOutput:
        if attention == KITCHEN:
            progress.warn(
                logger,
                "%s is not here: the model attends by torch's exact attention, which is slower",
                KITCHEN,
            )
        view = model.clone()
        view.model_options["transformer_options"][OVERRIDE_KEY] = by_torch
        return io.NodeOutput(view)


comfy_entrypoint = entrypoint_of(ModelAttentionBackend)
