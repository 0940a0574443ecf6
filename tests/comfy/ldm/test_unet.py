"""The UNet against recorded tiny networks, and its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy.ldm.unet.config import UNetConfig
from comfy.ldm.unet.model import UNetModel
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net


def build(net: GoldenNet) -> UNetModel:
    model = UNetModel(**net.constructor)
    model.load_state_dict(net.weights)
    return model.eval()


@pytest.fixture(scope="module")
def sd1(golden_folder: Path) -> GoldenNet:
    return read_golden_net(golden_folder / "nets/unet_sd1.safetensors")


@torch.inference_mode()
def test_sd1_agrees_with_the_reference(sd1: GoldenNet) -> None:
    given = sd1.inputs
    y = build(sd1)(given["x"], given["t"], given["context"])
    assert_close_to_golden(y, sd1.outputs["y"])


@torch.inference_mode()
def test_odd_sizes_come_back_to_their_size(sd1: GoldenNet) -> None:
    given = sd1.inputs
    y = build(sd1)(given["x_odd"], given["t_odd"], given["context"][:1])
    assert_close_to_golden(y, sd1.outputs["y_odd"])


def test_latents_of_videos_and_sounds_are_refused(sd1: GoldenNet) -> None:
    given = sd1.inputs
    for wrong in (given["x"].unsqueeze(2), given["x"].flatten(2)):
        with pytest.raises(ValueError, match=r"latents of 4 axes .*, found one of"):
            build(sd1)(wrong, given["t"], given["context"])


@torch.inference_mode()
def test_sdxl_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/unet_sdxl.safetensors")
    given = net.inputs
    out = build(net)(given["x"], given["t"], given["context"], y=given["y"])
    assert_close_to_golden(out, net.outputs["out"])


@torch.inference_mode()
def test_video_unet_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/unet_svd.safetensors")
    given = net.inputs
    out = build(net)(
        given["x"],
        given["t"],
        given["context"],
        y=given["y"],
        num_video_frames=int(given["num_video_frames"]),
        image_only_indicator=torch.zeros(1),
    )
    assert_close_to_golden(out, net.outputs["out"])


@torch.inference_mode()
def test_control_residuals_are_added_from_the_end_of_their_lists(
    golden_folder: Path, sd1: GoldenNet
) -> None:
    net = read_golden_net(golden_folder / "nets/controlnet_sd1.safetensors")
    control = {
        part: [net.outputs[f"control/{part}/{number}"] for number in range(count)]
        for part, count in {"middle": 1, "output": 4}.items()
    }
    given = net.inputs
    out = build(sd1)(given["x"], given["t"], given["context"], control=control)
    assert_close_to_golden(out, net.outputs["unet_sd1_with_control"])
    assert control == {"middle": [], "output": []}


@torch.inference_mode()
def test_a_control_residual_of_another_model_is_refused_with_both_shapes(sd1: GoldenNet) -> None:
    given = sd1.inputs
    control = {"middle": [torch.zeros(2, 7, 4, 4)]}
    with pytest.raises(ValueError, match=r"\(2, 7, 4, 4\).*\(2, 64, 4, 4\)"):
        build(sd1)(given["x"], given["t"], given["context"], control=control)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Assign to a public name for a while, as custom nodes do.

    pytest's monkeypatch would delete the name afterwards: it looks for it in the module's own dict.
    """
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


