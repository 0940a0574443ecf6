"""GGUF files: read as written, of every family, small in memory, with LoRAs; errors name causes."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading, ops
from comfy.families import detection
from comfy.ldm.flux.model import Flux
from comfy.ops.encoded import EncodedWeight
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumWeightTarget, WeightHook, create_target_dict
from comfy.patching.patcher import ModelPatcher
from comfy.saving import save_checkpoint
from comfy.weights.adapters import LoRAAdapter
from comfy.weights.assign import assign_weights
from comfy.weights.errors import (
    NoMatchingWeightsError,
    TruncatedWeightFileError,
    UnknownWeightFormatError,
    WeightFileError,
)
from comfy.weights.gguf_file import open_gguf
from comfy.weights.low_bit.blocks import BlockCode
from comfy.weights.low_bit.ggml import GGML_TYPES
from comfy.weights.low_bit.stored import StoredWeight
from comfy.weights.mapped_file import is_file_backed
from comfy.weights.state_dict import load_torch_file
from tests.comfy.families import key_shapes
from tests.support import gguf_files

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 64, "context_in_dim": 256,
    "hidden_size": 256, "mlp_ratio": 1.0, "num_heads": 4, "depth": 1, "depth_single_blocks": 1,
    "axes_dim": [16, 24, 24], "theta": 10000, "patch_size": 2, "qkv_bias": True,
    "guidance_embed": False,
}  # fmt: skip
"""A FLUX with matrices of 256 columns, as blocks of 256 need them."""
FACTS = {"general.architecture": "flux"}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {key: v.shape for key, v in Flux(**WIDE, device="meta").state_dict().items()}
    return {
        key: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)
        for key, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def files(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Path of the network in a type, written once."""
    folder, known = tmp_path_factory.mktemp("gguf"), {}

    def path(kind: str) -> str:
        if kind not in known:
            known[kind] = str(gguf_files.write(folder / f"{kind}.gguf", weights, kind, FACTS))
        return known[kind]

    return path


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def prediction(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x, context, y = (
        torch.randn(s, generator=generator) for s in ((1, 16, 4, 4), (1, 7, 256), (1, 64))
    )
    return model.apply_model(x, torch.tensor([0.5]), c_crossattn=context, y=y)


def coded(model: Any) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, EncodedWeight)}


# -- reading ---------------------------------------------------------------------------------------


def test_tensors_and_facts_are_read_as_written(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(4, 64), "b": torch.randn(3), "conv.weight": torch.randn(2, 3, 3, 3),
        "c": torch.randn(2, 5).bfloat16(), "d": torch.randn(7).half(),
    }  # fmt: skip
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    facts = {"name": "x", "count": 7, "factor": 0.5, "words": ["a", "bc"], "yes": True}
    path = gguf_files.write(
        tmp_path / "x.gguf",
        tensors,
        lambda key, value: "Q8_0" if key == "a.weight" else kinds[value.dtype],
        facts,
    )
    found, metadata = load_torch_file(path, return_metadata=True)
    assert list(found) == list(tensors)
    assert all(torch.equal(found[key], tensors[key]) for key in ("b", "conv.weight", "c", "d"))
    assert isinstance(found["a.weight"], StoredWeight)
    assert found["a.weight"].shape == (4, 64)
    assert (found["a.weight"].decoded() - tensors["a.weight"]).abs().max() < 0.02
    assert is_file_backed(found["a.weight"].stored)
    assert metadata == {"name": "x", "count": "7", "factor": "0.5", "yes": "True"}


def test_shapes_that_the_format_cannot_hold_come_back(tmp_path: Path) -> None:
    weight, first = torch.randn(8, 4, 1, 2, 2), torch.randn(1, 3, 4)
    path = gguf_files.write(
        tmp_path / "x.gguf",
        {"patch.weight": weight, "table": first},
        "F32",
        {"comfy.gguf.orig_shape.patch.weight": [8, 4, 1, 2, 2]},
        {"patch.weight": (16, 8), "table": (3, 4)},  # axes of one at the end are not kept
    )
    found = load_torch_file(path)
    assert torch.equal(found["patch.weight"], weight)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.empty(1, 3, 4, device="meta"))

    net = Net()
    assert not assign_weights(net, {"table": found["table"]}).missing
    assert torch.equal(net.table, first)


