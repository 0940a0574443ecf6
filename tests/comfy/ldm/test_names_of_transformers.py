"""What packs tell apart, replace and build of transformers' layers, under the names they import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy.ldm.hidream import model as hidream
from comfy.ldm.modules.diffusionmodules import mmdit
from tests.comfy.families.test_transformers import random_like


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def swap(network: nn.Module, kind: type[nn.Module]) -> Counter[str]:
    """Give every layer of a class another class with a forward of its own, as packs do.

    Returns:
        How often the new forwards ran, by class, filled while the network runs.
    """
    calls: Counter[str] = Counter()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[kind.__name__] += 1
        return kind.forward(self, *args, **kwargs)

    other = type(f"Pack{kind.__name__}", (kind,), {"forward": forward})
    found = [module for module in network.modules() if type(module) is kind]
    assert found, f"no layer of class {kind.__name__}"
    for module in found:
        module.__class__ = other
    return calls


@pytest.fixture(scope="module")
def hidream_network() -> hidream.HiDreamImageTransformer2DModel:
    network = hidream.HiDreamImageTransformer2DModel(
        num_layers=1, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
        caption_channels=(6, 6), text_emb_dim=4, axes_dims_rope=(4, 2, 2), llama_layers=(0, 1, 1),
        ff_dim=8, shared_ff_dim=8,
    ).eval()  # fmt: skip
    network.load_state_dict(random_like(network, 2))
    return network


def test_packs_take_the_place_of_every_layer_of_hidream(
    hidream_network: hidream.HiDreamImageTransformer2DModel,
) -> None:
    def run() -> Tensor:
        return hidream_network(
            noise(1, 16, 4, 4), torch.tensor([500.0]), noise(1, 4), noise(1, 3, 6),
            noise(1, 2, 5, 6),
        )  # fmt: skip

    before = run()
    wanted = {
        hidream.HiDreamImageBlock: 3,
        hidream.HiDreamImageTransformerBlock: 1,
        hidream.HiDreamImageSingleTransformerBlock: 2,
        hidream.HiDreamAttention: 3,
    }
    calls = [swap(hidream_network, kind) for kind in wanted]
    assert torch.equal(run(), before)
    assert [call.total() for call in calls] == list(wanted.values())


def test_a_norm_of_mmdit_has_a_weight_where_told() -> None:
    x = noise(2, 8)
    plain = mmdit.RMSNorm(8)
    assert not plain.state_dict()
    weighted = mmdit.RMSNorm(8, elementwise_affine=True, eps=1e-6, dtype=torch.float32)
    weighted.load_state_dict({"weight": torch.arange(8.0)})
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(plain(x), wanted)
    torch.testing.assert_close(weighted(x), wanted * torch.arange(8.0))
