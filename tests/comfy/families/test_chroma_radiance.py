"""Chroma Radiance: the network beside Chroma's and beside plain loops, and from text to picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from comfy import loading, text_loading
from comfy.families.chroma_radiance import read_radiance_config
from comfy.families.family import BrokenModelError
from comfy.ldm.chroma.model import Chroma
from comfy.ldm.chroma_radiance.layers import cosine_waves
from comfy.ldm.chroma_radiance.model import ChromaRadiance
from comfy.saving import save_checkpoint
from comfy_extras import nodes_chroma_radiance as nodes
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families import key_shapes
from tests.comfy.families.small_files import write
from tests.comfy.families.test_transformers import pieces, random_like, text_encoders

TRUNK: dict[str, Any] = {
    "context_in_dim": 24, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 1,
    "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10000, "qkv_bias": True,
    "out_dim": 32, "hidden_dim": 24, "n_layers": 2,
}  # fmt: skip
FIELD: dict[str, Any] = {
    "patch_size": 4, "nerf_hidden_size": 8, "nerf_mlp_ratio": 2, "nerf_depth": 2,
    "nerf_max_freqs": 3,
}  # fmt: skip
SIZES = {**TRUNK, **FIELD}
PREFIX = "model.diffusion_model."


def network(**changes: Any) -> ChromaRadiance:
    model = ChromaRadiance(**{**SIZES, **changes}).eval()
    weights = random_like(model, 4)
    generator = torch.Generator().manual_seed(8)
    for key, value in weights.items():
        if value.ndim == 1 and value.numel():
            weights[key] = 0.5 + torch.rand(value.shape, generator=generator)
    model.load_state_dict(weights)
    return model


def inputs(height: int = 12, width: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(2, 3, height, width, generator=generator),
        "timestep": torch.tensor([0.3, 0.8]),
        "context": torch.randn(2, 5, 24, generator=generator),
    }


def tokens_of_chroma(model: ChromaRadiance, given: dict[str, Tensor]) -> Tensor:
    """What Chroma's own network, with the same weights, gives to its last layer."""
    patch = model.patch_size
    channels = 3 * patch**2
    chroma = Chroma(**TRUNK, in_channels=channels, out_channels=channels, patch_size=patch).eval()
    own = chroma.state_dict()
    weights = {key: value for key, value in model.state_dict().items() if key in own}
    weights["img_in.weight"] = model.img_in_patch.weight.flatten(1)
    weights["img_in.bias"] = model.img_in_patch.bias
    last = {key: own[key] for key in ("final_layer.linear.weight", "final_layer.linear.bias")}
    chroma.load_state_dict({**weights, **last})
    seen: list[Tensor] = []
    chroma.final_layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    chroma(**given)
    return seen[0]


