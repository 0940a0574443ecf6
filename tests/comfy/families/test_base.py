"""Base models turn conditioning options into network inputs as recorded, and fill their network."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comfy import conds
from comfy.families import (
    auraflow,
    cascade,
    chroma,
    cosmos_video,
    detection,
    flux,
    flux2,
    hidream,
    hunyuan3d,
    hunyuan_dit,
    hunyuan_image,
    hunyuan_video,
    hunyuan_video15,
    kandinsky5,
    ltxv,
    lumina2,
    mochi,
    omnigen2,
    pixart,
    qwen_image,
    sd3,
    sd15,
    sd20,
    sd_pictures,
    sdxl,
    wan,
)
from comfy.families.base import BaseModel
from comfy.families.family import ModelFamily
from comfy.families.model_type import ModelType
from comfy.weights.fill import IncompleteWeightsError

TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 24,
}

VIDEO = {"in_channels": 8, "adm_in_channels": 768, "num_classes": "sequential"}
UPSCALER = {"in_channels": 7, "num_classes": 1000, "disable_self_attentions": [True, False]}
MMDIT = {
    "in_channels": 16,
    "out_channels": 16,
    "depth": 1,
    "num_blocks": 1,
    "adm_in_channels": 12,
    "num_patches": 64,
    "pos_embed_max_size": 8,
}
FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 12,
    "context_in_dim": 16,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
}
CHROMA = {**{k: v for k, v in FLUX.items() if k != "guidance_embed"}, "in_channels": 64}
CHROMA |= {"out_channels": 64, "out_dim": 32, "hidden_dim": 16, "n_layers": 1}
FLUX2 = {**FLUX, "in_channels": 128, "out_channels": 128, "patch_size": 1}
PIXART = {"hidden_size": 36, "num_heads": 3, "depth": 1, "caption_channels": 16}
LTXV = {
    "cross_attention_dim": 32,
    "attention_head_dim": 1,
    "caption_channels": 16,
    "num_layers": 1,
}
HUNYUAN_VIDEO = {
    "vec_in_dim": 12,
    "context_in_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [4, 6, 6],
}
HUNYUAN3D = {
    "in_channels": 64,
    "context_in_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
}

HUNYUAN_IMAGE = {
    **HUNYUAN_VIDEO, "in_channels": 64, "out_channels": 64, "patch_size": [1, 1],
    "vec_in_dim": None, "axes_dim": [8, 8], "byt5": True,
}  # fmt: skip
HUNYUAN_VIDEO15 = {
    **HUNYUAN_VIDEO, "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1],
    "vec_in_dim": None, "vision_in_dim": 8, "byt5": True,
}  # fmt: skip

WAN = {
    "model_type": "t2v",
    "in_dim": 16,
    "out_dim": 16,
    "dim": 24,
    "ffn_dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "text_dim": 16,
    "freq_dim": 16,
}
QWEN = {
    "in_channels": 64,
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": [4, 6, 6],
}
WITHOUT_NETWORK = {"disable_unet_model_creation": True}
Z_IMAGE = {
    "dim": 64,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 16,
    "axes_dims": [8, 12, 12],
    "z_image_modulation": True,
}
OWN_LAYOUT = {
    "caption_channels",
    "num_blocks",
    "context_in_dim",
    "text_dim",
    "joint_attention_dim",
    "cap_feat_dim",
    "disable_unet_model_creation",
}
WAN_VACE = {**WAN, "model_type": "vace", "vace_layers": 1, "vace_in_dim": 96}


def build(family: type[ModelFamily], **config: Any) -> BaseModel:
    """A model of the family with a tiny network without weights."""
    own_layout = bool(OWN_LAYOUT & config.keys())
    sizes = config if own_layout else {**TINY, **config}
    return family(sizes).get_model({}, "", device="meta")


CASES = {
    "sd15": (sd15.SD15, {}),
    "sd15_inpaint_mask": (sd15.SD15, {"in_channels": 9}),
    "sd15_inpaint_soft_mask_rounding": (sd15.SD15, {"in_channels": 9}),
    "sd15_inpaint_nomask": (sd15.SD15, {"in_channels": 9}),
    "ip2p": (sd15.SD15_instructpix2pix, {"in_channels": 8}),
    "sdxl_defaults": (sdxl.SDXL, {}),
    "sdxl_sizes": (sdxl.SDXL, {}),
    "refiner_pos": (sdxl.SDXLRefiner, {}),
    "refiner_neg": (sdxl.SDXLRefiner, {}),
    "refiner_ascore": (sdxl.SDXLRefiner, {}),
    "svd": (sd_pictures.SVD_img2vid, VIDEO),
    "svd_defaults": (sd_pictures.SVD_img2vid, VIDEO),
    "sv3d_u": (sd_pictures.SV3D_u, VIDEO),
    "sv3d_p": (sd_pictures.SV3D_p, VIDEO),
    "x4_noaug": (sd_pictures.SD_X4Upscaler, UPSCALER),
    "x4_aug0.2": (sd_pictures.SD_X4Upscaler, UPSCALER),
    "unclip_h": (sd_pictures.SD21UnclipH, {"adm_in_channels": 2048, "num_classes": "sequential"}),
    "unclip_h_none": (
        sd_pictures.SD21UnclipH,
        {"adm_in_channels": 2048, "num_classes": "sequential"},
    ),
    "lotus": (sd_pictures.LotusD, {"adm_in_channels": 4, "num_classes": "sequential"}),
    "sd3": (sd3.SD3, MMDIT),
    "flux": (flux.Flux, FLUX),
    "flux_guidance_ref": (flux.Flux, FLUX),
    "flux2": (flux2.Flux2, FLUX2),
    "ltxv": (ltxv.LTXV, LTXV),
    "pixart": (pixart.PixArtAlpha, PIXART),
    "hunyuan_video": (hunyuan_video.HunyuanVideo, HUNYUAN_VIDEO),
    "hunyuan_video_i2v": (hunyuan_video.HunyuanVideoI2V, HUNYUAN_VIDEO),
    "hunyuan_image21": (hunyuan_image.HunyuanImage21, HUNYUAN_IMAGE),
    "hunyuan_video15": (hunyuan_video15.HunyuanVideo15, HUNYUAN_VIDEO15),
    "skyreels": (hunyuan_video.HunyuanVideoSkyreelsI2V, HUNYUAN_VIDEO),
    "flux_fill": (flux.FluxInpaint, {**FLUX, "in_channels": 96}),
    "flux_fill_nomask": (flux.FluxInpaint, {**FLUX, "in_channels": 96}),
    "flux_control": (flux.Flux, {**FLUX, "in_channels": 32}),
    "wan_t2v": (wan.WAN21_T2V, WAN),
    "hunyuan3d2": (hunyuan3d.Hunyuan3Dv2, HUNYUAN3D),
    "chroma": (chroma.Chroma, CHROMA),
    "qwen_image": (qwen_image.QwenImage, QWEN),
    "z_image": (qwen_image.ZImage, Z_IMAGE),
    "lumina2": (lumina2.Lumina2, Z_IMAGE),
    "auraflow": (auraflow.AuraFlow, WITHOUT_NETWORK),
    "omnigen2": (omnigen2.Omnigen2, WITHOUT_NETWORK),
    "hidream": (hidream.HiDream, WITHOUT_NETWORK),
    "cosmos": (cosmos_video.CosmosT2V, WITHOUT_NETWORK),
    "cosmos_i2v": (cosmos_video.CosmosI2V, {**WITHOUT_NETWORK, "in_channels": 17}),
    "mochi": (mochi.GenmoMochi, WITHOUT_NETWORK),
    "hydit": (hunyuan_dit.HunyuanDiT, WITHOUT_NETWORK),
    "cascade_b": (cascade.Stable_Cascade_B, WITHOUT_NETWORK),
    "cascade_c": (cascade.Stable_Cascade_C, WITHOUT_NETWORK),
    "kandinsky5": (kandinsky5.Kandinsky5, WITHOUT_NETWORK),
    "wan_i2v_noimage": (wan.WAN21_I2V, {**WAN, "model_type": "i2v", "in_dim": 36}),
    "wan_i2v": (wan.WAN21_I2V, {**WAN, "model_type": "i2v", "in_dim": 36}),
    "wan_i2v_mask4": (wan.WAN21_I2V, {**WAN, "model_type": "i2v", "in_dim": 36}),
    "wan_fun_control": (wan.WAN21_FunControl2V, {**WAN, "model_type": "i2v", "in_dim": 48}),
    "wan22_5b": (wan.WAN22_T2V, {**WAN, "in_dim": 48, "out_dim": 48}),
    "wan_vace": (wan.WAN21_Vace, WAN_VACE),
    "wan_vace_none": (wan.WAN21_Vace, WAN_VACE),
}


def given_of(case: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `extra_conds` in a recorded case."""
    given: dict[str, Any] = {}
    for key, value in tensors.items():
        if not key.startswith(f"{case}/in/"):
            continue
        name = key.split("/in/")[1]
        if name == "image_embeds":
            picture = SimpleNamespace(image_embeds=value)
            one = {"clip_vision_output": picture, "strength": 0.8, "noise_augmentation": 0.1}
            given["unclip_conditioning"] = [one]
        elif name.endswith(".0"):
            given[name.removesuffix(".0")] = [value]
        else:
            given[name] = value
    given.update(facts["scalar_inputs"], prompt_type=facts["prompt_type"], device="cpu", seed=42)
    if case == "wan_vace":
        given["vace_strength"] = [0.7]
    if case == "sv3d_p":  # lists are not in the record; these answer to what came out
        given.update(elevation=[10.0, 20.0, 30.0], azimuth=[0.0, 120.0, 240.0])
    return given


