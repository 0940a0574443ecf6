"""Windows over long latents: coverage, weights, and agreement with whole evaluations."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import comfy.context_windows
from comfy.conds import CONDConstant
from comfy.nested_tensor import NestedTensor
from comfy.sampling import context_windows, noise, run, samplers, window_schedules
from comfy.sampling.window_schedules import CONTEXT_MAPPING, FUSE_MAPPING
from tests.comfy.sampling.support import (
    NEGATIVE,
    POSITIVE,
    ClosedFormModel,
    conditioning,
    context,
    patcher,
)


def handler_of(schedule: str, fuse: str = "flat", **options: Any) -> Any:
    return context_windows.IndexListContextHandler(
        window_schedules.get_matching_context_schedule(schedule),
        window_schedules.get_matching_fuse_method(fuse),
        **options,
    )


@pytest.mark.parametrize("schedule", CONTEXT_MAPPING)
@pytest.mark.parametrize(("length", "overlap"), [(4, 0), (4, 2), (7, 3)])
@pytest.mark.parametrize("frames", [3, 4, 9, 16, 33])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_windows_cover_every_frame(
    schedule: str, length: int, overlap: int, frames: int, step: int
) -> None:
    handler = handler_of(schedule, context_length=length, context_overlap=overlap, closed_loop=True)
    handler._step = step
    windows = handler.context_schedule.func(frames, handler, {})
    assert {frame for window in windows for frame in window} == set(range(frames))
    assert all(len(window) <= max(length, 1) or schedule == "batched" for window in windows)
    if schedule == "standard_uniform":
        assert all(window == sorted(window) for window in windows)


@pytest.mark.parametrize("schedule", CONTEXT_MAPPING)
def test_every_frame_is_in_a_window_whatever_the_options(schedule: str) -> None:
    for frames, length, stride, step in itertools.product(
        (2, 3, 5, 8, 13, 24, 41), (1, 2, 3, 7, 20), (1, 2, 3), (0, 1, 3, 5)
    ):
        for overlap, closed in itertools.product((0, 1, length // 2, length, length + 3), (0, 1)):
            handler = handler_of(
                schedule, context_length=length, context_overlap=overlap, context_stride=stride,
                closed_loop=bool(closed),
            )  # fmt: skip
            handler._step = step
            windows = handler.context_schedule.func(frames, handler, {})
            assert {frame for window in windows for frame in window} == set(range(frames)), (
                frames, length, overlap, stride, closed, step,
            )  # fmt: skip


def test_static_windows_end_with_the_frames() -> None:
    handler = handler_of("standard_static", context_length=4, context_overlap=1)
    made = handler.context_schedule.func(9, handler, {})
    assert made == [[0, 1, 2, 3], [3, 4, 5, 6], [5, 6, 7, 8]]


def test_looped_windows_move_from_step_to_step() -> None:
    handler = handler_of("looped_uniform", context_length=4, context_overlap=1, closed_loop=True)
    seen = []
    for step in range(3):
        handler._step = step
        seen.append(handler.context_schedule.func(8, handler, {}))
    assert seen[0] != seen[1]
    assert [window_schedules.ordered_halving(step) for step in range(4)] == [0, 0.5, 0.25, 0.75]


def test_weights() -> None:
    assert window_schedules.pyramid_weights(5) == [1, 2, 3, 2, 1]
    assert window_schedules.pyramid_weights(4) == [1, 2, 2, 1]
    facts = {"full_length": 10, "context_overlap": 2}
    first = window_schedules.overlap_weights(4, idxs=[0, 1, 2, 3], **facts)
    middle = window_schedules.overlap_weights(4, idxs=[3, 4, 5, 6], **facts)
    assert first == pytest.approx([1, 1, 1, 0])
    assert middle == pytest.approx([0, 1, 1, 0])


@pytest.mark.parametrize("fuse", FUSE_MAPPING)
@pytest.mark.parametrize("schedule", CONTEXT_MAPPING)
@pytest.mark.parametrize(("dim", "shape"), [(0, (9, 4, 4, 4)), (2, (1, 4, 9, 3, 3))])
def test_windows_give_what_the_whole_would_where_frames_do_not_interact(
    schedule: str, fuse: str, dim: int, shape: tuple[int, ...]
) -> None:
    latent = torch.zeros(shape)
    options = {"context_length": 4, "context_overlap": 2, "dim": dim, "closed_loop": True}
    made = []
    for handler in (None, handler_of(schedule, fuse, **options)):
        model = patcher(ClosedFormModel())
        if handler is not None:
            model.model_options["context_handler"] = handler
            context_windows.create_prepare_sampling_wrapper(model)
        made.append(
            run.sample(
                model, noise.prepare_noise(latent, 1), 3, 2.0, "euler", "normal",
                conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
            )
        )  # fmt: skip
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-4)


def test_conditioning_with_a_frame_for_each_is_cut() -> None:
    handler = handler_of("standard_static", context_length=4)
    window = context_windows.IndexListContextWindow([2, 3, 4, 5], 0, 9)
    contexts = torch.arange(9.0).reshape(9, 1, 1).expand(9, 2, 3)
    from comfy.conds import CONDCrossAttn

    entry = {
        "cross_attn": contexts, "strength": 0.5, "mask": torch.ones(3, 4, 4),
        "model_conds": {"c_crossattn": CONDCrossAttn(contexts), "y": CONDCrossAttn(context([1.0]))},
    }  # fmt: skip
    x = torch.zeros(9, 4, 4, 4)
    (made,) = handler.get_resized_cond([entry], x, window)
    assert made["cross_attn"][:, 0, 0].tolist() == [2, 3, 4, 5]
    assert made["model_conds"]["c_crossattn"].cond[:, 0, 0].tolist() == [2, 3, 4, 5]
    assert made["model_conds"]["y"] is entry["model_conds"]["y"]
    assert made["mask"] is entry["mask"]
    assert entry["cross_attn"].shape[0] == 9


class VideoModel(ClosedFormModel):
    """Takes its batch for videos of so many frames, as Stable Video Diffusion does."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        frames = CONDConstant(kwargs["noise"].shape[0])
        return {**super().extra_conds(**kwargs), "num_video_frames": frames}

    def apply_model(self, x: Tensor, *args: Any, num_video_frames: int, **kwargs: Any) -> Tensor:
        self.calls.append({"frames": num_video_frames, "videos": x.shape[0] / num_video_frames})
        return super().apply_model(x, *args, **kwargs)


