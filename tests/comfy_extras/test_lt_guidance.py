"""Pictures and sound of one latent are guided by scales of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.latent_formats import LatentFormat
from comfy.nested_tensor import NestedTensor
from comfy_extras import nodes_custom_sampler as custom
from comfy_extras import nodes_lt_guidance
from tests.comfy.sampling.support import conditioning, patcher
from tests.comfy.sampling.test_every_run import AnyShapeModel

SHAPES = [(1, 4, 2, 3, 3), (1, 4, 5)]


def guided(latent: Any, guider: Any) -> list[Tensor]:
    """Members of the latent after a few steps."""
    output = custom.SamplerCustomAdvanced.execute(
        noise=custom.RandomNoise.execute(3)[0],
        guider=guider,
        sampler=custom.KSamplerSelect.execute("euler")[0],
        sigmas=torch.tensor([0.9, 0.5, 0.2, 0.0]),
        latent_image={"samples": latent},
    )
    made = output[0]["samples"]
    return made.unbind() if isinstance(made, NestedTensor) else [made]


@pytest.fixture
def model() -> Any:
    space = LatentFormat()
    space.latent_channels = 4
    return patcher(AnyShapeModel("FLOW", {"shift": 3.0}, space))


def guiders(model: Any, video_cfg: float, audio_cfg: float) -> tuple[Any, Any, Any]:
    """The guider with both scales, and the usual one with each."""
    texts = conditioning([0.1]), conditioning([-0.3])
    both = nodes_lt_guidance.LTXVDualCFGGuider.execute(model, *texts, video_cfg, audio_cfg)[0]
    single = [custom.CFGGuider.execute(model, *texts, cfg)[0] for cfg in (video_cfg, audio_cfg)]
    return both, single[0], single[1]


@pytest.mark.parametrize("scales", [(3.0, 7.0), (1.0, 4.0), (4.0, 1.0), (2.0, 2.0), (1.0, 1.0)])
def test_each_member_is_guided_as_by_its_own_scale(model: Any, scales: tuple[float, float]) -> None:
    def latent() -> NestedTensor:
        return NestedTensor([torch.zeros(shape) for shape in SHAPES])

    both, by_video, by_audio = (guided(latent(), guider) for guider in guiders(model, *scales))
    # The members do not see each other in this model, so each goes its own way.
    torch.testing.assert_close(both[0], by_video[0])
    torch.testing.assert_close(both[1], by_audio[1])
    if scales[0] != scales[1]:
        assert not torch.allclose(by_video[1], by_audio[1])


def test_a_latent_of_one_kind_has_the_scale_of_the_pictures(model: Any) -> None:
    both, by_video, _ = guiders(model, 3.0, 7.0)
    latent = torch.zeros(SHAPES[0])
    torch.testing.assert_close(guided(latent, both)[0], guided(latent, by_video)[0])


def test_hooks_of_the_model_see_a_scale_for_each_number(model: Any) -> None:
    seen = []
    view = model.clone()
    view.set_model_sampler_post_cfg_function(
        lambda facts: seen.append(facts["cond_scale"]) or facts["denoised"]
    )
    guided(NestedTensor([torch.zeros(shape) for shape in SHAPES]), guiders(view, 3.0, 7.0)[0])
    assert seen[0].flatten().tolist() == [3.0] * 72 + [7.0] * 20
