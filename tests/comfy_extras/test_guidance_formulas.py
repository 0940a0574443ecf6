"""Guidance against formulas written from the papers with numpy, on random estimates; and the
places where those formulas divide by zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comfy.sampling import batching, conditioning, guidance
from comfy_extras import (
    nodes_apg,
    nodes_cfg,
    nodes_eps,
    nodes_freelunch,
    nodes_fresca,
    nodes_lumina2,
    nodes_mahiro,
    nodes_model_advanced,
    nodes_pag,
    nodes_perpneg,
    nodes_sag,
    nodes_slg,
    nodes_tcfg,
    nodes_video_model,
)
from tests.comfy.sampling.support import CPU, TestModel, assert_same_but_rounding, patcher

SIGMA, SCALE, SHAPE = 1.7, 5.0, (3, 4, 6, 10)
Array = np.ndarray


def draw(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


X, COND, UNCOND = draw(1) * 2, draw(2), draw(3)


def guided(view: Any, scale: float = SCALE, cond: Tensor = COND, uncond: Tensor = UNCOND) -> Tensor:
    """What the guider's arithmetic makes of two given estimates with a node's hooks."""
    options = {
        **view.model_options,
        "sampler_calc_cond_batch_function": lambda args: [cond, uncond],
        "disable_cfg1_optimization": True,
    }
    sigma = torch.full((SHAPE[0],), SIGMA)
    return guidance.sampling_function(TestModel(), X, sigma, [], [], scale, options)


def items(formula: Callable[..., Array], *tensors: Tensor) -> Tensor:
    """A formula for one item, applied to each of a batch in double precision."""
    rows = zip(*(tensor.double().numpy() for tensor in tensors))
    return torch.from_numpy(np.stack([formula(*row) for row in rows])).float()


def plain(cond: Array, uncond: Array) -> Array:
    return uncond + SCALE * (cond - uncond)


def rescaled(x: Array, cond: Array, uncond: Array) -> Array:
    """Lin et al. 2023, equations 14 to 16, on velocities of a unit-variance latent."""
    alpha, sigma = 1 / np.hypot(1, SIGMA), SIGMA / np.hypot(1, SIGMA)
    noised = alpha * x

    def velocity(clean: Array) -> Array:
        noise = (noised - alpha * clean) / sigma
        return alpha * noise - sigma * clean

    def clean(v: Array) -> Array:
        return alpha * noised - sigma * v

    v = plain(velocity(cond), velocity(uncond))
    factor = velocity(cond).std(ddof=1) / v.std(ddof=1)
    return clean(0.7 * factor * v + 0.3 * v)


def zero_star(x: Array, cond: Array, uncond: Array) -> Array:
    """Fan et al. 2025, equation 9: the negative velocity times its projection on the positive."""
    positive, negative = x - cond, x - uncond
    share = (positive * negative).sum() / (negative * negative).sum()
    # In clean estimates the scaled negative stands for the estimate times the share.
    return share * uncond + SCALE * (cond - share * uncond)


def projected(cond: Array, uncond: Array) -> Array:
    """Sadat et al. 2024, algorithm 1 without momentum: radius 2.5, eta 0.25."""
    step = cond - uncond
    step = step * min(1.0, 2.5 / np.linalg.norm(step))
    unit = cond / np.linalg.norm(cond)
    along = (step * unit).sum() * unit
    return cond + SCALE * (step - along + 0.25 * along)


def damped(x: Array, cond: Array, uncond: Array) -> Array:
    """Kwon et al. 2025, algorithm 1: the negative score on the first singular direction of both."""
    scores = np.stack([(x - cond).ravel(), (x - uncond).ravel()])
    _, _, directions = np.linalg.svd(scores, full_matrices=False)
    kept = (scores[1] @ directions[0]) * directions[0]
    return plain(cond, x - kept.reshape(x.shape))


def bounded(cond: Array, uncond: Array) -> Array:
    """The length of each pixel's channels is at most that of the positive estimate's."""
    made = plain(cond, uncond)
    lengths = np.linalg.norm(cond, axis=0), np.linalg.norm(made, axis=0)
    return made * np.minimum(lengths[0] / lengths[1], 1.0) * 0.8


def renormed(cond: Array, uncond: Array) -> Array:
    """Lumina-Image 2.0: the norm of an item is at most 0.9 times the positive estimate's."""
    made = plain(cond, uncond)
    limit = 0.9 * np.linalg.norm(cond)
    return made * min(1.0, limit / np.linalg.norm(made))


def frequencies(cond: Array, uncond: Array) -> Array:
    """Huang et al. 2025: frequencies -2..1 of both axes by 0.5, all others by 1.5."""
    step = np.fft.fft2(cond - uncond)
    rows, columns = (np.fft.fftfreq(size, 1 / size).round().astype(int) for size in SHAPE[2:])
    low = np.outer((rows >= -2) & (rows < 2), (columns >= -2) & (columns < 2))
    step = step * np.where(low, 0.5, 1.5)
    return uncond + SCALE * np.fft.ifft2(step).real


