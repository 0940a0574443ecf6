"""Every kind of change on tables, convolutions and matrices, in every storage type and on every
path that a weight takes to its layer: the same bits on all of them, and nothing left behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy import ops
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumWeightTarget, WeightHook, create_target_dict
from comfy.patching.patcher import ModelPatcher
from comfy.weights.adapters import ADAPTERS, LoRAAdapter
from comfy.weights.arithmetic import calculate_weight
from comfy.weights.assign import assign_weights
from comfy.weights.lora import load_lora
from tests.comfy.patching.test_residency_of_one_model import TOKENS, X, on_cpu, run
from tests.comfy.weights.test_encodings import coded
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot
from tests.support.from_file import network_from_file

KEYS = ("embed.weight", "conv.weight", "blocks.0.up.weight", "blocks.1.down.weight", "out.weight")
STEP = {
    torch.float32: 2**-21,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.float8_e4m3fn: 2**-3,
    torch.float8_e5m2: 2**-2,
}
"""Largest step between neighbours of a type, relative to their size."""


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))) / 4


def tensors_of(kind: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """What a file holds for one weight."""
    rows, columns, kernel = shape[0], shape[1], tuple(shape[2:])
    inner = torch.Size(shape[1:]).numel()
    down = rand(2, columns, *kernel)
    product = {"lora_up.weight": rand(rows, 2), "lora_down.weight": down, "alpha": torch.ones(1)}
    if kind == "lora with a core":
        product = {"lora_up.weight": rand(rows, 3), "lora_down.weight": rand(2, columns),
                   "lora_mid.weight": rand(3, 2, *(kernel or (1, 1)))}  # fmt: skip
    files: dict[str, dict[str, Tensor]] = {
        "lora": product,
        "lora with a core": product,
        "dora of inputs": {**product, "dora_scale": 1 + rand(1, columns, *(1 for _ in kernel))},
        "dora of outputs": {**product, "dora_scale": 1 + rand(rows, 1, *(1 for _ in kernel))},
        "dora of peft": {"lora_B.weight": rand(rows, 2), "lora_A.weight": down,
                         "lora_magnitude_vector": 1 + rand(rows)},
        "loha": {"hada_w1_a": rand(rows, 2), "hada_w1_b": rand(2, inner),
                 "hada_w2_a": rand(rows, 2), "hada_w2_b": rand(2, inner)},
        "lokr": {"lokr_w1": rand(2, 2), "lokr_w2": rand(rows // 2, columns // 2, *kernel)},
        "glora": {f"{name}.weight": rand(*size) for name, size in (
            ("a1", (columns, 2)), ("a2", (2, columns)), ("b1", (rows, 2)), ("b2", (2, inner)))},
        "oft": {"oft_blocks": rand(rows // 4, 4, 4), "alpha": torch.tensor(2.0)},
        "boft": {"oft_blocks": rand(2, rows // 2, 2, 2), "alpha": torch.tensor(2.0)},
        "ia3": {"weight": rand(rows), "on_input": torch.tensor(False)},
        "oft_of_inputs": {"oft_R.weight": rand(inner // 4, 6)},
        "boft_of_inputs": {"boft_R": rand(1, inner // 4, 4, 4), "boft_s": 1 + rand(rows, 1)},
        "bias of a factor": {"lora_B.weight": rand(rows, 2), "lora_A.weight": down,
                             "lora_B.bias": rand(rows), "alpha": torch.ones(1)},
        "diff": {"diff": rand(*shape)},
        "set": {"set_weight": rand(*shape)},
    }  # fmt: skip
    return files[kind]


KINDS = (
    "lora", "lora with a core", "dora of inputs", "dora of outputs", "dora of peft", "loha", "lokr",
    "glora", "oft", "boft", "ia3", "oft_of_inputs", "boft_of_inputs", "diff", "set",
)  # fmt: skip


PLACED = ("parts of rows", "part of columns", "function", "padded diff", "model_as_lora")
"""Changes that say where they go, or how; a file holds none of them as such."""


def turned(change: Tensor) -> Tensor:
    return change.flip(0)


def placed(kind: str, key: str, shape: tuple[int, ...]) -> dict[Any, Any]:
    """One change of a kind of `PLACED`, or two, as `add_patches` takes them."""
    rows, columns, half = shape[0], shape[1] // 2, shape[0] // 2
    up, down = rand(half, 2), rand(2, *shape[1:])
    grown = (rows + 3, *shape[1:]) if key == "embed.weight" else shape  # a table may have more rows
    return {
        "parts of rows": {
            (key, (0, 1, half)): LoRAAdapter(set(), (up, down, 1.0, None, None, None)),
            (key, (0, -half, half)): ("diff", (rand(half, *shape[1:]),)),
        },
        "part of columns": {(key, (1, 1, columns)): ("diff", (rand(rows, columns, *shape[2:]),))},
        "function": {
            (key, (0, 0, rows), turned): LoRAAdapter(
                set(), (rand(rows, 2), down, 1.0, None, None, None)
            )
        },
        "padded diff": {key: ("diff", (rand(*grown), {"pad_weight": True}))},
        "model_as_lora": {key: ("model_as_lora", (rand(*shape),))},
    }[kind]


def entries(patches: dict[Any, Any], key: str, strength: float, factor: float) -> list[Any]:
    """The changes of one weight as `calculate_weight` takes them."""
    found = [((k, None, None) if k == key else (*k, None)[:3], v) for k, v in patches.items()]
    return [(strength, v, factor, k[1], k[2]) for k, v in found if k[0] == key]


def patches_for(model: Network, kind: str) -> dict[Any, Any]:
    state = model.state_dict()
    patches: dict[Any, Any] = {}
    if kind in PLACED:
        for key in KEYS:
            patches.update(placed(kind, key, tuple(state[key].shape)))
        return patches
    for key in KEYS:
        file = {f"x.{name}": t for name, t in tensors_of(kind, tuple(state[key].shape)).items()}
        patches.update(load_lora(file, {"x": key}))
    assert list(patches) == list(KEYS)
    return patches


def test_no_kind_is_forgotten() -> None:
    model = Network()
    found = {getattr(patches_for(model, kind)[KEYS[0]], "name", kind) for kind in KINDS}
    assert found == {kind.name for kind in ADAPTERS} | {"diff", "set"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *PLACED])
def test_every_path_gives_the_same_bits_and_leaves_the_weights(
    accelerator: Any, kind: str, dtype: torch.dtype
) -> None:
    model = Network(depth=2, dtype=dtype, operations=ops.manual_cast)
    model.scale.data = torch.ones(1)  # used without a layer, and there is no product in float8
    before, plain = snapshot(model), on_cpu(model)
    patches = patches_for(model, kind)
    want = on_cpu(model, patches)
    assert not torch.equal(want, plain)
    device = torch.device(f"{accelerator.NAME}:0")
    for patcher_class in (ModelPatcher, ModelPatcherDynamic):
        for budget in (0, int(bytes_of(model) * 0.3)):
            patcher = patcher_class(model, device, CPU)
            patcher.add_patches(patches)
            patcher.patch_model(device, budget)
            for _ in range(2):
                assert torch.equal(run(model, accelerator), want), (patcher_class, budget)
            patcher.detach()
            assert_untouched(model, before)
    assert torch.equal(on_cpu(model), plain)


@pytest.mark.parametrize("used", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *PLACED])
def test_what_was_read_from_a_file_shows_the_same_and_comes_back(
    kind: str, used: torch.dtype, tmp_path: Path
) -> None:
    """Such weights lend their memory, where the kind of change allows it."""
    model = network_from_file(tmp_path, used=used)
    model.scale.data = torch.ones(1)
    patches, before = patches_for(model, kind), snapshot(model)
    want = on_cpu(copy.deepcopy(model), patches)
    for patcher_class in (ModelPatcher, ModelPatcherDynamic):
        patcher = patcher_class(model, CPU, CPU)
        patcher.add_patches(patches)
        patcher.patch_model(CPU)
        lent = patcher.residence.lent
        if kind == "lora" and used != torch.float8_e4m3fn:
            assert lent.keys() == set(KEYS)
        with torch.inference_mode():
            torch.testing.assert_close(model(X, TOKENS), want, rtol=1e-5, atol=1e-5)
        patcher.detach()
        assert_untouched(model, before)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *PLACED])
def test_a_rounded_weight_is_next_to_the_exact_one(kind: str, dtype: torch.dtype) -> None:
    model = Network(depth=2, dtype=dtype)
    patches, before = patches_for(model, kind), snapshot(model)
    limit, least = torch.finfo(dtype).max, max(torch.finfo(dtype).tiny, 2**-16)
    for strength, factor in ((0.0, 1.0), (-1.5, 1.0), (40.0, 1.0), (0.5, -0.25)):
        view = ModelPatcher(model, CPU, CPU)
        view.add_patches(patches, strength, factor)
        view.patch_model(CPU)
        shown = model.state_dict()
        for key in KEYS:
            original = before[key][1].to(torch.float32, copy=True)
            exact = calculate_weight(entries(patches, key, strength, factor), original, key)
            exact = exact.clamp(-limit, limit)
            assert shown[key].dtype == dtype
            assert bool(
                ((shown[key].float() - exact).abs() <= STEP[dtype] * exact.abs() + least).all()
            )
        view.unpatch_model()
        assert_untouched(model, before)


@pytest.mark.parametrize("dtype", list(STEP)[1:], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "bias of a factor"])
def test_a_file_in_a_narrow_type_means_the_values_it_holds(kind: str, dtype: torch.dtype) -> None:
    narrow = {
        f"x.{name}": tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors_of(kind, (16, 8, 3, 3)).items()
    }
    wide = {k: t.float() if t.is_floating_point() else t for k, t in narrow.items()}
    made, expected = (load_lora(file, {"x": "x.weight"}) for file in (narrow, wide))
    assert list(made) == list(expected)
    for key, patch in expected.items():
        weight = rand(16, 8, 3, 3) if key == "x.weight" else rand(16)
        shown, wanted = (
            calculate_weight([(0.7, p, 1.0, None, None)], weight.clone(), key)
            for p in (made[key], patch)
        )
        assert torch.allclose(shown, wanted, atol=1e-6)
        assert not torch.equal(wanted, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_coded_weights_give_the_same_streamed_and_resident(accelerator: Any, kind: str) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    net = nn.Sequential(*(ops.disable_weight_init.Linear(16, 16, device="meta") for _ in range(2)))
    tensors = {f"{n}.weight": rand(16, 16) + n for n in range(2)}
    tensors |= {f"{n}.bias": rand(16) for n in range(2)}
    assign_weights(net, coded(tensors, "per layer", prefix="")[0])
    before = {k: v.flatten().view(torch.uint8).clone() for k, v in net.state_dict().items()}
    patches = load_lora(
        {f"x.{name}": t for name, t in tensors_of(kind, (16, 16)).items()}, {"x": "1.weight"}
    )
    x, shown = rand(3, 16).to(device), []
    for patcher_class in (ModelPatcher, ModelPatcherDynamic):
        for budget in (0, 1):
            patcher = patcher_class(net, device, CPU)
            patcher.add_patches(patches, 0.5)
            patcher.patch_model(device, budget)
            with torch.inference_mode():
                shown.append(net(x).cpu())
            patcher.detach()
    assert all(torch.equal(out, shown[0]) for out in shown)
    decoded = [layer.decode_weight(layer.weight, torch.float32) for layer in net]
    exact = calculate_weight(
        [(0.5, patches["1.weight"], 1.0, None, None)], decoded[1].clone(), "1.weight"
    )
    with torch.inference_mode():
        first = torch.nn.functional.linear(x.cpu(), decoded[0], net[0].bias)
        wanted = torch.nn.functional.linear(first, exact, net[1].bias)
        plain = torch.nn.functional.linear(first, decoded[1], net[1].bias)
    assert (shown[0] - wanted).norm() < 0.1 * (wanted - plain).norm() + 0.05 * wanted.norm()
    for key, value in net.state_dict().items():
        assert torch.equal(value.flatten().view(torch.uint8), before[key]), key


@pytest.mark.parametrize("kind", [*KINDS, *PLACED])
def test_a_hook_shows_what_a_patch_would_and_hides_it_again(accelerator: Any, kind: str) -> None:
    model = Network(depth=2, dtype=torch.float8_e4m3fn, operations=ops.manual_cast)
    model.scale.data = torch.ones(1)
    patches, before = patches_for(model, kind), snapshot(model)
    plain, want = on_cpu(model), on_cpu(model, patches)
    device = torch.device(f"{accelerator.NAME}:0")
    hook = WeightHook(strength_model=1.0)
    hook.weights, hook.need_weight_init = patches, False
    group = HookGroup()
    group.add(hook)
    for budget in (0, int(bytes_of(model) * 0.3)):
        patcher = ModelPatcher(model, device, CPU)
        patcher.patch_model(device, budget)
        patcher.register_all_hook_patches(group, create_target_dict(EnumWeightTarget.Model), {})
        for hooks, expected in ((group, want), (None, plain), (group, want)):
            with torch.inference_mode():
                patcher.apply_hooks(hooks=hooks)
            assert torch.equal(run(model, accelerator), expected), budget
        patcher.cleanup()
        patcher.detach()
        assert_untouched(model, before)