def test_a_file_may_be_read_into_memory(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "x.gguf", {"a.weight": torch.randn(4, 64)})
    mapped, read = (open_gguf(path, how)[0]["a.weight"] for how in (True, False))
    assert isinstance(mapped, StoredWeight)
    assert isinstance(read, StoredWeight)
    assert is_file_backed(mapped.stored)
    assert not is_file_backed(read.stored)
    assert torch.equal(read.stored, mapped.stored)


@pytest.mark.parametrize("cut", [10, 30, 700, -40])
def test_a_truncated_file_is_an_error_that_says_so(
    cut: int, files: Callable[[str], str], tmp_path: Path
) -> None:
    whole = Path(files("Q8_0")).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:cut])
    with pytest.raises(TruncatedWeightFileError, match=r"cut\.gguf.*download it again"):
        load_torch_file(path)


@pytest.mark.parametrize(
    ("place", "new", "kind", "said"),
    [
        (4, b"\x00\x00\x00\x03", UnknownWeightFormatError, "big-endian"),
        (4, b"\x01\x00\x00\x00", UnknownWeightFormatError, "of version 1"),
        (8, b"\xff" * 8, WeightFileError, "announces 18446744073709551615 tensors"),
    ],
)
def test_a_header_of_another_form_is_an_error(
    place: int, new: bytes, kind: Any, said: str, files: Callable[[str], str], tmp_path: Path
) -> None:
    whole = bytearray(Path(files("Q8_0")).read_bytes()[:200])
    whole[place : place + len(new)] = new
    path = tmp_path / "odd.gguf"
    path.write_bytes(whole)
    with pytest.raises(kind, match=rf"odd\.gguf.*{said}.*To mend it"):
        load_torch_file(path)


@pytest.mark.parametrize(("number", "name"), [(16, "IQ2_XXS"), (99, "number 99")])
def test_an_unknown_type_is_an_error_that_names_it_and_what_is_known(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_files.NUMBERS, "odd", number)
    monkeypatch.setattr(gguf_files, "encoded", lambda *_: b"")
    path = gguf_files.write(tmp_path / "odd.gguf", {"x.weight": torch.ones(4)}, lambda *_: "odd")
    with pytest.raises(UnknownWeightFormatError, match=rf"'x.weight' .* {name}.*Q4_K"):
        load_torch_file(path)


def test_a_part_of_a_split_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    facts = {"split.no": 1, "split.count": 3}
    path = gguf_files.write(tmp_path / "p.gguf", {"x": torch.ones(4)}, "F32", facts)
    with pytest.raises(UnknownWeightFormatError, match=r"part 2 of 3.*llama-gguf-split --merge"):
        load_torch_file(path)


def test_a_shape_that_blocks_cannot_hold_is_an_error(tmp_path: Path) -> None:
    path = gguf_files.write(
        tmp_path / "odd.gguf", {"x": torch.ones(2, 32)}, "Q8_0", shapes={"x": (2, 33)}
    )
    with pytest.raises(WeightFileError, match=r"'x' has the shape \[2, 33\].*blocks of 32"):
        load_torch_file(path)


