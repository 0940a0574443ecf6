"""LoRA files under names of the diffusers library that no layout lists, for each family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy.weights.arithmetic import calculate_weight
from comfy.weights.diffusers_transformers import flux_to_diffusers, mmdit_to_diffusers
from comfy.weights.lora import convert_lora, load_lora, model_lora_keys_unet

SIZE, WIDE = 6, 10  # rows of the attention inputs and of what is packed below them


def network(**rows: int) -> dict[str, torch.Tensor]:
    """Weights of the given numbers of rows; `__` stands for a dot."""
    return {
        f"diffusion_model.{name.replace('__', '.')}.weight": torch.zeros(count, 4)
        for name, count in rows.items()
    }


HUNYUAN = network(
    vector_in__in_layer=SIZE, time_in__in_layer=SIZE, guidance_in__out_layer=SIZE,
    img_in__proj=SIZE, txt_in__input_embedder=SIZE, txt_in__t_embedder__in_layer=SIZE,
    txt_in__c_embedder__out_layer=SIZE,
    txt_in__individual_token_refiner__blocks__0__self_attn__qkv=3 * SIZE,
    txt_in__individual_token_refiner__blocks__0__self_attn__proj=SIZE,
    txt_in__individual_token_refiner__blocks__0__mlp__0=SIZE,
    txt_in__individual_token_refiner__blocks__0__adaLN_modulation__1=SIZE,
    txt_in__individual_token_refiner__blocks__0__norm1=SIZE,
    double_blocks__0__img_attn__qkv=3 * SIZE, double_blocks__0__txt_attn__qkv=3 * SIZE,
    double_blocks__0__img_attn__proj=SIZE, double_blocks__0__txt_mlp__2=SIZE,
    double_blocks__0__img_mod__lin=SIZE, single_blocks__0__linear1=3 * SIZE + WIDE,
    single_blocks__0__linear2=SIZE, single_blocks__0__modulation__lin=SIZE,
    final_layer__linear=SIZE, final_layer__adaLN_modulation__1=2 * SIZE,
)  # fmt: skip
FLUX2 = network(
    img_in=SIZE, time_in__in_layer=SIZE, double_blocks__0__img_attn__qkv=3 * SIZE,
    double_blocks__0__img_mlp__0=SIZE, double_stream_modulation_img__lin=SIZE,
    single_stream_modulation__lin=SIZE, single_blocks__0__linear1=3 * SIZE + WIDE,
    single_blocks__0__linear2=SIZE,
)  # fmt: skip
LTX = network(patchify_proj=SIZE, adaln_single__linear=SIZE, audio_prompt_adaln_single__linear=SIZE)
LUMINA = network(
    cap_embedder__1=SIZE, layers__0__attention__qkv=10, layers__0__attention__out=SIZE,
    layers__0__feed_forward__w2=SIZE, layers__0__adaLN_modulation__1=SIZE, t_embedder__mlp__2=SIZE,
    final_layer__linear=SIZE,
)  # fmt: skip
CHROMA = network(
    double_blocks__0__img_attn__qkv=3 * SIZE, distilled_guidance_layer__layers__0__in_layer=SIZE
)

COSMOS = network(
    blocks__0__self_attn__q_proj=SIZE, blocks__0__cross_attn__output_proj=SIZE,
    blocks__0__mlp__layer2=SIZE, blocks__0__adaln_modulation_cross_attn__2=SIZE,
    t_embedder__1__linear_1=SIZE, x_embedder__proj__1=SIZE, final_layer__adaln_modulation__1=SIZE,
    final_layer__linear=SIZE,
)  # fmt: skip

CASES: list[tuple[dict[str, torch.Tensor], str, str, int, int]] = [
    # weights of the family, name in the library, our weight, first row, rows
    (HUNYUAN, "transformer_blocks.0.attn.to_k", "double_blocks.0.img_attn.qkv", 6, 6),
    (HUNYUAN, "transformer_blocks.0.attn.add_v_proj", "double_blocks.0.txt_attn.qkv", 12, 6),
    (HUNYUAN, "transformer_blocks.0.attn.to_out.0", "double_blocks.0.img_attn.proj", 0, 6),
    (HUNYUAN, "transformer_blocks.0.ff_context.net.2", "double_blocks.0.txt_mlp.2", 0, 6),
    (HUNYUAN, "transformer_blocks.0.norm1.linear", "double_blocks.0.img_mod.lin", 0, 6),
    (HUNYUAN, "single_transformer_blocks.0.attn.to_q", "single_blocks.0.linear1", 0, 6),
    (HUNYUAN, "single_transformer_blocks.0.attn.to_v", "single_blocks.0.linear1", 12, 6),
    (HUNYUAN, "single_transformer_blocks.0.proj_mlp", "single_blocks.0.linear1", 18, 10),
    (HUNYUAN, "single_transformer_blocks.0.proj_out", "single_blocks.0.linear2", 0, 6),
    (HUNYUAN, "single_transformer_blocks.0.norm.linear", "single_blocks.0.modulation.lin", 0, 6),
    (HUNYUAN, "x_embedder.proj", "img_in.proj", 0, 6),
    (HUNYUAN, "context_embedder.proj_in", "txt_in.input_embedder", 0, 6),
    (HUNYUAN, "context_embedder.time_text_embed.text_embedder.linear_2",
     "txt_in.c_embedder.out_layer", 0, 6),
    (HUNYUAN, "context_embedder.token_refiner.refiner_blocks.0.attn.to_v",
     "txt_in.individual_token_refiner.blocks.0.self_attn.qkv", 12, 6),
    (HUNYUAN, "context_embedder.token_refiner.refiner_blocks.0.attn.to_out.0",
     "txt_in.individual_token_refiner.blocks.0.self_attn.proj", 0, 6),
    (HUNYUAN, "context_embedder.token_refiner.refiner_blocks.0.norm_out.linear",
     "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1", 0, 6),
    (HUNYUAN, "time_text_embed.guidance_embedder.linear_2", "guidance_in.out_layer", 0, 6),
    (HUNYUAN, "time_in.mlp.0", "time_in.in_layer", 0, 6),
    (HUNYUAN, "proj_out", "final_layer.linear", 0, 6),
    (FLUX2, "transformer_blocks.0.attn.to_q", "double_blocks.0.img_attn.qkv", 0, 6),
    (FLUX2, "transformer_blocks.0.ff.linear_in", "double_blocks.0.img_mlp.0", 0, 6),
    (FLUX2, "single_transformer_blocks.0.attn.to_qkv_mlp_proj", "single_blocks.0.linear1",
     0, 28),
    (FLUX2, "single_transformer_blocks.0.attn.to_out", "single_blocks.0.linear2", 0, 6),
    (FLUX2, "double_stream_modulation_img.linear", "double_stream_modulation_img.lin", 0, 6),
    (FLUX2, "single_stream_modulation.linear", "single_stream_modulation.lin", 0, 6),
    (FLUX2, "time_guidance_embed.timestep_embedder.linear_1", "time_in.in_layer", 0, 6),
    (LTX, "proj_in", "patchify_proj", 0, 6),
    (LTX, "time_embed.linear", "adaln_single.linear", 0, 6),
    (LTX, "audio_prompt_adaln.linear", "audio_prompt_adaln_single.linear", 0, 6),
    # six rows of queries, and two of keys and of values each
    (LUMINA, "layers.0.attn.to_q", "layers.0.attention.qkv", 0, 6),
    (LUMINA, "layers.0.attn.to_k", "layers.0.attention.qkv", 6, 2),
    (LUMINA, "layers.0.attn.to_v", "layers.0.attention.qkv", 8, 2),
    (LUMINA, "layers.0.feed_forward.linear_2", "layers.0.feed_forward.w2", 0, 6),
    (LUMINA, "layers.0.norm1.linear", "layers.0.adaLN_modulation.1", 0, 6),
    (LUMINA, "time_caption_embed.timestep_embedder.linear_2", "t_embedder.mlp.2", 0, 6),
    (LUMINA, "norm_out.linear_2", "final_layer.linear", 0, 6),
    (CHROMA, "distilled_guidance_layer.layers.0.linear_1",
     "distilled_guidance_layer.layers.0.in_layer", 0, 6),
    (COSMOS, "transformer_blocks.0.attn1.to_q", "blocks.0.self_attn.q_proj", 0, 6),
    (COSMOS, "transformer_blocks.0.attn2.to_out.0", "blocks.0.cross_attn.output_proj", 0, 6),
    (COSMOS, "transformer_blocks.0.ff.net.2", "blocks.0.mlp.layer2", 0, 6),
    (COSMOS, "transformer_blocks.0.norm2.linear_2", "blocks.0.adaln_modulation_cross_attn.2", 0, 6),
    (COSMOS, "time_embed.t_embedder.linear_1", "t_embedder.1.linear_1", 0, 6),
    (COSMOS, "patch_embed.proj", "x_embedder.proj.1", 0, 6),
    (COSMOS, "norm_out.linear_1", "final_layer.adaln_modulation.1", 0, 6),
    (COSMOS, "proj_out", "final_layer.linear", 0, 6),
]  # fmt: skip


def patches_of(file: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[Any, Any]:
    model = SimpleNamespace(
        state_dict=lambda **_: weights, model_config=SimpleNamespace(unet_config={})
    )
    return load_lora(convert_lora(file), model_lora_keys_unet(model))


def changed(patches: dict[Any, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the patches add to weights of zeros; weights that stay zero are left out."""
    out = {}
    for target, patch in patches.items():
        key, offset, function = ((target,) if isinstance(target, str) else (*target,)) + (None,) * (
            2 if isinstance(target, str) else 3 - len(target)
        )
        old = out.get(key, weights[key].clone())
        out[key] = calculate_weight([(1.0, patch, 1.0, offset, function)], old, key)
    return {key: value for key, value in out.items() if value.any()}


