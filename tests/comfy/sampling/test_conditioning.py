"""Areas, masks and widths of conditioning for latents of every rank."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comfy import conds
from comfy.families.base import BaseModel
from comfy.sampling import batching, conditioning, guidance, noise, run, samplers
from tests.comfy.sampling.support import CPU, TestModel, patcher

AREA_CASES = [
    # Picture areas on a picture and a video. One of more axes than the latent keeps the first ones.
    (("percentage", 0.5, 0.25, 0.1, 0.2), (10, 8), (5, 2, 1, 2)),
    (("percentage", 0.5, 0.25, 0.1, 0.2), (3, 10, 8), (3, 5, 2, 0, 1, 2)),
    ((4, 2, 1, 3), (3, 10, 8), (3, 4, 2, 0, 1, 3)),
    (("percentage", 1.0, 0.5, 0.25, 0.5, 0.1, 0.2), (10, 8), (10, 4, 5, 1)),
    ((2, 4, 2, 1, 1, 3), (10, 8), (2, 4, 1, 1)),
    ((4, 2, 1, 3), (20,), (4, 1)),
    (("percentage", 0.5, 0.25, 0.1, 0.2), (20,), (10, 2)),
    (("percentage", 0.01, 0.01, 0.0, 0.0), (10, 8), (1, 1, 0, 0)),
    # Halves round to the even number.
    (("percentage", 0.25, 0.75, 0.25, 0.75), (10, 10), (2, 8, 2, 8)),
]


@pytest.mark.parametrize(("area", "dims", "cells"), AREA_CASES)
def test_areas_become_cells(area: Any, dims: tuple[int, ...], cells: tuple[int, ...]) -> None:
    entries = [{"area": area, "model_conds": {}}]
    conditioning.resolve_areas_and_cond_masks_multidim(entries, dims, CPU)
    assert entries[0]["area"] == cells


MASK_CASES = [
    ((6, 8), (3, 4), (1, 3, 4)),
    ((1, 6, 8), (3, 4), (1, 3, 4)),
    ((2, 6, 8), (3, 4), (2, 3, 4)),
    ((2, 1, 6, 8), (3, 4), (2, 3, 4)),  # with an axis for channels, as a latent's own mask
    ((2, 1, 3, 4), (3, 4), (2, 3, 4)),
    ((2, 1, 5, 6, 8), (5, 3, 4), (2, 5, 3, 4)),
    ((1, 6, 8), (5, 3, 4), (1, 5, 3, 4)),  # one mask for all frames
    ((5, 6, 8), (5, 3, 4), (1, 5, 3, 4)),  # a mask for each frame
    ((2, 5, 6, 8), (5, 3, 4), (2, 5, 3, 4)),
    ((1, 1, 40), (20,), (1, 20)),
    ((1, 40), (20,), (1, 20)),
]


@pytest.mark.parametrize(("shape", "dims", "expected"), MASK_CASES)
def test_masks_take_the_shape_of_the_latent(
    shape: tuple[int, ...], dims: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    entries = [{"mask": torch.full(shape, 0.5), "model_conds": {}}]
    conditioning.resolve_areas_and_cond_masks_multidim(entries, dims, CPU)
    assert tuple(entries[0]["mask"].shape) == expected
    assert torch.allclose(entries[0]["mask"], torch.tensor(0.5))


class NumberModel(TestModel):
    """The estimate is the number given as the context."""

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, transformer_options: Any = None, **kw: Any
    ) -> Tensor:
        self.note_call(x, t, c_crossattn, transformer_options)
        return torch.ones_like(x) * c_crossattn[:, 0, 0].reshape(-1, *[1] * (x.ndim - 1))


def text(value: float, width: int = 4, **options: Any) -> list[Any]:
    return [torch.full((1, 1, width), value), options]


def estimate(entries: list[Any], shape: tuple[int, ...], sigma: float = 1.0) -> Tensor:
    model = NumberModel()
    lists = {"positive": conditioning.convert_cond(entries)}
    x = torch.zeros(shape)
    lists = conditioning.process_conds(model, x, lists, CPU)
    levels = torch.full((shape[0],), sigma)
    return batching.calc_cond_batch(model, [lists["positive"]], x, levels, {})[0]


def test_a_picture_area_of_a_video_covers_all_frames() -> None:
    entries = [text(1.0), text(3.0, area=(4, 4, 0, 0), strength=1.0)]
    made = estimate(entries, (1, 4, 3, 16, 16))
    assert torch.allclose(made[:, :, :, 8:, 8:], torch.tensor(1.0))
    assert torch.allclose(made[:, :, :, 0, 0], torch.tensor(2.0))  # (1 + 3) / 2


def test_overlaps_are_weighted_means() -> None:
    mask = torch.zeros(1, 8, 8)
    mask[:, :, :4] = 1.0
    entries = [
        text(1.0, strength=0.5), text(3.0, mask=mask, mask_strength=0.5), text(5.0, strength=2.0)
    ]  # fmt: skip
    made = estimate(entries, (2, 4, 8, 8))
    assert torch.allclose(made[..., 4:], torch.tensor((0.5 * 1 + 2 * 5) / 2.5))
    assert torch.allclose(made[..., :4], torch.tensor((0.5 * 1 + 0.5 * 3 + 2 * 5) / 3.0))


def test_an_entry_without_strength_does_not_count() -> None:
    # Also a lone one for the whole latent: no entry covers anything, which gives zeros.
    for others, expected in (([], 0.0), ([text(5.0)], 5.0), ([text(5.0), text(3.0)], 4.0)):
        for strength in (0.0, 0, torch.tensor(0.0)):
            made = estimate([text(9.0, strength=strength), *others], (2, 4, 8, 8))
            assert torch.equal(made, torch.full_like(made, expected))


def test_a_default_with_an_area_fills_what_is_left_of_that_area() -> None:
    entries = [
        text(1.0, area=(8, 4, 0, 0), strength=1.0),
        text(5.0, area=(8, 4, 0, 2), strength=1.0, default=True),
    ]
    made = estimate(entries, (2, 4, 8, 8))[1, 0, 0]
    assert made.tolist() == [1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 0.0, 0.0]


def test_an_area_outside_of_the_latent_does_nothing() -> None:
    made = estimate([text(1.0), text(9.0, area=(4, 4, 30, 30))], (1, 4, 8, 8))
    assert torch.equal(made, torch.ones_like(made))


def test_ranges_hold_between_their_sigmas() -> None:
    entries = [text(1.0, start_percent=0.0, end_percent=0.5), text(2.0, start_percent=0.5)]
    middle = NumberModel().model_sampling.percent_to_sigma(0.5)
    for sigma, expected in ((middle * 1.1, 1.0), (middle, 1.5), (middle * 0.9, 2.0)):
        made = estimate(entries, (1, 4, 8, 8), sigma)
        assert torch.allclose(made, torch.tensor(expected)), sigma


@pytest.mark.parametrize("option", ["area", "mask"])
def test_an_area_of_a_nested_latent_is_refused(option: str) -> None:
    from tests.comfy.sampling.test_every_run import SHAPES, latent_of

    value = (4, 4, 0, 0) if option == "area" else torch.ones(1, 8, 8)
    latent = latent_of(SHAPES[2])
    with pytest.raises(ValueError, match=f"option '{option}', which cannot apply to a latent of"):
        run.sample_custom(
            patcher(NumberModel()), noise.prepare_noise(latent, 1), 1.0, samplers.ksampler("euler"),
            torch.tensor([1.0, 0.0]), [text(1.0, **{option: value})], [text(0.0)], latent,
            disable_pbar=True, seed=1,
        )  # fmt: skip


class PickyModel(NumberModel):
    """Says which widths it takes."""

    def conditioning_widths(self) -> dict[str, int]:
        return {"c_crossattn": 4, "y": 6}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        made = super().extra_conds(**kwargs)
        if "pooled" in kwargs:
            made["y"] = conds.CONDRegular(kwargs["pooled"])
        return made


def test_conditioning_of_another_model_is_refused_with_both_widths() -> None:
    def go(positive: list[Any], negative: list[Any]) -> Tensor:
        latent = torch.zeros(1, 4, 8, 8)
        return run.sample_custom(
            patcher(PickyModel()), latent, 1.0, samplers.ksampler("euler"),
            torch.tensor([1.0, 0.0]), [positive], [negative], latent, disable_pbar=True, seed=1,
        )  # fmt: skip

    assert torch.isfinite(go(text(1.0), text(0.0))).all()
    with pytest.raises(ValueError, match=r"positive .* c_crossattn of width 5 .* takes 4"):
        go(text(1.0, width=5), text(0.0))
    with pytest.raises(ValueError, match=r"negative .* y of width 3 .* takes 6"):
        go(text(1.0), text(0.0, pooled=torch.zeros(1, 3)))


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (torch.zeros(7, 4), r"shape \(7, 4\), expected \[batch, tokens, 4\]"),
        (torch.zeros(1, 0, 4), r"shape \(1, 0, 4\), expected .* one token"),
        (None, r"positive conditioning holds no text.* width 4"),
    ],
)
def test_conditioning_without_tokens_is_named(context: Tensor | None, words: str) -> None:
    class TextModel(PickyModel):
        def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
            return super().extra_conds(**kwargs) if "cross_attn" in kwargs else {}

    latent = torch.zeros(1, 4, 8, 8)
    with pytest.raises(ValueError, match=words):
        run.sample_custom(
            patcher(TextModel()), latent, 1.0, samplers.ksampler("euler"), torch.tensor([1.0, 0.0]),
            [[context, {}]], [text(0.0)], latent, disable_pbar=True, seed=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    "area", [(4, 4, 0), (4, 4, -2, 0), (4.5, 4, 0, 0), ("percentage", 0.5, 0.5, -0.5, 0)]
)
def test_what_is_no_area_is_named(area: Any) -> None:
    with pytest.raises(ValueError, match=r"an area is .* found " + re.escape(str(area))):
        conditioning.resolve_areas_and_cond_masks([{"area": area}], 8, 8, CPU)


def test_numbers_of_an_area_may_come_from_elsewhere() -> None:
    entries = [{"area": (np.int64(4), torch.tensor(3), 2.0, np.float32(1))}]
    conditioning.resolve_areas_and_cond_masks(entries, 8, 8, CPU)
    assert entries[0]["area"] == (4, 3, 2, 1)


@pytest.mark.parametrize("shape", [(5,), (1, 0, 8), (0, 8, 8)])
def test_a_conditioning_mask_without_rows_is_named(shape: tuple[int, ...]) -> None:
    entries = [{"mask": torch.ones(shape), "set_area_to_bounds": True}]
    with pytest.raises(ValueError, match=re.escape(f"shape {shape} has no rows and columns")):
        conditioning.resolve_areas_and_cond_masks(entries, 8, 8, CPU)


def test_a_wrapper_may_make_conditioning_fit() -> None:
    def fit(apply_model: Any, args: dict[str, Any]) -> Tensor:
        inputs = {**args["c"], "c_crossattn": args["c"]["c_crossattn"][..., :4]}
        return apply_model(args["input"], args["timestep"], **inputs)

    view = patcher(PickyModel())
    view.set_model_unet_function_wrapper(fit)
    latent = torch.zeros(1, 4, 8, 8)
    made = run.sample_custom(
        view, latent, 1.0, samplers.ksampler("euler"), torch.tensor([1.0, 0.0]),
        [text(1.0, width=5)], [text(0.0, width=5)], latent, disable_pbar=True, seed=1,
    )  # fmt: skip
    assert torch.allclose(made, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("entry", "config", "widths"),
    [
        (None, {"context_dim": 768}, {"c_crossattn": 768}),
        (
            None,
            {"context_dim": [1024, 1024], "adm_in_channels": 2048},
            {"c_crossattn": 1024, "y": 2048},
        ),
        (None, {"context_in_dim": 4096, "vec_in_dim": 768}, {"c_crossattn": 4096, "y": 768}),
        (None, {"context_dim": None, "adm_in_channels": None}, {}),
        ("text_dim", {"text_dim": 4096, "context_dim": 768}, {"c_crossattn": 4096}),
        ("text_dim", {"context_dim": 768}, {}),
    ],
)
def test_a_base_model_knows_its_widths(
    entry: str | None, config: dict[str, Any], widths: dict[str, int]
) -> None:
    model: Any = SimpleNamespace(text_width=entry, model_config=SimpleNamespace(unet_config=config))
    assert BaseModel.conditioning_widths(model) == widths


def test_contexts_are_repeated_to_a_common_length_without_changing_the_result() -> None:
    class MeanModel(NumberModel):
        def apply_model(self, x: Tensor, t: Tensor, c_crossattn: Tensor, **kw: Any) -> Tensor:
            self.note_call(x, t, c_crossattn, kw.get("transformer_options") or {})
            return torch.ones_like(x) * c_crossattn.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)

    generator = torch.Generator().manual_seed(3)
    for first, second, calls in ((77, 154, 1), (154, 231, 1), (77, 385, 2), (6, 4, 1), (7, 3, 2)):
        model = MeanModel()
        contexts = [torch.randn(1, length, 4, generator=generator) for length in (first, second)]
        lists = {
            name: conditioning.convert_cond([[context, {}]])
            for name, context in zip(("positive", "negative"), contexts)
        }
        x = torch.zeros(1, 4, 8, 8)
        lists = conditioning.process_conds(model, x, lists, CPU)
        both = [lists["positive"], lists["negative"]]
        made = batching.calc_cond_batch(model, both, x, torch.ones(1), {})
        assert len(model.calls) == calls, (first, second)
        for result, context in zip(made, contexts):
            assert torch.allclose(result, context.mean(), atol=1e-6)


def test_one_by_one_is_the_rule_where_pictures_must_not_depend_on_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from comfy.devices import runtime
    from comfy.devices.policies import MemoryPolicy, PrecisionPolicy

    before = runtime.get_runtime()
    runtime.install_runtime(
        runtime.build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(deterministic=True))
    )
    try:
        assert torch.are_deterministic_algorithms_enabled()
        model = NumberModel()
        lists = [conditioning.convert_cond([text(1.0)]), conditioning.convert_cond([text(0.0)])]
        x = torch.zeros(1, 4, 8, 8)
        lists = [conditioning.process_conds(model, x, {"a": one}, CPU)["a"] for one in lists]
        guidance.sampling_function(model, x, torch.ones(1), lists[1], lists[0], 2.0, {})
        assert [call["cond_or_uncond"] for call in model.calls] == [[1], [0]]
    finally:
        runtime.install_runtime(before)
    assert not torch.are_deterministic_algorithms_enabled()