@pytest.mark.parametrize("case", CASES)
def test_conditioning_options_become_the_recorded_inputs(
    case: str,
    golden_tensors: Callable[[str], dict[str, Tensor]],
    golden_json: Callable[[str], Any],
) -> None:
    family, config = CASES[case]
    tensors = golden_tensors("model_conds.safetensors")
    facts = golden_json("model_conds_meta.json")[case]
    made = build(family, **config).extra_conds(**given_of(case, tensors, facts))
    assert made.keys() == facts["out"].keys()
    for name, cond in made.items():  # some are cut to areas, where the recorded kind is not
        assert facts["out"][name]["cond_type"] in {kind.__name__ for kind in type(cond).__mro__}
    for name, cond in made.items():
        # Sinusoids of numbers near 1000 in float32: the rounding of the angle is about 3e-5.
        got, key = cond.cond, f"{case}/out/{name}"
        if isinstance(cond, conds.CONDList):
            got, key = got[0], f"{key}.0"
        if isinstance(cond, conds.CONDConstant):
            assert got == facts["out"][name]["value"]
            continue
        torch.testing.assert_close(got, tensors[key], rtol=0, atol=1e-4)


def test_the_known_region_is_noised_as_recorded(
    golden_tensors: Callable[[str], dict[str, Tensor]],
) -> None:
    tensors = golden_tensors("model_conds.safetensors")
    root = "scale_latent_inpaint/SD1.5"
    model = build(sd15.SD15)
    for sigma in (0.3, 0.9):
        got = model.scale_latent_inpaint(
            sigma=torch.tensor([sigma]),
            noise=tensors[f"{root}/noise"],
            latent_image=tensors[f"{root}/latent"],
        )
        torch.testing.assert_close(got, tensors[f"{root}/sigma{sigma}"], rtol=1e-5, atol=1e-6)


