"""Nodes that mix models and save the result."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import folder_paths
from comfy.devices import residency
from comfy.saving import autoencoder_hints, text_hints
from comfy.saving import save_checkpoint as write_checkpoint
from comfy.weights.state_dict import save_torch_file
from comfy_extras.merging import NETWORK, merged_clip, merged_model
from comfy_nodes.latent_files import header_text

HIDDEN = {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}
UNIT = {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.01}
FACTOR = {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.01}


class ModelMergeSimple:
    """Mixes two models."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model1": ("MODEL",),
                "model2": ("MODEL",),
                "ratio": ("FLOAT", dict(UNIT)),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "merge"
    CATEGORY = "advanced/model_merging"

    def merge(self, model1: Any, model2: Any, ratio: float) -> tuple[Any]:
        """model1 * ratio + model2 * (1 - ratio)."""
        return merged_model(model1, model2, lambda _key: (1.0 - ratio, ratio))


class ModelSubtract:
    """Takes one model from another."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model1": ("MODEL",),
                "model2": ("MODEL",),
                "multiplier": ("FLOAT", dict(FACTOR)),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "merge"
    CATEGORY = "advanced/model_merging"

    def merge(self, model1: Any, model2: Any, multiplier: float) -> tuple[Any]:
        """(model1 - model2) * multiplier."""
        return merged_model(model1, model2, lambda _key: (-multiplier, multiplier))


class ModelAdd:
    """Adds one model to another."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model1": ("MODEL",), "model2": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "merge"
    CATEGORY = "advanced/model_merging"

    def merge(self, model1: Any, model2: Any) -> tuple[Any]:
        """model1 + model2."""
        return merged_model(model1, model2, lambda _key: (1.0, 1.0))


class ModelMergeBlocks:
    """Mixes two models, part by part."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model1": ("MODEL",),
                "model2": ("MODEL",),
                "input": ("FLOAT", dict(UNIT)),
                "middle": ("FLOAT", dict(UNIT)),
                "out": ("FLOAT", dict(UNIT)),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "merge"
    CATEGORY = "advanced/model_merging"

    def merge(self, model1: Any, model2: Any, **ratios: float) -> tuple[Any]:
        """Each weight takes the ratio of the longest name it starts with, else the first one."""
        default = next(iter(ratios.values()))

        def strengths(key: str) -> tuple[float, float]:
            inner = key.removeprefix(NETWORK)
            fitting = [name for name in ratios if inner.startswith(name)]
            ratio = ratios[max(fitting, key=len)] if fitting else default
            return 1.0 - ratio, ratio

        return merged_model(model1, model2, strengths)


class CLIPMergeSimple:
    """Mixes two text encoders."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip1": ("CLIP",),
                "clip2": ("CLIP",),
                "ratio": ("FLOAT", dict(UNIT)),
            }
        }

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "merge"
    CATEGORY = "advanced/model_merging"

    def merge(self, clip1: Any, clip2: Any, ratio: float) -> tuple[Any]:
        """clip1 * ratio + clip2 * (1 - ratio)."""
        return merged_clip(clip1, clip2, 1.0 - ratio, ratio)


class CLIPSubtract:
    """Takes one text encoder from another."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip1": ("CLIP",),
                "clip2": ("CLIP",),
                "multiplier": ("FLOAT", dict(FACTOR)),
            }
        }

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "merge"
    CATEGORY = "advanced/model_merging"

    def merge(self, clip1: Any, clip2: Any, multiplier: float) -> tuple[Any]:
        """(clip1 - clip2) * multiplier."""
        return merged_clip(clip1, clip2, -multiplier, multiplier)


class CLIPAdd:
    """Adds one text encoder to another."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"clip1": ("CLIP",), "clip2": ("CLIP",)}}

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "merge"
    CATEGORY = "advanced/model_merging"

    def merge(self, clip1: Any, clip2: Any) -> tuple[Any]:
        """clip1 + clip2."""
        return merged_clip(clip1, clip2, 1.0, 1.0)


def save_checkpoint(
    model: Any,
    clip: Any = None,
    vae: Any = None,
    clip_vision: Any = None,
    filename_prefix: str | None = None,
    output_dir: str | None = None,
    prompt: dict[str, Any] | None = None,
    extra_pnginfo: dict[str, Any] | None = None,
) -> None:
    """Saves a checkpoint under the next free name of a prefix."""
    path, title = next_file(filename_prefix or "checkpoints/ComfyUI", output_dir)
    metadata = {"modelspec.sai_model_spec": "1.0.0", "modelspec.title": title}
    metadata |= header_text(prompt, extra_pnginfo) or {}
    write_checkpoint(path, model, clip, vae, clip_vision, metadata=metadata)


