"""Nodes that show the model a picture: editing, upscaling, other views, video, style."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import style_model
from comfy.ldm.flux.redux import ReduxImageEncoder
from comfy.ldm.t2i_adapter.style import StyleAdapter
from comfy_extras import nodes_flux, nodes_ip2p, nodes_sdupscale, nodes_stable3d, nodes_video_model
from comfy_nodes.style import StyleModelApply, extended_mask

COND = [[torch.zeros(1, 2, 3), {"kept": 1}]]


class FakeVAE:
    """The mean of 8 x 8 pixels as a latent of three channels."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def encode(self, pixels: Tensor) -> Tensor:
        self.seen.append(pixels)
        return torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)


class FakeVision:
    """An image encoder whose embedding is the mean colour."""

    def encode_image(self, image: Tensor, crop: bool = True) -> Any:
        del crop
        return SimpleNamespace(image_embeds=image.mean(dim=(1, 2)))


def test_editing_cuts_the_middle_to_whole_cells() -> None:
    pixels = torch.rand(1, 21, 37, 3)
    vae = FakeVAE()
    node = nodes_ip2p.InstructPixToPixConditioning
    positive, negative, latent = node.execute(COND, COND, pixels, vae)
    assert torch.equal(vae.seen[0], pixels[:, 2:18, 2:34])
    shown = positive[0][1]["concat_latent_image"]
    assert shown.shape == (1, 3, 2, 4)
    assert torch.equal(negative[0][1]["concat_latent_image"], shown)
    assert not latent["samples"].any()
    assert COND[0][1] == {"kept": 1}


def test_the_upscaler_gets_the_small_picture_in_the_range_of_latents() -> None:
    images = torch.full((2, 8, 12, 3), 0.75)
    node = nodes_sdupscale.SD_4XUpscale_Conditioning
    positive, negative, latent = node.execute(images, COND, COND, 4.0, 0.25)
    assert latent["samples"].shape == (2, 4, 8, 12)
    for conditioning in (positive, negative):
        options = conditioning[0][1]
        assert torch.allclose(options["concat_image"], torch.full((2, 3, 8, 12), 0.5))
        assert options["noise_augmentation"] == 0.25


def test_zero123_is_told_the_camera() -> None:
    image = torch.rand(1, 16, 16, 3)
    node = nodes_stable3d.StableZero123_Conditioning
    positive, negative, latent = node.execute(FakeVision(), image, FakeVAE(), 32, 16, 3, 10.0, 90.0)
    camera = positive[0][0][0, 0, -4:]
    expected = torch.tensor([math.radians(-10), 1.0, 0.0, math.pi / 2])
    assert torch.allclose(camera, expected, atol=1e-6)
    assert negative[0][0].shape == (1, 1, 3)
    assert not negative[0][0].any()
    assert latent["samples"].shape == (3, 4, 2, 4)


def test_zero123_moves_the_camera_on_through_a_batch() -> None:
    image = torch.rand(1, 16, 16, 3)
    node = nodes_stable3d.StableZero123_Conditioning_Batched
    made = node.execute(FakeVision(), image, FakeVAE(), 16, 16, 3, 0.0, 0.0, 10.0, 90.0)
    cameras = made[0][0][0][:, 0, -4:]
    assert torch.allclose(cameras[:, 0], torch.deg2rad(torch.tensor([0.0, -10.0, -20.0])))
    assert torch.allclose(cameras[:, 1], torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)
    assert made[2]["batch_index"] == [0, 0, 0]


def test_several_pictures_are_one_for_each_view() -> None:
    pictures = torch.rand(3, 16, 16, 3)
    alone = nodes_stable3d.StableZero123_Conditioning
    batched = nodes_stable3d.StableZero123_Conditioning_Batched
    for made in (
        alone.execute(FakeVision(), pictures, FakeVAE(), 16, 16, 3, 10.0, 90.0),
        batched.execute(FakeVision(), pictures, FakeVAE(), 16, 16, 3, 0.0, 0.0, 10.0, 90.0),
    ):
        torch.testing.assert_close(made[0][0][0][:, 0, :3], pictures.mean(dim=(1, 2)))
    with pytest.raises(ValueError, match=r"init_image: expected one picture or .* \(2\), found 3"):
        alone.execute(FakeVision(), pictures, FakeVAE(), 16, 16, 2, 10.0, 90.0)


def test_sv3d_turns_once_around() -> None:
    image = torch.rand(1, 16, 16, 3)
    node = nodes_stable3d.SV3D_Conditioning
    positive, _, latent = node.execute(FakeVision(), image, FakeVAE(), 16, 16, 5, 7.0)
    assert positive[0][1]["azimuth"] == [0.0, 90.0, 180.0, 270.0, 360.0]
    assert positive[0][1]["elevation"] == [7.0] * 5
    assert latent["samples"].shape[0] == 5