def test_sdxl_says_what_is_missing_when_the_conditioning_has_no_pooled_output() -> None:
    with pytest.raises(ValueError, match="pooled output"):
        build(sdxl.SDXL).extra_conds(noise=torch.zeros(1, 4, 8, 8), device="cpu")


MARKERS = {
    "none": {},
    "v_pred": {"v_pred": 0.0},
    "v_pred+ztsnr": {"v_pred": 0.0, "ztsnr": 0.0},
    "edm_mean+edm_std (playground 2.5)": {"edm_mean": 0.0, "edm_std": 0.0},
    "edm_vpred.sigma_max=120,sigma_min=0.002": {
        "edm_vpred.sigma_max": 120.0,
        "edm_vpred.sigma_min": 0.002,
    },
}


@pytest.mark.parametrize("case", MARKERS)
def test_marker_keys_choose_the_prediction_type_of_sdxl(
    case: str, golden_json: Callable[[str], Any]
) -> None:
    expected = golden_json("model_families.json")["sdxl_model_type_by_marker_keys"][case]
    family = sdxl.SDXL(dict(TINY))
    markers = {key: torch.tensor(value) for key, value in MARKERS[case].items()}
    assert family.model_type(markers).name == expected["model_type"]
    assert family.sampling_settings == expected["sampling_settings"]
    assert type(family.latent_format).__name__ == expected["latent_format"]


