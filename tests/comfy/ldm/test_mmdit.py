"""MMDiT (Stable Diffusion 3 and 3.5) against recorded tiny networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comfy.ldm.mmdit.model import OpenAISignatureMMDITWrapper
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net

INPUTS = ("x", "t", "context", "y")
NAMES = ("sd3_mmdit", "sd35_mmdit_rms", "sd35_medium_mmdit")


def build(net: GoldenNet) -> OpenAISignatureMMDITWrapper:
    model = OpenAISignatureMMDITWrapper(**net.constructor).eval()
    model.load_state_dict(net.weights)
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_networks_agree_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    model, given = build(net), net.inputs
    out = model(given["x"], given["t"], given["context"], given["y"])
    assert_close_to_golden(out, net.outputs["out"])
    odd = model(given["x_odd"], given["t"][:1], given["context"][:1], given["y"][:1])
    assert_close_to_golden(odd, net.outputs["out_odd"])


@torch.inference_mode()
def test_a_block_is_replaced(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/sd3_mmdit.safetensors")
    given, seen = net.inputs, []

    def keep(args, extra):
        seen.append(sorted(args))
        return extra["original_block"](args)

    options = {"patches_replace": {"dit": {("double_block", 1): keep}}}
    args = (given["x"], given["t"], given["context"], given["y"])
    out = build(net)(*args, transformer_options=options)
    assert seen == [["img", "transformer_options", "txt", "vec"]]
    assert_close_to_golden(out, net.outputs["out"])


@torch.inference_mode()
def test_a_latent_beyond_the_positions_is_refused_with_both_sizes(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/sd3_mmdit.safetensors")
    given = net.inputs
    with pytest.raises(ValueError, match=r"10 x 4.*8 x 8"):
        build(net)(torch.zeros(2, 4, 20, 8), given["t"], given["context"], given["y"])


@torch.inference_mode()
def test_every_attention_shows_its_result_and_where_the_picture_is(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/sd3_mmdit.safetensors")
    model, seen = build(net), []
    args = dict(zip(("x", "timesteps", "context", "y"), (net.inputs[k] for k in INPUTS)))
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
    assert len(seen) == len(model.joint_blocks)
    assert all(span == (text, shape[1]) and shape[0] == 2 for shape, span, _ in seen)
    assert {heads for *_, heads in seen} == {model.num_heads}
    assert not torch.allclose(run(darken), whole)
