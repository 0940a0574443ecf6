"""Stable Cascade: the recorded networks, its autoencoders, small files from text to picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading
from comfy.families.cascade import read_cascade_config
from comfy.families.family import BrokenModelError
from comfy.ldm.cascade.stage_a import StageA
from comfy.ldm.cascade.stage_b import StageB
from comfy.ldm.cascade.stage_c import StageC
from comfy.ldm.cascade.stage_c_coder import EffnetEncoder, StageC_coder
from comfy.vae.vae import VAE
from comfy_extras.nodes_stable_cascade import (
    StableCascade_EmptyLatentImage,
    StableCascade_StageB_Conditioning,
)
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_hidream import clip_g
from tests.comfy.families.test_transformers import random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT = 64  # of the small bigG
C_SIZES: dict[str, Any] = {
    "c_r": 16, "c_cond": 24, "c_hidden": [64, 64], "nhead": [1, 1], "blocks": [[1, 2], [2, 1]],
    "block_repeat": [[1, 1], [2, 1]], "c_clip_text": TEXT, "c_clip_text_pooled": TEXT,
    "c_clip_img": 12, "c_clip_seq": 4,
}  # fmt: skip
B_SIZES: dict[str, Any] = {
    "c_r": 16, "c_cond": 24, "c_hidden": [16, 32, 64, 64], "nhead": [-1, -1, 1, 1],
    "blocks": [[1, 1, 2, 1], [1, 2, 1, 1]], "block_repeat": [[1, 1, 1, 1], [2, 1, 1, 2]],
    "c_clip": TEXT,
}  # fmt: skip
NETWORKS = {"c": (StageC, C_SIZES), "b": (StageB, B_SIZES)}
C_SHAPE, B_SHAPE = (1, 16, 5, 7), (1, 4, 18, 22)
BODY_PARAMETERS = 21_458_488 - 1281 * 1000  # published, without the layer of classes


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network(stage: str) -> dict[str, Tensor]:
    kind, sizes = NETWORKS[stage]
    return random_like(kind(**sizes), 4)


def counted(module: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Random weights, with the counters that norms of a training keep."""
    counters = {k: v for k, v in module.state_dict().items() if k.endswith("num_batches_tracked")}
    return {**random_like(module, seed), **counters}


def stage_a() -> dict[str, Tensor]:
    return counted(StageA(bottleneck_blocks=3, c_hidden=16, codebook_size=8), 5)


def checkpoint(folder: Path, stage: str) -> str:
    tensors = prefixed(network(stage), PREFIX)
    encoder = clip_g()
    tensors["text_encoder.clip_g.text_projection"] = encoder.pop("text_projection.weight").T
    tensors |= prefixed(encoder, "text_encoder.clip_g.transformer.")
    if stage == "b":
        tensors |= prefixed(stage_a(), "vae.")
    else:
        coder = StageC_coder(c_hidden=16, has_encoder=False)
        tensors |= prefixed(counted(coder, 6), "vae.")
    return write(tensors, folder / f"stage_{stage}.safetensors")


@pytest.mark.parametrize("stage", NETWORKS)
def test_the_networks_agree_with_the_reference(stage: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/cascade_{stage}.safetensors")
    model = NETWORKS[stage][0](**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    assert_close_to_golden(model(given.pop("x"), given.pop("t"), **given), net.outputs["a"])


@pytest.mark.parametrize(("stage", "hole"), [("c", "clip_img_mapper"), ("b", "effnet_mapper.0")])
def test_sizes_are_read_from_the_weights_and_a_hole_is_named(stage: str, hole: str) -> None:
    weights = network(stage)
    config = read_cascade_config(weights)
    assert config is not None
    sizes = NETWORKS[stage][1]
    usual = {"c_clip_seq": 4, "block_repeat": sizes["block_repeat"]}
    assert {key: {**usual, **config}[key] for key in sizes} == sizes
    del weights[f"{hole}.weight"]
    with pytest.raises(BrokenModelError, match=f"stage {stage.upper()}, but {hole}"):
        read_cascade_config(weights)


def test_text_becomes_a_picture_in_two_stages(tmp_path: Path) -> None:
    first: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, "c"))
    second: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, "b"))
    assert type(first.model.model.model_config).__name__ == "Stable_Cascade_C"
    assert type(second.model.model.model_config).__name__ == "Stable_Cascade_B"
    empty_c, empty_b = StableCascade_EmptyLatentImage.execute(256, 320, 42).args
    assert empty_c["samples"].shape == (1, 16, 7, 6)
    positive = first.clip.encode_from_tokens_scheduled(first.clip.tokenize("a red cat"))
    negative = first.clip.encode_from_tokens_scheduled(first.clip.tokenize(""))
    run = (5, 2, 2.0, "euler", "simple")
    made = common_ksampler(first.model, *run, positive, negative, empty_c)[0]
    assert made["samples"].isfinite().all()
    told = StableCascade_StageB_Conditioning.execute(positive, made)[0]
    small = {"samples": empty_b["samples"][..., :18, :22]}
    result = common_ksampler(second.model, *run, told, negative, small)[0]
    plain = common_ksampler(second.model, *run, positive, negative, small)[0]
    assert not torch.equal(result["samples"], plain["samples"])
    assert second.vae.decode(result["samples"]).shape == (1, 72, 88, 3)
    assert first.vae.decode(made["samples"]).shape == (1, 28, 24, 3)  # a preview