def test_the_spread_of_one_norm_tells_velocity_prediction_in_sd2(
    golden_json: Callable[[str], Any],
) -> None:
    for case, expected in golden_json("model_families.json")["sd2_model_type"].items():
        channels = int(case.split("in_channels=")[1].split(",")[0])
        spread = float(case.rsplit("=", 1)[1])
        norm = torch.randn(1024, generator=torch.Generator().manual_seed(1))
        norm = (norm - norm.mean()) / norm.std(unbiased=False) * spread
        family = sd20.SD20({**TINY, "in_channels": channels})
        assert family.model_type({f"p.{sd20.VELOCITY_NORM}": norm}, "p.").name == expected, case


def tiny_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = build(sd15.SD15).diffusion_model.state_dict()
    return {
        f"model.diffusion_model.{key}": torch.randn(value.shape, generator=generator) * 0.1
        for key, value in shapes.items()
    }


def test_weights_are_taken_over_and_removed_from_the_file() -> None:
    state_dict = {**tiny_weights(), "other": torch.zeros(1)}
    first = state_dict["model.diffusion_model.input_blocks.0.0.weight"]
    model = build(sd15.SD15).load_model_weights(state_dict, "model.diffusion_model.")
    assert list(state_dict) == ["other"]
    loaded = model.diffusion_model.get_parameter("input_blocks.0.0.weight")
    assert loaded.data_ptr() == first.data_ptr()
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_missing_weights_are_an_error_that_counts_and_names_them() -> None:
    state_dict = tiny_weights()
    del state_dict["model.diffusion_model.out.2.weight"]
    del state_dict["model.diffusion_model.out.2.bias"]
    with pytest.raises(IncompleteWeightsError, match=r"2 keys .*out\.2\.weight"):
        build(sd15.SD15).load_model_weights(state_dict, "model.diffusion_model.")


def test_weights_that_do_not_fit_at_all_are_an_error() -> None:
    with pytest.raises(IncompleteWeightsError, match="none of the 1 tensors"):
        build(sd15.SD15).load_model_weights({"x.y": torch.zeros(1)}, "x.")


def test_a_wrong_shape_is_an_error_that_names_key_and_both_sizes() -> None:
    state_dict = tiny_weights()
    state_dict["model.diffusion_model.out.2.weight"] = torch.zeros(4, 33, 3, 3)
    with pytest.raises(IncompleteWeightsError, match=r"out\.2\.weight.*33"):
        build(sd15.SD15).load_model_weights(state_dict, "model.diffusion_model.")


def test_the_clean_estimate_is_that_of_the_prediction_type() -> None:
    model = build(sd15.SD15).load_model_weights(tiny_weights(), "model.diffusion_model.")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 8, 8, generator=generator) * 5
    context = torch.randn(2, 7, 24, generator=generator)
    sigma = torch.tensor([5.0, 1.0])
    with torch.no_grad():
        denoised = model.apply_model(x, sigma, c_crossattn=context)
        scaled = x / (sigma**2 + 1).sqrt().reshape(2, 1, 1, 1)
        timestep = model.model_sampling.timestep(sigma).float()
        noise = model.diffusion_model(scaled, timestep, context=context)
    torch.testing.assert_close(denoised, x - noise * sigma.reshape(2, 1, 1, 1))