class Recorder:
    """Patches that record where they were called and change nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def attn(self, n, context, value, extra):
        self.seen.append(("attn", extra["block"], extra["n_heads"], extra["dim_head"]))
        assert "patches" not in extra
        return n, context, value

    def block(self, h, options):
        self.seen.append(options["block"])
        return h

    def output(self, h, skip, options):
        self.seen.append(options["block"])
        return h, skip


@torch.inference_mode()
def test_patches_that_change_nothing_leave_the_output_equal(sd1: GoldenNet) -> None:
    recorder, given = Recorder(), sd1.inputs
    options = {
        "patches": {
            "attn1_patch": [recorder.attn],
            "attn2_patch": [recorder.attn],
            "input_block_patch": [recorder.block],
            "input_block_patch_after_skip": [recorder.block],
            "output_block_patch": [recorder.output],
            "attn1_output_patch": [lambda out, extra: out],
            "middle_patch": [lambda x, extra: x],
            "middle_block_after_patch": [lambda facts: {"h": facts["h"]}],
            "emb_patch": [lambda emb, channels, options: emb],
        }
    }
    y = build(sd1)(given["x"], given["t"], given["context"], transformer_options=options)
    assert_close_to_golden(y, sd1.outputs["y"])
    assert ("attn", ("middle", 0), 4, 16) in recorder.seen
    assert ("input", 3) in recorder.seen
    assert ("output", 0) in recorder.seen
    assert options["original_shape"] == [2, 4, 8, 8]
    assert options["transformer_index"] == 7


@torch.inference_mode()
@pytest.mark.parametrize("key", [("input", 1), ("input", 1, 0)])
def test_an_attention_is_replaced_for_its_block_only(sd1: GoldenNet, key: tuple) -> None:
    calls, given = [], sd1.inputs

    def replacement(q, k, v, extra):
        calls.append(extra["block"])
        return torch.zeros_like(q)

    options = {"patches_replace": {"attn1": {key: replacement}}}
    y = build(sd1)(given["x"], given["t"], given["context"], transformer_options=options)
    assert calls == [("input", 1)]
    assert not torch.allclose(y, sd1.outputs["y"])


@torch.inference_mode()
def test_wrappers_run_around_the_network_outermost_first(sd1: GoldenNet) -> None:
    order, given = [], sd1.inputs

    def wrapper(name):
        def run(executor, *args, **kwargs):
            order.append(name)
            return executor(*args, **kwargs) * 2

        return run

    options = {"wrappers": {"diffusion_model": {"a": [wrapper("a")], None: [wrapper("b")]}}}
    y = build(sd1)(given["x"], given["t"], given["context"], transformer_options=options)
    assert order == ["a", "b"]
    assert_close_to_golden(y / 4, sd1.outputs["y"])


@torch.inference_mode()
def test_the_attention_of_one_model_can_be_overridden(sd1: GoldenNet) -> None:
    calls, given = [], sd1.inputs

    def override(function, *args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    options = {"optimized_attention_override": override}
    y = build(sd1)(given["x"], given["t"], given["context"], transformer_options=options)
    assert len(calls) == 14
    assert_close_to_golden(y, sd1.outputs["y"])


@torch.inference_mode()
def test_replacing_a_public_step_takes_effect(sd1: GoldenNet) -> None:
    from comfy.ldm.modules.diffusionmodules import openaimodel

    seen, original, given = [], openaimodel.apply_control, sd1.inputs

    def apply_control(h, control, name):
        seen.append(name)
        return original(h, control, name)

    with replaced(openaimodel, "apply_control", apply_control):
        build(sd1)(given["x"], given["t"], given["context"])
    assert seen == ["input"] * 4 + ["middle"] + ["output"] * 4


def test_replacing_optimized_attention_takes_effect(sd1: GoldenNet) -> None:
    from comfy.ldm.modules import attention as public
    from comfy.nn import attention

    calls, original, given = [], attention.optimized_attention, sd1.inputs

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    with replaced(public, "optimized_attention", counted):
        build(sd1)(given["x"], given["t"], given["context"])
    assert attention.optimized_attention is original
    assert len(calls) == 14


def test_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match="hedas"):
        UNetConfig.from_options(in_channels=4, model_channels=32, out_channels=4, hedas=8)


def test_norm_groups_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"48.*32"):
        UNetConfig(4, 48, 4, 1, (1, 2), num_heads=8)


def test_y_is_demanded_where_the_network_has_a_label_embedding(sd1: GoldenNet) -> None:
    given = sd1.inputs
    with pytest.raises(ValueError, match="takes no vector"):
        build(sd1)(given["x"], given["t"], given["context"], y=torch.zeros(2, 4))
