"""What packs tell apart, replace and build of transformers' layers, under the names they import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy.ldm.aura import mmdit as aura
from comfy.ldm.cosmos import predict2
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.hidream import model as hidream
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.ldm.modules.diffusionmodules import mmdit
from comfy.ldm.qwen_image import model as qwen
from comfy.ldm.wan import model as wan
from comfy.ldm.wan import vae as wan_vae
from comfy.nn.timesteps import timestep_embedding
from comfy.ops import disable_weight_init as operations
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


def test_packs_take_the_place_of_every_layer_of_auraflow() -> None:
    network = aura.MMDiT(
        dim=8, n_layers=3, n_double_layers=1, n_heads=2, cond_seq_dim=6, max_seq=16, inner_dim=8
    ).eval()
    network.load_state_dict(random_like(network, 2))

    def run() -> Tensor:
        return network(noise(1, 4, 4, 4), torch.tensor([0.5]), noise(1, 3, 6))

    before = run()
    wanted = {
        aura.MMDiTBlock: 1, aura.DiTBlock: 2, aura.DoubleAttention: 1, aura.SingleAttention: 2,
    }  # fmt: skip
    calls = [swap(network, kind) for kind in wanted]
    assert torch.equal(run(), before)
    assert [call.total() for call in calls] == list(wanted.values())


class PackFeedForward(qwen.FeedForward):
    """A feed-forward whose layers a pack makes itself, after the base class's base."""

    def __init__(self, dim: int, **place: Any) -> None:
        super(qwen.FeedForward, self).__init__()
        first = qwen.GELU(dim, 4 * dim, approximate="tanh", operations=operations, **place)
        last = operations.Linear(4 * dim, dim, **place)
        self.net = nn.ModuleList([first, nn.Dropout(0.0), last])


class PackTransformer(qwen.QwenImageTransformer2DModel):
    """A network of which a pack makes the parts it does not want to change from ours."""

    def __init__(self, dim: int, heads: int, axes: list[int]) -> None:
        nn.Module.__init__(self)
        parts: dict[str, Any] = {"dtype": None, "device": None, "operations": operations}
        self.pe_embedder = EmbedND(dim=sum(axes), theta=10000, axes_dim=axes)
        self.time_text_embed = qwen.QwenTimestepProjEmbeddings(
            embedding_dim=dim, pooled_projection_dim=768, **parts
        )
        self.norm_out = qwen.LastLayer(dim, dim, **parts)
        self.mlp = PackFeedForward(dim)

    def _forward(self, x: Tensor, timestep: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        turns = self.pe_embedder(ids).squeeze(1).unsqueeze(2).to(x.dtype)
        temb = self.time_text_embed(timestep, x)
        q = qwen.apply_rotary_emb(x.unflatten(-1, (2, -1)), turns)
        return q.flatten(2), self.norm_out(self.mlp(x), temb)


def test_a_network_made_of_our_layers_computes_what_ours_computes() -> None:
    ours = qwen.QwenImageTransformer2DModel(
        in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip
    weights = random_like(ours, 2)
    ours.load_state_dict(weights)
    theirs = PackTransformer(16, 2, [4, 2, 2])
    prefix = "transformer_blocks.0.img_"
    theirs.load_state_dict(
        {k.removeprefix(prefix): v for k, v in weights.items()
         if k.startswith((f"{prefix}mlp.", "time_text_embed.", "norm_out."))}
    )  # fmt: skip
    x, ids = noise(1, 5, 16), torch.arange(15.0).view(1, 5, 3)
    q, out = theirs._forward(x, torch.tensor([0.3]), ids)
    block: Any = ours.transformer_blocks[0]
    assert type(block.img_mlp) is qwen.FeedForward
    temb = ours.time_text_embed(torch.tensor([0.3]), x)
    assert torch.equal(out, ours.norm_out(block.img_mlp(x), temb))
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    turned = qwen.apply_rotary_emb(heads, ours.pe_embedder(ids))  # heads before tokens, too
    torch.testing.assert_close(q, turned.transpose(1, 2).flatten(2))
    assert qwen.apply_rotary_emb(x[:, :0], ours.pe_embedder(ids)).shape == (1, 0, 16)


def test_cosmos_turns_by_rotations_as_by_angles() -> None:
    angles = noise(5, 4)
    cos, sin = angles.cos(), angles.sin()
    matrices = torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))
    x = noise(1, 2, 5, 8)
    torch.testing.assert_close(predict2.apply_rotary_pos_emb(x, matrices), predict2.turn(x, angles))


def test_waves_of_positions_of_wan() -> None:
    positions = torch.tensor([0.0, 2.0, 900.0])
    made = wan.sinusoidal_embedding_1d(8, positions)
    assert torch.equal(made, timestep_embedding(positions, 8))
    assert made.shape == (3, 8)


def test_packs_put_their_convolution_and_norm_into_the_autoencoder_of_wan() -> None:
    network = wan_vae.WanVAE(dim=8, z_dim=4, num_res_blocks=1).eval()
    network.load_state_dict(random_like(network, 2))
    video, latent = noise(1, 3, 5, 8, 8), noise(1, 4, 2, 1, 1)
    before = network.encode(video), network.decode(latent)
    norms = swap(network, wan_vae.RMS_norm)
    convolutions = swap(network, wan_vae.CausalConv3d)
    assert torch.equal(network.encode(video), before[0])
    assert torch.equal(network.decode(latent), before[1])
    assert norms.total() > 0
    assert convolutions.total() > 0


def test_a_convolution_of_wan_continues_what_it_is_given() -> None:
    layer = wan_vae.CausalConv3d(1, 1, 3, padding=1)
    layer.load_state_dict({"weight": torch.ones(1, 1, 3, 3, 3), "bias": torch.zeros(1)})
    frames = noise(1, 1, 6, 4, 4)
    whole = layer(frames)
    assert whole.shape == frames.shape
    pieces = [layer(frames[:, :, :2]), layer(frames[:, :, 2:], cache_x=frames[:, :, :2])]
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole)
    short = layer(frames[:, :, 1:], cache_x=frames[:, :, :1])  # one frame missing: zeros
    torch.testing.assert_close(short, whole[:, :, 1:])


def test_a_norm_of_wan_along_the_last_axis_and_with_a_bias() -> None:
    norm = wan_vae.RMS_norm(4, channel_first=False, bias=True)
    norm.load_state_dict({"gamma": torch.full((4,), 2.0), "bias": torch.ones(4)})
    x = noise(3, 4)
    wanted = x / x.square().mean(-1, keepdim=True).sqrt() * 2 + 1
    torch.testing.assert_close(norm(x), wanted)
    assert wan_vae.RMS_norm(4, images=False).gamma.shape == (4, 1, 1, 1)


def test_a_control_network_of_z_image_is_built_by_its_usual_sizes() -> None:
    network = ZImage_Control(
        additional_in_dim=17, refiner_control=True, n_control_layers=15, device="meta",
        dtype=torch.bfloat16, operations=operations,
    )  # fmt: skip
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert shapes["control_all_x_embedder.2-1.weight"] == (3840, 132)
    assert shapes["control_layers.14.feed_forward.w1.weight"] == (10240, 3840)
    assert shapes["control_noise_refiner.1.adaLN_modulation.0.weight"] == (4 * 3840, 256)