def test_wrappers_run_around_the_model() -> None:
    model = build(sd15.SD15).load_model_weights(tiny_weights(), "model.diffusion_model.")

    def halve(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        return executor(*args, **kwargs) * 0.5

    x, sigma = torch.ones(1, 4, 8, 8), torch.tensor([2.0])
    context = torch.ones(1, 3, 24)
    options = {"wrappers": {"apply_model": {"test": [halve]}}}
    with torch.no_grad():
        plain = model.apply_model(x, sigma, c_crossattn=context)
        wrapped = model.apply_model(x, sigma, c_crossattn=context, transformer_options=options)
    torch.testing.assert_close(wrapped, plain * 0.5)


def test_memory_grows_with_the_picture_and_the_family_factor() -> None:
    small = build(sd15.SD15)
    assert small.memory_required([2, 4, 64, 64]) == 2 * small.memory_required([1, 4, 64, 64])
    assert small.memory_required([1, 4, 128, 64]) == 2 * small.memory_required([1, 4, 64, 64])
    lean = build(sdxl.SDXL)
    ratio = lean.memory_required([1, 4, 64, 64]) / small.memory_required([1, 4, 64, 64])
    assert ratio == pytest.approx(0.8)


def test_saving_gives_back_the_keys_of_the_file() -> None:
    model = build(sd15.SD15).load_model_weights(tiny_weights(), "model.diffusion_model.")
    clip = {"clip_l.transformer.text_model.final_layer_norm.weight": torch.zeros(1)}
    saved = model.state_dict_for_saving(clip, {"decoder.conv_in.bias": torch.zeros(1)})
    text = "cond_stage_model.transformer.text_model.final_layer_norm.weight"
    assert text in saved
    assert "first_stage_model.decoder.conv_in.bias" in saved
    assert set(tiny_weights()) <= set(saved)
    assert isinstance(detection.model_config_from_unet(saved, "model.diffusion_model."), sd15.SD15)


def test_a_v_prediction_model_is_marked_when_saved() -> None:
    model = build(sdxl.SDXL)
    model.model_type = ModelType.V_PREDICTION
    assert "v_pred" in model.state_dict_for_saving()


def test_pictures_take_the_place_of_text_in_sdxl() -> None:
    model = build(sdxl.SDXL)
    seen = SimpleNamespace(image_embeds=torch.randn(2, 1280))
    one = {"clip_vision_output": seen, "strength": 0.5, "noise_augmentation": 0.0}
    given = {"noise": torch.zeros(1, 4, 8, 8), "device": "cpu", "seed": 3}
    text = {"pooled_output": torch.zeros(1, 1280)}
    vector = model.encode_adm(unclip_conditioning=[one], **given, **text)
    assert vector.shape == (1, 2816)
    # Two pictures at half strength are their mean, and a little noise.
    assert (vector[:, :1280] - seen.image_embeds.mean(dim=0)).std() < 0.1
    assert torch.equal(vector, model.encode_adm(unclip_conditioning=[one], **given, **text))
    assert not model.encode_adm(**given, **text)[:, :1280].any()


def cosine_shares() -> np.ndarray:
    """What is left of a picture at each of 1000 levels, by the squared cosine, in float64."""
    left = np.cos((np.arange(1001) / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.cumprod(1 - np.minimum(1 - left[1:] / left[:-1], 0.999))


@pytest.mark.parametrize("seed", [None, 0, 3, 2**64 - 1])
def test_pictures_of_unclip_are_noised_and_summed_by_the_formula(seed: int | None) -> None:
    model = build(sd_pictures.SD21UnclipH, adm_in_channels=2048, num_classes="sequential")
    dim, shares = 1024, cosine_shares()
    settings = [(0.7, 0.0), (0.4, 0.5), (1.5, 1.0)]
    pictures = [
        {
            "clip_vision_output": SimpleNamespace(image_embeds=torch.randn(1, dim)),
            "strength": strength, "noise_augmentation": amount,
        }
        for strength, amount in settings
    ]  # fmt: skip
    # Each picture starts the stream of the seed anew; the sum goes on in that of the last.
    stream = torch.Generator().manual_seed((seed or 0) - 10)
    of_each, of_sum = (torch.randn(1, dim, generator=stream).numpy() for _ in range(2))
    steps = np.exp(-np.log(10000) * np.arange(dim // 2) / (dim // 2))

    def noised(embedding: Any, amount: float, drawn: Any = of_each) -> Any:
        level = round(999 * amount)
        noisy = shares[level] ** 0.5 * embedding + (1 - shares[level]) ** 0.5 * drawn
        told = np.concatenate([np.cos(level * steps), np.sin(level * steps)])[None]
        return np.concatenate([noisy, told], axis=1)

    made = [
        noised(one["clip_vision_output"].image_embeds.double().numpy(), amount) * strength
        for one, (strength, amount) in zip(pictures, settings)
    ]
    for count, expected in ((1, made[0]), (3, noised(sum(made)[:, :dim], 0.05, of_sum))):
        given = {"unclip_conditioning": pictures[:count], "device": "cpu", "seed": seed}
        found = model.encode_adm(noise=torch.zeros(1, 4, 8, 8), **given).double().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_noise_augmentation_leaves_no_weights_in_files() -> None:
    for family in (sdxl.SDXL, sd_pictures.SD21UnclipH):
        model = build(family, adm_in_channels=2048, num_classes="sequential")
        assert not [key for key in model.state_dict() if "noise_augmentor" in key]