def test_a_video_along_the_batch_is_as_long_as_its_window() -> None:
    model = patcher(VideoModel())
    model.model_options["context_handler"] = handler_of("batched", context_length=6)
    latent = torch.zeros(16, 4, 3, 3)
    run.sample(
        model, noise.prepare_noise(latent, 1), 1, 2.0, "euler", "normal",
        conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
    )  # fmt: skip
    calls = [call for call in model.model.calls if "frames" in call]
    assert calls == [{"frames": count, "videos": 2} for count in (6, 6, 4)]


def test_control_hints_are_cut_along_the_chain() -> None:
    def control(previous: Any = None) -> Any:
        made = SimpleNamespace(
            cond_hint_original=torch.arange(9.0).reshape(9, 1, 1, 1), previous_controlnet=previous
        )
        made.copy = lambda: SimpleNamespace(**vars(made))
        return made

    handler = handler_of("standard_static", context_length=2)
    window = context_windows.IndexListContextWindow([7, 8], 0, 9)
    cut = handler.prepare_control_objects(control(control()), torch.zeros(9, 4, 4, 4), window)
    assert cut.cond_hint_original.flatten().tolist() == [7, 8]
    assert cut.previous_controlnet.cond_hint_original.flatten().tolist() == [7, 8]


def test_free_noise_repeats_the_first_window_shuffled() -> None:
    start = torch.randn(12, 1, generator=torch.Generator().manual_seed(0))
    made = context_windows.apply_freenoise(start, 0, 4, 1, seed=5)
    assert torch.equal(made[:4], start[:4])
    assert set(made.flatten().tolist()) <= set(start[:4].flatten().tolist())
    assert sorted(made[4:7].flatten().tolist()) == sorted(start[:3].flatten().tolist())
    assert torch.equal(made, context_windows.apply_freenoise(start, 0, 4, 1, seed=5))


def test_the_last_group_of_free_noise_shuffles_as_many_frames_as_it_has_places() -> None:
    """The group before it may be longer: its first frames are taken, in an order of their own."""
    start = torch.arange(15.0)
    made = context_windows.apply_freenoise(start, 0, 5, 1, seed=5)
    assert sorted(made[5:9].tolist()) == [0, 1, 2, 3]
    assert sorted(made[9:13].tolist()) == sorted(made[4:8].tolist())
    assert sorted(made[13:].tolist()) == sorted(made[8:10].tolist())
    generator = torch.Generator().manual_seed(5)
    orders = [torch.randperm(count, generator=generator) for count in (4, 4, 2)]
    assert made[13:].tolist() == made[orders[2] + 8].tolist()


def test_free_noise_is_used_in_a_run() -> None:
    model = patcher(ClosedFormModel())
    model.model_options["context_handler"] = handler_of(
        "standard_static", context_length=2, freenoise=True
    )
    context_windows.create_sampler_sample_wrapper(model)
    latent = torch.zeros(4, 4, 2, 2)
    seen: list[Tensor] = []
    run.sample_custom(
        model, noise.prepare_noise(latent, 1), 1.0, samplers.ksampler("euler"),
        torch.tensor([10.0, 0.0]), conditioning(POSITIVE), conditioning(NEGATIVE), latent,
        disable_pbar=True, seed=1, callback=lambda i, x0, x, total: seen.append(x),
    )  # fmt: skip
    rows = {tuple(row.tolist()) for row in seen[0].flatten(1)}
    assert len(rows) == 2


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown context schedule 'x'; known: looped_uniform"):
        comfy.context_windows.get_matching_context_schedule("x")
    with pytest.raises(ValueError, match="unknown fuse method 'x'; known: flat"):
        comfy.context_windows.get_matching_fuse_method("x")


