"""Nodes that patch the network or add model calls, on a small UNet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import conds
from comfy.ldm.unet.model import UNetModel
from comfy.sampling import noise, run, samplers
from comfy_extras import (
    nodes_attention_multiply,
    nodes_freelunch,
    nodes_gits,
    nodes_hypertile,
    nodes_lumina2,
    nodes_model_downscale,
    nodes_optimalsteps,
    nodes_pag,
    nodes_sag,
    nodes_slg,
    nodes_tomesd,
    nodes_video_model,
)
from tests.comfy.sampling.support import TestModel, patcher
from tests.support.tiny_checkpoint import UNET

LATENT = torch.zeros(1, 4, 16, 24)


class UNetBase(TestModel):
    """A base model around a small UNet with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = {**UNET, "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1]}
        self.diffusion_model = UNetModel(**config).eval()
        for parameter in self.diffusion_model.parameters():
            torch.nn.init.normal_(parameter, std=0.08)
        self.model_config = SimpleNamespace(unet_config={"model_channels": 16})

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return {"c_crossattn": conds.CONDCrossAttn(kwargs["cross_attn"])}

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, transformer_options: Any = None, **kw: Any
    ) -> Tensor:
        self.note_call(x, t, c_crossattn, transformer_options)
        sampling = self.model_sampling
        out = self.diffusion_model(
            sampling.calculate_input(t, x),
            sampling.timestep(t).float(),
            context=c_crossattn,
            transformer_options=transformer_options,
        )
        return sampling.calculate_denoised(t, out, x)


@pytest.fixture(scope="module")
def base() -> UNetBase:
    return UNetBase()


@pytest.fixture
def model(base: UNetBase) -> Any:
    base.calls.clear()
    return patcher(base)


def text(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, 7, 32, generator=generator), {}]]


@torch.inference_mode()
def sample(model: Any, cfg: float = 3.0, latent: Tensor = LATENT) -> Tensor:
    return run.sample_custom(
        model, noise.prepare_noise(latent, 3), cfg, samplers.ksampler("euler"),
        torch.tensor([8.0, 1.0, 0.0]), text(1), text(2), latent, disable_pbar=True, seed=3,
    )  # fmt: skip


def patched(node: Any, model: Any, *values: Any) -> Any:
    return node.execute(model, *values)[0]


def test_pag_adds_one_call_a_step_with_the_positive(model: Any) -> None:
    plain = sample(model)
    calls = len(model.model.calls)
    guided = sample(patched(nodes_pag.PerturbedAttentionGuidance, model, 2.0))
    assert len(model.model.calls) - calls == 4
    assert model.model.calls[-1]["cond_or_uncond"] == [0]
    assert not torch.equal(plain, guided)
    off = sample(patched(nodes_pag.PerturbedAttentionGuidance, model, 0.0))
    assert torch.equal(plain, off)


