"""Checkpoints with weights in a code load at their size, compute right, and take LoRAs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy import loading, ops
from comfy.devices import runtime
from comfy.ops import float8
from comfy.ops.encoded import EncodedWeight
from comfy.patching.patcher import ModelPatcher
from comfy.weights import encodings, state_dict
from comfy.weights.adapters import LoRAAdapter
from comfy.weights.assign import assign_weights
from comfy.weights.errors import NotSafetensorsError, WeightFileError
from comfy.weights.rounding import string_to_seed
from tests.support import tiny_checkpoint

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NETWORK = "model.diffusion_model."


def coded_keys(tensors: dict[str, Tensor], prefix: str) -> list[str]:
    """The matrices under a prefix, other than tables and the first and last layers."""
    return [
        key
        for key, value in tensors.items()
        if key.startswith(prefix) and key.endswith(".weight") and value.ndim == 2
        and "embed" not in key
    ]  # fmt: skip


def coded(
    tensors: dict[str, Tensor], form: str, dtype: torch.dtype = E4M3, prefix: str = NETWORK
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """(file with coded matrices, the same weights decoded, metadata) in one of the forms."""
    file, plain, layers = dict(tensors), dict(tensors), {}
    for number, key in enumerate(coded_keys(tensors, prefix)):
        layer = key[: -len(".weight")]
        scale = tensors[key].abs().max() / torch.finfo(dtype).max * (1 + number % 3)
        file[key] = (tensors[key] / scale).to(dtype)
        plain[key] = file[key].float() * scale
        layers[layer] = {"format": str(dtype)[6:]}
        names = (
            ("scale_weight", "scale_input") if form == "old" else ("weight_scale", "input_scale")
        )
        file[f"{layer}.{names[0]}"] = scale.reshape(() if number % 2 else (1,))
        if number % 3 == 0:
            file[f"{layer}.{names[1]}"] = torch.tensor(0.02)
        if form == "per layer":
            text = bytearray(json.dumps(layers[layer]).encode())
            file[f"{layer}.comfy_quant"] = torch.frombuffer(text, dtype=torch.uint8)
    metadata = dict(tiny_checkpoint.HEADER)
    if form == "old":
        file[f"{prefix}scaled_fp8"] = torch.empty(0, dtype=dtype)
    if form == "metadata":
        whole = {"format_version": "1.0", "layers": layers}
        metadata["_quantization_metadata"] = json.dumps(whole)
    return file, plain, metadata


def prediction(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x, context = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 7, 32)
    context = torch.randn(2, 7, 32, generator=generator)
    with torch.inference_mode():
        return model.apply_model(x, torch.tensor([3.0, 0.5]), c_crossattn=context)


def load(path: Path, **options: Any) -> ModelPatcher:
    return loading.load_diffusion_model(str(path), options)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return tiny_checkpoint.weights()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("form", ["old", "per layer", "metadata"])
def test_a_coded_network_predicts_as_its_decoded_weights_do(
    form: str, dtype: torch.dtype, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file, plain, metadata = coded(tensors, form, dtype)
    one = load(tiny_checkpoint.write(tmp_path / "coded.safetensors", file, metadata))
    two = load(tiny_checkpoint.write(tmp_path / "plain.safetensors", plain))
    encoded = [m for m in one.model.modules() if isinstance(m, EncodedWeight)]
    assert len(encoded) == len(coded_keys(tensors, NETWORK))
    assert {m.weight.dtype for m in encoded} == {dtype}
    assert one.model.diffusion_model.input_blocks[0][0].weight.dtype == torch.float32
    torch.testing.assert_close(prediction(one.model), prediction(two.model), rtol=0, atol=1e-5)


def test_coded_weights_stay_in_the_file(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    file, _, metadata = coded(tensors, "old")
    model = load(tiny_checkpoint.write(tmp_path / "coded.safetensors", file, metadata)).model
    matrices = {m.weight for m in model.modules() if isinstance(m, EncodedWeight)}
    assert all(encodings.is_encoded(f"{n}.weight", model.state_dict())
               for n, m in model.named_modules() if isinstance(m, EncodedWeight))  # fmt: skip
    assert all(m.element_size() == 1 for m in matrices)


def lora(model: nn.Module, keys: list[str], size: float) -> dict[str, LoRAAdapter]:
    generator = torch.Generator().manual_seed(1)
    weights = model.state_dict()
    made = {}
    for key in keys:
        rows, columns = weights[key].shape
        up = torch.randn(rows, 3, generator=generator) * size
        down = torch.randn(3, columns, generator=generator)
        made[key] = LoRAAdapter(set(), (up, down, 3.0, None, None, None))
    return made


def test_a_lora_changes_decoded_weights_and_leaves_no_trace(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file, plain, metadata = coded(tensors, "old")
    one = load(tiny_checkpoint.write(tmp_path / "coded.safetensors", file, metadata))
    two = load(tiny_checkpoint.write(tmp_path / "plain.safetensors", plain))
    keys = [key.replace(NETWORK, "diffusion_model.") for key in coded_keys(tensors, NETWORK)]
    before = {k: v.clone() for k, v in one.model.state_dict().items()}
    bare = prediction(two.model)
    for patcher in (one, two):
        patcher.add_patches(lora(patcher.model, keys, 0.01), 0.8)
        patcher.patch_model(CPU)
    layer = one.model.get_submodule(keys[3][: -len(".weight")])
    wanted = two.model.state_dict()[keys[3]]
    step = layer.weight_scale * 32  # distance of the largest float8 numbers
    got = layer.decode_weight(layer.weight, torch.float32)
    inside = wanted.abs() <= layer.weight_scale * 448
    assert inside.float().mean() > 0.9
    assert ((got - wanted).abs()[inside] <= step).all()
    changed, wanted = prediction(one.model), prediction(two.model)
    assert (changed - wanted).norm() < 0.2 * (wanted - bare).norm()
    one.unpatch_model()
    assert all(torch.equal(v, before[k]) for k, v in one.model.state_dict().items())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_streamed_and_resident_coded_weights_give_the_same(
    asynchronous: bool, accelerator: Any
) -> None:
    accelerator.set_async(asynchronous)
    device = torch.device(f"{accelerator.NAME}:0")
    net = nn.Sequential(*(ops.disable_weight_init.Linear(16, 16, device="meta") for _ in range(3)))
    weights = {f"{i}.{n}": torch.randn(16, *[16] * (n == "weight")) for i in range(3)
               for n in ("weight", "bias")}  # fmt: skip
    file, _, _ = coded(weights, "per layer", prefix="")
    assign_weights(net, file)
    patcher = ModelPatcher(net, device, CPU)
    patcher.add_patches(lora(net, ["0.weight", "2.weight"], 0.1))
    x = torch.randn(4, 16).to(device)
    with torch.inference_mode():
        patcher.patch_model(device)
        resident = net(x).cpu()
        patcher.unpatch_model()
        patcher.patch_model(device, 1)
        streamed = net(x).cpu()
        patcher.unpatch_model()
    assert torch.equal(resident, streamed)


def test_patched_weights_are_rounded_by_the_seed_of_their_key(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file, _, metadata = coded(tensors, "per layer")
    path = tiny_checkpoint.write(tmp_path / "coded.safetensors", file, metadata)
    key = coded_keys(tensors, NETWORK)[0].replace(NETWORK, "diffusion_model.")
    patched = []
    for _ in range(2):
        patcher = load(path)
        patcher.add_patches(lora(patcher.model, [key], 0.01))
        patched.append(patcher.patch_weight_to_device(key, return_weight=True))
    assert torch.equal(patched[0].view(torch.uint8), patched[1].view(torch.uint8))
    layer: Any = patcher.model.get_submodule(key[: -len(".weight")])
    whole = patcher.calculate_weight(patcher.patches[key], layer.convert_weight(layer.weight), key)
    again = layer.set_weight(whole, seed=string_to_seed(key), return_weight=True)
    assert torch.equal(again.view(torch.uint8), patched[0].view(torch.uint8))


def test_a_saved_coded_network_loads_again(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    file, _, metadata = coded(tensors, "old")
    first = load(tiny_checkpoint.write(tmp_path / "one.safetensors", file, metadata))
    saved = first.model.state_dict_for_saving()
    state_dict.save_torch_file(saved, tmp_path / "two.safetensors", metadata)
    again = load(tmp_path / "two.safetensors")
    assert torch.equal(prediction(first.model), prediction(again.model))


def test_a_coded_text_encoder_works(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    prefix = "cond_stage_model."
    file, plain, metadata = coded(tensors, "old", prefix=prefix)
    made = []
    for name, content in (("coded", file), ("plain", plain)):
        path = tiny_checkpoint.write(tmp_path / f"{name}.safetensors", content, metadata)
        clip = loading.load_checkpoint_guess_config(str(path), output_model=False).clip
        assert clip is not None
        made.append(clip.encode("a red circle"))
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=2e-2)  # decoded in float32


def test_scales_of_rows_are_understood() -> None:
    net = nn.Sequential(ops.disable_weight_init.Linear(6, 4, bias=False, device="meta"))
    stored, scale = torch.randn(4, 6).to(E4M3), torch.rand(4, 1)
    assign_weights(net, {"0.weight": stored, "0.weight_scale": scale})
    x = torch.randn(2, 6)
    torch.testing.assert_close(net(x), x @ (stored.float() * scale).T)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (b'{"format": "made_up4"}', "made_up4"),
        (b"{}", "None"),
        (b"[1]", "not a JSON object"),
        (b"\xff\x00", "not JSON"),
    ],
)
def test_an_unknown_code_is_an_error_that_names_the_layer(
    settings: bytes, named: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file, _, metadata = coded(tensors, "per layer")
    layer = coded_keys(tensors, NETWORK)[0][: -len(".weight")]
    file[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(settings), dtype=torch.uint8)
    path = tiny_checkpoint.write(tmp_path / "odd.safetensors", file, metadata)
    with pytest.raises(WeightFileError, match=named) as caught:
        load(path)
    assert layer.removeprefix(NETWORK) in str(caught.value)
    assert "odd.safetensors" in str(caught.value)


def test_a_code_without_its_scale_is_an_error(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    file, _, metadata = coded(tensors, "per layer")
    layer = coded_keys(tensors, NETWORK)[0][: -len(".weight")]
    del file[f"{layer}.weight_scale"]
    path = tiny_checkpoint.write(tmp_path / "odd.safetensors", file, metadata)
    with pytest.raises(WeightFileError, match="without its scale"):
        load(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": 3}', "{}"])
def test_a_broken_description_of_layers_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    tiny_checkpoint.write(path, {"a": torch.ones(1)}, {"_quantization_metadata": text})
    with pytest.raises(NotSafetensorsError, match="_quantization_metadata"):
        state_dict.load_torch_file(path)


@pytest.mark.parametrize("form", ["old", "metadata"])
def test_older_descriptions_can_be_brought_to_todays_form(
    form: str, tensors: dict[str, Tensor]
) -> None:
    file, _, metadata = coded(tensors, form)
    today, _, _ = coded(tensors, "per layer")
    file["elsewhere.scale_weight"] = torch.ones(())
    converted, kept = encodings.convert_old_quants(file, NETWORK, metadata)
    assert kept == metadata
    assert converted.keys() - {"elsewhere.scale_weight"} == today.keys()
    assert all(
        json.loads(v.numpy().tobytes()) == {"format": "float8_e4m3fn"}
        for k, v in converted.items()
        if k.endswith("comfy_quant")
    )


@pytest.fixture
def with_products() -> Any:
    """A policy under which the CPU counts as multiplying float8, and the speed option is on."""

    before = runtime.get_runtime()

    def install(**precision: Any) -> None:
        precision = {"supports_fp8_compute": True, "fast": frozenset({float8.OPTION}), **precision}
        policy = replace(before.precision, **precision)
        runtime.install_runtime(replace(before, precision=policy))

    yield install
    runtime.install_runtime(before)


def wide_layer(input_scale: bool) -> tuple[nn.Module, Tensor, Tensor]:
    layer = nn.Sequential(ops.disable_weight_init.Linear(64, 32, device="meta"))
    file: dict[str, Tensor] = {
        "0.weight": (torch.randn(32, 64) * 60).to(E4M3),
        "0.weight_scale": torch.tensor(0.01),
        "0.bias": torch.randn(32),
    }
    if input_scale:
        file["0.input_scale"] = torch.tensor(0.01)
    assign_weights(layer, file)
    x = torch.randn(3, 5, 64)
    return layer, x, x @ (file["0.weight"].float() * 0.01).T + file["0.bias"]


@pytest.mark.parametrize("input_scale", [False, True])
def test_products_in_float8_are_near_the_decoded_ones(
    input_scale: bool, with_products: Callable[..., None]
) -> None:
    layer, x, wanted = wide_layer(input_scale)
    decoded = layer(x)
    torch.testing.assert_close(decoded, wanted)
    with_products()
    coarse = layer(x)
    assert not torch.equal(coarse, decoded)
    assert (coarse - wanted).norm() < 0.05 * wanted.norm()


def test_without_the_hardware_weights_are_decoded_and_the_log_says_so(
    with_products: Callable[..., None], caplog: Any
) -> None:
    float8._say_once.cache_clear()
    layer, x, wanted = wide_layer(False)
    with_products(supports_fp8_compute=False)
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(layer(x), wanted)
    assert caplog.text.count("no float8 products") == 1


def test_layers_of_plain_float8_weights_multiply_them_as_they_are(
    with_products: Callable[..., None],
) -> None:
    assert ops.pick_operations(E4M3, torch.float32) is ops.manual_cast
    assert ops.pick_operations(E4M3, torch.float32, fp8_optimizations=True) is ops.fp8_ops
    with_products()
    chosen = ops.pick_operations(E4M3, torch.float32)
    assert chosen is ops.fp8_ops
    assert ops.pick_operations(E4M3, torch.float32, disable_fast_fp8=True) is ops.manual_cast
    layer = chosen.Linear(32, 16, dtype=E4M3)
    layer.weight.data.copy_(torch.randn(16, 32))
    layer.bias.data.zero_()
    x = torch.randn(4, 32)
    wanted = x @ layer.weight.float().T
    assert (layer(x) - wanted).norm() < 0.06 * wanted.norm()
    assert not torch.equal(layer(x), wanted)


def test_a_merge_leaves_scales_and_settings_to_their_weights() -> None:
    patchers, decoded = [], []
    for seed, largest in ((1, 1.0), (2, 5.0)):
        weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) * largest
        file, plain, _ = coded({"0.weight": weight}, "per layer", prefix="")
        net = nn.Sequential(ops.disable_weight_init.Linear(16, 8, bias=False, device="meta"))
        assign_weights(net, file)
        patchers.append(ModelPatcher(net, CPU, CPU))
        decoded.append(plain["0.weight"])
    assert list(patchers[1].get_key_patches()) == ["0.weight"]
    view = patchers[0].clone()
    view.add_patches(patchers[1].get_key_patches(), 0.1, 0.9)
    view.patch_model(CPU)
    layer: Any = view.model[0]
    wanted = 0.9 * decoded[0] + 0.1 * decoded[1]
    got = layer.decode_weight(layer.weight, torch.float32)
    inside = wanted.abs() <= layer.weight_scale * 448
    assert ((got - wanted).abs()[inside] <= layer.weight_scale * 32).all()
    view.unpatch_model()


@pytest.mark.parametrize("names", ["kohya", "own", "peft"])
def test_a_lora_file_finds_coded_weights_under_its_names(
    names: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file, _, metadata = coded(tensors, "old")
    patcher = load(tiny_checkpoint.write(tmp_path / "coded.safetensors", file, metadata))
    key = next(k for k in coded_keys(tensors, NETWORK) if k.endswith("attn1.to_q.weight"))
    ours = key.replace(NETWORK, "diffusion_model.")[: -len(".weight")]
    stem, up, down = {
        "kohya": ("lora_unet_" + ours.removeprefix("diffusion_model.").replace(".", "_"),
                  "lora_up.weight", "lora_down.weight"),
        "own": (ours, "lora_up.weight", "lora_down.weight"),
        "peft": (ours, "lora_B.weight", "lora_A.weight"),
    }[names]  # fmt: skip
    rows, columns = tensors[key].shape
    content = {f"{stem}.{up}": torch.ones(rows, 2), f"{stem}.{down}": torch.ones(2, columns)}
    view, _ = loading.load_lora_for_models(patcher, None, content, 0.5, 0.0)
    assert view is not None
    assert list(view.patches) == [f"{ours}.weight"]
    bare = prediction(patcher.model)
    view.patch_model(CPU)
    assert not torch.equal(prediction(view.model), bare)
    view.unpatch_model()
    assert torch.equal(prediction(view.model), bare)
