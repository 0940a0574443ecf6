"""Mixing two models of one architecture, with a ratio for each of its parts.

A part is a beginning of weight names. Each architecture is one row of the table: the parts before
its blocks, the blocks (name pattern and number), and the parts after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfy_extras.merging import NETWORK, family_of
from comfy_extras.nodes_model_merging import UNIT, ModelMergeBlocks

CATEGORY = "advanced/model_merging/model_specific"


def numbered(pattern: str, count: int) -> list[str]:
    """The pattern filled with 0, 1, ..."""
    return [pattern.format(number) for number in range(count)]


def unet_parts(levels: int, stop: str) -> list[str]:
    """Parts of a Stable Diffusion UNet; `stop` ends the names of its blocks."""
    return [
        "time_embed.",
        "label_emb.",
        *numbered("input_blocks.{}" + stop, levels),
        *numbered("middle_block.{}" + stop, 3),
        *numbered("output_blocks.{}" + stop, levels),
        "out.",
    ]


def mmdit_parts(blocks: int) -> list[str]:
    """Parts of Stable Diffusion 3."""
    embedders = ["pos_embed.", "x_embedder.", "context_embedder.", "y_embedder.", "t_embedder."]
    return [*embedders, *numbered("joint_blocks.{}.", blocks), "final_layer."]


def cosmos_parts(blocks: int) -> list[str]:
    """Parts of the first Cosmos models."""
    before = ["pos_embedder.", "extra_pos_embedder.", "x_embedder.", "t_embedder.", "affline_norm."]
    return [*before, *numbered("blocks.block{}.", blocks), "final_layer."]


def predict2_parts(blocks: int) -> list[str]:
    """Parts of Cosmos Predict 2."""
    before = ["pos_embedder.", "x_embedder.", "t_embedder.", "t_embedding_norm."]
    return [*before, *numbered("blocks.{}.", blocks), "final_layer."]


FLUX_PARTS = [
    *["img_in.", "time_in.", "guidance_in", "vector_in.", "txt_in."],
    *numbered("double_blocks.{}.", 19),
    *numbered("single_blocks.{}.", 38),
    "final_layer.",
]
AURAFLOW_PARTS = [
    *["init_x_linear.", "positional_encoding", "cond_seq_linear.", "register_tokens"],
    "t_embedder.",
    *numbered("double_layers.{}.", 4),
    *numbered("single_layers.{}.", 32),
    *["modF.", "final_linear."],
]
MOCHI_PARTS = [
    *["pos_frequencies.", "t_embedder.", "t5_y_embedder.", "t5_yproj."],
    *numbered("blocks.{}.", 48),
    "final_layer.",
]
LTXV_PARTS = [
    *["patchify_proj.", "adaln_single.", "caption_projection."],
    *numbered("transformer_blocks.{}.", 28),
    *["scale_shift_table", "proj_out."],
]
WAN_PARTS = [
    *["patch_embedding.", "time_embedding.", "time_projection.", "text_embedding.", "img_emb."],
    *numbered("blocks.{}.", 40),
    "head.",
]
QWEN_IMAGE_PARTS = [
    *["pos_embeds.", "img_in.", "txt_norm.", "txt_in.", "time_text_embed."],
    *numbered("transformer_blocks.{}.", 60),
    "proj_out.",
]

PARTS: dict[str, Sequence[str]] = {
    "ModelMergeSD1": unet_parts(12, "."),
    "ModelMergeSD2": unet_parts(12, "."),
    "ModelMergeSDXL": unet_parts(9, ""),
    "ModelMergeSD3_2B": mmdit_parts(24),
    "ModelMergeAuraflow": AURAFLOW_PARTS,
    "ModelMergeFlux1": FLUX_PARTS,
    "ModelMergeSD35_Large": mmdit_parts(38),
    "ModelMergeMochiPreview": MOCHI_PARTS,
    "ModelMergeLTXV": LTXV_PARTS,
    "ModelMergeCosmos7B": cosmos_parts(28),
    "ModelMergeCosmos14B": cosmos_parts(36),
    "ModelMergeWAN2_1": WAN_PARTS,
    "ModelMergeCosmosPredict2_2B": predict2_parts(28),
    "ModelMergeCosmosPredict2_14B": predict2_parts(36),
    "ModelMergeQwenImage": QWEN_IMAGE_PARTS,
}

DESCRIPTIONS = {
    "ModelMergeWAN2_1": "The small model has 30 blocks and the large one 40; img_emb is there in "
    "image-to-video models only.",
}


class MergeByParts(ModelMergeBlocks):
    """Mixes two models of one architecture; its rows name the parts."""

    PARTS: Sequence[str] = ()
    CATEGORY = CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        models = {"model1": ("MODEL",), "model2": ("MODEL",)}
        return {"required": {**models, **{part: ("FLOAT", dict(UNIT)) for part in cls.PARTS}}}

    def merge(self, model1: Any, model2: Any, **ratios: float) -> tuple[Any]:
        """As for blocks.

        Raises:
            ValueError: The first model has none of the blocks, or the second is of another kind.
        """
        blocks = tuple(part for part in self.PARTS if part.rstrip(".")[-1].isdigit())
        keys = [key.removeprefix(NETWORK) for key in model1.get_key_patches(NETWORK)]
        if not any(key.startswith(blocks) for key in keys):
            found = sorted({key.partition(".")[0] for key in keys})
            raise ValueError(
                f"model1: {type(self).__name__} mixes models with blocks such as {blocks[0]!r}, "
                f"found {family_of(model1)} with the parts {', '.join(found)}; take the node of "
                "its family, or ModelMergeSimple"
            )
        return super().merge(model1, model2, **ratios)


def merging_node(name: str) -> type[MergeByParts]:
    """The node class of a row."""
    facts = {
        "PARTS": PARTS[name],
        "DESCRIPTION": DESCRIPTIONS.get(name, ""),
        "__module__": __name__,
        "__doc__": f"Mixes two models, part by part ({name.removeprefix('ModelMerge')}).",
    }
    return type(name, (MergeByParts,), facts)


NODE_CLASS_MAPPINGS = {name: merging_node(name) for name in PARTS}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}

ModelMergeSD1 = NODE_CLASS_MAPPINGS["ModelMergeSD1"]
ModelMergeSDXL = NODE_CLASS_MAPPINGS["ModelMergeSDXL"]
ModelMergeFlux1 = NODE_CLASS_MAPPINGS["ModelMergeFlux1"]
