"""Patches and wrappers reach networks without recorded numbers at every place they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy.ldm.cosmos.model import GeneralDIT
from comfy.ldm.genmo.model import AsymmDiTJoint
from tests.comfy.families import test_cosmos, test_cosmos_video, test_hunyuan3d21, test_mochi
from tests.comfy.families.test_mochi import waves

Options = dict[str, Any]


def mochi() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = AsymmDiTJoint(**test_mochi.SIZES)
    model.load_state_dict(test_mochi.network())
    return model, (waves(*test_mochi.SHAPE), torch.tensor([0.3]), waves(1, 7, test_mochi.TEXT))


def cosmos() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = GeneralDIT(**test_cosmos_video.SIZES)
    model.load_state_dict(test_cosmos_video.network())
    text = waves(1, 5, test_cosmos.TEXT)
    return model, (waves(*test_cosmos_video.SHAPE), torch.tensor([0.4]), text)


def halved(out: Tensor, told: Options) -> Tensor:
    del told
    return out / 2


def shifted(args: Options, extra: Options) -> Options:
    """A block beside which the video's tokens move."""
    made: Options = extra["original_block"](args)
    return {**made, "img": made["img"] + torch.arange(made["img"].shape[-1])}


@pytest.mark.parametrize("make", [mochi, cosmos, test_hunyuan3d21.given])
@torch.inference_mode()
def test_patches_and_wrappers_are_reached(make: Callable[[], Any]) -> None:
    model, given = make()
    plain, calls = model(*given), []

    def wrapper(execute: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(execute)
        return execute(*args, **kwargs)

    for place in model.reads_patches:
        options: Options = {"patches": {place: [halved]}}
        if place == "dit":
            options = {"patches_replace": {"dit": {("double_block", 1): shifted}}}
        assert not torch.allclose(model(*given, transformer_options=options), plain, atol=1e-3)
    options = {"wrappers": {"diffusion_model": {None: [wrapper]}}}
    assert torch.equal(model(*given, transformer_options=options), plain)
    assert len(calls) == 1