@pytest.mark.parametrize("dim", [1, 4, 5])
def test_an_axis_that_has_no_windows_is_named(dim: int) -> None:
    model, latent = patcher(ClosedFormModel()), torch.zeros(1, 4, 8, 8)
    model.model_options["context_handler"] = handler_of("batched", dim=dim)
    context_windows.create_prepare_sampling_wrapper(model)
    found = rf"dim: expected an axis of .*\(1, 4, 8, 8\)\) .* found {dim}"
    with pytest.raises(ValueError, match=found):
        run.sample(
            model, noise.prepare_noise(latent, 1), 3, 2.0, "euler", "normal",
            conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
        )  # fmt: skip


def test_windows_over_the_cells_of_several_parts_are_refused() -> None:
    model = patcher(ClosedFormModel())
    model.model_options["context_handler"] = handler_of("batched", context_length=2, dim=2)
    latent = NestedTensor([torch.zeros(1, 4, 5, 3, 3), torch.zeros(1, 4, 9)])
    with pytest.raises(ValueError, match="expected a latent of one part, found one of 2"):
        run.sample_custom(
            model, latent, 1.0, samplers.ksampler("euler"), torch.tensor([10.0, 0.0]),
            conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
        )  # fmt: skip


@pytest.mark.parametrize("schedule", CONTEXT_MAPPING)
@pytest.mark.parametrize(
    ("dim", "shape", "mask_shape"),
    [
        (2, (1, 4, 9, 9), (9, 9)), (3, (2, 4, 9, 9), (2, 9, 9)), (0, (9, 4, 3, 3), (9, 3, 3)),
        (2, (1, 4, 9, 9, 4), (9, 9, 4)), (3, (1, 4, 9, 9, 4), (9, 9, 4)), (2, (1, 4, 9), (1, 9)),
    ],
)  # fmt: skip
def test_regions_lie_where_they_did_in_the_whole(
    schedule: str, dim: int, shape: tuple[int, ...], mask_shape: tuple[int, ...]
) -> None:
    latent = torch.zeros(shape)
    first = torch.rand(mask_shape, generator=torch.Generator().manual_seed(1))
    positive = [
        [context(POSITIVE), {"mask": first}],
        [context(NEGATIVE), {"mask": 1 - first, "strength": 0.5}],
    ]
    options = {"context_length": 4, "context_overlap": 2, "dim": dim, "closed_loop": True}
    made = []
    for handler in (None, handler_of(schedule, "pyramid", **options)):
        model = patcher(ClosedFormModel())
        if handler is not None:
            model.model_options["context_handler"] = handler
        made.append(
            run.sample(
                model, noise.prepare_noise(latent, 1), 3, 2.0, "euler", "normal",
                positive, conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
            )
        )  # fmt: skip
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dim", "indices", "expected"),
    [
        (2, [0, 1, 2, 3], [(2, 4, 2, 1)]),
        (2, [4, 5, 6, 7], [(2, 4, 0, 1)]),
        (2, [7, 8], []),
        (2, [5, 6, 7, 8, 0, 1, 2, 3], [(1, 4, 0, 1), (2, 4, 6, 1)]),
        (3, [0, 1, 2, 3], [(4, 3, 2, 1)]),
        (0, [0, 1], [(4, 4, 2, 1)]),
    ],
)
def test_an_area_is_the_part_of_it_in_the_window(
    dim: int, indices: list[int], expected: list[tuple[int, ...]]
) -> None:
    window = context_windows.IndexListContextWindow(indices, dim, 9)
    entry = {"area": (4, 4, 2, 1), "model_conds": {}}
    handler = handler_of("standard_static", dim=dim)
    made = handler.get_resized_cond([entry], torch.zeros(9, 4, 9, 9), window)
    assert [part["area"] for part in made] == expected


def test_a_text_with_as_many_tokens_as_the_latent_has_rows_is_whole_in_every_window() -> None:
    from comfy.conds import CONDCrossAttn

    handler = handler_of("standard_static", dim=2)
    window = context_windows.IndexListContextWindow([2, 3], 2, 9)
    text, several = torch.rand(1, 9, 9), torch.rand(1, 2, 4, 9, 3, 3)
    entry = {"cross_attn": text, "model_conds": {"c": CONDCrossAttn(text), "vace": several}}
    (made,) = handler.get_resized_cond([entry], torch.zeros(1, 4, 9, 3, 3), window)
    assert made["cross_attn"] is text
    assert made["model_conds"]["c"].cond is text
    assert torch.equal(made["model_conds"]["vace"], several[:, :, :, [2, 3]])