def test_sag_blurs_where_the_negative_looks(model: Any) -> None:
    plain = sample(model)
    guided = sample(patched(nodes_sag.SelfAttentionGuidance, model, 0.5, 2.0))
    assert not torch.equal(plain, guided)
    assert torch.isfinite(guided).all()
    torch.testing.assert_close(
        sample(patched(nodes_sag.SelfAttentionGuidance, model, 0.0, 2.0)), plain,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_sag_evaluates_the_negative_even_at_scale_one(model: Any) -> None:
    sample(patched(nodes_sag.SelfAttentionGuidance, model, 0.5, 2.0), cfg=1.0)
    assert model.model.calls[0]["cond_or_uncond"] == [1, 0]


def test_a_blur_keeps_constants_and_the_mean() -> None:
    flat = torch.full((1, 3, 9, 9), 2.0)
    torch.testing.assert_close(nodes_sag.gaussian_blur_2d(flat, 9, 2.0), flat)
    point = torch.zeros(1, 1, 21, 21)
    point[0, 0, 10, 10] = 1.0
    blurred = nodes_sag.gaussian_blur_2d(point, 9, 2.0)
    assert float(blurred.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(blurred[0, 0, 10, 10]) < 0.1


@pytest.mark.parametrize(("tokens", "height", "width"), [(24, 16, 24), (96, 8, 12), (35, 5, 7)])
def test_a_token_grid_has_the_tokens(tokens: int, height: int, width: int) -> None:
    rows, columns = nodes_sag.grid_of(tokens, height, width)
    assert rows * columns == tokens
    assert (rows <= columns) == (height <= width)


@pytest.mark.parametrize("node", [nodes_freelunch.FreeU, nodes_freelunch.FreeU_V2])
def test_freeu_with_ones_changes_nothing_and_otherwise_something(model: Any, node: Any) -> None:
    # This UNet's decoder has the widths 32 and 16: neither is 2 or 4 times its base width of 16,
    # unless the base is said to be 8.
    model.model.model_config.unet_config["model_channels"] = 8
    try:
        plain = sample(model)
        neutral = sample(patched(node, model, 1.0, 1.0, 1.0, 1.0))
        torch.testing.assert_close(neutral, plain, rtol=1e-4, atol=1e-4)
        changed = sample(patched(node, model, 1.3, 1.4, 0.9, 0.2))
        assert not torch.allclose(changed, plain, atol=1e-2)
    finally:
        model.model.model_config.unet_config["model_channels"] = 16


def test_scaling_low_frequencies_scales_the_mean_only() -> None:
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    made = nodes_freelunch.scale_low_frequencies(x + 3.0, 1, 0.5)
    assert float(made.mean()) == pytest.approx(0.5 * float((x + 3.0).mean()), rel=1e-4)


def test_hypertile_divides_and_joins_exactly() -> None:
    tiling = nodes_hypertile.Tiling(tile_size=32, swap_size=2, max_depth=0, scale_depth=False)
    x = torch.arange(16 * 24, dtype=torch.float).reshape(1, -1, 1)
    q, _, _ = tiling.divide(x, x, x, {"original_shape": [1, 4, 16, 24]})
    assert q.shape[0] > 1
    assert torch.equal(tiling.join(q, {}), x)
    other = torch.zeros(1, 100, 1)
    assert tiling.divide(other, other, other, {"original_shape": [1, 4, 16, 24]})[0] is other


def test_hypertile_runs(model: Any) -> None:
    plain = sample(model)
    tiled = sample(patched(nodes_hypertile.HyperTile, model, 32, 2, 0, False))
    assert tiled.shape == plain.shape
    assert not torch.equal(tiled, plain)


def test_merged_tokens_come_back_in_place() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6 * 8, 5)
    x[:, 1::2] = x[:, ::2]  # neighbours are equal: merging them loses nothing
    plan = nodes_tomesd.plan_merge(x, 6, 8, 0.4)
    assert plan is not None
    merged = plan.apply(x)
    assert merged.shape[1] == 48 - int(48 * 0.4)
    back = plan.undo(merged)
    kept = plan.sources.gather(1, plan.kept)
    for item in range(2):
        assert torch.equal(back[item, kept[item]], x[item, kept[item]])
    assert torch.isfinite(back).all()


def test_merged_queries_see_every_key() -> None:
    x = torch.randn(1, 6 * 8, 5, generator=torch.Generator().manual_seed(0))
    merging = nodes_tomesd.Merging(0.4)
    queries, keys, values = merging.merge(x, x, x, {"original_shape": (1, 4, 6, 8)})
    assert queries.shape[1] == 48 - int(48 * 0.4)
    assert keys is x
    assert values is x
    assert merging.spread(queries, {}).shape == x.shape


def test_no_tokens_are_merged_at_ratio_zero(model: Any) -> None:
    plain = sample(model)
    assert torch.equal(sample(patched(nodes_tomesd.TomePatchModel, model, 0.0)), plain)
    merged = sample(patched(nodes_tomesd.TomePatchModel, model, 0.5))
    assert not torch.equal(merged, plain)


@pytest.mark.parametrize(
    ("side", "factor", "expected"), [(9, 0.144, 62), (15, 0.24, 63), (8, 3, 3)]
)
def test_shrinking_rounds_the_product_with_the_reciprocal(
    side: int, factor: float, expected: int
) -> None:
    made = nodes_model_downscale.shrunk(torch.ones(1, 1, side, side), factor, "area")
    assert made.shape[-2:] == (expected, expected)


@pytest.mark.parametrize("after_skip", [True, False])
def test_deep_shrink_works_within_its_span(model: Any, after_skip: bool) -> None:
    plain = sample(model)
    values = (1, 2.0, 0.0, 1.0, after_skip, "bicubic", "bicubic")
    shrunk = sample(patched(nodes_model_downscale.PatchModelAddDownscale, model, *values))
    assert shrunk.shape == plain.shape
    assert not torch.equal(shrunk, plain)
    never = (1, 2.0, 0.99, 1.0, after_skip, "bicubic", "bicubic")
    outside = sample(patched(nodes_model_downscale.PatchModelAddDownscale, model, *never))
    assert torch.equal(outside, plain)


def test_attention_weights_are_multiplied(model: Any) -> None:
    view = patched(nodes_attention_multiply.UNetCrossAttentionMultiply, model, 1.0, 1.0, 0.0, 1.0)
    touched = {key for key in view.patches if key.endswith("attn2.to_v.weight")}
    assert touched
    assert not any("attn1" in key for key in view.patches)
    plain = sample(model)
    # Without values the texts cannot matter, so guidance changes nothing.
    torch.testing.assert_close(sample(view, cfg=5.0), sample(view, cfg=1.0), rtol=1e-3, atol=1e-3)
    assert torch.equal(sample(model), plain)


class SkippableModel(TestModel):
    """The estimate counts the blocks that are not skipped."""

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, transformer_options: Any = None, **kw: Any
    ) -> Tensor:
        self.note_call(x, t, c_crossattn, transformer_options)
        table = transformer_options.get("patches_replace", {}).get("dit", {})
        blocks = [("double_block", 7), ("single_block", 7), ("double_block", 8)]
        running = [b for b in blocks if b not in table]
        mean = c_crossattn.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        return torch.zeros_like(x) + len(running) + mean