def test_svd_is_told_motion_rate_and_noise() -> None:
    image = torch.rand(1, 16, 16, 4)
    encode = nodes_video_model.SVD_img2vid_Conditioning().encode
    positive, negative, latent = encode(FakeVision(), image, FakeVAE(), 32, 16, 7, 99, 8, 0.0)
    options = positive[0][1]
    assert (options["motion_bucket_id"], options["fps"]) == (99, 8)
    assert options["concat_latent_image"].shape == (1, 3, 2, 4)
    assert not negative[0][1]["concat_latent_image"].any()
    assert latent["samples"].shape == (7, 4, 2, 4)
    torch.manual_seed(0)
    noisy = encode(FakeVision(), image, FakeVAE(), 32, 16, 7, 99, 8, 0.5)[0][0][1]
    assert not torch.equal(noisy["concat_latent_image"], options["concat_latent_image"])


def test_kontext_takes_the_nearest_proportions() -> None:
    scale = nodes_flux.FluxKontextImageScale.execute
    assert scale(torch.rand(1, 100, 100, 3))[0].shape == (1, 1024, 1024, 3)
    assert scale(torch.rand(1, 100, 230, 3))[0].shape == (1, 672, 1568, 3)
    assert scale(torch.rand(1, 130, 100, 3))[0].shape == (1, 1184, 880, 3)


def test_flux_text_carries_guidance_and_a_text_for_each_encoder() -> None:
    seen: dict[str, Any] = {}

    def encode(tokens: dict[str, Any], add_dict: dict[str, Any]) -> list[Any]:
        seen.update(tokens)
        return [[None, add_dict]]

    clip = SimpleNamespace(
        tokenize=lambda text: {"l": f"l of {text}", "t5xxl": f"t5 of {text}"},
        encode_from_tokens_scheduled=encode,
    )
    made = nodes_flux.CLIPTextEncodeFlux.execute(clip, "short", "long", 2.5)[0]
    assert seen == {"l": "l of short", "t5xxl": "t5 of long"}
    assert made[0][1] == {"guidance": 2.5}


# -- style models --------------------------------------------------------------------------------


class Style:
    """A style model that gives ones."""

    def get_cond(self, output: Any) -> Tensor:
        del output
        return torch.ones(1, 4, 3)


def apply(strength: float, kind: str, conditioning: Any = COND) -> Any:
    return StyleModelApply().apply_stylemodel(conditioning, Style(), None, strength, kind)[0][0]


def test_style_tokens_follow_the_text_at_their_strength() -> None:
    tokens, options = apply(0.5, "multiply")
    assert tokens.shape == (1, 6, 3)
    assert torch.equal(tokens[0, 2:], torch.full((4, 3), 0.5))
    assert options == {"kept": 1}


def test_style_may_weaken_attention_instead() -> None:
    tokens, options = apply(0.25, "attn_bias")
    assert torch.equal(tokens[0, 2:], torch.ones(4, 3))
    mask = options["attention_mask"]
    # Two text tokens, four style tokens and one place for the picture.
    assert mask.shape == (1, 7, 7)
    assert torch.allclose(mask[0, [0, 1, 6], 2:6], torch.tensor(math.log(0.25)).half(), atol=1e-3)
    assert not mask[0, 2:6].any()
    assert not mask[0, :, [0, 1, 6]].any()


def test_no_attention_at_all_is_minus_infinity() -> None:
    mask = apply(0.0, "attn_bias")[1]["attention_mask"]
    assert mask[0, 0, 2] == -math.inf


def test_a_second_style_keeps_the_bias_of_the_first() -> None:
    first = apply(0.25, "attn_bias")
    second = apply(1.0, "multiply", [first])[1]["attention_mask"]
    assert second.shape == (1, 11, 11)
    assert second[0, 0, 2] == pytest.approx(math.log(0.25), abs=1e-3)
    assert not second[0, 0, 6:10].any()


def test_a_boolean_mask_forbids() -> None:
    allowed = torch.tensor([[[True, False, True]] * 3])
    bias = extended_mask(allowed, torch.zeros(1, 2, 3), 1, 1, 1.0)
    assert bias[0, 0].tolist() == [0.0, -math.inf, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["redux", "adapter"])
def test_style_models_are_told_by_their_keys_and_sized_by_their_shapes(
    kind: str, tmp_path: Any
) -> None:
    network = ReduxImageEncoder(12, 20) if kind == "redux" else StyleAdapter(16, 20, 8, 2, 3)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path / "style.safetensors"
    from safetensors.torch import save_file

    save_file(network.state_dict(), path)
    loaded = style_model.load_style_model(str(path))
    width, tokens = (12, 5) if kind == "redux" else (16, 3)
    states = torch.rand(2, 5, width)
    made = loaded.get_cond(SimpleNamespace(last_hidden_state=states))
    assert made.shape == (2, tokens, 20)
    assert torch.allclose(made, network(states), atol=1e-6)
    wrong = SimpleNamespace(last_hidden_state=torch.rand(1, 5, 7))
    with pytest.raises(ValueError, match=rf"{width} channels.*has 7"):
        loaded.get_cond(wrong)


def test_another_file_is_no_style_model(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    from comfy.weights.errors import WeightFileError

    path = tmp_path / "lora.safetensors"
    save_file({"a.lora_up.weight": torch.zeros(1)}, path)
    with pytest.raises(WeightFileError, match=r"no style model.*lora_up"):
        style_model.load_style_model(str(path))
