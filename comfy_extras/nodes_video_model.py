"""Loading, conditioning, guidance and areas of video models whose batch axis is time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import folder_paths
import node_helpers
from comfy import loading, resize
from comfy.devices import formulas
from comfy_extras.empty_latents import empty_image
from comfy_extras.guidance import with_rule
from comfy_extras.nodes_model_merging import FileSaver, save_checkpoint
from comfy_nodes.conditioning import Conditioning
from comfy_nodes.limits import MAX_RESOLUTION

CELL, CHANNELS = 8, 4


class ImageOnlyCheckpointLoader:
    """Loads a checkpoint whose text encoder is an image encoder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"ckpt_name": (folder_paths.get_filename_list("checkpoints"),)}}

    RETURN_TYPES = ("MODEL", "CLIP_VISION", "VAE")
    FUNCTION = "load_checkpoint"
    CATEGORY = "loaders/video_models"

    def load_checkpoint(
        self, ckpt_name: str, output_vae: bool = True, output_clip: bool = True
    ) -> tuple[Any, Any, Any]:
        """Model, image encoder and autoencoder."""
        del output_clip  # it has none
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        found = loading.load_checkpoint_guess_config(
            path, output_vae=output_vae, output_clip=False, output_clipvision=True
        )
        return (found.model, found.clip_vision, found.vae)


