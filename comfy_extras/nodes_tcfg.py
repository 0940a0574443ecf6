"""Guidance without the part of the negative score that leads off the path of both.

Source: Kwon et al. 2025, https://arxiv.org/abs/2503.18137.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import Facts, patched_model_schema, with_pre_cfg


def score_tangential_damping(cond_score: Tensor, uncond_score: Tensor) -> Tensor:
    """The negative score along the main direction that both scores share.

    The negative one is the first row of the decomposed matrix, as in the recorded runs: nearly
    parallel rows make their order visible, most in the first number of each item.
    """
    both = torch.stack([uncond_score.flatten(1), cond_score.flatten(1)], dim=1).float()
    _, _, directions = torch.linalg.svd(both, full_matrices=False)
    main = directions[:, 0:1]
    kept = (both[:, 0:1] @ main.transpose(-2, -1)) * main
    return kept.reshape(uncond_score.shape).to(uncond_score.dtype)


class TCFG(io.ComfyNode):
    """Tangential damping of the negative score."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return patched_model_schema(
            "TCFG",
            "advanced/guidance",
            display_name="Tangential Damping CFG",
            description="Takes from the negative prediction what leads away from both.",
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        def change(facts: Facts) -> list[Tensor]:
            x = facts["input"]
            cond, uncond, *others = facts["conds_out"]
            return [cond, x - score_tangential_damping(x - cond, x - uncond), *others]

        return with_pre_cfg(model, change)


class TcfgExtension(ComfyExtension):
    """The node of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TCFG]


async def comfy_entrypoint() -> TcfgExtension:
    """Called by the loader of built-in modules."""
    return TcfgExtension()
