"""Control networks on a simulated accelerator: a second device, little memory, patched models.

Whatever the residency of the diffusion model and of the control network, a run gives the same
latent, and leaves weights and memory as they were.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import comfy.controlnet
import comfy.sample
import comfy.utils
from comfy import loading
from comfy.control.base import ControlBase
from comfy.control.loading import load_controlnet_state_dict
from comfy.control.networks import T2IAdapter
from comfy.devices import residency
from comfy.ldm.t2i_adapter.model import Adapter_light
from comfy.ldm.unet.controlnet import ControlNet
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from comfy.weights.adapters import LoRAAdapter
from tests.comfy.patching.test_packs_sampling import NEGATIVE, POSITIVE, close
from tests.support import tiny_checkpoint
from tests.support.accelerator import assert_untouched, snapshot

HINT = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(9))
ENCODER = "diffusion_model.input_blocks.3.1.transformer_blocks.0.attn1.to_q.weight"
LITTLE = 700_000  # bytes; the diffusion model alone has more
KINDS = (ModelPatcher, ModelPatcherDynamic)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("control") / "tiny.safetensors")


@pytest.fixture
def model(checkpoint: Path, accelerator: Any) -> Any:
    accelerator.set_device_count(2)
    return loading.load_checkpoint_guess_config(
        str(checkpoint), output_vae=False, output_clip=False
    ).model


def control_network(model: Any) -> ControlNet:
    """A ControlNet of random weights for a diffusion model."""
    config = dict(model.model.model_config.unet_config)
    for name in ("out_channels", "transformer_depth_output", "dtype"):
        config.pop(name, None)
    network = ControlNet(hint_channels=3, **config)
    generator = torch.Generator().manual_seed(4)
    for key, weight in network.state_dict().items():
        own = model.model.diffusion_model.state_dict().get(key)
        if own is None:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        else:
            weight.copy_(own + torch.randn(own.shape, generator=generator) * 0.01)
    return network.requires_grad_(False).eval()


def control_lora(model: Any) -> ControlBase:
    network = control_network(model)
    base = model.model.diffusion_model.state_dict()
    weights = {key: value for key, value in network.state_dict().items() if key not in base}
    generator = torch.Generator().manual_seed(5)
    for key, weight in network.state_dict().items():
        if key in base and weight.ndim > 1:
            stem = key.removesuffix(".weight")
            weights[f"{stem}.up"] = torch.randn(weight.shape[0], 2, generator=generator) * 0.2
            weights[f"{stem}.down"] = torch.randn(2, weight[0].numel(), generator=generator) * 0.2
    weights["lora_controlnet"] = torch.tensor([])
    control = load_controlnet_state_dict(weights)
    assert control is not None
    return control


def whole_network(model: Any) -> ControlBase:
    weights = dict(control_network(model).state_dict())
    control = load_controlnet_state_dict(weights, metadata=tiny_checkpoint.HEADER)
    assert control is not None
    return control


def adapter(model: Any) -> ControlBase:
    network = Adapter_light(channels=[16, 16, 32, 32], nums_rb=1, cin=192)
    generator = torch.Generator().manual_seed(6)
    for weight in network.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    network.requires_grad_(False)
    return T2IAdapter(_Fitting(network).eval(), 3, 8, "nearest-exact")


class _Fitting(torch.nn.Module):
    """An adapter for the two levels of the tiny network."""

    unshuffle_amount = 8

    def __init__(self, network: Adapter_light) -> None:
        super().__init__()
        self.network = network

    def forward(self, hint: Tensor) -> dict[str, list[Tensor | None]]:
        features = [f for f in self.network(hint)["input"] if f is not None]
        return {"input": [None, features[-1]]}


CONTROLS = {"lora": control_lora, "network": whole_network, "adapter": adapter}


def lora(model: Any) -> dict[str, Any]:
    weight = model.model.state_dict()[ENCODER]
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(weight.shape[0], 2, generator=generator)
    down = torch.randn(2, weight.shape[1], generator=generator)
    return {ENCODER: LoRAAdapter(set(), (up, down, 2.0, None, None, None))}


def sample(model: Any, control: ControlBase | None) -> Tensor:
    noise = comfy.sample.prepare_noise(torch.zeros(1, 4, 8, 8), 3, None)
    options = {}
    if control is not None:
        given = control.copy().set_cond_hint(HINT, 0.8)
        options = {"control": given, "control_apply_to_uncond": False}
    return comfy.sample.sample(
        model, noise, 2, 4.0, "euler", "normal", [[POSITIVE, options]], [[NEGATIVE, dict(options)]],
        torch.zeros(1, 4, 8, 8), disable_pbar=True, seed=3,
    )  # fmt: skip


def variants(model: Any, kind: type[ModelPatcher], device: torch.device) -> dict[str, Any]:
    """Views of a model on a device, plain and with a LoRA on a weight the control network has."""
    plain = kind(model.model, device, model.offload_device)
    patched = plain.clone()
    patched.add_patches(lora(model))
    return {"plain": plain, "patched": patched}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_controlled_run_gives_the_same_wherever_the_weights_are(
    model: Any, accelerator: Any, name: str
) -> None:
    control = CONTROLS[name](model)
    first = torch.device(f"{accelerator.NAME}:0")
    before = snapshot(model.model)
    views = variants(model, ModelPatcher, first)
    want = {key: sample(view, control) for key, view in views.items()}
    assert not close(want["plain"], sample(views["plain"], None))
    assert not close(want["plain"], want["patched"])
    second = torch.device(f"{accelerator.NAME}:1")
    for kind, capacity in itertools.product(KINDS, (1 << 30, LITTLE)):
        residency.unload_all_models()
        accelerator.set_capacity(capacity, 1)
        views = variants(model, kind, second)
        for key in ("patched", "plain"):
            assert close(sample(views[key], control), want[key]), (kind, capacity)
        assert torch.accelerator.memory_allocated(0) == 0
    residency.unload_all_models()
    gc.collect()
    assert torch.accelerator.memory_allocated(0) == torch.accelerator.memory_allocated(1) == 0
    assert_untouched(model.model, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONTROLS)
def test_memory_that_runs_out_anywhere_in_a_controlled_run_leaves_no_trace(
    model: Any, accelerator: Any, name: str, kind: type[ModelPatcher]
) -> None:
    control = CONTROLS[name](model)
    device = torch.device(f"{accelerator.NAME}:1")
    before = snapshot(model.model)
    network = getattr(control, "t2i_model", None) or getattr(control, "control_model", None)
    own = {} if network is None else snapshot(network)
    views = variants(model, kind, device)
    want = sample(views["patched"], control)
    for after, failures, capacity in ((1, 50, 1 << 30), (17, 1, LITTLE), (61, 50, LITTLE)):
        residency.unload_all_models()
        accelerator.set_capacity(capacity, 1)
        accelerator.fail_allocation(after, failures)
        with contextlib.suppress(residency.OutOfMemoryReport):
            assert close(sample(views["patched"], control), want)
        accelerator.fail_allocation(-1)
    assert close(sample(views["patched"], control), want)
    residency.unload_all_models()
    gc.collect()
    assert torch.accelerator.memory_allocated(1) == 0
    assert_untouched(model.model, before)
    if network is not None:
        assert_untouched(network, own)


def test_a_control_lora_costs_a_run_what_it_says(model: Any, accelerator: Any) -> None:
    """Its network is planned before there is one, so nothing loaded for the run has to go again."""
    control = control_lora(model)
    view = variants(model, ModelPatcher, torch.device(f"{accelerator.NAME}:0"))["patched"]
    seen: list[tuple[int, int]] = []

    def loaded(*_: Any) -> None:
        seen.append((view.loaded_size(), len(residency.loaded_models(True))))

    view.set_model_unet_function_wrapper(
        lambda apply, args: (loaded(), apply(args["input"], args["timestep"], **args["c"]))[1]
    )
    accelerator.set_capacity(1_100_000)
    sample(view, control)
    during = seen[-1]
    assert during[1] == 2, "the control network is one of the run's models"
    assert residency.loaded_models() == [view]
    assert view.loaded_size() == during[0] > 0


class Keyframed:
    """What a pack puts before the classes of control networks: strengths by step and block."""

    keyframes: list[tuple[float, float]]
    weights: list[float]

    def become(self, control: Any, keyframes: list[tuple[float, float]]) -> Any:
        control.copy_to(self)
        self.keyframes, self.weights, self.starts = keyframes, [1.0, 0.5, 0.25, 0.8], []
        self.told: list[str] = []
        return self

    def copy(self) -> Any:
        lora = isinstance(self, comfy.controlnet.ControlLora)
        new = type(self)(self.control_weights) if lora else type(self)(None)
        if not lora:
            new.control_model = self.control_model
            new.control_model_wrapped = self.control_model_wrapped.clone()
            new.manual_cast_dtype = self.manual_cast_dtype
        return new.become(self, self.keyframes)

    def pre_run(self, model: Any, percent_to_timestep_function: Any) -> None:
        super().pre_run(model, percent_to_timestep_function)
        self.starts = [percent_to_timestep_function(start) for start, _ in self.keyframes]
        self.told.append("pre_run")

    def cleanup(self) -> None:
        super().cleanup()
        self.starts = []
        self.told.append("cleanup")

    def get_control(self, x_noisy: Tensor, t: Tensor, cond: Any, batched_number: int,
                    transformer_options: Any) -> Any:  # fmt: skip
        before = None
        if self.previous_controlnet is not None:
            before = self.previous_controlnet.get_control(
                x_noisy, t, cond, batched_number, transformer_options
            )
        dtype = self.manual_cast_dtype or self.control_model.dtype
        size = [side * self.compression_ratio for side in x_noisy.shape[-2:]]
        if self.cond_hint is None:
            hint = comfy.utils.common_upscale(
                self.cond_hint_original, size[1], size[0], "nearest-exact", "center"
            )
            self.cond_hint = hint.to(device=x_noisy.device, dtype=dtype)
        hint = comfy.controlnet.broadcast_image_to(self.cond_hint, x_noisy.shape[0], batched_number)
        sampling = self.model_sampling_current
        control = self.control_model(
            x=sampling.calculate_input(t, x_noisy).to(dtype), hint=hint,
            timesteps=sampling.timestep(t).float(), context=cond["c_crossattn"].to(dtype), y=None,
        )  # fmt: skip
        current = max(i for i, start in enumerate(self.starts) if t[0] <= start)
        self.now = self.keyframes[current][1]
        return self.control_merge(control, before, output_dtype=None)

    def control_merge(self, control: Any, control_prev: Any, output_dtype: Any) -> Any:
        for part, residuals in control.items():
            control[part] = [None if r is None else r * self.now * self.weights[i % 4]
                             for i, r in enumerate(residuals)]  # fmt: skip
        return super().control_merge(control, control_prev, output_dtype)


class KeyframedNet(Keyframed, comfy.controlnet.ControlNet):
    pass


class KeyframedLora(Keyframed, comfy.controlnet.ControlLora):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_control_networks_that_a_pack_subclasses_run_in_chains_wherever_the_weights_are(
    model: Any, accelerator: Any, kind: type[ModelPatcher]
) -> None:
    keyframes = [(0.0, 1.0), (0.4, 0.3)]
    vanilla, low_rank = whole_network(model), control_lora(model)
    net = KeyframedNet(vanilla.control_model, manual_cast_dtype=vanilla.manual_cast_dtype)
    net.become(vanilla, keyframes)
    chain = KeyframedLora(low_rank.control_weights).become(low_rank, keyframes)
    before = snapshot(model.model), snapshot(vanilla.control_model)
    views = variants(model, ModelPatcher, torch.device(f"{accelerator.NAME}:0"))
    copies: list[Any] = []

    def run(view: Any) -> Tensor:
        first = net.copy().set_cond_hint(1 - HINT, 0.5)
        last = chain.copy().set_cond_hint(HINT, 0.8).set_previous_controlnet(first)
        copies[:] = [first, last]
        options = {"control": last, "control_apply_to_uncond": False}
        conds = [[[tensor, dict(options)]] for tensor in (POSITIVE, NEGATIVE)]
        latent = torch.zeros(1, 4, 8, 8)
        noise = comfy.sample.prepare_noise(latent, 3, None)
        return comfy.sample.sample(view, noise, 2, 4.0, "euler", "normal", *conds, latent,
                                   disable_pbar=True, seed=3)  # fmt: skip

    want = {key: run(view) for key, view in views.items()}
    assert not close(want["plain"], sample(views["plain"], low_rank))
    for index, capacity in ((0, LITTLE), (1, 1 << 30), (1, LITTLE)):
        residency.unload_all_models()
        accelerator.set_capacity(capacity, index)
        views = variants(model, kind, torch.device(f"{accelerator.NAME}:{index}"))
        for key in ("patched", "plain"):
            assert close(run(views[key]), want[key]), (index, capacity, key)
            assert all(control.told[-1] == "cleanup" for control in copies)
    residency.unload_all_models()
    copies.clear()
    gc.collect()
    assert torch.accelerator.memory_allocated(0) == torch.accelerator.memory_allocated(1) == 0
    assert_untouched(model.model, before[0])
    assert_untouched(vanilla.control_model, before[1])
