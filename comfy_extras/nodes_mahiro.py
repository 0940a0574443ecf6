"""Guidance that leans on the positive prediction where both predictions agree."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import Facts, patched_model_schema, with_post_cfg


def signed_root(x: Tensor) -> Tensor:
    """Square root of the size, with the sign kept."""
    return x.abs().sqrt() * x.sign()


class Mahiro(io.ComfyNode):
    """Guidance that leans on the positive prediction where both predictions agree."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return patched_model_schema(
            "Mahiro",
            "_for_testing",
            display_name="Mahiro CFG",
            is_experimental=True,
            description="Follows the positive text more than the difference to the negative one.",
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        def change(facts: Facts) -> Tensor:
            scale, guided = facts["cond_scale"], facts["denoised"]
            leap = facts["cond_denoised"] * scale
            negative_leap = facts["uncond_denoised"] * scale
            middle = (leap + guided) / 2
            agreement = cosine_similarity(signed_root(negative_leap), signed_root(middle)).mean()
            share = 2 * (agreement + 1)  # 0: opposite, 4: the same
            return (share * guided + (4 - share) * leap) / 4

        return with_post_cfg(model, change)


class MahiroExtension(ComfyExtension):
    """The node of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [Mahiro]


async def comfy_entrypoint() -> MahiroExtension:
    """Called by the loader of built-in modules."""
    return MahiroExtension()
