"""Networks that act inside a diffusion model, and how they are put there.

Of the published ones the style projector of USO, which goes with FLUX.1, can be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import folder_paths
from comfy.devices import placement
from comfy.ldm.flux.uso import SigLIPMultiFeatProjModel
from comfy.patching.dynamic import core_patcher_class
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import fill
from comfy.weights.state_dict import load_torch_file

# Layers, counted from the end, that the projector is shown; the third is the last but one.
LOW_LAYER, MIDDLE_LAYER = -20, -11
USO_PREFIX, USO_MARK = "feature_embedder.", "mid_layer_norm.bias"
# Other networks of this kind: a key that only they have -> name.
UNSUPPORTED = (
    ("controlnet_blocks.0.y_rms.weight", "DiffSynth ControlNet of Qwen-Image"),
    ("control_all_x_embedder.2-1.weight", "ControlNet of Z-Image"),
)


def style_projector(sd: Mapping[str, Tensor]) -> nn.Module | None:
    """The style projector of USO, filled; None for other weights."""
    prefix = USO_PREFIX if USO_PREFIX + USO_MARK in sd else ""
    if prefix + USO_MARK not in sd:
        return None
    weights = {key[len(prefix) :]: value for key, value in sd.items() if key.startswith(prefix)}
    tokens, places = weights["mid_embedding_linear.0.weight"].shape
    width, channels = weights["mid_projection.weight"].shape
    network = SigLIPMultiFeatProjModel(places, tokens, channels, width, device="meta")
    fill(network, weights, "style projector")
    return network.eval()


class ModelPatchLoader:
    """Loads a network that acts inside a diffusion model."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"name": (folder_paths.get_filename_list("model_patches"),)}}

    RETURN_TYPES = ("MODEL_PATCH",)
    FUNCTION = "load_model_patch"
    EXPERIMENTAL = True
    CATEGORY = "advanced/loaders"

    def load_model_patch(self, name: str) -> tuple[Any]:
        """The network of a file in models/model_patches, in a patcher.

        Raises:
            WeightFileError: The file is of no known kind, or of one that is not supported.
        """
        path = folder_paths.get_full_path_or_raise("model_patches", name)
        sd = load_torch_file(path, safe_load=True)
        network = style_projector(sd)
        if network is None:
            known = next((title for key, title in UNSUPPORTED if key in sd), None)
            found = f"no known model patch: found {contents_in_words(sorted(sd))}"
            raise WeightFileError(
                path,
                found if known is None else f"this is a {known}, which is not supported yet",
                "choose the style projector of USO for FLUX.1",
            )
        load, offload = placement.get_torch_device(), placement.unet_offload_device()
        return (core_patcher_class()(network, load_device=load, offload_device=offload),)


class UsoStyleProjectorPatch:
    """Puts a picture's style before the text.

    Args:
        model_patch: The projector in its patcher.
        encoded_image: States [3, B, L, D] of the picture.
    """

    def __init__(self, model_patch: Any, encoded_image: Tensor) -> None:
        self.model_patch = model_patch
        self.encoded_image = encoded_image

    def __call__(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        text: Tensor = kwargs["txt"]
        style = self.model_patch.model(self.encoded_image.to(text)).to(text)
        style = style.expand(text.shape[0], -1, -1)
        ids: Tensor = kwargs["txt_ids"]
        whole = torch.cat([style, text], dim=1)
        places = torch.zeros(*whole.shape[:2], ids.shape[-1], dtype=ids.dtype, device=ids.device)
        return {**kwargs, "txt": whole, "txt_ids": places}

    def to(self, device_or_dtype: Any) -> UsoStyleProjectorPatch:
        """Moves the states along with the model."""
        if isinstance(device_or_dtype, torch.device):
            self.encoded_image = self.encoded_image.to(device_or_dtype)
        return self

    def models(self) -> list[Any]:
        """Patchers that have to be on the device as well."""
        return [self.model_patch]


class USOStyleReference:
    """Gives FLUX the style of a picture."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "model_patch": ("MODEL_PATCH",),
                "clip_vision_output": ("CLIP_VISION_OUTPUT",),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply_patch"
    EXPERIMENTAL = True
    CATEGORY = "advanced/model_patches/flux"

    def apply_patch(self, model: Any, model_patch: Any, clip_vision_output: Any) -> tuple[Any]:
        """A view of the model.

        Raises:
            ValueError: The image encoder gave no states of its layers.
        """
        states = getattr(clip_vision_output, "all_hidden_states", None)
        if states is None or states.shape[1] < -LOW_LAYER:
            raise ValueError(
                "USO needs the states of all layers of a SigLIP image encoder; encode the picture "
                "with sigclip_vision_patch14_384"
            )
        last = clip_vision_output.penultimate_hidden_states
        encoded = torch.stack([states[:, LOW_LAYER], states[:, MIDDLE_LAYER], last])
        view = model.clone()
        view.set_model_post_input_patch(UsoStyleProjectorPatch(model_patch, encoded))
        return (view,)


NODE_CLASS_MAPPINGS = {
    "ModelPatchLoader": ModelPatchLoader,
    "USOStyleReference": USOStyleReference,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