def skippable_run(view: Any, cfg: float = 2.0) -> float:
    ones, zeros = [[torch.ones(1, 1, 4), {}]], [[torch.zeros(1, 1, 4), {}]]
    latent = torch.zeros(1, 4, 4, 4)
    made = run.sample_custom(
        view, latent, cfg, samplers.ksampler("euler"), torch.tensor([5.0, 0.0]), ones, zeros,
        latent, disable_pbar=True, seed=0,
    )  # fmt: skip
    return float(made.mean())


def test_skip_layer_guidance_adds_the_difference_within_its_span() -> None:
    model = patcher(SkippableModel())
    node = nodes_slg.SkipLayerGuidanceDiT
    plain = skippable_run(model)
    assert plain == 5.0  # 3 + 0 + 2 * 1
    view = node.execute(model, 1.5, 0.0, 1.0, "7, 8", "7")[0]
    assert skippable_run(view) == plain + 1.5 * 3
    outside = node.execute(model, 1.5, 0.9, 1.0, "7, 8", "7")[0]
    assert skippable_run(outside) == plain
    assert node.execute(model, 1.5, 0.0, 1.0, "", "")[0] is model


def test_simple_skip_layer_guidance_skips_for_the_negative_only() -> None:
    model = patcher(SkippableModel())
    view = nodes_slg.SkipLayerGuidanceDiTSimple.execute(model, 0.0, 1.0, "7", "")[0]
    assert skippable_run(view) == 2.0 + 2.0 * (4.0 - 2.0)
    assert [call["cond_or_uncond"] for call in model.model.calls] == [[0], [1]]
    assert skippable_run(view, cfg=1.0) == 4.0


def test_layers_are_read_from_any_text() -> None:
    assert nodes_slg.layers_of("7, 8;9 and 10") == [7, 8, 9, 10]


def guidance_facts() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    cond, uncond, x = (torch.randn(3, 4, 6, 6, generator=generator) for _ in range(3))
    return {
        "cond_denoised": cond, "uncond_denoised": uncond, "input": x, "cond_scale": 4.0,
        "timestep": torch.full((3,), 2.0),
    }  # fmt: skip


def test_renorm_bounds_each_item_alone() -> None:
    facts = guidance_facts()
    facts["cond_denoised"][0] *= 100
    made = facts["input"] - nodes_lumina2.renormed(facts, 4, 100.0, 1.0)
    limit = facts["cond_denoised"].flatten(1).norm(dim=1)
    assert (made.flatten(1).norm(dim=1) <= limit * 1.001).all()
    early = facts["input"] - nodes_lumina2.renormed(facts, 4, 1.0, 1.0)
    torch.testing.assert_close(early, facts["cond_denoised"])
    free = facts["input"] - nodes_lumina2.renormed(facts, 4, 100.0, 0.0)
    cond, uncond = facts["cond_denoised"], facts["uncond_denoised"]
    torch.testing.assert_close(free, uncond + 4.0 * (cond - uncond), rtol=1e-4, atol=1e-4)


def test_frames_get_their_own_scales() -> None:
    args = {"cond": torch.ones(5, 1, 1, 1), "uncond": torch.zeros(5, 1, 1, 1), "cond_scale": 4.0}
    linear = nodes_video_model.guided_by_frame(args, nodes_video_model.linear_scales(args, 1.0))
    assert linear.flatten().tolist() == pytest.approx([1.0, 1.75, 2.5, 3.25, 4.0])
    scales = nodes_video_model.triangle_scales(args, 1.0)
    assert scales.tolist() == pytest.approx([1.0, 2.5, 4.0, 2.5, 1.0])


def test_an_area_of_a_video_has_three_axes() -> None:
    node = nodes_video_model.ConditioningSetAreaPercentageVideo()
    (made,) = node.append(text(1), 0.5, 0.25, 1.0, 0.1, 0.2, 0.3, 0.8)
    assert made[0][1]["area"] == ("percentage", 1.0, 0.25, 0.5, 0.3, 0.2, 0.1)


def test_scheduler_nodes_give_their_tables() -> None:
    assert len(nodes_gits.GITSScheduler.execute(1.2, 10, 1.0)[0]) == 11
    assert len(nodes_optimalsteps.OptimalStepsScheduler.execute("FLUX", 20, 0.5)[0]) == 11
