"""Control networks: chains, strength, ranges against recorded runs; loading; sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy.control import loading
from comfy.control.base import ControlBase, StrengthType, broadcast_image_to
from comfy.control.hints import with_channels
from comfy.control.networks import ControlLora, ControlNet, T2IAdapter
from comfy.families import sd15
from comfy.ldm.unet import controlnet
from comfy.patching.patcher import ModelPatcher
from comfy.sampling import run
from comfy.weights.errors import UnknownWeightFormatError
from tests.support.golden_nets import read_golden_net


@pytest.fixture(scope="module")
def patcher(golden_folder: Path) -> ModelPatcher:
    recorded = read_golden_net(golden_folder / "nets/unet_sd1.safetensors")
    family = sd15.SD15({**recorded.constructor, "dtype": torch.float32})
    family.unet_config.update(num_heads=recorded.constructor["num_heads"])
    model = family.get_model({}, "", device="meta")
    model.load_model_weights(dict(recorded.weights))
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


@pytest.fixture(scope="module")
def case(golden_folder: Path) -> dict[str, Tensor]:
    return load_file(str(golden_folder / "nets/e2e_sd1_tiny.safetensors"))


@pytest.fixture(scope="module")
def network(golden_folder: Path) -> torch.nn.Module:
    recorded = read_golden_net(golden_folder / "nets/controlnet_sd1.safetensors")
    model = controlnet.ControlNet(**recorded.constructor)
    model.load_state_dict(recorded.weights)
    return model.eval()


def hinted(network: torch.nn.Module, image: Tensor, strength: float, *limits: float) -> ControlBase:
    control = ControlNet(network, load_device=torch.device("cpu"))
    return control.copy().set_cond_hint(image.movedim(-1, 1), strength, limits or (0.0, 1.0))


def sample(patcher: ModelPatcher, case: dict[str, Tensor], control: ControlBase | None) -> Tensor:
    options: dict[str, Any] = {}
    if control is not None:
        options = {"control": control, "control_apply_to_uncond": False}
    noise = torch.randn([1, 4, 8, 8], generator=torch.manual_seed(42))
    return run.sample(
        patcher,
        noise,
        4,
        5.0,
        "euler",
        "normal",
        [[case["in/pos"], dict(options)]],
        [[case["in/neg"], dict(options)]],
        torch.zeros(1, 4, 8, 8),
        seed=42,
        disable_pbar=True,
    )


def assert_recorded(got: Tensor, expected: Tensor) -> None:
    """Agrees within 4 times the rounding found, of the output's spread."""
    assert (got - expected).abs().max() < 3e-5 * expected.std()


@pytest.mark.parametrize(
    ("strength", "start", "end"),
    [(0.6, 0.0, 1.0), (1.0, 0.0, 0.5), (1.0, 0.0, 1.0), (1.0, 0.3, 0.8)],
)
def test_strength_and_range_agree_with_the_reference(
    patcher, case, network, strength, start, end
) -> None:
    control = hinted(network, case["in/image"], strength, start, end)
    expected = case[f"out/cn_strength{strength}_start{start}_end{end}"]
    assert_recorded(sample(patcher, case, control), expected)
    assert control.cond_hint is None, "a run leaves nothing behind"


def test_a_chain_adds_up_as_in_the_reference(patcher, case, network) -> None:
    first = hinted(network, case["in/image"], 0.5)
    second = hinted(network, 1 - case["in/image"], 0.4).set_previous_controlnet(first)
    assert_recorded(sample(patcher, case, second), case["out/cn_chained_0.5_0.4inverted"])
    assert len(second.get_models()) == 2


def test_global_average_pooling_agrees_with_the_reference(patcher, case, network) -> None:
    control = hinted(network, case["in/image"], 1.0)
    control.global_average_pooling = True
    assert_recorded(sample(patcher, case, control), case["out/cn_global_average_pooling"])


def test_a_file_is_recognised_and_built_from_its_shapes(
    golden_folder, patcher, case, tmp_path
) -> None:
    recorded = read_golden_net(golden_folder / "nets/controlnet_sd1.safetensors")
    path = tmp_path / "tiny_shuffle.safetensors"
    save_file(recorded.weights, path, metadata={"unet_config": '{"num_heads": 4}'})
    control = loading.load_controlnet(str(path))
    assert isinstance(control, ControlNet)
    assert control.global_average_pooling
    control.global_average_pooling = False
    control.set_cond_hint(case["in/image"].movedim(-1, 1))
    expected = case["out/cn_strength1.0_start0.0_end1.0"]
    assert_recorded(sample(patcher, case, control), expected)


def test_an_unknown_file_is_refused_by_name(tmp_path) -> None:
    save_file({"foo.weight": torch.zeros(1)}, tmp_path / "foo.safetensors")
    with pytest.raises(UnknownWeightFormatError, match=r"foo\.safetensors.*ControlNet"):
        loading.load_controlnet(str(tmp_path / "foo.safetensors"))


@pytest.mark.parametrize("name", ["full", "light", "xl"])
def test_t2i_adapters_are_recognised(name: str, golden_folder: Path) -> None:
    recorded = read_golden_net(golden_folder / f"nets/t2i_adapter_{name}.safetensors")
    control = loading.load_controlnet_state_dict(dict(recorded.weights))
    assert isinstance(control, T2IAdapter)
    assert control.channels_in == 3
    built = control.t2i_model(recorded.inputs["x"])
    first = recorded.outputs["input/1" if name == "xl" else "input/0"]
    torch.testing.assert_close(
        built["input"][1 if name == "xl" else 0], first, rtol=1e-4, atol=1e-5
    )


