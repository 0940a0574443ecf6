"""Style models: pictures, as an image encoder sees them, turned into tokens beside the text.

Which network a file holds is told by its keys, its sizes by its shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfy.clip_vision import states_of
from comfy.ldm.flux.redux import ReduxImageEncoder
from comfy.ldm.t2i_adapter.style import StyleAdapter
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import fill
from comfy.weights.state_dict import load_torch_file

STYLE_HEADS = 8  # of the one style adapter that was published


class StyleModel:
    """A network that turns image encoder states into tokens."""

    def __init__(self, model: nn.Module, device: str | torch.device = "cpu") -> None:
        del device  # small enough to stay where its weights are
        self.model = model

    @torch.no_grad()
    def get_cond(self, input: Any) -> Tensor:
        """Tokens [B, L, D] of a picture that an image encoder described.

        Raises:
            ValueError: There are no states, or they are of another encoder.
        """
        states = states_of(input, "clip_vision_output").float()
        width = input_width(self.model)
        if states.shape[-1] != width:
            raise ValueError(
                f"this style model needs an image encoder with states of {width} channels, but "
                f"the given one has {states.shape[-1]}; load the encoder that belongs to it"
            )
        return self.model(states)


def input_width(model: nn.Module) -> int:
    """Channels of the states that a style network takes."""
    if isinstance(model, ReduxImageEncoder):
        return model.redux_up.in_features
    return int(model.get_parameter("style_embedding").shape[-1])


def network_of(sd: Mapping[str, Tensor]) -> nn.Module | None:
    """The empty network that some weights belong to; None if they are of no style model."""
    if "style_embedding" in sd:
        _, tokens, width = sd["style_embedding"].shape
        prefix = "transformer_layes."
        blocks = {key.split(".")[1] for key in sd if key.startswith(prefix)}
        context = sd["proj"].shape[1]
        return StyleAdapter(width, context, STYLE_HEADS, len(blocks), tokens, device="meta")
    if "redux_down.weight" in sd:
        width = sd["redux_up.weight"].shape[1]
        return ReduxImageEncoder(width, sd["redux_down.weight"].shape[0], device="meta")
    return None


def load_style_model(ckpt_path: str) -> StyleModel:
    """The style model of a file.

    Raises:
        WeightFileError: The file cannot be read or holds no style model.
    """
    sd = load_torch_file(ckpt_path, safe_load=True)
    network = network_of(sd)
    if network is None:
        raise WeightFileError(
            ckpt_path,
            f"no style model: found {contents_in_words(sorted(sd))}",
            "choose a file of FLUX Redux or of the T2I style adapter",
        )
    fill(network, dict(sd), "style model")
    return StyleModel(network.eval().requires_grad_(False))
