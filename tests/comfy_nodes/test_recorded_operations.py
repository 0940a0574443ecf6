"""Latent, picture, mask and conditioning nodes give the recorded numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nodes
from comfy_extras import nodes_mask

Recorded = dict[str, Tensor]


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], Recorded]) -> Recorded:
    return golden_tensors("image_latent_ops.safetensors")


def check(got: Tensor, expected: Tensor, atol: float = 5e-7) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def latent(recorded: Recorded, name: str = "latent_2_4_16_24") -> dict[str, Any]:
    return {"samples": recorded[f"in/{name}"], "of_a_pack": "kept"}


LATENT_CASES: dict[str, Callable[[Recorded], Any]] = {
    "LatentBlend/0.3": lambda r: nodes.LatentBlend().blend(
        latent(r), latent(r, "latent_b_2_4_16_24"), 0.3
    ),
    "LatentComposite/x64_y32_feather16": lambda r: nodes.LatentComposite().composite(
        # The recorder's 16 went to composite_method, the argument before feather.
        latent(r),
        latent(r, "latent_from_2_4_8_8"),
        64,
        32,
        16,
    ),
    "LatentCrop/w64_h64_x32_y16": lambda r: nodes.LatentCrop().crop(latent(r), 64, 64, 32, 16),
    "LatentFlip/x": lambda r: nodes.LatentFlip().flip(latent(r), "x-axis: vertically"),
    "LatentRotate/90": lambda r: nodes.LatentRotate().rotate(latent(r), "90 degrees"),
    "LatentUpscale/bislerp/w256_h160/center": lambda r: nodes.LatentUpscale().upscale(
        latent(r), "bislerp", 256, 160, "center"
    ),
    "LatentUpscale/nearest-exact/w256_h160/center": lambda r: nodes.LatentUpscale().upscale(
        latent(r), "nearest-exact", 256, 160, "center"
    ),
    "LatentUpscaleBy/bislerp/1.37": lambda r: nodes.LatentUpscaleBy().upscale(
        latent(r), "bislerp", 1.37
    ),
    "LatentUpscaleBy/nearest-exact/1.37": lambda r: nodes.LatentUpscaleBy().upscale(
        latent(r), "nearest-exact", 1.37
    ),
}


@pytest.mark.parametrize("case", LATENT_CASES)
def test_latent_nodes(case: str, recorded: Recorded) -> None:
    before = recorded["in/latent_2_4_16_24"].clone()
    result = LATENT_CASES[case](recorded)[0]
    # Rotations between nearly parallel vectors: the arc cosine loses digits near 1.
    check(result["samples"], recorded[case], atol=1e-5 if "bislerp" in case else 5e-7)
    assert result["of_a_pack"] == "kept"
    assert torch.equal(recorded["in/latent_2_4_16_24"], before)


def test_padding_for_outpainting(recorded: Recorded) -> None:
    image = recorded["in/image_1_10_12_3"]
    padded, mask = nodes.ImagePadForOutpaint().expand_image(image, 4, 2, 3, 1, 3)
    check(padded, recorded["ImagePadForOutpaint/l4_t2_r3_b1_f3/image"])
    check(mask, recorded["ImagePadForOutpaint/l4_t2_r3_b1_f3/mask"])


@pytest.mark.parametrize(("expand", "tapered"), [(2, True), (2, False), (-1, True)])
def test_growing_masks(expand: int, tapered: bool, recorded: Recorded) -> None:
    grown = nodes_mask.GrowMask().expand_mask(recorded["in/mask_1_10_12"], expand, tapered)
    check(grown[0], recorded[f"GrowMask/{expand}/tapered{int(tapered)}"])


def test_feathering_masks(recorded: Recorded) -> None:
    ones = torch.ones(1, 10, 12)
    faded = nodes_mask.FeatherMask.execute(ones, left=3, top=2, right=4, bottom=1)
    check(faded[0], recorded["FeatherMask/ones/l3_t2_r4_b1"])
    assert ones.min() == 1


def conditioning(recorded: Recorded, which: str) -> list[list[Any]]:
    return [[recorded[f"in/cond_{which}"], {"pooled_output": recorded[f"in/pooled_{which}"]}]]


def test_averaging_conditioning(recorded: Recorded) -> None:
    to, other = conditioning(recorded, "a"), conditioning(recorded, "b")
    ((tensor, options),) = nodes.ConditioningAverage().addWeighted(to, other, 0.3)[0]
    check(tensor, recorded["ConditioningAverage/0.3/cond"])
    check(options["pooled_output"], recorded["ConditioningAverage/0.3/pooled"])


def test_joining_conditioning(recorded: Recorded) -> None:
    to, other = conditioning(recorded, "a"), conditioning(recorded, "b")
    ((tensor, _),) = nodes.ConditioningConcat().concat(to, other)[0]
    check(tensor, recorded["ConditioningConcat"])
