"""Nodes that load model files. Each names a file of a model folder and hands on what was inside."""

from __future__ import annotations

from typing import Any

import torch

import folder_paths
from comfy import legacy_config, loading, lora_loading, text_loading
from comfy.devices import placement
from comfy.loading import FOLDERS_OPTION
from comfy.weights.lora_report import of_numbers
from comfy.weights.state_dict import load_torch_file
from comfy_api.latest import io
from comfy_nodes import vae_choices

Loaded = tuple[Any, ...]


def device_input(always: bool = False) -> dict[str, Any]:
    """The optional input that says where a model runs.

    Args:
        always: Have it on every machine; else where there are several accelerators to choose from.
    """
    choices = placement.device_choices()
    if not always and len(choices) == len(("default", "cpu")):
        return {}
    return {"optional": {"device": (choices, {"advanced": True})}}


def device_inputs() -> list[io.Input]:
    """`device_input` for nodes that declare their inputs as objects."""
    choices, options = device_input().get("optional", {}).get("device", ([], {}))
    return [io.Combo.Input("device", options=choices, optional=True, **options)] if choices else []


class CheckpointLoaderSimple:
    """Loads a whole checkpoint."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = folder_paths.get_filename_list("checkpoints")
        tooltip = "Checkpoint file in models/checkpoints."
        return {"required": {"ckpt_name": (names, {"tooltip": tooltip})}, **device_input()}

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    OUTPUT_TOOLTIPS = (
        "Model that denoises latents.",
        "Text encoder.",
        "Autoencoder between pictures and latents.",
    )
    FUNCTION = "load_checkpoint"
    CATEGORY = "loaders"
    DESCRIPTION = "Loads a checkpoint: diffusion model, text encoder and autoencoder in one file."

    def load_checkpoint(self, ckpt_name: str, device: str = "default") -> Loaded:
        """MODEL, CLIP and VAE; a part that the file does not hold is None."""
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        place = placement.placed(device)
        folders = folder_paths.get_folder_paths("text_encoders")
        return loading.load_checkpoint_guess_config(
            path,
            output_vae=True,
            output_clip=True,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            model_options={**place, "vae_device": place.get("load_device")},
            te_model_options={FOLDERS_OPTION: folders, **place},
        )[:3]


class CheckpointLoader:
    """Loads a checkpoint with a configuration file."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "config_name": (folder_paths.get_filename_list("configs"),),
                "ckpt_name": (folder_paths.get_filename_list("checkpoints"),),
            }
        }

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load_checkpoint"
    CATEGORY = "advanced/loaders"
    DEPRECATED = True

    def load_checkpoint(self, config_name: str, ckpt_name: str) -> Loaded:
        """MODEL, CLIP and VAE, with prediction type and text layer as configured."""
        return legacy_config.load_checkpoint(
            folder_paths.get_full_path_or_raise("configs", config_name),
            folder_paths.get_full_path_or_raise("checkpoints", ckpt_name),
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
        )[:3]


class VAELoader:
    """Loads an autoencoder."""

    video_taes = vae_choices.VIDEO_APPROXIMATIONS
    image_taes = vae_choices.IMAGE_APPROXIMATIONS

    @staticmethod
    def vae_list(s: Any = None) -> list[str]:  # noqa: ARG004 - public signature
        """Autoencoder files, approximate ones that are complete, and the pixel space."""
        return vae_choices.names()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae_name": (cls.vae_list(cls),)}, **device_input()}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "load_vae"
    CATEGORY = "loaders"

    def load_vae(self, vae_name: str, device: str = "default") -> Loaded:
        """The autoencoder.

        Raises:
            WeightFileError: The file cannot be read or holds no autoencoder.
        """
        return (vae_choices.load(vae_name, placement.resolve_device(device)),)


class LoraLoader:
    """Adds a LoRA to model and text encoder."""

    def __init__(self) -> None:
        self.loaded_lora: tuple[str, dict[str, Any]] | None = None

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        def strength(of: str) -> tuple[str, dict[str, Any]]:
            limits = {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.01}
            return (
                "FLOAT",
                {**limits, "tooltip": f"How much it changes the {of}; may be negative."},
            )

        names = folder_paths.get_filename_list("loras")
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "Model that the LoRA changes."}),
                "clip": ("CLIP", {"tooltip": "Text encoder that the LoRA changes."}),
                "lora_name": (names, {"tooltip": "LoRA file in models/loras."}),
                "strength_model": strength("model"),
                "strength_clip": strength("text encoder"),
            }
        }

    RETURN_TYPES: tuple[str, ...] = ("MODEL", "CLIP")
    OUTPUT_TOOLTIPS: tuple[str, ...] = ("The changed model.", "The changed text encoder.")
    FUNCTION = "load_lora"
    CATEGORY = "loaders"
    DESCRIPTION = "Changes a model's style or subject with a LoRA. Several can be chained."

    def load_lora(
        self, model: Any, clip: Any, lora_name: str, strength_model: float, strength_clip: float
    ) -> Loaded:
        """Views of model and text encoder with the LoRA added; strengths of 0 change nothing.

        Raises:
            NoMatchingWeightsError: Nothing in the file belongs to the model or the text encoder.
            NotANumberError: The file holds NaN or infinite numbers.
        """
        if strength_model == 0 and strength_clip == 0:
            return (model, clip)
        path = folder_paths.get_full_path_or_raise("loras", lora_name)
        if self.loaded_lora is None or self.loaded_lora[0] != path:
            self.loaded_lora = (path, of_numbers(load_torch_file(path, safe_load=True), path))
        return lora_loading.load_lora_for_models(
            model, clip, self.loaded_lora[1], strength_model, strength_clip, path=path
        )