@pytest.mark.parametrize(("stage", "shape"), [("c", C_SHAPE), ("b", B_SHAPE)])
def test_a_checkpoint_survives_saving(stage: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, stage))
    latent = sampled(found.model, found.clip, shape)
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, shape), latent)
    assert torch.equal(again.vae.decode(latent), found.vae.decode(latent))


def test_pictures_are_looked_at_by_their_strength(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, "c"), output_vae=False)
    seen = SimpleNamespace(image_embeds=torch.ones(1, 12))
    pictures = [
        {"clip_vision_output": seen, "strength": s, "noise_augmentation": 0} for s in (1, 2)
    ]
    made = found.model.model.extra_conds(
        noise=torch.zeros(C_SHAPE), device="cpu", pooled_output=torch.zeros(1, TEXT),
        unclip_conditioning=pictures,
    )  # fmt: skip
    assert made["clip_img"].cond[0, :, 0].tolist() == [1, 2]
    latent = sampled(found.model, found.clip, C_SHAPE)
    shown = sampled(found.model, found.clip, C_SHAPE, unclip_conditioning=pictures)
    assert not torch.equal(shown, latent)
    with pytest.raises(ValueError, match="pooled output"):
        found.model.model.extra_conds(noise=torch.zeros(C_SHAPE), device="cpu")


def test_joined_projections_of_older_files_load_as_well(tmp_path: Path) -> None:
    weights = network("b")
    older = {k: v for k, v in weights.items() if ".attn.to_" not in k}
    for key in weights:
        if ".attn.to_q." in key:
            parts = [weights[key.replace("to_q", name)] for name in ("to_q", "to_k", "to_v")]
            root, _, kind = key.partition(".to_q.")
            older[f"{root}.in_proj_{kind}"] = torch.cat(parts)
    plain, other = (
        loading.load_diffusion_model(write(w, tmp_path / f"{n}.safetensors")).model.state_dict()
        for n, w in (("plain", weights), ("older", older))
    )
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_stage_a_has_the_recorded_weights_and_both_ways_fit() -> None:
    vae = VAE(sd=stage_a(), dtype=torch.float32)
    assert (vae.latent_channels, vae.downscale_ratio, vae.upscale_ratio) == (4, 4, 4)
    latent = vae.encode(torch.rand(1, 16, 24, 3))
    assert latent.shape == (1, 4, 4, 6)
    assert vae.decode(latent).shape == (1, 16, 24, 3)


def test_the_encoder_of_stage_c_is_the_published_body_and_says_what_it_cannot() -> None:
    with torch.device("meta"):
        encoder = EffnetEncoder(16)
    count = sum(math.prod(p.shape) for p in encoder.backbone.parameters())
    assert count == BODY_PARAMETERS
    keys = encoder.state_dict()
    assert "backbone.1.0.block.0.1.num_batches_tracked" in keys
    assert keys["backbone.4.0.block.2.fc1.weight"].shape == (16, 256, 1, 1)
    assert keys["mapper.0.weight"].shape == (16, 1280, 1, 1)


def test_the_halves_of_stage_c_load_alone() -> None:
    previewer = counted(StageC_coder(c_hidden=16, has_encoder=False), 6)
    alone = {key.removeprefix("previewer."): value for key, value in previewer.items()}
    vae = VAE(sd=alone, dtype=torch.float32)
    assert vae.latent_channels == 16
    assert vae.decode(torch.rand(1, 16, 3, 4)).shape == (1, 12, 16, 3)
    with pytest.raises(ValueError, match="load the encoder of stage C"):
        vae.encode(torch.rand(1, 64, 64, 3))
    encoder = counted(StageC_coder(has_previewer=False), 7)
    for key, value in encoder.items():
        if key.endswith(("mean", "std")) and "running" not in key:
            encoder[key] = torch.full_like(value, 0.5)
    vae = VAE(sd={k.removeprefix("encoder."): v for k, v in encoder.items()}, dtype=torch.float32)
    assert vae.encode(torch.rand(1, 64, 96, 3)).shape == (1, 16, 2, 3)
    with pytest.raises(ValueError, match="only encodes"):
        vae.decode(torch.rand(1, 16, 2, 2))
