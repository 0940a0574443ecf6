"""What networks that inpaint or edit are given beside the latent: the mask and the picture."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from comfy import loading
from comfy.families import sd15
from comfy.ldm.unet.model import UNetModel
from comfy_nodes.sampling import common_ksampler
from comfy_nodes.vae import InpaintModelConditioning, VAEEncodeForInpaint
from tests.comfy.families.test_base import build
from tests.support import tiny_checkpoint

SCALE = 0.18215
BLANK = torch.tensor([0.8223, -0.6876, 0.6364, 0.1380]).view(1, 4, 1, 1)
UNET = "model.diffusion_model."


def spread(tensor: Tensor, count: int) -> Tensor:
    """The entries nearest in relative position."""
    have = len(tensor)
    if count < have:
        step = (have - 1) / max(count - 1, 1)
        return tensor[[min(round(i * step), have - 1) for i in range(count)]]
    return tensor[[min(int((i + 0.5) * have / count), have - 1) for i in range(count)]]


def at_size(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Cut to the proportions of a size from the middle, then resized."""
    if tensor.shape[-2:] == (rows, columns):
        return tensor
    height, width = tensor.shape[-2:]
    top = left = 0
    if width / height > columns / rows:
        left = round((width - width * (columns / rows) / (width / height)) / 2)
    elif width / height < columns / rows:
        top = round((height - height * (width / height) / (columns / rows)) / 2)
    cut = tensor[..., top : height - top, left : width - left]
    return functional.interpolate(cut, size=(rows, columns), mode="bilinear")


def test_mask_and_picture_are_those_of_the_conditioning_or_of_the_run() -> None:
    model = build(sd15.SD15, in_channels=9)
    for seed in range(60):
        r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        batch, rows, columns = r.randint(1, 4), r.randint(4, 9), r.randint(4, 9)
        noise = torch.zeros(batch, 4, rows, columns)

        def drawn(channels: int, r: random.Random = r, g: Any = generator) -> Tensor:
            return torch.rand(
                r.randint(1, 4), channels, r.randint(4, 40), r.randint(4, 40), generator=g
            )

        given: dict[str, Tensor] = {"latent_image": torch.randn(noise.shape, generator=generator)}
        mask = image = None
        if r.random() < 0.5:
            mask = given["denoise_mask"] = torch.rand(noise.shape, generator=generator)
        if r.random() < 0.5:
            mask = given["concat_mask"] = drawn(r.choice([1, 4]))
        if r.random() < 0.3:
            mask = given["concat_mask"] = drawn(1)[:, 0]
        if r.random() < 0.5:
            image = given["concat_latent_image"] = drawn(4)
        made = model.extra_conds(noise=noise, device="cpu", **given)["c_concat"].cond

        if mask is None:
            expected = torch.cat([torch.ones_like(noise[:, :1]), BLANK.expand_as(noise)], dim=1)
        else:
            mask = mask[:, :1] if mask.ndim == 4 else mask[:, None]
            picture = given["latent_image"] if image is None else image * SCALE
            parts = [at_size(mask, rows, columns).round(), at_size(picture, rows, columns)]
            expected = torch.cat([spread(part, batch) for part in parts], dim=1)
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6, msg=str(seed))


@pytest.mark.parametrize("given", [1, 2, 3, 5])
def test_pictures_to_edit_are_spread_over_the_batch(given: int) -> None:
    model = build(sd15.SD15_instructpix2pix, in_channels=8)
    pictures = torch.randn(given, 4, 6, 5, generator=torch.Generator().manual_seed(given))
    for batch in (1, 2, 3, 4):
        noise = torch.zeros(batch, 4, 6, 5)
        made = model.concat_cond(noise=noise, device="cpu", concat_latent_image=pictures)
        assert torch.equal(made, spread(pictures, batch))


@pytest.fixture(scope="module")
def inpainting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small inpainting checkpoint."""
    weights = tiny_checkpoint.weights()
    network = UNetModel(**{**tiny_checkpoint.UNET, "in_channels": 9}, device="meta")
    first = "input_blocks.0.0.weight"
    generator = torch.Generator().manual_seed(1)
    weights[UNET + first] = (
        torch.randn(network.state_dict()[first].shape, generator=generator) * 0.05
    )
    path = tmp_path_factory.mktemp("inpainting") / "small.safetensors"
    return loading.load_checkpoint_guess_config(str(tiny_checkpoint.write(path, weights)))


@pytest.mark.parametrize("by_conditioning", [True, False])
@torch.inference_mode()
def test_a_run_shows_the_network_the_picture_around_the_hole(
    by_conditioning: bool, inpainting: Any
) -> None:
    seen: list[Tensor] = []

    def watch(apply_model: Any, args: dict[str, Any]) -> Tensor:
        seen.append(args["c"]["c_concat"])
        return apply_model(args["input"], args["timestep"], **args["c"])

    model = inpainting.model.clone()
    model.set_model_unet_function_wrapper(watch)
    text = inpainting.clip.encode_from_tokens_scheduled(inpainting.clip.tokenize("a cat"))
    generator = torch.Generator().manual_seed(2)
    pixels, mask = torch.rand(1, 64, 48, 3, generator=generator), torch.zeros(1, 64, 48)
    mask[:, 16:40, 8:24] = 1
    # Both make the same latent of the greyed picture; it reaches the network by another way.
    encoded = VAEEncodeForInpaint().encode(inpainting.vae, pixels, mask, 0)[0]
    positive = negative = text
    latent = encoded
    if by_conditioning:
        positive, negative, latent = InpaintModelConditioning().encode(
            text, text, pixels, inpainting.vae, mask
        )
        encoded = {"samples": positive[0][1]["concat_latent_image"]}
    common_ksampler(model, 1, 1, 2.0, "euler", "normal", positive, negative, latent)
    cells = functional.interpolate(mask[:, None], size=(8, 6), mode="bilinear").round()
    expected = torch.cat([cells, encoded["samples"] * SCALE], dim=1)
    for concat in seen:
        for one in concat.split(1):
            torch.testing.assert_close(one, expected)