class LoraLoaderModelOnly(LoraLoader):
    """Adds a LoRA to a model."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        strength = {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.01}
        return {
            "required": {
                "model": ("MODEL",),
                "lora_name": (folder_paths.get_filename_list("loras"),),
                "strength_model": ("FLOAT", strength),
            }
        }

    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The changed model.",)
    FUNCTION = "load_lora_model_only"

    def load_lora_model_only(self, model: Any, lora_name: str, strength_model: float) -> Loaded:
        """A view of the model with the LoRA added."""
        return (self.load_lora(model, None, lora_name, strength_model, 0)[0],)


class UNETLoader:
    """Loads a diffusion model without text encoder and autoencoder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "unet_name": (folder_paths.get_filename_list("diffusion_models"),),
                "weight_dtype": (list(WEIGHT_TYPES),),
            },
            **device_input(),
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load_unet"
    CATEGORY = "advanced/loaders"

    def load_unet(self, unet_name: str, weight_dtype: str, device: str = "default") -> Loaded:
        """The model, its weights kept in `weight_dtype`."""
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        options = {**WEIGHT_TYPES[weight_dtype], **placement.placed(device)}
        return (loading.load_diffusion_model(path, model_options=options),)


class CLIPLoader:
    """Loads a text encoder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip_name": (folder_paths.get_filename_list("text_encoders"),),
                "type": (list(CLIP_TYPES),),
            },
            **device_input(always=True),
        }

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load_clip"
    CATEGORY = "advanced/loaders"
    DESCRIPTION = "Loads a text encoder from a file of its own."

    def load_clip(
        self, clip_name: str, type: str = "stable_diffusion", device: str = "default"
    ) -> Loaded:
        """The text encoder, as the model family named by `type` uses it."""
        path = folder_paths.get_full_path_or_raise("text_encoders", clip_name)
        return (load_text_encoders([path], type, device),)


class DualCLIPLoader:
    """Loads a pair of text encoders."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip_name1": (folder_paths.get_filename_list("text_encoders"),),
                "clip_name2": (folder_paths.get_filename_list("text_encoders"),),
                "type": (list(CLIP_PAIR_TYPES),),
            },
            **device_input(always=True),
        }

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load_clip"
    CATEGORY = "advanced/loaders"
    DESCRIPTION = "Loads two text encoders that a model uses together."

    def load_clip(
        self, clip_name1: str, clip_name2: str, type: str, device: str = "default"
    ) -> Loaded:
        """The pair, as the model family named by `type` uses it."""
        names = (clip_name1, clip_name2)
        paths = [folder_paths.get_full_path_or_raise("text_encoders", name) for name in names]
        # What the menu calls sdxl is the arrangement of plain Stable Diffusion.
        family = "stable_diffusion" if type == "sdxl" else type
        return (load_text_encoders(paths, family, device),)


def load_text_encoders(paths: list[str], family: str, device: str) -> Any:
    """Text encoder from files, where `device` says."""
    folders = folder_paths.get_folder_paths("text_encoders")
    options: dict[str, Any] = {FOLDERS_OPTION: folders, **placement.placed(device)}
    return text_loading.load_clip(
        ckpt_paths=paths,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        clip_type=text_loading.clip_type(family),
        model_options=options,
    )


WEIGHT_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}

CLIP_PAIR_TYPES = (
    "sdxl",
    "sd3",
    "flux",
    "hunyuan_video",
    "hidream",
    "hunyuan_image",
    "hunyuan_video_15",
    "kandinsky5",
    "kandinsky5_image",
    "ltxv",
    "newbie",
    "ace",
)

CLIP_TYPES = (
    "stable_diffusion",
    "stable_cascade",
    "sd3",
    "stable_audio",
    "mochi",
    "ltxv",
    "pixart",
    "cosmos",
    "lumina2",
    "wan",
    "hidream",
    "chroma",
    "ace",
    "omnigen2",
    "qwen_image",
    "hunyuan_image",
    "flux2",
    "ovis",
)

NODE_CLASS_MAPPINGS: dict[str, type] = {
    "CheckpointLoaderSimple": CheckpointLoaderSimple,
    "CheckpointLoader": CheckpointLoader,
    "VAELoader": VAELoader,
    "LoraLoader": LoraLoader,
    "LoraLoaderModelOnly": LoraLoaderModelOnly,
    "UNETLoader": UNETLoader,
    "CLIPLoader": CLIPLoader,
    "DualCLIPLoader": DualCLIPLoader,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "CheckpointLoaderSimple": "Load Checkpoint",
    "CheckpointLoader": "Load Checkpoint With Config (DEPRECATED)",
    "VAELoader": "Load VAE",
    "LoraLoader": "Load LoRA",
    "UNETLoader": "Load Diffusion Model",
    "CLIPLoader": "Load CLIP",
    "DualCLIPLoader": "DualCLIPLoader",
}