def picture_by_loops(model: ChromaRadiance, tokens: Tensor, x: Tensor) -> Tensor:
    """The part that works pixel by pixel, one patch and one pixel after another."""
    weights, side, count = model.state_dict(), FIELD["patch_size"], FIELD["nerf_max_freqs"]
    width, inner = FIELD["nerf_hidden_size"], FIELD["nerf_hidden_size"] * FIELD["nerf_mlp_ratio"]
    batch, _, height, wide = x.shape
    made = torch.zeros(batch, width, height, wide)
    pairs = [(a, b) for a in range(count) for b in range(count)]
    for item in range(batch):
        for patch, token in enumerate(tokens[item]):
            top, left = (patch // (wide // side)) * side, (patch % (wide // side)) * side
            matrices = []
            for number in range(FIELD["nerf_depth"]):
                name = f"nerf_blocks.{number}.param_generator"
                flat = weights[f"{name}.weight"] @ token + weights[f"{name}.bias"]
                gate, value, out = flat.split(width * inner)
                three = gate.reshape(width, inner), value.reshape(width, inner)
                matrices.append([m / m.norm(dim=0) for m in (*three, out.reshape(inner, width))])
            for row in range(side):
                for column in range(side):
                    v, u = row / (side - 1), column / (side - 1)
                    place = [
                        math.cos(math.pi * a * u) * math.cos(math.pi * b * v) / (1 + a * b)
                        for a, b in pairs
                    ]
                    told = torch.cat([x[item, :, top + row, left + column], torch.tensor(place)])
                    name = "nerf_image_embedder.embedder.0"
                    h = weights[f"{name}.weight"] @ told + weights[f"{name}.bias"]
                    for number, (gate, value, out) in enumerate(matrices):
                        scale = weights[f"nerf_blocks.{number}.norm.scale"]
                        n = h / (h.square().mean() + 1e-6).sqrt() * scale
                        h = h + (F.silu(n @ gate) * (n @ value)) @ out
                    made[item, :, top + row, left + column] = h
    return made


@torch.inference_mode()
@pytest.mark.parametrize("head", ["conv", "linear"])
def test_the_network_is_chromas_with_a_field_over_each_patch(head: str) -> None:
    model, given = network(nerf_final_head_type=head), inputs()
    weights = model.state_dict()
    field = picture_by_loops(model, tokens_of_chroma(model, given), given["x"])
    name = "nerf_final_layer_conv" if head == "conv" else "nerf_final_layer"
    norm = weights[f"{name}.norm.scale"][:, None, None]
    normed = field / (field.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * norm
    if head == "conv":
        wanted = F.conv2d(normed, weights[f"{name}.conv.weight"], weights[f"{name}.conv.bias"],
                          padding=1)  # fmt: skip
    else:
        wanted = torch.einsum("oc,bchw->bohw", weights[f"{name}.linear.weight"], normed)
        wanted = wanted + weights[f"{name}.linear.bias"][:, None, None]
    torch.testing.assert_close(model(**given), wanted, rtol=1e-4, atol=1e-4)


def test_places_are_told_by_columns_before_rows() -> None:
    told = cosine_waves(2, 2, torch.empty(0)).tolist()
    # (a, b) = (0, 0), (0, 1), (1, 0), (1, 1) at the pixels of the first row, then of the second.
    right, below = [1, 1, -1, -0.5], [1, -1, 1, -0.5]
    assert told == [pytest.approx(row) for row in ([1, 1, 1, 0.5], right, below, [1, -1, -1, 0.5])]


@torch.inference_mode()
def test_a_taught_clean_picture_becomes_the_flow() -> None:
    given = inputs()
    flow, clean = network(use_x0=True), network()
    times = given["timestep"].reshape(-1, 1, 1, 1)
    torch.testing.assert_close(flow(**given), (given["x"] - clean(**given)) / times)
    assert flow.state_dict().keys() - clean.state_dict().keys() == {"__x0__"}


@torch.inference_mode()
def test_wide_patches_are_seen_at_half_the_size() -> None:
    wide = network(patch_kernel=2)
    given = inputs()
    seen: list[Tensor] = []
    wide.img_in_patch.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert wide(**given).shape == given["x"].shape
    assert torch.equal(seen[0], given["x"][..., ::2, ::2])
    assert "__32x32__" in wide.state_dict()


@torch.inference_mode()
@pytest.mark.parametrize("tile", [0, 1, 4, 100])
def test_patches_may_go_through_some_at_a_time(tile: int) -> None:
    model, given = network(), inputs()
    options: dict[str, Any] = {"chroma_radiance_options": {"nerf_tile_size": tile}}
    taken: list[int] = []
    model.nerf_image_embedder.register_forward_pre_hook(lambda _, args: taken.append(len(args[0])))
    tiled = model(**given, transformer_options=options)
    torch.testing.assert_close(tiled, network()(**given), rtol=1e-5, atol=1e-5)
    assert taken == {0: [12], 1: [2] * 6, 4: [8, 4], 100: [12]}[tile]
    with pytest.raises(ValueError, match="unknown options tiles; known: nerf_tile_size"):
        model(**given, transformer_options={"chroma_radiance_options": {"tiles": 1}})


@torch.inference_mode()
def test_a_picture_of_parts_of_patches_is_filled_from_its_other_side() -> None:
    model, given = network(nerf_final_head_type="linear"), inputs(10, 7)
    x = given["x"]
    whole = torch.cat([x, x[..., :2, :]], dim=-2)
    whole = torch.cat([whole, whole[..., :1]], dim=-1)
    wanted = model(**{**given, "x": whole})[..., :10, :7]
    torch.testing.assert_close(model(**given), wanted)


@torch.inference_mode()
def test_colours_and_places_are_put_together_in_single_precision() -> None:
    model = ChromaRadiance(**SIZES, dtype=torch.bfloat16)
    types = {key: value.dtype for key, value in model.state_dict().items()}
    embedder = {key for key in types if key.startswith("nerf_image_embedder.")}
    assert {types[key] for key in embedder} == {torch.float32}
    assert {types[key] for key in types.keys() - embedder} == {torch.bfloat16}
    model.load_state_dict(random_like(model, 1))
    given = {key: value.bfloat16() for key, value in inputs().items()}
    assert model(**given).isfinite().all()


def test_the_recorded_file_has_the_recorded_sizes(
    golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    recorded = golden_json("model_families.json")["variants"]["Chroma Radiance"]
    expected = dict(recorded["detected_unet_config"])
    weights = key_shapes.network(golden_folder, "Chroma Radiance")
    config = read_radiance_config(weights)
    assert config is not None
    whole = ChromaRadiance(**config, device="meta")
    assert whole.nerf_tile_size == expected.pop("nerf_tile_size")
    assert str(whole.nerf_image_embedder.dtype) == expected.pop("nerf_embedder_dtype")
    assert {key: config[key] for key in expected} == expected
    assert config.keys() - expected.keys() == {"patch_kernel"}
    marks = {"__x0__": torch.empty(0), "__32x32__": torch.empty(0)}
    marked = read_radiance_config({**weights, **marks})
    assert marked == {**config, "use_x0": True, "patch_size": 32}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"img_in_patch.weight": None}, "but img_in_patch.weight is missing"),
        ({"nerf_image_embedder.embedder.0.weight": None}, "embedder.0.weight is missing"),
        ({"nerf_image_embedder.embedder.0.weight": torch.empty(8, 14)}, "in 14 numbers.*not fit"),
        ({"nerf_blocks.0.param_generator.weight": torch.empty(9, 32)}, "in 9 rows.*not fit"),
        ({"img_in_patch.weight": torch.empty(30, 3, 4, 4)}, "makes 30 channels, which heads of 16"),
        (
            {"img_in_patch.weight": torch.empty(32, 3, 5, 5), "__32x32__": torch.empty(0)},
            "patches of 32 pixels, which img_in_patch.weight, over 5 pixels, does not divide",
        ),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Tensor | None], told: str) -> None:
    weights: dict[str, Any] = {**network().state_dict(), **changed}
    weights = {key: value for key, value in weights.items() if value is not None}
    with pytest.raises(BrokenModelError, match=told):
        read_radiance_config(weights)


