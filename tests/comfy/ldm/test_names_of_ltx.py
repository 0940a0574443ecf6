"""What packs build and replace of LTX video's networks, under the names they import."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy.ldm.lightricks import model as public
from comfy.ldm.lightricks.av_model import LTXAVModel
from comfy.ldm.lightricks.connectors import ConnectorBlock, ConnectorsConfig
from comfy.ldm.lightricks.rotations import THETA, angles, halves, neighbours
from comfy.ldm.lightricks.vae.causal_conv3d import CausalConv3d
from comfy.ldm.lightricks.vae.causal_video_autoencoder import Decoder, Encoder, ResnetBlock3D
from comfy.ldm.lightricks.vae.pixel_norm import PixelNorm
from comfy.ops import disable_weight_init as operations
from comfy.patching.patcher import ModelPatcher
from tests.comfy.families.test_ltxav import SIZES, SOUND, TEXT, VIDEO, noise, varied
from tests.comfy.families.test_ltxv import SIZES as VIDEO_SIZES
from tests.comfy.families.test_ltxv import VERSIONS, autoencoder

WIDTH, HEADS, LENGTH = 16, 4, 5


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class PackBlock(nn.Module):
    """A connector's layer as packs write it: of the host's attention and feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        parts: dict[str, Any] = {"dtype": None, "device": None, "operations": operations}
        self.attn1 = public.CrossAttention(
            query_dim=dim, heads=heads, dim_head=dim // heads, context_dim=None, eps=1e-6, **parts
        )
        self.ff = public.FeedForward(dim, dim_out=dim, glu=True, **parts)

    def forward(self, x: Tensor, pe: Any) -> Tensor:
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)
        x = self.attn1(normed, mask=None, pe=pe) + x
        return self.ff(torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)) + x


def pack_turn(places: Tensor, kind: public.LTXRopeType) -> Any:
    """Turns of places, put together by a pack of the host's functions."""
    grid = public.generate_freq_grid_np(THETA, 1, WIDTH)
    freqs = grid * (places[..., None] / 4096 * 2 - 1)
    missing = WIDTH // 2 - freqs.shape[-1]
    if kind == public.LTXRopeType.SPLIT:
        return (*public.split_freqs_cis(freqs, missing, HEADS), True)
    return (*public.interleaved_freqs_cis(freqs, 2 * missing), False)


@pytest.mark.parametrize("kind", list(public.LTXRopeType))
def test_a_layer_made_of_our_parts_gives_what_ours_gives(kind: public.LTXRopeType) -> None:
    ours = ConnectorBlock(
        ConnectorsConfig(width=WIDTH, heads=HEADS),
        {"dtype": None, "device": None, "operations": operations},
    )
    theirs = PackBlock(WIDTH, HEADS)
    weights = varied(ours, 1)
    ours.load_state_dict(weights)
    theirs.load_state_dict(weights)
    places = torch.arange(LENGTH)[None]
    turned = angles(places[:, None], (4096,), WIDTH, torch.float64)
    made = (
        halves(turned, HEADS, torch.float32)
        if kind is public.LTXRopeType.SPLIT
        else neighbours(turned, torch.float32)
    )
    x = noise(2, LENGTH, WIDTH)
    torch.testing.assert_close(theirs(x, pack_turn(places, kind)), ours(x, made))
    assert not torch.allclose(ours(x, made), ours(x.flip(1), made).flip(1))  # places matter


@pytest.mark.parametrize("kind", list(public.LTXRopeType))
def test_a_turn_keeps_lengths_and_pairs_without_an_axis(kind: public.LTXRopeType) -> None:
    freqs = noise(1, LENGTH, WIDTH // 2 - 2)
    pe: Any
    if kind is public.LTXRopeType.SPLIT:
        pe = (*public.split_freqs_cis(freqs, 2, HEADS), True)
        still = [0, 1, 2, 3]  # both pairs of the first head: channels 0 and 2, 1 and 3
    else:
        pe, still = public.interleaved_freqs_cis(freqs, 4), [0, 1, 2, 3]
    x = noise(1, LENGTH, WIDTH, seed=4)
    turned = public.apply_rotary_emb(x, pe)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[..., still], x[..., still])
    assert not torch.isclose(turned[..., 4:], x[..., 4:]).any()
    if kind is public.LTXRopeType.SPLIT:
        apart = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        heads = public.apply_rotary_emb(apart, pe)
        assert torch.equal(heads.transpose(1, 2).flatten(2), turned)