class ImageOnlyCheckpointSave(FileSaver):
    """Saves model, image encoder and autoencoder in one file."""

    saved = ("model", "clip_vision", "vae")
    usual_prefix = "checkpoints/ComfyUI"

    def save(
        self,
        model: Any,
        clip_vision: Any,
        vae: Any,
        filename_prefix: str,
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Weights as LoRAs and merges make them."""
        save_checkpoint(
            model,
            clip_vision=clip_vision,
            vae=vae,
            filename_prefix=filename_prefix,
            output_dir=self.output_dir,
            prompt=prompt,
            extra_pnginfo=extra_pnginfo,
        )
        return {}


class SVD_img2vid_Conditioning:
    """Asks Stable Video Diffusion to go on from a picture."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        def side(default: int) -> tuple[str, dict[str, int]]:
            return "INT", {"default": default, "min": 16, "max": MAX_RESOLUTION, "step": 8}

        augmentation = {"default": 0.0, "min": 0.0, "max": 10.0, "step": 0.01}
        return {
            "required": {
                "clip_vision": ("CLIP_VISION",),
                "init_image": ("IMAGE",),
                "vae": ("VAE",),
                "width": side(1024),
                "height": side(576),
                "video_frames": ("INT", {"default": 14, "min": 1, "max": 4096}),
                "motion_bucket_id": ("INT", {"default": 127, "min": 1, "max": 1023}),
                "fps": ("INT", {"default": 6, "min": 1, "max": 1024}),
                "augmentation_level": ("FLOAT", augmentation),
            }
        }

    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    RETURN_NAMES = ("positive", "negative", "latent")
    FUNCTION = "encode"
    CATEGORY = "conditioning/video_models"

    def encode(
        self,
        clip_vision: Any,
        init_image: Tensor,
        vae: Any,
        width: int,
        height: int,
        video_frames: int,
        motion_bucket_id: int,
        fps: int,
        augmentation_level: float,
    ) -> tuple[Conditioning, Conditioning, dict[str, Tensor]]:
        """Both conditionings and an empty latent [frames, 4, height / 8, width / 8].

        Args:
            augmentation_level: Standard deviation of noise on the picture; more of it lets the
                video differ more from the picture.
        """
        embeds = clip_vision.encode_image(init_image).image_embeds.unsqueeze(0)
        pixels = resize.common_upscale(
            init_image.movedim(-1, 1), width, height, "bilinear", "center"
        ).movedim(1, -1)[..., :3]
        if augmentation_level > 0:
            pixels = pixels + torch.randn_like(pixels) * augmentation_level
        latent = vae.encode(pixels)
        facts = {
            "motion_bucket_id": motion_bucket_id,
            "fps": fps,
            "augmentation_level": augmentation_level,
        }
        positive = [[embeds, {**facts, "concat_latent_image": latent}]]
        nothing = {**facts, "concat_latent_image": torch.zeros_like(latent)}
        samples = empty_image(video_frames, CHANNELS, height, width, CELL)
        return (positive, [[torch.zeros_like(embeds), nothing]], {"samples": samples})


def guided_by_frame(args: dict[str, Any], scales: Tensor) -> Tensor:
    """Classifier-free guidance with a scale [frames] for each item of the batch."""
    cond, uncond = args["cond"], args["uncond"]
    scales = scales.reshape(cond.shape[0], *(1,) * (cond.ndim - 1))
    return uncond + scales * (cond - uncond)


def linear_scales(args: dict[str, Any], min_cfg: float) -> Tensor:
    """From min_cfg at the first frame to the full scale at the last."""
    cond = args["cond"]
    return torch.linspace(min_cfg, args["cond_scale"], cond.shape[0], device=cond.device)


def triangle_scales(args: dict[str, Any], min_cfg: float) -> Tensor:
    """From min_cfg up to the full scale in the middle and back."""
    cond = args["cond"]
    place = torch.linspace(0, 1, cond.shape[0], device=cond.device)
    rise = 2 * (place - torch.floor(place + 0.5)).abs()
    return rise * (args["cond_scale"] - min_cfg) + min_cfg


class VideoLinearCFGGuidance:
    """Weaker guidance for the first frames, which the given picture guides already.

    Source: Blattmann et al. 2023, https://arxiv.org/abs/2311.15127, appendix D.
    """

    scales = staticmethod(linear_scales)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        options = {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.5, "round": 0.01}
        return {"required": {"model": ("MODEL",), "min_cfg": ("FLOAT", options)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "sampling/video_models"

    def patch(self, model: Any, min_cfg: float) -> tuple[Any]:
        """A view of the model with a scale for each frame."""
        scales = self.scales
        view = with_rule(
            model,
            lambda args: guided_by_frame(args, scales(args, min_cfg)),
            # Frames of other scales need the negative although the last has a scale of 1; there it
            # has always counted as zeros.
            needs_negative=min_cfg != 1 and formulas.as_published(),
        )
        return (view,)


class VideoTriangleCFGGuidance(VideoLinearCFGGuidance):
    """Weaker guidance for the first and the last frames, which show the given view again.

    Source: Voleti et al. 2024, https://arxiv.org/abs/2403.12008, section 3.
    """

    scales = staticmethod(triangle_scales)


def share(default: float) -> tuple[str, dict[str, float]]:
    """Declaration of a part of a length."""
    return "FLOAT", {"default": default, "min": 0, "max": 1.0, "step": 0.01}


class ConditioningSetAreaPercentageVideo:
    """Restricts a conditioning to a part of the picture and of the time."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        sizes = {name: share(1.0) for name in ("width", "height", "temporal")}
        offsets = {name: share(0) for name in ("x", "y", "z")}
        strength = {"default": 1.0, "min": 0.0, "max": 10.0, "step": 0.01}
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                **sizes,
                **offsets,
                "strength": ("FLOAT", strength),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "append"
    CATEGORY = "conditioning"

    def append(
        self,
        conditioning: Conditioning,
        width: float,
        height: float,
        temporal: float,
        x: float,
        y: float,
        z: float,
        strength: float,
    ) -> tuple[Conditioning]:
        """The conditioning with its area; z and temporal are offset and length in time."""
        values = {
            "area": ("percentage", temporal, height, width, z, y, x),
            "strength": strength,
            "set_area_to_bounds": False,
        }
        return (node_helpers.conditioning_set_values(conditioning, values),)


NODE_CLASS_MAPPINGS = {
    "ImageOnlyCheckpointLoader": ImageOnlyCheckpointLoader,
    "ImageOnlyCheckpointSave": ImageOnlyCheckpointSave,
    "SVD_img2vid_Conditioning": SVD_img2vid_Conditioning,
    "VideoLinearCFGGuidance": VideoLinearCFGGuidance,
    "VideoTriangleCFGGuidance": VideoTriangleCFGGuidance,
    "ConditioningSetAreaPercentageVideo": ConditioningSetAreaPercentageVideo,
}

NODE_DISPLAY_NAME_MAPPINGS = {
    "ImageOnlyCheckpointLoader": "Image Only Checkpoint Loader (img2vid model)",
}
