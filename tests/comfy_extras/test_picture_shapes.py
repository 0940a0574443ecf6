"""Pictures of any number of channels, masks of any axes, and sizes and batches that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import node_helpers
from comfy.nested_tensor import NestedTensor
from comfy_extras import nodes_latent, nodes_mask
from comfy_extras.frame_compression import compressed
from comfy_extras.images.batching import BatchImagesNode
from comfy_extras.images.stitching import ImageStitch
from comfy_extras.masks.compositing import ImageCompositeMasked, LatentCompositeMasked
from comfy_extras.nodes_canny import Canny
from comfy_extras.nodes_compositing import (
    JoinImageWithAlpha,
    PorterDuffImageComposite,
    SplitImageWithAlpha,
)
from comfy_extras.nodes_images import ImageScaleToMaxDimension
from comfy_extras.nodes_mask import CropMask, ImageColorToMask, ImageToMask, MaskComposite
from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow, ModelSamplingSD3
from comfy_extras.nodes_morphology import ImageRGBToYUV
from comfy_extras.nodes_post_processing import (
    ImageScaleToTotalPixels,
    Quantize,
    ResizeImageMaskNode,
)
from comfy_nodes.image import ImageBatch, ImageScaleBy
from comfy_nodes.latent import LatentUpscaleBy
from comfy_nodes.latent_joining import LatentBlend
from comfy_nodes.vae import VAEDecode, VAEDecodeTiled

GREY = torch.linspace(0, 1, 16 * 24).reshape(1, 16, 24, 1)
COLOURED = GREY.repeat(1, 1, 1, 3)
SEEN = GREY.new_full(GREY.shape, 0.25)  # how opaque a picture is

Change = Callable[[Tensor], Tensor]
ALIKE: dict[str, Change] = {
    "Canny": lambda image: Canny.execute(image, 0.1, 0.2)[0],
    "ImageRGBToYUV": lambda image: ImageRGBToYUV.execute(image)[0],
    "ImageColorToMask": lambda image: ImageColorToMask.execute(image, 0x808080)[0],
    "ImageQuantize": lambda image: Quantize.execute(image, 4, "bayer-4")[0],
    "ImageToMask": lambda image: ImageToMask.execute(image, "blue")[0],
    "JoinImageWithAlpha": lambda image: JoinImageWithAlpha.execute(image, SEEN[..., 0])[0],
    "SplitImageWithAlpha": lambda image: SplitImageWithAlpha.execute(image)[0],
    "LTXVPreprocess": lambda image: compressed(image, 20),
}


@pytest.mark.parametrize("node", ALIKE)
def test_grey_is_the_same_value_in_all_colours(node: str) -> None:
    change = ALIKE[node]
    expected = change(COLOURED)
    assert torch.equal(change(GREY), expected)
    if node != "ImageToMask":
        assert torch.equal(change(torch.cat([GREY, SEEN], dim=-1)), expected)


JOINS: dict[str, Change] = {
    "ImageBatch": lambda grey: ImageBatch().batch(COLOURED, grey)[0][1:],
    "ImageBatch, grey first": lambda grey: ImageBatch().batch(grey, COLOURED)[0][:1],
    "BatchImagesNode": lambda grey: BatchImagesNode.execute({"0": grey, "1": COLOURED})[0][:1],
    "ImageStitch": lambda grey: ImageStitch.execute(
        grey, "right", True, 0, "white", image2=COLOURED
    )[0][:, :, :24],
    "ImageCompositeMasked": lambda grey: ImageCompositeMasked.execute(
        torch.zeros_like(COLOURED), grey, 0, 0, False
    )[0],
}


@pytest.mark.parametrize("node", JOINS)
def test_grey_joins_colours(node: str) -> None:
    assert torch.equal(JOINS[node](GREY), COLOURED)


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        ((0.2,), 3, (0.2, 0.2, 0.2)),
        ((0.2,), 4, (0.2, 0.2, 0.2, 1.0)),
        ((0.2, 0.6), 4, (0.2, 0.2, 0.2, 0.6)),
        ((0.2, 0.6), 3, (0.2, 0.2, 0.2)),
        ((0.1, 0.2, 0.3), 4, (0.1, 0.2, 0.3, 1.0)),
        ((0.1, 0.2, 0.3, 0.4), 3, (0.1, 0.2, 0.3)),
        ((0.1, 0.2, 0.3, 0.4), 1, (0.1,)),
    ],
)
def test_channels(given: tuple[float, ...], wanted: int, expected: tuple[float, ...]) -> None:
    made = node_helpers.with_channels(torch.tensor([[[given]]]), wanted)
    assert torch.equal(made, torch.tensor([[[expected]]]))


def test_grey_with_transparency_is_taken_apart() -> None:
    assert torch.equal(
        SplitImageWithAlpha.execute(torch.cat([GREY, SEEN], dim=-1))[1], 1 - SEEN[..., 0]
    )


MASK = torch.rand(1, 16, 24, generator=torch.Generator().manual_seed(0))
MASKED: dict[str, Change] = {
    "JoinImageWithAlpha": lambda mask: JoinImageWithAlpha.execute(COLOURED, mask)[0],
    "PorterDuff": lambda mask: PorterDuffImageComposite.execute(
        COLOURED, mask, COLOURED, mask, "SRC_OVER"
    )[1],
    "ImageCompositeMasked": lambda mask: ImageCompositeMasked.execute(
        COLOURED, 1 - COLOURED, 0, 0, False, mask
    )[0],
    "MaskComposite": lambda mask: MaskComposite.execute(mask, mask, 1, 2, "add")[0],
    "CropMask": lambda mask: CropMask.execute(mask, 1, 2, 3, 4)[0],
    "FeatherMask": lambda mask: nodes_mask.FeatherMask.execute(mask, 1, 2, 3, 4)[0],
    "GrowMask": lambda mask: nodes_mask.GrowMask.execute(mask, 2, True)[0],
    "MaskToImage": lambda mask: nodes_mask.MaskToImage.execute(mask)[0],
}


@pytest.mark.parametrize("node", MASKED)
@pytest.mark.parametrize("shape", [(16, 24), (1, 1, 16, 24)])
def test_masks_come_with_other_axes_too(node: str, shape: tuple[int, ...]) -> None:
    assert torch.equal(MASKED[node](MASK.reshape(shape)), MASKED[node](MASK))


def latent(*shape: int) -> dict[str, Any]:
    return {"samples": torch.ones(shape)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda: LatentUpscaleBy().upscale(latent(1, 4, 8, 2), "area", 0.2),
            "scale_by: expected at least 1 on each side, found 0 x 2, which is 2 x 8 scaled by 0.2",
        ),
        (
            lambda: ImageScaleBy().upscale(torch.ones(1, 2, 64, 3), "lanczos", 0.1),
            "scale_by: .* found 6 x 0, which is 64 x 2 scaled by 0.1",
        ),
        (
            lambda: ResizeImageMaskNode.execute(
                GREY, "area", {"resize_type": "scale by multiplier", "multiplier": 0.01}
            ),
            "multiplier: .* found 0 x 0, which is 24 x 16 scaled by 0.01",
        ),
        (
            lambda: ImageScaleToMaxDimension.execute(GREY, "area", 0),
            "largest_size: expected at least 1 pixel, found 0",
        ),
        (
            lambda: CropMask.execute(torch.ones(1, 16, 24), 24, 3, 8, 8),
            "x, y: expected a corner inside the mask of 24 x 16, found 24, 3",
        ),
        (
            lambda: MaskComposite.execute(torch.ones(1, 4, 4), torch.ones(2, 4, 4), 0, 0, "add"),
            r"source: expected one mask or as many as destination has \(1\), found 2",
        ),
        (
            lambda: LatentBlend().blend(latent(3, 4, 9, 5), latent(2, 4, 8, 8), 0.5),
            r"samples2: expected one latent or as many as samples1 has \(3\), found 2",
        ),
        (
            lambda: nodes_latent.LatentConcat.execute(latent(1, 4, 8, 8), latent(1, 4, 8, 8), "-t"),
            "samples1: expected a latent of a video, found one of a picture",
        ),
        (
            lambda: nodes_latent.LatentCut.execute(latent(1, 4, 8, 8), "t", 0, 1),
            "samples: expected a latent of a video, found one of a picture",
        ),
        (
            lambda: nodes_latent.LatentCut.execute(latent(2, 8, 100), "y", 0, 1),
            "samples: expected a latent of a picture or video, found one of a sound",
        ),
        (
            lambda: nodes_latent.LatentOperationSharpen.execute(3, 1.0, 0.1)[0](
                latent=torch.ones(2, 8, 100)
            ),
            "expected a latent of a picture or video, found one of a sound",
        ),
        (lambda: ModelSamplingSD3().patch(None, 0.0), "shift: expected a number above 0, found 0"),
        (lambda: ModelSamplingAuraFlow().patch_aura(None, 0.0), "shift: expected a number above 0"),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        change()


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (2, 2)])
def test_one_latent_is_blended_with_each_of_others(counts: tuple[int, int]) -> None:
    made = LatentBlend().blend(latent(counts[0], 4, 9, 5), latent(counts[1], 4, 8, 8), 0.5)[0]
    assert made["samples"].shape == (max(counts), 4, 9, 5)


def test_sides_are_whole_steps() -> None:
    made = ImageScaleToTotalPixels.execute(torch.ones(1, 1000, 4, 3), "area", 0.01, 64)[0]
    assert made.shape == (1, 1600, 64, 3)


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (2, 4, 8, 8), (1, 8, 9), (1, 4, 2, 3, 3)])
@pytest.mark.parametrize("multiplier", [0.0, 0.5, 100.0])
def test_tone_mapping_never_gives_nan(shape: tuple[int, ...], multiplier: float) -> None:
    tonemap = nodes_latent.LatentOperationTonemapReinhard.execute(multiplier)[0]
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = tonemap(latent=latent)
    length = latent.norm(dim=1, keepdim=True)
    axes = tuple(range(1, latent.ndim))
    spread = length.std(axes, keepdim=True) if length[0].numel() > 1 else 0
    white = (length.mean(axes, keepdim=True) + 5 * spread) * multiplier
    expected = white * (length / white) / (1 + length / white) if multiplier else 0 * length
    torch.testing.assert_close(made.norm(dim=1, keepdim=True), expected)


@pytest.mark.parametrize(("shape", "dim"), [((2, 4, 8, 8), "t"), ((2, 8, 100), "y")])
def test_what_has_no_such_direction_is_not_cut(shape: tuple[int, ...], dim: str) -> None:
    given = latent(*shape)
    assert nodes_latent.LatentCutToBatch.execute(given, dim, 1)[0]["samples"].shape == shape


@pytest.mark.parametrize(
    "decode",
    [VAEDecode().decode, functools.partial(VAEDecodeTiled().decode, tile_size=64)],
)
def test_the_pictures_of_a_video_with_sound_are_decoded(decode: Callable[..., Any]) -> None:
    class Seen:
        """An autoencoder that gives back what it is given."""

        def decode(self, latent: Tensor, **_: Any) -> Tensor:
            return latent

        decode_tiled = decode

        def temporal_compression_decode(self) -> None:
            return None

        def spacial_compression_decode(self) -> int:
            return 8

    video, sound = torch.rand(1, 2, 4, 4), torch.rand(1, 8, 5)
    samples = {"samples": NestedTensor([video, sound])}
    assert torch.equal(decode(Seen(), samples)[0], video)


@pytest.mark.parametrize("resize_source", [False, True])
def test_a_video_is_pasted_frame_by_frame(resize_source: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    below = torch.randn(1, 4, 3, 8, 8, generator=generator)
    above = torch.randn(1, 4, 3, 5, 6, generator=generator)

    def pasted(target: Tensor, source: Tensor) -> Tensor:
        latents = {"samples": target}, {"samples": source}
        made = LatentCompositeMasked.execute(*latents, 16, 8, resize_source, MASK)[0]
        return made["samples"]

    whole = pasted(below, above)
    for frame in range(3):
        torch.testing.assert_close(
            whole[:, :, frame], pasted(below[:, :, frame], above[:, :, frame])
        )


@pytest.mark.parametrize(
    "decode",
    [VAEDecode().decode, functools.partial(VAEDecodeTiled().decode, tile_size=64)],
)
def test_a_sound_is_not_decoded_as_a_picture(decode: Callable[..., Any]) -> None:
    vae = SimpleNamespace(latent_dim=2, decode=None)
    with pytest.raises(ValueError, match=r"samples: expected a latent of pictures.*\(1, 4, 64\)"):
        decode(vae, latent(1, 4, 64))
