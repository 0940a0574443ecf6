"""Loaders of whole models in less usual forms."""

from __future__ import annotations

import os
from typing import Any

import folder_paths
from comfy import diffusers_load, loading

Loaded = tuple[Any, ...]


class unCLIPCheckpointLoader:
    """Loads a checkpoint that also holds an image encoder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"ckpt_name": (folder_paths.get_filename_list("checkpoints"),)}}

    RETURN_TYPES = ("MODEL", "CLIP", "VAE", "CLIP_VISION")
    FUNCTION = "load_checkpoint"
    CATEGORY = "loaders"

    def load_checkpoint(
        self, ckpt_name: str, output_vae: bool = True, output_clip: bool = True
    ) -> Loaded:
        """MODEL, CLIP, VAE and CLIP_VISION; a part that the file does not hold is None."""
        return loading.load_checkpoint_guess_config(
            folder_paths.get_full_path_or_raise("checkpoints", ckpt_name),
            output_vae=output_vae,
            output_clip=output_clip,
            output_clipvision=True,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
        )


def model_folders() -> list[str]:
    """Folders that hold a whole model, relative to models/diffusers."""
    found = []
    for root in folder_paths.get_folder_paths("diffusers"):
        for folder, _, files in os.walk(root, followlinks=True):
            if diffusers_load.INDEX in files:
                found.append(os.path.relpath(folder, start=root))
    return sorted(found)


class DiffusersLoader:
    """Loads a model from a folder of the diffusers library."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_path": (model_folders(),)}}

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load_checkpoint"
    CATEGORY = "advanced/loaders/deprecated"

    def load_checkpoint(
        self, model_path: str, output_vae: bool = True, output_clip: bool = True
    ) -> Loaded:
        """MODEL, CLIP and VAE.

        Raises:
            FileNotFoundError: There is no such model folder.
        """
        # The name comes from outside: only folders that the list offers are loaded.
        if model_path not in model_folders():
            raise FileNotFoundError(
                f"there is no model folder {model_path!r} in models/diffusers; "
                f"one holds a file {diffusers_load.INDEX}"
            )
        roots = folder_paths.get_folder_paths("diffusers")
        path = next(
            os.path.join(root, model_path)
            for root in roots
            if os.path.isfile(os.path.join(root, model_path, diffusers_load.INDEX))
        )
        return diffusers_load.load_diffusers(
            path,
            output_vae=output_vae,
            output_clip=output_clip,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
        )


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "unCLIPCheckpointLoader": unCLIPCheckpointLoader,
    "DiffusersLoader": DiffusersLoader,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
