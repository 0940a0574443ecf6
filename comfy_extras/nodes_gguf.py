"""Loaders of GGUF files under the names published workflows use.

The usual loaders read these files, too; a pack that brings nodes of these names goes before these.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import folder_paths
from comfy import loading, progress
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_nodes.loaders import CLIP_PAIR_TYPES, CLIP_TYPES, load_text_encoders

logger = logging.getLogger(__name__)

CATEGORY = "advanced/loaders"
AS_COMPUTED = ("default", "target")
TYPES = (*AS_COMPUTED, "float32", "float16", "bfloat16")
# Folders of these files -> the folder whose files such nodes list beside them.
NETWORKS, ENCODERS = ("unet_gguf", "diffusion_models"), ("clip_gguf", "text_encoders")


def network_names() -> list[str]:
    """GGUF files of diffusion models."""
    own, usual = map(folder_paths.get_filename_list, NETWORKS)
    return sorted({*own, *(name for name in usual if name.lower().endswith(".gguf"))})


def encoder_names() -> list[str]:
    """Files of text encoders, GGUF and others: a pair is often one of each."""
    return sorted({name for folder in ENCODERS for name in folder_paths.get_filename_list(folder)})


def path_of(folders: Sequence[str], name: str) -> str:
    """Path of a file in the first folder that has it.

    Raises:
        FileNotFoundError: None has it.
    """
    found = folder_paths.get_full_path(folders[0], name)
    return found or folder_paths.get_full_path_or_raise(folders[1], name)


class UnetLoaderGGUF(io.ComfyNode):
    """Loads a quantised diffusion model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="UnetLoaderGGUF",
            display_name="Unet Loader (GGUF)",
            category=CATEGORY,
            description="Loads a diffusion model whose weights stay quantised in memory.",
            inputs=[io.Combo.Input("unet_name", options=network_names())],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, unet_name: str) -> io.NodeOutput:
        return io.NodeOutput(loading.load_diffusion_model(path_of(NETWORKS, unet_name)))

    load_unet = execute


class UnetLoaderGGUFAdvanced(io.ComfyNode):
    """The same with choices that other servers have."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="UnetLoaderGGUFAdvanced",
            display_name="Unet Loader (GGUF/Advanced)",
            category=CATEGORY,
            description=(
                "Loads a diffusion model whose weights stay quantised in memory. Weights are "
                "always decoded in the type of the computation, and LoRAs added in float32."
            ),
            inputs=[
                io.Combo.Input("unet_name", options=network_names()),
                io.Combo.Input("dequant_dtype", options=list(TYPES), default="default"),
                io.Combo.Input("patch_dtype", options=list(TYPES), default="default"),
                io.Boolean.Input("patch_on_device", default=False),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        unet_name: str,
        dequant_dtype: str = "default",
        patch_dtype: str = "default",
        patch_on_device: bool = False,
    ) -> io.NodeOutput:
        if dequant_dtype not in AS_COMPUTED or patch_dtype not in (*AS_COMPUTED, "float32"):
            progress.warn(
                logger,
                "dequant_dtype %s, patch_dtype %s: weights are decoded in the type of the "
                "computation and patched in float32; choose that type with the start-up options",
                dequant_dtype,
                patch_dtype,
            )
        if patch_on_device:
            progress.warn(logger, "patch_on_device: patches always go where they are used")
        return io.NodeOutput(loading.load_diffusion_model(path_of(NETWORKS, unet_name)))

    load_unet = execute


def encoder_inputs(count: int) -> list[io.Input]:
    """Names of so many files."""
    names = encoder_names()
    if count == 1:
        return [io.Combo.Input("clip_name", options=names)]
    return [io.Combo.Input(f"clip_name{place + 1}", options=names) for place in range(count)]


def encoders(names: Sequence[str], kind: str) -> io.NodeOutput:
    """The text encoder of some files."""
    paths = [path_of(ENCODERS, name) for name in names]
    # What the menu calls sdxl is the arrangement of plain Stable Diffusion.
    return io.NodeOutput(
        load_text_encoders(paths, "stable_diffusion" if kind == "sdxl" else kind, "default")
    )


class CLIPLoaderGGUF(io.ComfyNode):
    """Loads a text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPLoaderGGUF",
            display_name="CLIPLoader (GGUF)",
            category=CATEGORY,
            description="Loads a text encoder, quantised or not.",
            inputs=[*encoder_inputs(1), io.Combo.Input("type", options=list(CLIP_TYPES))],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip_name: str, type: str = "stable_diffusion") -> io.NodeOutput:
        return encoders([clip_name], type)

    load_clip = execute


class DualCLIPLoaderGGUF(io.ComfyNode):
    """Loads a pair of text encoders."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DualCLIPLoaderGGUF",
            display_name="DualCLIPLoader (GGUF)",
            category=CATEGORY,
            description="Loads two text encoders, quantised or not, that a model uses together.",
            inputs=[*encoder_inputs(2), io.Combo.Input("type", options=list(CLIP_PAIR_TYPES))],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip_name1: str, clip_name2: str, type: str) -> io.NodeOutput:
        return encoders([clip_name1, clip_name2], type)

    load_clip = execute


class TripleCLIPLoaderGGUF(io.ComfyNode):
    """Loads the text encoders of Stable Diffusion 3."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TripleCLIPLoaderGGUF",
            display_name="TripleCLIPLoader (GGUF)",
            category=CATEGORY,
            description="Loads CLIP ViT-L, OpenCLIP ViT-bigG and T5-XXL, quantised or not.",
            inputs=encoder_inputs(3),
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip_name1: str, clip_name2: str, clip_name3: str) -> io.NodeOutput:
        return encoders([clip_name1, clip_name2, clip_name3], "sd3")

    load_clip = execute


class QuadrupleCLIPLoaderGGUF(io.ComfyNode):
    """Loads the text encoders of HiDream."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuadrupleCLIPLoaderGGUF",
            display_name="QuadrupleCLIPLoader (GGUF)",
            category=CATEGORY,
            description="Loads CLIP ViT-L, OpenCLIP ViT-bigG, T5-XXL and Llama, quantised or not.",
            inputs=encoder_inputs(4),
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(
        cls, clip_name1: str, clip_name2: str, clip_name3: str, clip_name4: str
    ) -> io.NodeOutput:
        return encoders([clip_name1, clip_name2, clip_name3, clip_name4], "hidream")

    load_clip = execute


comfy_entrypoint = entrypoint_of(
    UnetLoaderGGUF,
    UnetLoaderGGUFAdvanced,
    CLIPLoaderGGUF,
    DualCLIPLoaderGGUF,
    TripleCLIPLoaderGGUF,
    QuadrupleCLIPLoaderGGUF,
)