def test_guidance_scale() -> None:
    made = guided(patcher(TestModel()))
    assert_same_but_rounding(made, items(plain, COND, UNCOND))


FORMULAS: list[tuple[Callable[[Any], Any], Callable[..., Array], tuple[Tensor, ...]]] = [
    (lambda m: nodes_model_advanced.RescaleCFG().patch(m, 0.7), rescaled, (X, COND, UNCOND)),
    (nodes_cfg.CFGZeroStar.execute, zero_star, (X, COND, UNCOND)),
    (lambda m: nodes_apg.APG.execute(m, 0.25, 2.5, 0.0), projected, (COND, UNCOND)),
    (nodes_tcfg.TCFG.execute, damped, (X, COND, UNCOND)),
    (lambda m: nodes_cfg.CFGNorm.execute(m, 0.8), bounded, (COND, UNCOND)),
    (lambda m: nodes_fresca.FreSca.execute(m, 0.5, 1.5, 2), frequencies, (COND, UNCOND)),
    (
        lambda m: nodes_eps.EpsilonScaling.execute(m, 1.02),
        lambda x, cond, uncond: x - (x - plain(cond, uncond)) / 1.02,
        (X, COND, UNCOND),
    ),
]


@pytest.mark.parametrize(
    ("node", "formula", "inputs"), FORMULAS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_node_follows_its_paper(
    node: Callable[[Any], Any], formula: Callable[..., Array], inputs: tuple[Tensor, ...]
) -> None:
    made = guided(node(patcher(TestModel()))[0])
    share = 4e-6 if formula is damped else 1e-6  # singular vectors in single precision
    assert_same_but_rounding(made, items(formula, *inputs), share)


def test_renormed_guidance() -> None:
    facts = {
        "cond_denoised": COND, "uncond_denoised": UNCOND, "cond_scale": SCALE, "input": X,
        "timestep": torch.full((SHAPE[0],), SIGMA),
    }  # fmt: skip
    made = X - nodes_lumina2.renormed(facts, 4, 100.0, 0.9)
    assert_same_but_rounding(made, items(renormed, COND, UNCOND))


@pytest.mark.parametrize("says", [True, False])
def test_all_channels_are_renormed_where_a_network_does_not_say_how_many(says: bool) -> None:
    model = patcher(TestModel())
    model.model.diffusion_model = torch.nn.Module()
    if says:
        model.model.diffusion_model.in_channels = SHAPE[1]
    made = guided(nodes_lumina2.RenormCFG.execute(model, 100.0, 0.9)[0])
    assert_same_but_rounding(made, items(renormed, COND, UNCOND))


@pytest.mark.parametrize("node", [nodes_freelunch.FreeU, nodes_freelunch.FreeU_V2])
def test_free_lunch_without_a_unet_is_refused_in_words(node: Any) -> None:
    model = patcher(TestModel())
    model.model.model_config = type("Flux", (), {"unet_config": {}})()
    with pytest.raises(ValueError, match=r"UNet.*Flux does not have"):
        node.execute(model, 1.3, 1.4, 0.9, 0.2)


def test_momentum_of_projected_guidance() -> None:
    """The steps add up: g1, then g2 - 0.5 g1 (Sadat et al. 2024, equation 8)."""
    view = nodes_apg.APG.execute(patcher(TestModel()), 1.0, 0.0, -0.5)[0]
    first = guided(view)
    assert_same_but_rounding(first, COND + SCALE * (COND - UNCOND))
    other = draw(9)
    made = guided(view, cond=other)
    step = (other - UNCOND) - 0.5 * (COND - UNCOND)
    assert_same_but_rounding(made, other + SCALE * step)


def test_perpendicular_negative_guidance() -> None:
    """Armandpour et al. 2023, equation 8, over the whole batch as the published node has it."""
    nothing = draw(4)
    positive, negative = (COND - nothing).double(), (UNCOND - nothing).double()
    across = negative - (negative * positive).sum() / (positive**2).sum() * positive
    expected = nothing + SCALE * (positive - 0.6 * across)
    made = nodes_perpneg.perp_neg(X, COND, UNCOND, nothing, 0.6, SCALE)
    assert_same_but_rounding(made.double(), expected)


def test_mahiro() -> None:
    made = guided(nodes_mahiro.Mahiro.execute(patcher(TestModel()))[0]).double()
    cond, uncond = COND.double(), UNCOND.double()
    cfg, leap = uncond + SCALE * (cond - uncond), cond * SCALE

    def root(value: Tensor) -> Tensor:
        return value.abs().sqrt() * value.sign()

    likeness = torch.nn.functional.cosine_similarity(
        root(uncond * SCALE), root((leap + cfg) / 2), dim=1
    )
    share = 2 * (likeness.mean() + 1)
    assert_same_but_rounding(made, (share * cfg + (4 - share) * leap) / 4)


@pytest.mark.parametrize("frames", [1, 2, 3, 8])
def test_scales_of_frames(frames: int) -> None:
    args = {"cond": torch.ones(frames, 4, 2, 2), "cond_scale": 4.0}
    linear = nodes_video_model.linear_scales(args, 1.0).tolist()
    assert linear == pytest.approx(np.linspace(1.0, 4.0, frames).tolist())
    place = np.linspace(0, 1, frames)
    triangle = 1.0 + 3.0 * 2 * np.abs(place - np.floor(place + 0.5))
    made = nodes_video_model.triangle_scales(args, 1.0).tolist()
    assert made == pytest.approx(triangle.tolist(), abs=1e-6)


def freeu(x: Array, skip: Array, b: float, s: float, structured: bool) -> tuple[Array, Array]:
    """Si et al. 2023, equations 4 to 7: frequencies -1 and 0 of both axes count as low."""
    half = x.shape[0] // 2
    gain: Any = b
    if structured:
        mean = x.mean(0)
        gain = (b - 1) * (mean - mean.min()) / (mean.max() - mean.min()) + 1
    x = np.concatenate([x[:half] * gain, x[half:]])
    spectrum = np.fft.fft2(skip)
    rows, columns = (np.fft.fftfreq(size, 1 / size).round() for size in skip.shape[1:])
    low = np.outer((rows >= -1) & (rows < 1), (columns >= -1) & (columns < 1))
    return x, np.fft.ifft2(spectrum * np.where(low, s, 1.0)).real


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("size", [(6, 10), (5, 7)])
def test_free_lunch(structured: bool, size: tuple[int, int]) -> None:
    model = patcher(TestModel())
    model.model.model_config = type("C", (), {"unet_config": {"model_channels": 4}})
    node = nodes_freelunch.FreeU_V2 if structured else nodes_freelunch.FreeU
    view = node.execute(model, 1.3, 1.4, 0.9, 0.2)[0]
    (patch,) = view.model_options["transformer_options"]["patches"]["output_block_patch"]
    generator = torch.Generator().manual_seed(5)
    for channels, b, s in ((16, 1.3, 0.9), (8, 1.4, 0.2), (4, None, None)):
        h, skip = (torch.randn(2, channels, *size, generator=generator) for _ in range(2))
        made = patch(h.clone(), skip.clone(), {})
        expected = [h, skip]
        if b is not None:
            pairs = [
                freeu(a, c, b, s, structured)
                for a, c in zip(h.double().numpy(), skip.double().numpy())
            ]
            expected = [torch.from_numpy(np.stack(part)).float() for part in zip(*pairs)]
        for result, wanted in zip(made, expected):
            assert_same_but_rounding(result, wanted)


def test_rescaling_of_skipped_layers() -> None:
    """SD3.5's sampler: towards the spread of the positive estimate."""
    skipped = draw(6)
    model = patcher(TestModel())
    span = nodes_slg.Span(model, 0.0, 1.0)
    view = nodes_slg.guided_by_skipping(model, [7], [], 2.5, span, 0.4)
    (change,) = view.model_options["sampler_post_cfg_function"]
    facts = {
        "denoised": plain(COND, UNCOND), "cond_denoised": COND, "sigma": torch.full((3,), SIGMA),
        "cond": [], "input": X, "model": TestModel(), "model_options": {},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes_slg.batching, "calc_cond_batch", lambda *args: [skipped])
        made = change(facts)
    raw = plain(COND, UNCOND) + 2.5 * (COND - skipped)
    expected = raw * (0.4 * COND.std() / raw.std() + 0.6)
    assert_same_but_rounding(made, expected)


def test_self_attention_guidance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hong et al. 2023, equations 10 and 16: blur the estimate where it is looked at, predict from
    it with the same noise, and move away from what that loses."""
    from scipy.ndimage import gaussian_filter

    view = nodes_sag.SelfAttentionGuidance.execute(patcher(TestModel()), 0.7, 2.0)[0]
    recorder = view.model_options["transformer_options"]["patches_replace"]["attn1"][
        ("middle", 0, 0)
    ]
    rows, columns, heads = 3, 5, 2
    generator = torch.Generator().manual_seed(8)
    scores = torch.randn(SHAPE[0] * heads, 15, 15, generator=generator).softmax(-1)
    recorder.scores = scores
    estimate, seen = draw(7), []

    def calculate(model: Any, conds: Any, x: Tensor, sigma: Tensor, options: Any) -> list[Tensor]:
        seen.append(x)
        return [estimate]

    monkeypatch.setattr(nodes_sag.batching, "calc_cond_batch", calculate)
    made = guided(view)
    received = scores.numpy().reshape(SHAPE[0], heads, 15, 15).mean(1).sum(1)
    mask = (received.reshape(SHAPE[0], 1, rows, columns) > 1.0).repeat(2, 2).repeat(2, 3)
    uncond = UNCOND.double().numpy()
    blurred = gaussian_filter(uncond, (0, 0, 2.0, 2.0), mode="mirror", truncate=2.0)
    degraded = torch.from_numpy(np.where(mask, blurred, uncond)).float()
    assert_same_but_rounding(seen[0], degraded + X - UNCOND)
    expected = UNCOND + SCALE * (COND - UNCOND) + 0.7 * (degraded - estimate)
    assert_same_but_rounding(made, expected)


class Attends(TestModel):
    """Calls a recorder with a token of the text's value; memory may hold one entry only."""

    def __init__(self, recorder: Any, is_scarce: bool) -> None:
        super().__init__()
        self.recorder, self.is_scarce = recorder, is_scarce

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        return float(self.is_scarce and input_shape[0] > 1)

    def apply_model(self, x: Tensor, t: Tensor, c_crossattn: Tensor, **kw: Any) -> Tensor:
        tokens = c_crossattn[:, :1] * torch.tensor([[1.0], [0.0]])
        self.recorder(tokens, tokens, tokens, {**kw["transformer_options"], "n_heads": 1})
        return x


@pytest.mark.parametrize("is_scarce", [False, True])
@pytest.mark.parametrize("shares", [True, False])
def test_self_attention_of_several_negatives_is_the_same_whatever_memory_there_is(
    shares: bool, is_scarce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alike negatives: the newest, which comes first in a call of all. Others: the last call's."""
    monkeypatch.setattr(batching.memory, "recent_free_memory", lambda _: 1.0)
    lengths = (3, 3, 3) if shares else (3, 10, 17)
    texts = [torch.full((1, length, 4), value + 1.0) for value, length in enumerate(lengths)]
    recorder, x = nodes_sag.AttentionRecorder(), torch.zeros(1, 4, 8, 8)
    model = Attends(recorder, is_scarce)
    lists = {"positive": texts[:1], "negative": texts}
    ready = {
        name: conditioning.convert_cond([[text, {}] for text in given])
        for name, given in lists.items()
    }
    ready = conditioning.process_conds(model, x, ready, CPU)
    batching.calc_cond_batch(model, [*ready.values()], x, torch.ones(1), {})
    assert recorder.scores is not None
    product = 4 * 3.0 * 3.0 / 2  # four channels of the newest text's value, by the root of four
    expected = torch.tensor([[product, 0.0], [0.0, 0.0]]).softmax(-1)
    torch.testing.assert_close(recorder.scores[0], expected)


def test_perturbed_attention_guidance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahn et al. 2024, equation 14: away from the estimate whose tokens see only themselves."""
    perturbed, blocks = draw(7), []

    def calculate(model: Any, conds: Any, x: Tensor, sigma: Tensor, options: Any) -> list[Tensor]:
        blocks.append(options["transformer_options"]["patches_replace"]["attn1"])
        return [perturbed]

    monkeypatch.setattr(nodes_pag.batching, "calc_cond_batch", calculate)
    made = guided(nodes_pag.PerturbedAttentionGuidance.execute(patcher(TestModel()), 2.5)[0])
    expected = UNCOND + SCALE * (COND - UNCOND) + 2.5 * (COND - perturbed)
    assert_same_but_rounding(made, expected)
    (((place, replacement),),) = [list(block.items()) for block in blocks]
    assert place[:2] == ("middle", 0)
    q, k, v = (draw(seed).flatten(2) for seed in (1, 2, 3))
    assert torch.equal(replacement(q, k, v, {}), v)


NODES = [node for node, _, _ in FORMULAS] + [nodes_mahiro.Mahiro.execute]


@pytest.mark.parametrize("scale", [0.0, 1.0, 7.5])
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("case", ["equal", "zeros"])
def test_degenerate_estimates_stay_finite(node: Any, scale: float, case: str) -> None:
    same = COND if case == "equal" else torch.zeros(SHAPE)
    made = guided(node(patcher(TestModel()))[0], scale, same, same.clone())
    assert torch.isfinite(made).all()


def test_perpendicular_guidance_without_a_direction_stays_finite() -> None:
    made = nodes_perpneg.perp_neg(X, COND, UNCOND, COND, 1.0, SCALE)
    assert torch.isfinite(made).all()


def test_a_flat_feature_map_gets_no_structured_gain() -> None:
    made = nodes_freelunch.structured_gain(torch.ones(1, 4, 3, 3), 1.4)
    assert torch.equal(made, torch.ones(1, 1, 3, 3))