def test_an_adapter_acts_through_the_sampler(golden_folder, patcher, case) -> None:
    recorded = read_golden_net(golden_folder / "nets/t2i_adapter_full.safetensors")
    adapter = loading.load_controlnet_state_dict(dict(recorded.weights))

    class Fitting(torch.nn.Module):
        unshuffle_amount = 8

        def forward(self, hint: Tensor) -> dict[str, list]:
            assert hint.shape[-2:] == (64, 64)
            return {"input": [None, hint.new_ones(1, 32, 8, 8)]}

    adapter.t2i_model = Fitting()
    adapter.set_cond_hint(case["in/image"].movedim(-1, 1), 0.5)
    changed = sample(patcher, case, adapter)
    assert not torch.allclose(changed, case["out/plain"], atol=1e-3)


def test_a_control_lora_of_no_difference_is_a_copy_of_the_model(patcher, network) -> None:
    own = ("input_hint_block.", "zero_convs.", "middle_block_out.")
    weights = {k: v for k, v in network.state_dict().items() if k.startswith(own)}
    stem = "time_embed.0"
    weights[f"{stem}.up"], weights[f"{stem}.down"] = torch.ones(128, 2), torch.zeros(2, 32)
    weights["lora_controlnet"] = torch.tensor([])
    control = loading.load_controlnet_state_dict(weights)
    assert isinstance(control, ControlLora)
    control.pre_run(patcher.model, lambda percent: percent)
    base = patcher.model.diffusion_model.state_dict()
    built = control.control_model.state_dict()
    assert torch.equal(built["time_embed.0.weight"], base["time_embed.0.weight"])
    assert torch.equal(built["zero_convs.0.0.weight"], weights["zero_convs.0.0.weight"])
    control.cleanup()
    assert control.control_model is None


@pytest.mark.parametrize(
    ("given", "batch", "conds", "expected"),
    [(1, 4, 2, [0]), (2, 4, 2, [0, 1, 0, 1]), (3, 4, 2, [0, 1, 0, 1]), (2, 6, 2, [0, 1, 0] * 2)],
)
def test_hints_are_repeated_to_the_batch(given, batch, conds, expected) -> None:
    assert broadcast_image_to(torch.arange(given), batch, conds).tolist() == expected


def test_linear_strength_grows_towards_the_end_and_shared_tensors_are_scaled_once() -> None:
    control = ControlBase()
    control.strength, control.strength_type = 0.5, StrengthType.LINEAR_UP
    ones = torch.ones(1)
    merged = control.control_merge({"output": [torch.ones(1), torch.ones(1), None]}, None, None)
    assert [None if v is None else v.item() for v in merged["output"]] == [0.125, 0.25, None]
    control.strength_type = StrengthType.CONSTANT
    merged = control.control_merge({"output": [ones, ones]}, None, None)
    assert merged["output"][0] is merged["output"][1]
    assert ones.item() == 1.0


def test_a_missing_hint_or_vae_is_named(network) -> None:
    control = ControlNet(network, load_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="no hint"):
        control._make_hint(64, 64)
    control.latent_format = object()
    with pytest.raises(ValueError, match="needs a VAE"):
        control._make_hint(64, 64)


def test_a_network_for_texts_of_another_width_is_refused(patcher, case, network) -> None:
    control = hinted(network, torch.rand(1, 64, 64, 3), 1.0)
    options = {"control": control, "cross_attn_controlnet": torch.zeros(1, 4, 48)}
    conds = [[case["in/pos"], options]], [[case["in/neg"], {}]]
    latent = torch.zeros(1, 4, 8, 8)
    with pytest.raises(ValueError, match="expected a ControlNet for texts of width 48"):
        run.sample(patcher, latent, 1, 5.0, "euler", "normal", *conds, latent, disable_pbar=True)


def counted(channels: int) -> torch.Tensor:
    """A hint whose channels hold 1, 2, 3, ..."""
    return torch.arange(1.0, channels + 1).reshape(1, -1, 1, 1).expand(1, -1, 8, 8)


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        (3, 3, [1, 2, 3]), (4, 3, [1, 2, 3]), (1, 3, [1, 1, 1]), (2, 3, [1, 1, 1]),
        (3, 1, [2]), (4, 1, [2]), (6, 6, [1, 2, 3, 4, 5, 6]), (5, None, [1, 2, 3, 4, 5]),
    ],
)  # fmt: skip
def test_hints_have_the_channels_that_a_network_takes(
    given: int, wanted: int | None, expected: list[float]
) -> None:
    assert with_channels(counted(given), wanted)[0, :, 0, 0].tolist() == expected


def test_hints_that_are_no_colours_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"image: expected a hint of 6 channels, .* found 3"):
        with_channels(counted(3), 6)
    with pytest.raises(ValueError, match=r"image: .*real numbers .* found torch.uint8"):
        with_channels(counted(3).to(torch.uint8), 3)
    with pytest.raises(ValueError, match=r"image: expected pictures .* found a tensor of 3 axes"):
        with_channels(counted(3)[0], 3)


def test_transparency_and_grey_change_nothing_for_a_run(patcher, case, network) -> None:
    latent = torch.zeros(1, 4, 8, 8)
    grey = torch.rand(1, 64, 64, 1)

    def made(hint: torch.Tensor) -> torch.Tensor:
        conds = [
            [[case[name], {"control": hinted(network, hint, 1.0)}]] for name in ("in/pos", "in/neg")
        ]
        return run.sample(
            patcher, latent, 1, 5.0, "euler", "normal", *conds, latent, disable_pbar=True
        )

    colours = grey.expand(-1, -1, -1, 3)
    for hint in (grey, torch.cat([colours, torch.rand_like(grey)], dim=-1)):
        assert torch.equal(made(hint), made(colours))
