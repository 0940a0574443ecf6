"""Networks that act inside a diffusion model, and how they are put there.

They are the style projector of USO, which goes with FLUX.1, DiffSynth's ControlNets of Qwen-Image
and the Fun ControlNets of Z-Image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import folder_paths
from comfy.devices import placement
from comfy.ldm.flux.uso import SigLIPMultiFeatProjModel
from comfy.ldm.lumina.controlnet import (
    EMBEDDER,
    LATENT_CHANNELS,
    ZImage_Control,
    build,
    z_image_convert,
)
from comfy.ldm.qwen_image.controlnet import QwenImageBlockWiseControlNet
from comfy.patching.dynamic import core_patcher_class
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError, fill
from comfy.weights.state_dict import load_torch_file
from comfy_extras.control_patches import DiffSynthCnetPatch, ZImageControlPatch

# Layers, counted from the end, that the projector is shown; the third is the last but one.
LOW_LAYER, MIDDLE_LAYER = -20, -11
USO_PREFIX, USO_MARK = "feature_embedder.", "mid_layer_norm.bias"
QWEN_MARK = "controlnet_blocks.0.y_rms.weight"
Z_IMAGE_MARK = f"control_all_x_embedder.{EMBEDDER}.weight"
IMAGE_DIMENSIONS = {QwenImageBlockWiseControlNet: 3, ZImage_Control: 2}  # of the autoencoders


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


def qwen_image_control(sd: Mapping[str, Tensor]) -> nn.Module | None:
    """The DiffSynth ControlNet of Qwen-Image, filled; None for other weights."""
    if QWEN_MARK not in sd:
        return None
    weights = dict(sd)
    network = QwenImageBlockWiseControlNet(
        **QwenImageBlockWiseControlNet.sizes_of(weights), device="meta"
    )
    fill(network, weights, "ControlNet of Qwen-Image")
    return network.eval()


def z_image_control(sd: Mapping[str, Tensor]) -> nn.Module | None:
    """The ControlNet of Z-Image, filled; None for other weights."""
    if Z_IMAGE_MARK not in sd:
        return None
    weights = z_image_convert(sd)
    network = build(weights, device="meta")
    fill(network, weights, "ControlNet of Z-Image")
    return network.eval()


KINDS = (style_projector, qwen_image_control, z_image_control)


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
            WeightFileError: The file is of no known kind, or incomplete.
        """
        path = folder_paths.get_full_path_or_raise("model_patches", name)
        sd = load_torch_file(path, safe_load=True)
        try:
            network = next((made for kind in KINDS if (made := kind(sd)) is not None), None)
        except (KeyError, IncompleteWeightsError) as error:
            raise WeightFileError(
                path, f"a part of a model patch is missing or of a wrong shape: {error}",
                "fetch the file again",
            ) from error  # fmt: skip
        if network is None:
            raise WeightFileError(
                path,
                f"no known model patch: found {contents_in_words(sorted(sd))}",
                "choose the style projector of USO for FLUX.1, or a DiffSynth ControlNet of "
                "Qwen-Image or a Fun ControlNet of Z-Image",
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


STRENGTH = ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.01})
COLOURS = 3


class QwenImageDiffsynthControlnet:
    """Lets a picture control Qwen-Image, or Z-Image with a network of that."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "model_patch": ("MODEL_PATCH",),
                "vae": ("VAE",),
                "image": ("IMAGE",),
                "strength": STRENGTH,
            },
            "optional": {"mask": ("MASK",)},
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "diffsynth_controlnet"
    EXPERIMENTAL = True
    CATEGORY = "advanced/loaders/qwen"

    def diffsynth_controlnet(
        self,
        model: Any,
        model_patch: Any,
        vae: Any,
        image: Tensor | None = None,
        strength: float = 1.0,
        inpaint_image: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Any]:
        """A view of the model.

        Raises:
            ValueError: There is no picture, or the parts are not of one family.
        """
        pictures = [None if one is None else one[..., :COLOURS] for one in (image, inpaint_image)]
        if all(one is None for one in pictures):
            raise ValueError("no picture to control by: connect an image or an inpaint_image")
        _check_family(model, model_patch.model, vae)
        known = None
        if mask is not None:  # 1 is what is to be made, as in the masks of the editor
            known = 1.0 - mask.reshape(-1, 1, *mask.shape[-2:])
        view = model.clone()
        rest = {"mask": known, "inpaint_image": pictures[1]}
        if isinstance(model_patch.model, ZImage_Control):
            patch = ZImageControlPatch(model_patch, vae, pictures[0], strength, **rest)
            view.set_model_noise_refiner_patch(patch)
            view.set_model_double_block_patch(patch)
        else:
            picture = pictures[0] if pictures[0] is not None else pictures[1]
            single = DiffSynthCnetPatch(model_patch, vae, picture, strength, **rest)
            view.set_model_double_block_patch(single)
        return (view,)


class ZImageFunControlnet(QwenImageDiffsynthControlnet):
    """Lets a picture, a picture to fill in, or both control Z-Image."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "model_patch": ("MODEL_PATCH",),
                "vae": ("VAE",),
                "strength": STRENGTH,
            },
            "optional": {"image": ("IMAGE",), "inpaint_image": ("IMAGE",), "mask": ("MASK",)},
        }

    CATEGORY = "advanced/loaders/zimage"


def _check_family(model: Any, control: nn.Module, vae: Any) -> None:
    """Refuse a control network of one family with a model or an autoencoder of another."""
    dimensions = next((n for kind, n in IMAGE_DIMENSIONS.items() if isinstance(control, kind)), 0)
    if not dimensions:
        raise ValueError(
            f"the model patch is a {type(control).__name__}, which does not control by a picture; "
            "load a DiffSynth ControlNet of Qwen-Image or a Fun ControlNet of Z-Image"
        )
    family = "Z-Image" if isinstance(control, ZImage_Control) else "Qwen-Image"
    network = model.get_model_object("diffusion_model")
    read = getattr(network, "reads_patches", None)
    if read is not None and (
        "double_block" not in read or ("noise_refiner" in read) != (family == "Z-Image")
    ):
        raise ValueError(
            f"this ControlNet is for {family}, but the model is a {type(network).__name__}; load "
            f"a model of {family}"
        )
    channels, found = vae.latent_channels, vae.latent_dim
    if (channels, found) != (LATENT_CHANNELS, dimensions):
        raise ValueError(
            f"this VAE has {channels} latent channels of {found} dimensions, but that of {family} "
            f"has {LATENT_CHANNELS} of {dimensions}; load the VAE of {family}"
        )


NODE_CLASS_MAPPINGS = {
    "ModelPatchLoader": ModelPatchLoader,
    "QwenImageDiffsynthControlnet": QwenImageDiffsynthControlnet,
    "ZImageFunControlnet": ZImageFunControlnet,
    "USOStyleReference": USOStyleReference,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
