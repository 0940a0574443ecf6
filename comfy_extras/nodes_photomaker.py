"""PhotoMaker: an identity from pictures takes the place of a word.

Source: Li et al. 2023, https://arxiv.org/abs/2312.04461.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import folder_paths
from comfy.clip_vision import clip_preprocess, vision_config
from comfy.devices import placement
from comfy.ldm.clip.vision import CLIPVisionModelProjection
from comfy.ops import manual_cast
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError, fill
from comfy.weights.state_dict import load_torch_file
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

TRIGGER = "photomaker"  # the word of the text that stands for the person
CATEGORY = "_for_testing/photomaker"


class MLP(nn.Module):
    """Two layers after a norm."""

    def __init__(
        self, in_dim: int, hidden_dim: int, out_dim: int, residual: bool, device: Any = None
    ) -> None:
        super().__init__()
        self.layernorm = manual_cast.LayerNorm(in_dim, device=device)
        self.fc1 = manual_cast.Linear(in_dim, hidden_dim, device=device)
        self.fc2 = manual_cast.Linear(hidden_dim, out_dim, device=device)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        made = self.fc2(functional.gelu(self.fc1(self.layernorm(x))))
        return made + x if self.residual else made


class FuseModule(nn.Module):
    """Joins a word's state with the states of pictures."""

    def __init__(self, embed_dim: int, device: Any = None) -> None:
        super().__init__()
        self.mlp1 = MLP(embed_dim * 2, embed_dim, embed_dim, residual=False, device=device)
        self.mlp2 = MLP(embed_dim, embed_dim, embed_dim, residual=True, device=device)
        self.layer_norm = manual_cast.LayerNorm(embed_dim, device=device)

    def forward(self, words: Tensor, pictures: Tensor) -> Tensor:
        """States [N, D] of words and of as many pictures -> states [N, D]."""
        joined = self.mlp1(torch.cat([words, pictures], dim=-1)) + words
        return self.layer_norm(self.mlp2(joined))


class PhotoMakerIDEncoder(CLIPVisionModelProjection):
    """An image encoder with a projection for each text encoder of SDXL.

    Args:
        config: Sizes of the image encoder.
        second_dim: Width of the second text encoder.
    """

    def __init__(self, config: dict[str, Any], second_dim: int, device: Any = None) -> None:
        super().__init__(config, torch.float32, device, manual_cast)
        self.image_size: int = config["image_size"]
        self.visual_projection_2 = manual_cast.Linear(
            config["hidden_size"], second_dim, bias=False, device=device
        )
        self.text_width = config["projection_dim"] + second_dim
        self.fuse_module = FuseModule(self.text_width, device)

    def forward(  # type: ignore[override]
        self, pixels: Tensor, text: Tensor, places: Tensor
    ) -> Tensor:
        """Text states with an identity in some places.

        Args:
            pixels: Prepared pictures [N, 3, H, W].
            text: States [1, L, D]; not modified.
            places: [L], true where the identity goes; as many places as pictures, at most.
        """
        shared = self.vision_model(pixels)[2]
        states = [self.visual_projection(shared), self.visual_projection_2(shared)]
        chosen = int(places.sum())
        identity = torch.cat(states, dim=-1)[:chosen]
        changed = text.clone()
        changed[:, places] = self.fuse_module(text[0, places], identity).unsqueeze(0)
        return changed


def load_id_encoder(path: str) -> PhotoMakerIDEncoder:
    """The encoder of a file.

    Raises:
        WeightFileError: The file is no PhotoMaker encoder.
    """
    content: Mapping[str, Any] = load_torch_file(path, safe_load=True)
    weights = dict(content.get("id_encoder", content))
    try:
        config = vision_config(weights)
        second = weights["visual_projection_2.weight"].shape[0]
        encoder = PhotoMakerIDEncoder(config, second, "meta")
        fill(encoder, weights, "PhotoMaker encoder")
    except (IncompleteWeightsError, KeyError) as error:
        raise WeightFileError(
            path, f"no PhotoMaker encoder: {error}", "choose photomaker-v1.bin"
        ) from error
    return encoder.eval()


class PhotoMakerLoader(io.ComfyNode):
    """Loads a PhotoMaker encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = folder_paths.get_filename_list("photomaker")
        return io.Schema(
            node_id="PhotoMakerLoader",
            category=CATEGORY,
            is_experimental=True,
            inputs=[io.Combo.Input("photomaker_model_name", options=names)],
            outputs=[io.Photomaker.Output()],
        )

    @classmethod
    def execute(cls, photomaker_model_name: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("photomaker", photomaker_model_name)
        return io.NodeOutput(load_id_encoder(path))

    load_photomaker_model = execute


class PhotoMakerEncode(io.ComfyNode):
    """Text to conditioning, with the person of a picture in it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PhotoMakerEncode",
            category=CATEGORY,
            is_experimental=True,
            inputs=[
                io.Photomaker.Input("photomaker"),
                io.Image.Input("image"),
                io.Clip.Input("clip"),
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    default="photograph of photomaker",
                ),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    @torch.no_grad()
    def execute(cls, photomaker: Any, image: Tensor, clip: Any, text: str) -> io.NodeOutput:
        words = text.split(" ")
        place = words.index(TRIGGER) + 1 if TRIGGER in words else 0
        tokens = {
            name: [without_word(chunk, place) for chunk in chunks]
            for name, chunks in clip.tokenize(text, return_word_ids=True).items()
        }
        states, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
        if place and states.shape[-1] != photomaker.text_width:
            raise ValueError(
                f"clip: expected the text encoders of the model that the PhotoMaker is for, of "
                f"width {photomaker.text_width} together, found {states.shape[-1]}"
            )
        if place:
            places = torch.zeros(states.shape[1], dtype=torch.bool)
            places[place - 1] = True  # the word before the trigger, counting the start token
            picture = image[:1].to(placement.get_torch_device())
            pixels = clip_preprocess(picture, size=photomaker.image_size).float()
            photomaker.to(pixels.device)
            made = photomaker(pixels, states.to(pixels), places.to(pixels.device))
            states = made.to(states)
        return io.NodeOutput([[states, {"pooled_output": pooled}]])

    apply_photomaker = execute


def without_word(chunk: list[Any], number: int) -> list[Any]:
    """Tokens and weights of a chunk without a word, filled up with its last token."""
    kept = [entry for entry in chunk if entry[2] != number or number == 0]
    kept += [chunk[-1]] * (len(chunk) - len(kept))
    return [(token, weight) for token, weight, _ in kept]


comfy_entrypoint = entrypoint_of(PhotoMakerLoader, PhotoMakerEncode)