def next_file(prefix: str, output_dir: str | None) -> tuple[str, str]:
    """Path of the next file of a prefix, and its title."""
    folder, name, counter, _, filled = folder_paths.get_save_image_path(
        prefix, output_dir or folder_paths.get_output_directory()
    )
    return os.path.join(folder, f"{name}_{counter:05}_.safetensors"), f"{filled} {counter}"


class FileSaver:
    """Base of the nodes that save models.

    Attributes:
        saved: Inputs that go into the file; their types are their names in capitals.
        usual_prefix: How the file's name begins where nobody says otherwise.
    """

    saved: ClassVar[tuple[str, ...]]
    usual_prefix: ClassVar[str]

    def __init__(self) -> None:
        self.output_dir = folder_paths.get_output_directory()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        required: dict[str, Any] = {name: (name.upper(),) for name in cls.saved}
        required["filename_prefix"] = ("STRING", {"default": cls.usual_prefix})
        return {"required": required, "hidden": dict(HIDDEN)}

    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    CATEGORY = "advanced/model_merging"


class CheckpointSave(FileSaver):
    """Saves model, text encoder and autoencoder in one file."""

    saved = ("model", "clip", "vae")
    usual_prefix = "checkpoints/ComfyUI"

    def save(
        self,
        model: Any,
        clip: Any,
        vae: Any,
        filename_prefix: str,
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Weights as LoRAs and merges make them."""
        save_checkpoint(
            model,
            clip=clip,
            vae=vae,
            filename_prefix=filename_prefix,
            output_dir=self.output_dir,
            prompt=prompt,
            extra_pnginfo=extra_pnginfo,
        )
        return {}


class ModelSave(FileSaver):
    """Saves a diffusion model."""

    saved = ("model",)
    usual_prefix = "diffusion_models/ComfyUI"

    def save(
        self,
        model: Any,
        filename_prefix: str,
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Weights as LoRAs and merges make them."""
        save_checkpoint(
            model,
            filename_prefix=filename_prefix,
            output_dir=self.output_dir,
            prompt=prompt,
            extra_pnginfo=extra_pnginfo,
        )
        return {}


WITH_VOCABULARY = ("t5", "gemma", "mistral")  # encoders whose files carry their word pieces


class CLIPSave(FileSaver):
    """Saves a text encoder, one file for each of its parts."""

    saved = ("clip",)
    usual_prefix = "clip/ComfyUI"

    def save(
        self,
        clip: Any,
        filename_prefix: str,
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Each file has the keys of a text encoder file, ready to be loaded alone."""
        residency.load_models_gpu([clip.load_model()], force_patch_weights=True)
        parts: dict[str, dict[str, Any]] = {}
        vocabulary: dict[str, Any] = {}
        for key, value in clip.get_sd().items():
            part, _, inner = key.partition(".")
            if not inner:
                vocabulary[key] = value
            elif inner.startswith("transformer."):
                parts.setdefault(part, {})[inner.removeprefix("transformer.")] = value
        for part, tensors in parts.items():
            if any(name in part for name in WITH_VOCABULARY):
                tensors.update(vocabulary)
        metadata = {**text_hints(clip), **(header_text(prompt, extra_pnginfo) or {})}
        for part, tensors in parts.items():
            suffix = f"_{part}" if len(parts) > 1 else ""
            path, _ = next_file(filename_prefix + suffix, self.output_dir)
            save_torch_file(tensors, path, metadata=metadata)
        return {}


class VAESave(FileSaver):
    """Saves an autoencoder."""

    saved = ("vae",)
    usual_prefix = "vae/ComfyUI_vae"

    def save(
        self,
        vae: Any,
        filename_prefix: str,
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The keys are those of an autoencoder file."""
        path, _ = next_file(filename_prefix, self.output_dir)
        metadata = {**autoencoder_hints(vae), **(header_text(prompt, extra_pnginfo) or {})}
        save_torch_file(vae.get_sd(), path, metadata=metadata)
        return {}


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "ModelMergeSimple": ModelMergeSimple,
    "ModelMergeBlocks": ModelMergeBlocks,
    "ModelMergeSubtract": ModelSubtract,
    "ModelMergeAdd": ModelAdd,
    "CheckpointSave": CheckpointSave,
    "CLIPMergeSimple": CLIPMergeSimple,
    "CLIPMergeSubtract": CLIPSubtract,
    "CLIPMergeAdd": CLIPAdd,
    "CLIPSave": CLIPSave,
    "VAESave": VAESave,
    "ModelSave": ModelSave,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {"CheckpointSave": "Save Checkpoint"}