@pytest.mark.parametrize(
    "wrong", [{"nerf_final_head_type": "square"}, {"patch_kernel": 3, "patch_size": 4}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one of conv, linear, and patch_kernel divides"):
        ChromaRadiance(**{**SIZES, **wrong})


def sampled(model: Any, clip: Any, text: str = "a red cat") -> Tensor:
    cond = clip.encode_from_tokens_scheduled(clip.tokenize(text))
    nothing = clip.encode_from_tokens_scheduled(clip.tokenize(""))
    latent = nodes.EmptyChromaRadianceLatentImage.execute(width=16, height=16).args[0]
    made = common_ksampler(model, 3, 2, 1.5, "euler", "simple", cond, nothing, latent)
    samples: Tensor = made[0]["samples"]
    return samples


def checkpoint(folder: Path, use_x0: bool = False) -> str:
    """A whole checkpoint of small parts."""
    weights = network(use_x0=use_x0, patch_size=8).state_dict()
    tensors = {PREFIX + key: value for key, value in weights.items()}
    encoder = text_encoders(24)["t5xxl"]
    tensors |= {f"cond_stage_model.t5xxl.transformer.{k}": v for k, v in encoder.items()}
    return write(tensors, folder / "radiance.safetensors")


@torch.inference_mode()
@pytest.mark.parametrize("use_x0", [False, True])
def test_text_becomes_a_picture_and_survives_saving(use_x0: bool, tmp_path: Path) -> None:
    pieces(tmp_path)
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, use_x0))
    assert type(found.model.model.model_config).__name__ == "ChromaRadiance"
    latent = sampled(found.model, found.clip)
    assert latent.shape == (1, 3, 16, 16)
    assert latent.isfinite().all()
    assert not torch.equal(sampled(found.model, found.clip, "cat"), latent)
    kept = latent.clone()
    picture = found.vae.decode(latent)
    assert torch.equal(latent, kept)
    torch.testing.assert_close(picture, (latent.movedim(1, -1) / 2 + 0.5).clamp(0, 1))
    torch.testing.assert_close(found.vae.encode(picture), latent.clamp(-1, 1))
    again_path = tmp_path / "again.safetensors"
    save_checkpoint(str(again_path), found.model, found.clip, found.vae)
    assert (PREFIX + "__x0__" in load_file(again_path)) is use_x0
    again: Any = loading.load_checkpoint_guess_config(str(again_path))
    assert torch.equal(sampled(again.model, again.clip), latent)


@torch.inference_mode()
def test_single_files_load_and_the_options_reach_the_network(tmp_path: Path) -> None:
    pieces(tmp_path)
    weights = network(patch_size=8).state_dict()
    model: Any = loading.load_diffusion_model(write(weights, tmp_path / "model.safetensors"))
    encoder = write(text_encoders(24)["t5xxl"], tmp_path / "t5.safetensors")
    clip = text_loading.load_clip([encoder], clip_type=text_loading.CLIPType.CHROMA)
    taken: list[int] = []
    embedder = model.model.diffusion_model.nerf_image_embedder
    embedder.register_forward_pre_hook(lambda _, args: taken.append(len(args[0])))
    plain = sampled(model, clip)
    whole, taken[:] = list(taken), []
    view = nodes.ChromaRadianceOptions.execute(
        model=model, preserve_wrapper=True, start_sigma=1.0, end_sigma=0.0, nerf_tile_size=1
    ).args[0]
    torch.testing.assert_close(sampled(view, clip), plain, rtol=1e-4, atol=1e-4)
    assert sum(taken) == sum(whole)
    assert len(taken) == 4 * len(whole)
