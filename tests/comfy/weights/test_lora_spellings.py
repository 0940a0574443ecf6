"""Files of trainers in the wild: other wrappings of names, PEFT's DoRA, (IA)^3, biases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy.weights.arithmetic import calculate_weight
from comfy.weights.lora import load_lora, model_lora_keys_unet

WAN = ("blocks.0.self_attn.q", "blocks.0.self_attn.o", "blocks.0.cross_attn.k_img",
       "blocks.0.ffn.0", "blocks.0.ffn.2", "text_embedding.0", "time_projection.1", "head.head",
       "img_emb.proj.1")  # fmt: skip
FLUX = ("double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.norm.key_norm",
        "single_blocks.0.linear1", "single_blocks.0.linear2", "txt_in", "img_in")  # fmt: skip


def keys_of(names: tuple[str, ...], **config: Any) -> dict[str, Any]:
    weights = {f"diffusion_model.{name}.weight": torch.empty(0) for name in names}
    if "txt_in" in names:
        weights["diffusion_model.double_blocks.0.img_attn.norm.key_norm.scale"] = torch.empty(0)
    return model_lora_keys_unet(
        SimpleNamespace(
            state_dict=lambda **_: weights, model_config=SimpleNamespace(unet_config=config)
        )
    )


def pair(name: str, up: str = "lora_B.weight", down: str = "lora_A.weight") -> dict[str, Any]:
    return {f"{name}.{up}": torch.ones(4, 2), f"{name}.{down}": torch.ones(2, 4)}


@pytest.mark.parametrize(
    "name",
    [
        "diffusion_model.blocks.0.self_attn.q", "blocks.0.self_attn.q",
        "transformer.blocks.0.self_attn.q", "base_model.model.blocks.0.self_attn.q",
        "base_model.model.transformer.blocks.0.self_attn.q",
        "model.diffusion_model.blocks.0.self_attn.q", "pipe.dit.blocks.0.self_attn.q",
        "module.blocks.0.self_attn.q", "lora_unet_blocks_0_self_attn_q",
        "lora_unet__blocks_0_self_attn_q", "lycoris_blocks_0_self_attn_q",
        "lora_transformer_blocks_0_self_attn_q", "transformer.blocks.0.attn1.to_q",
        "blocks.0.attn1.to_q", "lycoris_blocks_0_attn1_to_q",
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffixes", [
    ("lora_B.weight", "lora_A.weight"), ("lora_up.weight", "lora_down.weight"),
    ("lora_B.default.weight", "lora_A.default.weight"),
])  # fmt: skip
def test_a_name_is_read_in_every_wrapping(
    name: str, suffixes: tuple[str, str], caplog: Any
) -> None:
    patches = load_lora(pair(name, *suffixes), keys_of(WAN))
    assert list(patches) == ["diffusion_model.blocks.0.self_attn.q.weight"]
    assert "fit no weight" not in caplog.text


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.0.attn1.to_out.0", "blocks.0.self_attn.o"),
        ("blocks.0.attn2.add_k_proj", "blocks.0.cross_attn.k_img"),
        ("blocks.0.ffn.net.0.proj", "blocks.0.ffn.0"),
        ("blocks.0.ffn.net.2", "blocks.0.ffn.2"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
        ("proj_out", "head.head"),
    ],
)
def test_wan_is_read_under_the_librarys_names(theirs: str, ours: str) -> None:
    patches = load_lora(pair(f"transformer.{theirs}"), keys_of(WAN))
    assert list(patches) == [f"diffusion_model.{ours}.weight"]


def test_slices_of_a_weight_keep_their_place_in_any_wrapping() -> None:
    known = keys_of(FLUX, hidden_size=4, depth=1, depth_single_blocks=1, mlp_ratio=4.0)
    asked = pair("transformer.single_transformer_blocks.0.attn.to_k")
    other = pair("lora_unet_single_transformer_blocks_0_attn_to_k")
    assert load_lora(other, known).keys() == load_lora(asked, known).keys()
    assert len(load_lora(other, known)) == 1


def test_the_layouts_own_names_win_over_other_wrappings() -> None:
    file = pair("diffusion_model.img_in") | {
        k: v * 2 for k, v in pair("transformer.img_in").items()
    }
    patches = load_lora(file, keys_of(FLUX))
    assert float(patches["diffusion_model.img_in.weight"].weights[0].max()) == 1.0


def test_a_name_of_another_part_is_not_taken_for_the_networks(caplog: Any) -> None:
    file = pair("text_encoder.blocks.0.self_attn.q") | pair("lora_te1_blocks_0_self_attn_q")
    assert load_lora(file, keys_of(WAN)) == {}
    assert "4 of 4" in caplog.text
    assert "text_encoder.blocks.0" in caplog.text


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 3), (6, 5, 1, 1), (6, 5, 3)])
@pytest.mark.parametrize("suffix", ["", ".weight", ".default", ".default.weight"])
@pytest.mark.parametrize("alpha", [None, 3.0])
def test_dora_of_peft_scales_the_rows_of_the_changed_weight(
    shape: tuple[int, ...], suffix: str, alpha: float | None
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    weight, down = (torch.randn(s, generator=generator) for s in (shape, (2, *shape[1:])))
    up = torch.randn(6, 2, *(1,) * (len(shape) - 2), generator=generator)
    magnitude = torch.rand(6, generator=generator) + 0.5
    stored = magnitude if len(shape) == 2 else magnitude.reshape(1, 6, *(1,) * (len(shape) - 2))
    file = {
        "a.lora_B.weight": up,
        "a.lora_A.weight": down,
        f"a.lora_magnitude_vector{suffix}": stored,
    }
    if alpha is not None:
        file["a.alpha"] = torch.tensor(alpha)
    patches = load_lora(file, {"a": "a.weight"})

    changed = weight.double().clone()
    for o in range(6):
        for r in range(2):
            changed[o] += (1.0 if alpha is None else alpha / 2) * up[o, r].item() * down[r].double()
    expected = torch.stack(
        [m * row / row.pow(2).sum().sqrt() for m, row in zip(magnitude, changed)]
    )
    for strength in (1.0, 0.4, -0.5):
        patch = (strength, patches["a.weight"], 1.0, None, None)
        made = calculate_weight([patch], weight.clone(), "a.weight")
        wanted = weight + (expected - weight) * strength
        assert torch.allclose(made.double(), wanted.double(), rtol=1e-5, atol=1e-6)


def test_dora_of_peft_fits_slices_and_reordered_rows() -> None:
    weight, up, down = torch.randn(8, 5), torch.randn(4, 2), torch.randn(2, 5)
    magnitude = torch.rand(4) + 0.5
    file = {"a.lora_B.weight": up, "a.lora_A.weight": down, "a.lora_magnitude_vector": magnitude}
    adapter = load_lora(file, {"a": "w"})["w"]

    def flipped(t: torch.Tensor) -> torch.Tensor:
        return t.flip(0)

    made = calculate_weight([(1.0, adapter, 1.0, (0, 4, 4), flipped)], weight.clone(), "w")
    rows = weight[4:] + (up @ down).flip(0)
    expected = magnitude.flip(0)[:, None] * rows / rows.norm(dim=1, keepdim=True)
    assert torch.equal(made[:4], weight[:4])
    assert torch.allclose(made[4:], expected, rtol=1e-5, atol=1e-6)


def test_dora_of_peft_with_wrong_magnitudes_leaves_the_weight(caplog: Any) -> None:
    weight = torch.randn(6, 5)
    file = {**pair("a"), "a.lora_magnitude_vector": torch.ones(7)}
    file["a.lora_B.weight"], file["a.lora_A.weight"] = torch.ones(6, 2), torch.ones(2, 5)
    adapter = load_lora(file, {"a": "w"})["w"]
    made = calculate_weight([(1.0, adapter, 1.0, None, None)], weight.clone(), "w")
    assert torch.equal(made, weight)
    assert "magnitudes (7,)" in caplog.text


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 3)])
def test_ia3_scales_rows_or_columns(on_input: bool, shape: tuple[int, ...]) -> None:
    weight, count = torch.randn(shape), shape[1] if on_input else shape[0]
    factors = torch.randn(count)
    file = {"a.weight": factors, "a.on_input": torch.tensor(on_input)}
    patches = load_lora(file, {"a": "w"})
    made = calculate_weight([(0.7, patches["w"], 1.0, None, None)], weight.clone(), "w")
    expected = weight.double().clone()
    for i, v in enumerate(factors.tolist()):
        index = (slice(None), i) if on_input else (i,)
        expected[index] *= 1 + 0.7 * v
    assert torch.allclose(made.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("up", "down"), [("lora_B", "lora_A"), ("lora_up", "lora_down")])
def test_the_bias_of_a_factor_changes_the_layers_bias(up: str, down: str, caplog: Any) -> None:
    file = {f"a.{up}.weight": torch.ones(4, 2), f"a.{down}.weight": torch.ones(2, 4),
            f"a.{up}.bias": torch.ones(4), "a.alpha": torch.tensor(1.0)}  # fmt: skip
    patches = load_lora(file, {"a": "a.weight"})
    assert torch.equal(patches["a.bias"][1][0], torch.full((4,), 0.5))
    assert "fit no weight" not in caplog.text
