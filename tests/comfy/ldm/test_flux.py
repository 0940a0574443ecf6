"""Flux and its kin against recorded tiny networks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comfy.ldm.flux.math import apply_rope1, rope
from comfy.ldm.flux.model import Flux, FluxParams
from tests.support.golden_nets import GoldenNet, read_golden_net
from tests.support.golden_nets import assert_close_to_golden as assert_close

# Guidance is multiplied by 1000 before its waves are taken, so the last bit of `exp`, which differs
# between versions of torch, shows.
TOLERANCE = 5e-5


def assert_close_to_golden(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(actual, expected, TOLERANCE)


def build(net: GoldenNet) -> Flux:
    model = Flux(**net.constructor).eval()
    model.load_state_dict(net.weights)
    return model


def given(net: GoldenNet) -> dict:
    names = {"t": "timestep"}
    skipped = ("x_odd", "ref_latent")
    return {names.get(k, k): v for k, v in net.inputs.items() if k not in skipped}


@pytest.mark.parametrize("name", ["flux", "flux_schnell", "flux_ovis", "flux2"])
@torch.inference_mode()
def test_networks_agree_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    assert_close_to_golden(build(net)(**given(net)), net.outputs["out"])


@torch.inference_mode()
def test_odd_sizes_come_back_to_their_size(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/flux.safetensors")
    args = {k: v[:1] for k, v in given(net).items()} | {"x": net.inputs["x_odd"]}
    assert_close_to_golden(build(net)(**args), net.outputs["out_odd"])


@pytest.mark.parametrize(
    ("name", "method", "key"),
    [
        ("flux", None, "out_ref_default(offset)"),
        ("flux", "index", "out_ref_index"),
        ("flux", "uxo", "out_ref_uxo"),
        ("flux2", None, "out_ref"),
    ],
)
@torch.inference_mode()
def test_references_agree_with_the_reference(name, method, key, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    args = {k: v[:1] for k, v in given(net).items()}
    latent = net.inputs["ref_latent"]
    # The recorded run of "index" had a second reference, half the first.
    args["ref_latents"] = [latent, latent * 0.5] if method == "index" else [latent]
    if method is not None:
        args["ref_latents_method"] = method
    assert_close_to_golden(build(net)(**args), net.outputs[key])


@torch.inference_mode()
def test_blocks_are_replaced_one_by_one(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/flux.safetensors")
    seen = []

    def keep(args, extra):
        seen.append(args["transformer_options"]["block_index"])
        return extra["original_block"](args)

    table = {("double_block", 0): keep, ("single_block", 1): keep}
    options = {"patches_replace": {"dit": table}}
    out = build(net)(**given(net), transformer_options=options)
    assert seen == [0, 1]
    assert_close_to_golden(out, net.outputs["out"])


@torch.inference_mode()
def test_control_residuals_reach_the_blocks(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/flux.safetensors")
    model, args = build(net), given(net)
    zero = {"input": [torch.zeros(2, 12, 32)], "output": [None, torch.zeros(2, 12, 32)]}
    assert_close_to_golden(model(**args, control=zero), net.outputs["out"])
    some = {"input": [torch.ones(2, 12, 32)], "output": []}
    assert not torch.allclose(model(**args, control=some), net.outputs["out"])


def test_axes_that_do_not_fill_a_head_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"\[4, 4\].*16"):
        FluxParams(4, 4, None, 8, 32, 2.0, 2, 1, 1, [4, 4], 10000, 2, True, False)


@torch.inference_mode()
def test_every_attention_shows_its_result_and_where_the_picture_is(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/flux.safetensors")
    model, seen = build(net), []
    args = given(net)
    whole = model(**args)
    text = args["context"].shape[1]

    def watch(out: torch.Tensor, extra_options: dict) -> torch.Tensor:
        seen.append((tuple(out.shape), tuple(extra_options["img_slice"]), extra_options["n_heads"]))
        assert "patches" not in extra_options
        return out

    def darken(out: torch.Tensor, extra_options: dict) -> torch.Tensor:
        start, stop = extra_options["img_slice"]
        return torch.cat([out[:, :start], out[:, start:stop] * 0, out[:, stop:]], dim=1)

    def run(patch: object) -> torch.Tensor:
        options = {"patches": {"attn1_output_patch": [patch]}}
        return model(**args, transformer_options=options)

    assert torch.equal(run(watch), whole)
    assert len(seen) == len(model.double_blocks) + len(model.single_blocks)
    assert all(span == (text, shape[1]) and shape[0] == 2 for shape, span, _ in seen)
    assert {heads for *_, heads in seen} == {model.num_heads}
    assert not torch.allclose(run(darken), whole)


def turned(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`apply_rope1` by its definition."""
    pairs = x.to(matrices.dtype).unflatten(-1, (-1, 1, 2))
    return (matrices[..., 0] * pairs[..., 0] + matrices[..., 1] * pairs[..., 1]).flatten(-2)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize(("heads", "length", "head"), [(3, 1501, 128), (6, 501, 40), (1, 3, 2)])
def test_channels_have_the_same_bits_wherever_vectors_and_threads_end(
    heads: int, length: int, head: int, threads: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = rope(100 * torch.randn(1, length, generator=generator), head, 10000.0)[:, None]
    for shape in ((2, heads, length, head), (2, length, heads, head)):
        x = torch.randn(shape, generator=generator)
        x = x if shape[2] == length else x.transpose(1, 2)
        assert torch.equal(apply_rope1(x, matrices), turned(x, matrices))
        assert torch.equal(apply_rope1(x[:1], matrices), turned(x, matrices)[:1])
        several = torch.cat([matrices, matrices])
        assert torch.equal(apply_rope1(x[:1], several), turned(x[:1], several))


@pytest.mark.parametrize("lies", ["in order", "heads last", "reversed", "odd start", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rotation", "stretched rotation", "any matrix"])
def test_channels_are_turned_to_the_same_bits_however_they_lie(kind, dtype, lies) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 19, 32, generator=generator).to(dtype)
    matrices = rope(torch.arange(19.0)[None], 32, 10000.0)[:, None]
    if kind != "rotation":
        matrices = matrices * 1.3
    if kind == "any matrix":
        matrices = matrices + torch.randn(matrices.shape, generator=generator)
    if lies == "heads last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif lies == "reversed":
        x = x.mT.contiguous().mT
    elif lies == "odd start":
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    elif lies == "nothing":
        x = x[:0]
    out = apply_rope1(x, matrices)
    assert out.dtype == dtype
    assert torch.equal(out, turned(x, matrices).to(dtype))