def test_configurations_name_turns_and_precision() -> None:
    told = {"rope_type": "split", "frequencies_precision": "float64"}
    assert public.LTXRopeType.from_dict(told) is public.LTXRopeType.SPLIT
    assert public.LTXRopeType.from_dict({}) is public.LTXRopeType.INTERLEAVED
    precision = public.LTXFrequenciesPrecision
    assert precision.from_dict(told) is precision.FLOAT64
    assert precision.from_dict({}) is precision.FLOAT32
    assert precision.from_dict({}, default=precision.FLOAT64) is precision.FLOAT64
    with pytest.raises(ValueError, match="'spiral' is not a valid LTXRopeType"):
        public.LTXRopeType.from_dict({"rope_type": "spiral"})


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_waves_of_times(flip: bool, shift: int) -> None:
    times = torch.tensor([0.0, 3.0, 500.0])
    wave = [math.exp(-math.log(10000) * n / (4 - shift)) for n in range(4)]
    sines = [[math.sin(2 * t * w) for w in wave] for t in times.tolist()]
    cosines = [[math.cos(2 * t * w) for w in wave] for t in times.tolist()]
    parts = (cosines, sines) if flip else (sines, cosines)
    wanted = torch.cat([torch.tensor(part) for part in parts], dim=1)
    made = public.Timesteps(8, flip_sin_to_cos=flip, downscale_freq_shift=shift, scale=2)(times)
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


def test_times_are_embedded_as_the_network_embeds_them() -> None:
    network = public.LTXVModel(**VIDEO_SIZES)
    network.load_state_dict(varied(network, 2))
    inside: Any = network.adaln_single.emb["timestep_embedder"]
    alone = public.TimestepEmbedding(256, 64, operations=operations)
    alone.load_state_dict(inside.state_dict())
    waves = public.Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)(torch.ones(1))
    assert torch.equal(alone(waves), network.adaln_single(torch.ones(1), torch.float32)[1])
    with pytest.raises(ValueError, match="expected act_fn 'silu'"):
        public.TimestepEmbedding(4, 4, act_fn="mish")