@pytest.mark.parametrize(("weights", "name", "ours", "start", "rows"), CASES)
@pytest.mark.parametrize("style", ["transformer.{}", "lycoris_{}", "diffusion_model.{}"])
@pytest.mark.parametrize("kind", ["lora", "lokr", "loha", "diff"])
def test_a_name_of_the_library_changes_the_rows_it_stands_for(
    weights: dict[str, torch.Tensor],
    name: str,
    ours: str,
    start: int,
    rows: int,
    style: str,
    kind: str,
) -> None:
    name = style.format(name.replace(".", "_") if style.startswith("lycoris") else name)
    generator = torch.Generator().manual_seed(rows + start)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "lora":
        up, down = rand(rows, 2), rand(2, 4)
        file, delta = {f"{name}.lora_B.weight": up, f"{name}.lora_A.weight": down}, up @ down
    elif kind == "lokr":
        w1, w2 = rand(2, 2), rand(rows // 2, 2)
        file, delta = {f"{name}.lokr_w1": w1, f"{name}.lokr_w2": w2}, torch.kron(w1, w2)
    elif kind == "loha":
        parts = rand(rows, 2), rand(2, 4), rand(rows, 2), rand(2, 4)
        file = {f"{name}.hada_{n}": p for n, p in zip(("w1_a", "w1_b", "w2_a", "w2_b"), parts)}
        delta = (parts[0] @ parts[1]) * (parts[2] @ parts[3])
    else:
        delta = rand(rows, 4)
        file = {f"{name}.diff": delta}
    expected = torch.zeros_like(weights[f"diffusion_model.{ours}.weight"])
    expected[start : start + rows] = delta
    made = changed(patches_of(file, weights), weights)
    assert list(made) == [f"diffusion_model.{ours}.weight"]
    assert torch.allclose(made[f"diffusion_model.{ours}.weight"], expected, atol=1e-5)


def test_the_last_modulation_is_stored_scale_first_in_the_library() -> None:
    delta = torch.randn(2 * SIZE, 4)
    made = changed(patches_of({"transformer.norm_out.linear.diff": delta}, HUNYUAN), HUNYUAN)
    expected = torch.cat([delta[SIZE:], delta[:SIZE]])
    assert torch.equal(made["diffusion_model.final_layer.adaLN_modulation.1.weight"], expected)


@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_the_wide_part_of_a_packed_layer_is_as_wide_as_the_network_says(ratio: float) -> None:
    names = flux_to_diffusers({"hidden_size": 8, "depth_single_blocks": 1, "mlp_ratio": ratio})
    place = names["single_transformer_blocks.0.proj_mlp.weight"]
    assert place == ("single_blocks.0.linear1.weight", (0, 24, int(8 * ratio)))


def test_only_the_last_joint_block_stores_its_scale_first() -> None:
    names = mmdit_to_diffusers({"depth": 1, "num_blocks": 3})
    ends = [names[f"transformer_blocks.{n}.norm1_context.linear.weight"] for n in range(3)]
    assert [isinstance(end, tuple) for end in ends] == [False, False, True]


def test_a_change_that_does_not_tell_its_rows_is_not_put_on_the_whole_of_a_packed_weight(
    caplog: Any,
) -> None:
    name = "transformer.transformer_blocks.0.attn.to_k"
    file = {f"{name}.ia3_l": torch.full((1, 4), 2.0), "transformer.proj_out.diff": torch.ones(6, 4)}
    assert list(patches_of(file, HUNYUAN)) == ["diffusion_model.final_layer.linear.weight"]
    assert f"{name}.ia3_l" in caplog.text


def test_a_slice_that_the_weight_does_not_have_leaves_it_alone(caplog: Any) -> None:
    delta = torch.ones(40, 4)
    name = "transformer.single_transformer_blocks.0.proj_mlp"
    assert changed(patches_of({f"{name}.diff": delta}, HUNYUAN), HUNYUAN) == {}
    assert "40 rows" in caplog.text
    assert "made for another model" in caplog.text


def test_biases_of_factors_find_their_part_of_a_packed_layer() -> None:
    weights = HUNYUAN | {"diffusion_model.double_blocks.0.img_attn.qkv.bias": torch.zeros(3 * SIZE)}
    name = "transformer.transformer_blocks.0.attn.to_v"
    file = {f"{name}.lora_B.weight": torch.ones(SIZE, 2), f"{name}.lora_A.weight": torch.ones(2, 4),
            f"{name}.lora_B.bias": torch.arange(1.0, SIZE + 1)}  # fmt: skip
    made = changed(patches_of(file, weights), weights)
    bias = made["diffusion_model.double_blocks.0.img_attn.qkv.bias"]
    assert bias.tolist() == [0.0] * 12 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_attention_processors_of_flux_are_read_whatever_blocks_they_change() -> None:
    weights = network(
        double_blocks__0__img_attn__qkv=3 * SIZE, double_blocks__0__txt_attn__proj=SIZE,
        single_blocks__0__linear2=SIZE,
    )  # fmt: skip
    file = {}
    for name, rows in (("double_blocks.0.processor.qkv_lora1", 3 * SIZE),
                       ("double_blocks.0.processor.proj_lora2", SIZE),
                       ("single_blocks.0.processor.proj_lora", SIZE)):  # fmt: skip
        file[f"{name}.up.weight"], file[f"{name}.down.weight"] = (
            torch.ones(rows, 1),
            torch.ones(1, 4),
        )
    assert len(changed(patches_of(file, weights), weights)) == 3


def test_a_change_of_wans_modulation_is_read() -> None:
    weights = network(blocks__0__self_attn__q=SIZE)
    weights["diffusion_model.blocks.0.modulation"] = torch.zeros(1, 6, 4)
    made = changed(
        patches_of({"diffusion_model.blocks.0.diff_m": torch.ones(1, 6, 4)}, weights), weights
    )
    assert made["diffusion_model.blocks.0.modulation"].all()