def test_a_language_model_that_encodes_no_text_is_refused(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": torch.ones(4, 4)}
    facts = {"general.architecture": "mamba"}
    path = gguf_files.write(tmp_path / "m.gguf", tensors, "F32", facts)
    with pytest.raises(UnknownWeightFormatError, match=r"architecture 'mamba'.*t5.*qwen3"):
        load_torch_file(path)


# -- families --------------------------------------------------------------------------------------


def test_every_recorded_family_is_recognised_from_quantised_matrices(golden_folder: Path) -> None:
    def quantised(value: Tensor) -> Tensor:
        kind = GGML_TYPES[gguf_files.NUMBERS["Q4_0"]]
        if value.ndim != 2 or value.shape[1] % kind.elements:
            return value
        assert kind.unpack is not None
        code = BlockCode(kind.name, value.shape, kind.elements, kind.size, kind.unpack)
        data = torch.empty(gguf_files.size_of(value, "Q4_0"), dtype=torch.uint8, device="meta")
        return StoredWeight(data, code, value.shape)

    seen = set()
    for name in key_shapes.recorded(golden_folder)["nets"]:
        plain = key_shapes.network(golden_folder, name)
        wanted = detection.model_config_from_unet(plain, "")
        if wanted is None or type(wanted) in seen:
            continue
        seen.add(type(wanted))
        coded_ones = {key: quantised(value) for key, value in plain.items()}
        found = detection.model_config_from_unet(coded_ones, "")
        assert type(found) is type(wanted), name
        assert found.unet_config == wanted.unet_config, name
    assert len(seen) > 30


def test_a_file_without_some_weights_is_an_error_that_names_them(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    key = "double_blocks.0.img_attn.qkv.weight"
    left = {name: value for name, value in weights.items() if name != key}
    path = gguf_files.write(tmp_path / "less.gguf", left, "Q8_0", FACTS)
    with pytest.raises(WeightFileError, match=rf"less\.gguf.*{key}"):
        loading.load_diffusion_model(str(path))


def test_a_file_of_no_known_family_is_described(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "odd.gguf", {"odd.weight": torch.ones(4, 32)}, "Q8_0")
    with pytest.raises(loading.UnknownArchitectureError, match=r"odd\.gguf.*odd\.weight"):
        loading.load_diffusion_model(str(path))


# -- running ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "lost"), [("F16", 0.002), ("Q8_0", 0.02), ("Q4_K", 0.2)])
def test_a_quantised_network_is_small_and_predicts_nearly_the_same(
    kind: str, lost: float, files: Callable[[str], str], weights: dict[str, Tensor]
) -> None:
    whole = loading.load_diffusion_model(files("F32"))
    patcher = loading.load_diffusion_model(files(kind))
    wanted, got = prediction(whole.model), prediction(patcher.model)
    assert (got - wanted).norm() < lost * wanted.norm()
    if kind == "F16":
        return
    assert not torch.equal(got, wanted)
    matrices = {k: v for k, v in weights.items() if gguf_files.fitting(v, kind) != "F32"}
    assert len(coded(patcher.model)) == len(matrices)
    saved = sum(
        v.nbytes - gguf_files.size_of(v, gguf_files.fitting(v, kind)) for v in matrices.values()
    )
    assert patcher.model_size() == whole.model_size() - saved
    assert os.path.getsize(files(kind)) < os.path.getsize(files("F32"))
    assert all(is_file_backed(layer.weight) for layer in coded(patcher.model).values())


def lora_of(model: Any) -> dict[str, LoRAAdapter]:
    """A change of every quantised weight."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, layer in coded(model).items():
        rows, columns = layer.decoded_shape()
        up, down = (torch.randn(s, generator=generator) * 0.05 for s in ((rows, 3), (3, columns)))
        made[f"{name}.weight"] = LoRAAdapter(set(), (up, down, 3.0, None, None, None))
    return made


@pytest.fixture
def twin(files: Callable[[str], str], tmp_path: Path) -> tuple[ModelPatcher, ModelPatcher]:
    """A quantised network, and one whose weights are those of the first decoded."""
    one = loading.load_diffusion_model(files("Q4_K"))
    plain = {k.removeprefix("diffusion_model."): v for k, v in one.model.state_dict().items()}
    for name, layer in coded(one.model).items():
        key = f"{name.removeprefix('diffusion_model.')}.weight"
        plain[key] = layer.decode_weight(layer.weight.detach(), torch.float32)
    path = tmp_path / "plain.safetensors"
    save_file({k: v.contiguous().clone() for k, v in plain.items()}, path)
    return one, loading.load_diffusion_model(str(path))


def test_a_lora_is_added_to_decoded_weights_at_use_and_leaves_no_trace(
    twin: tuple[ModelPatcher, ModelPatcher],
) -> None:
    before = {k: v.clone() for k, v in twin[0].model.state_dict().items()}
    bare = prediction(twin[0].model)
    assert torch.equal(bare, prediction(twin[1].model))
    changed = []
    for patcher in twin:
        view = patcher.clone()
        view.add_patches(lora_of(twin[0].model), 0.8)
        view.patch_model(CPU)
        changed.append(prediction(view.model))
        assert view.loaded_size() == view.model_size()
        view.unpatch_model()
    assert torch.equal(changed[0], changed[1])
    assert (changed[0] - bare).norm() > 0.001 * bare.norm()
    assert all(torch.equal(v, before[k]) for k, v in twin[0].model.state_dict().items())
    assert torch.equal(prediction(twin[0].model), bare)


def test_a_lora_of_another_size_is_refused_as_for_plain_weights(
    files: Callable[[str], str],
) -> None:
    patcher = loading.load_diffusion_model(files("Q4_K"))
    stem = "diffusion_model.double_blocks.0.img_attn.proj"
    lora = {
        f"{stem}.lora_up.weight": torch.ones(200, 2),
        f"{stem}.lora_down.weight": torch.ones(2, 256),
    }
    with pytest.raises(NoMatchingWeightsError, match="other sizes than the weights"):
        loading.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
    lora[f"{stem}.lora_up.weight"] = torch.ones(256, 2)
    view, _ = loading.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
    assert view is not None
    assert list(view.patches) == [f"{stem}.weight"]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_lora_may_widen_the_first_layer(kind: str, files: Callable[[str], str]) -> None:
    patcher = loading.load_diffusion_model(files(kind))
    assert patcher.model.input_channels() == 16
    view = patcher.clone()
    # Each channel is moved otherwise: layer norms take away what moves all alike.
    up, down = torch.linspace(-1, 1, 256)[:, None], torch.full((1, 128), 0.1)
    wider = LoRAAdapter(set(), (up, down, None, None, None, (256, 128)))
    view.add_patches({"diffusion_model.img_in.weight": wider})
    view.patch_model(CPU)
    assert view.model.input_channels() == 32
    beside = view.model.concat_cond(noise=torch.zeros(1, 16, 4, 4))
    assert beside is not None
    x, beside = torch.zeros(1, 16, 4, 4), beside + 1
    context, y = torch.zeros(1, 7, 256), torch.zeros(1, 64)
    made = view.model.apply_model(x, torch.tensor([0.5]), beside, context, y=y)
    view.unpatch_model()
    assert patcher.model.input_channels() == 16
    plain = patcher.model.apply_model(x, torch.tensor([0.5]), c_crossattn=context, y=y)
    assert made.shape == x.shape
    assert float((made - plain).abs().max()) > 0.01 * float(plain.abs().max())


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_resident_or_streamed_the_prediction_is_the_same(
    kind: type[ModelPatcher], patched: bool, accelerator: Any
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    net = torch.nn.Sequential(
        *(ops.disable_weight_init.Linear(64, 64, device="meta") for _ in range(3))
    )
    file: dict[str, Tensor] = {}
    for number in range(3):
        of = GGML_TYPES[gguf_files.NUMBERS["Q8_0"]]
        weight = torch.randn(64, 64) / 8
        data = torch.frombuffer(bytearray(gguf_files.encoded(weight, "Q8_0")), dtype=torch.uint8)
        assert of.unpack is not None
        code = BlockCode("Q8_0", weight.shape, of.elements, of.size, of.unpack)
        file[f"{number}.weight"] = StoredWeight(data, code, weight.shape)
        file[f"{number}.bias"] = torch.randn(64)
    assign_weights(net, file)
    patcher = kind(net, device, CPU)
    if patched:
        patcher.add_patches(lora_of(net))
    x = torch.randn(4, 64).to(device)
    outputs = []
    for budget in (0, 1, 6000):
        patcher.patch_model(device, budget)
        outputs.append(net(x).cpu())
        if budget == 0 and kind is ModelPatcher:
            assert patcher.loaded_size() == patcher.model_size() == 3 * (64 * 68 + 256)
        patcher.unpatch_model()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    plain = x.cpu()
    for number in range(3):
        decoded = file[f"{number}.weight"].decoded()  # type: ignore[attr-defined]
        if patched:
            up, down = lora_of(net)[f"{number}.weight"].weights[:2]
            decoded = decoded + up @ down
        plain = plain @ decoded.T + file[f"{number}.bias"]
    torch.testing.assert_close(outputs[0], plain, rtol=1e-4, atol=1e-4)


def test_a_network_can_be_copied_and_pickled(files: Callable[[str], str]) -> None:
    patcher = loading.load_diffusion_model(files("Q4_K"))
    copied = copy.deepcopy(patcher)
    assert copied.model is not patcher.model
    assert copied.model_size() == patcher.model_size()
    assert torch.equal(prediction(copied.model), prediction(patcher.model))
    layer = patcher.model.diffusion_model.double_blocks[0].img_attn.proj
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is type(layer)
    x = torch.randn(3, 256)
    assert torch.equal(again(x), layer(x))


def test_a_merge_is_that_of_the_decoded_weights(
    twin: tuple[ModelPatcher, ModelPatcher], files: Callable[[str], str]
) -> None:
    base = loading.load_diffusion_model(files("F32"))
    merged = []
    for other in twin:
        view = base.clone()
        view.add_patches(other.get_key_patches("diffusion_model."), 0.25, 0.75)
        view.patch_model(CPU)
        merged.append(prediction(view.model))
        view.unpatch_model()
    assert torch.equal(merged[0], merged[1])
    assert not torch.equal(merged[0], prediction(base.model))


def test_weights_of_a_hook_are_shown_and_taken_off(files: Callable[[str], str]) -> None:
    patcher = loading.load_diffusion_model(files("Q4_K"))
    bare = prediction(patcher.model)
    wanted = patcher.clone()
    wanted.add_patches(lora_of(patcher.model), 0.8)
    wanted.patch_model(CPU)
    changed = prediction(wanted.model)
    wanted.unpatch_model()
    hook = WeightHook(strength_model=0.8)
    hook.weights, hook.need_weight_init = lora_of(patcher.model), False
    group = HookGroup()
    group.add(hook)
    patcher.patch_model(CPU)
    patcher.register_all_hook_patches(group, create_target_dict(EnumWeightTarget.Model))
    patcher.apply_hooks(group)
    shown = prediction(patcher.model)
    assert (shown - changed).norm() < 0.02 * (changed - bare).norm()  # rounded to float16
    patcher.apply_hooks(None)
    assert torch.equal(prediction(patcher.model), bare)
    patcher.unpatch_model()


@pytest.mark.parametrize("patched", [False, True])
def test_a_saved_network_is_a_plain_one(
    patched: bool, files: Callable[[str], str], tmp_path: Path
) -> None:
    patcher = loading.load_diffusion_model(files("Q4_K"))
    if patched:
        patcher = patcher.clone()
        patcher.add_patches(lora_of(patcher.model), 0.8)
    path = tmp_path / "saved.safetensors"
    save_checkpoint(str(path), patcher)
    tensors = load_torch_file(path)
    assert not any(value.dtype == torch.uint8 for value in tensors.values())
    patcher.patch_model(CPU)
    again = loading.load_diffusion_model(str(path))
    wanted = prediction(patcher.model)
    assert (prediction(again.model) - wanted).norm() < 0.002 * wanted.norm()
    patcher.unpatch_model()