def test_a_pack_replaces_what_a_layer_does() -> None:
    """By an object patch on the forward of one attention, as packs for negative texts do."""
    network = public.LTXVModel(**VIDEO_SIZES).eval()
    network.load_state_dict(varied(network, 2))
    patcher = ModelPatcher(network, torch.device("cpu"), torch.device("cpu"))
    block: Any = network.transformer_blocks[1]
    assert type(block) is public.BasicTransformerBlock

    def forward(x: Tensor, context: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
        attn = block.attn2
        assert set(kwargs) == {"transformer_options"}
        q, k = attn.q_norm(attn.to_q(x)), attn.k_norm(attn.to_k(context))
        seen = public.CrossAttention.forward(attn, x, context, mask, **kwargs)
        return seen * 0 if (q.shape[-1], k.shape[-1]) == (attn.heads * attn.dim_head,) * 2 else seen

    args = (noise(1, 8, 2, 2, 2), torch.tensor([0.5]), noise(1, 3, TEXT))
    before = network(*args)
    patcher.add_object_patch("transformer_blocks.1.attn2.forward", forward)
    patcher.patch_model()
    without = network(*args)
    patcher.unpatch_model()
    assert torch.equal(network(*args), before)
    assert not torch.allclose(without, before)


@pytest.fixture(scope="module")
def both_streams() -> LTXAVModel:
    network = LTXAVModel(**SIZES).eval()
    network.load_state_dict(varied(network, 4))
    return network


def run(network: LTXAVModel, sound: Tensor, **told: bool) -> list[Tensor]:
    made = network(
        [noise(*VIDEO), sound], torch.tensor([0.5]), noise(1, 5, 2 * TEXT, seed=5),
        transformer_options=dict(told),
    )  # fmt: skip
    assert isinstance(made, list)
    return made


def test_packs_leave_out_streams_and_what_they_tell_each_other(both_streams: LTXAVModel) -> None:
    sounds = noise(*SOUND), noise(*SOUND, seed=9)
    whole = run(both_streams, sounds[0])
    deaf = run(both_streams, sounds[0], a2v_cross_attn=False)
    assert not torch.allclose(deaf[0], whole[0])
    # which sound it is does not matter to a video that does not hear it, nor one that stands still
    deaf_too = {"a2v_cross_attn": False, "v2a_cross_attn": False}
    apart = [run(both_streams, sound, **deaf_too) for sound in sounds]
    assert torch.equal(apart[0][0], apart[1][0])
    alone = both_streams(noise(*VIDEO), torch.tensor([0.5]), noise(1, 5, 2 * TEXT, seed=5))
    torch.testing.assert_close(apart[0][0], alone)
    blind = run(both_streams, sounds[0], v2a_cross_attn=False)
    assert not torch.allclose(blind[1], whole[1])
    still = run(both_streams, sounds[0], run_vx=False)
    assert not torch.allclose(still[1], whole[1])  # it hears of a video that no layer changed
    assert not torch.allclose(still[0], whole[0])
    mute = run(both_streams, sounds[0], run_ax=False)
    assert not torch.allclose(mute[1], whole[1])


@pytest.mark.parametrize("version", ["0.9.1", "2"])
def test_a_pack_puts_its_own_norm_and_convolution_into_the_autoencoder(version: str) -> None:
    config = VERSIONS[version]
    parts: dict[str, Any] = {"dtype": None, "device": None, "operations": operations}
    weights = {
        key.removeprefix("decoder."): value
        for key, value in autoencoder(config).items()
        if key.startswith("decoder.")
    }
    decoder = Decoder(config, {**parts, "spatial_padding_mode": config.decoder_border})
    decoder.load_state_dict(weights)
    calls: list[str] = []

    def norm(self: PixelNorm, x: Tensor) -> Tensor:
        calls.append("norm")
        return x / (x.square().mean(self.dim, keepdim=True) + self.eps).sqrt()

    def conv(self: CausalConv3d, x: Tensor, causal: bool | None = None) -> Tensor:
        calls.append("conv")
        return CausalConv3d.forward(self, x, causal)

    latent = noise(1, 8, 1, 2, 2)
    before = decoder(latent, 0.05, torch.Generator().manual_seed(0))
    residuals = [module for module in decoder.modules() if isinstance(module, ResnetBlock3D)]
    for module in decoder.modules():
        if isinstance(module, PixelNorm):
            module.forward = norm.__get__(module)  # type: ignore[method-assign]
        elif isinstance(module, CausalConv3d):
            module.forward = conv.__get__(module)  # type: ignore[method-assign]
    after = decoder(latent, 0.05, torch.Generator().manual_seed(0))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert calls.count("norm") == 2 * len(residuals) + 1
    assert calls.count("conv") >= 2 * len(residuals) + 2


def test_a_convolution_sees_the_past_only_or_both_sides() -> None:
    layer = CausalConv3d(1, 1, kernel_size=3)
    layer.load_state_dict({"conv.weight": torch.ones(1, 1, 3, 3, 3), "conv.bias": torch.zeros(1)})
    frames = torch.arange(1.0, 5).view(1, 1, 4, 1, 1)
    assert layer(frames).flatten().tolist() == [3, 4, 6, 9]
    assert layer(frames, causal=False).flatten().tolist() == [4, 6, 9, 11]
    assert issubclass(Encoder, nn.Module)


def test_the_sound_autoencoder_is_the_one_nodes_load() -> None:
    from comfy.ldm.lightricks.vae import audio_vae
    from comfy.vae import ltx_audio

    assert audio_vae.AudioVAE is ltx_audio.AudioVAE
    ratio = ltx_audio.AudioVAEConfig().ratio
    assert ratio == audio_vae.LATENT_DOWNSAMPLE_FACTOR
