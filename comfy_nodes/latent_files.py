"""Nodes that keep latents in files of their own (`.latent`, a safetensors file with the prompt in
its header).
"""

from __future__ import annotations

import json
import os
from typing import Any

import safetensors
import safetensors.torch

import folder_paths
import node_helpers
from comfy.cli_args import args
from comfy.sampling.environment import environment
from comfy_nodes.latent_basics import Latent

FORMAT_KEY = "latent_format_version_0"
LEGACY_SCALE = (
    1.0 / 0.18215
)  # files without the format key hold latents of Stable Diffusion 1.x, already scaled


class SaveLatent:
    """Writes a latent to the output folder."""

    def __init__(self) -> None:
        self.output_dir = folder_paths.get_output_directory()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples": ("LATENT",),
                "filename_prefix": ("STRING", {"default": "latents/ComfyUI"}),
            },
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    CATEGORY = "_for_testing"

    def save(
        self,
        samples: Latent,
        filename_prefix: str = "ComfyUI",
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Writes the samples; other entries of the latent are not kept."""
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, self.output_dir
        )
        file = f"{filename}_{counter:05}_.latent"
        tensors = {
            "latent_tensor": samples["samples"].contiguous(),
            FORMAT_KEY: samples["samples"].new_zeros(0),
        }
        safetensors.torch.save_file(
            tensors, os.path.join(folder, file), metadata=header_text(prompt, extra_pnginfo)
        )
        return {"ui": {"latents": [{"filename": file, "subfolder": subfolder, "type": "output"}]}}


class LoadLatent:
    """Reads a latent from the input folder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        folder = folder_paths.get_input_directory()
        names = os.listdir(folder) if os.path.isdir(folder) else []
        files = sorted(name for name in names if name.endswith(".latent"))
        return {"required": {"latent": (files,)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "load"
    CATEGORY = "_for_testing"

    def load(self, latent: str) -> tuple[Latent]:
        """The samples, in the autoencoder's scale.

        Raises:
            ValueError: The file holds no latent.
        """
        path = folder_paths.get_annotated_filepath(latent)
        try:
            tensors = safetensors.torch.load_file(path, device="cpu")
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"latent: expected a file that a Save Latent node wrote, found {latent}, which "
                f"cannot be read ({error}); choose another one"
            ) from error
        if "latent_tensor" not in tensors:
            raise ValueError(
                f"{latent} is not a latent file: it holds {sorted(tensors)[:3]}, not latent_tensor"
            )
        scale = 1.0 if FORMAT_KEY in tensors else LEGACY_SCALE
        return ({"samples": tensors["latent_tensor"].float() * scale},)

    @classmethod
    def IS_CHANGED(cls, latent: str) -> str:
        return node_helpers.file_digest(folder_paths.get_annotated_filepath(latent))

    @classmethod
    def VALIDATE_INPUTS(cls, latent: str) -> bool | str:
        if not folder_paths.exists_annotated_filepath(latent):
            return f"Invalid latent file: {latent}"
        return True


def header_text(
    prompt: dict[str, Any] | None, extra: dict[str, Any] | None
) -> dict[str, str] | None:
    """Header entries of saved safetensors files; None when metadata are switched off."""
    if args.disable_metadata:
        return None
    entries = {"prompt": json.dumps(prompt if prompt is not None else "")}
    entries.update({name: json.dumps(value) for name, value in (extra or {}).items()})
    entries["environment"] = json.dumps(environment())
    return entries


NODE_CLASS_MAPPINGS: dict[str, type] = {"SaveLatent": SaveLatent, "LoadLatent": LoadLatent}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
