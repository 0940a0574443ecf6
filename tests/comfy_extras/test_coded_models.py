"""What reads or changes weights of a loaded model sees those in a code as the numbers they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import folder_paths
from comfy import loading
from comfy.control import loading as control_loading
from comfy.control.low_rank import low_rank_patches
from comfy.devices import residency
from comfy.ldm.unet import controlnet
from comfy.ops.encoded import EncodedWeight, decoded_tensor
from comfy.weights.state_dict import load_torch_file
from comfy_extras.nodes_lora_extract import LoraSave
from comfy_extras.nodes_model_merging import ModelMergeSimple, ModelSubtract
from comfy_extras.training.factors import ALGORITHMS
from comfy_extras.training.parts import AdapterPlan, TrainedParts
from tests.support import gguf_files, tiny_checkpoint

FORMS = ("gguf", "float8")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
    residency.unload_all_models()  # so that weights are shown as files have them


def network_weights(seed: int = 0) -> dict[str, Tensor]:
    prefix = "model.diffusion_model."
    whole = tiny_checkpoint.weights(seed=seed)
    return {k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)}


def is_matrix(weight: Tensor) -> bool:
    return weight.ndim == 2 and weight.shape[1] % 32 == 0


def in_float8(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices with scales, as files have them."""
    told = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    coded = dict(weights)
    for key, weight in weights.items():
        if is_matrix(weight):
            layer, scale = key.removesuffix("weight"), weight.abs().max() / 448
            coded[key] = (weight / scale).to(torch.float8_e4m3fn)
            coded |= {f"{layer}weight_scale": scale, f"{layer}comfy_quant": told.clone()}
    return coded


def network_file(folder: Path, form: str, weights: dict[str, Tensor], name: str) -> str:
    path = folder / f"{name}.{'gguf' if form == 'gguf' else 'safetensors'}"
    header = {"unet_config": tiny_checkpoint.HEADER["unet_config"]}
    if form == "gguf":
        return str(gguf_files.write(path, weights, "Q8_0", header))
    save_file(in_float8(weights) if form == "float8" else weights, path, header)
    return str(path)


@pytest.fixture(scope="module", params=FORMS)
def twins(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in a code, and one whose weights are those of the first decoded."""
    folder = tmp_path_factory.mktemp(request.param)
    with torch.inference_mode():
        weights = network_weights()
        coded = loading.load_diffusion_model(network_file(folder, request.param, weights, "coded"))
        network = coded.model.diffusion_model
        layers = [m for m in network.modules() if isinstance(m, EncodedWeight)]
        assert len(layers) == sum(map(is_matrix, weights.values())) > 20
        decoded = {key: decoded_tensor(network, key) for key in weights}
        whole = {
            key: value.contiguous().clone() for key, value in decoded.items() if value is not None
        }
        plain = loading.load_diffusion_model(network_file(folder, "plain", whole, "plain"))
        other = loading.load_diffusion_model(
            network_file(folder, "plain", network_weights(1), "other")
        )
    return coded, plain, other


def saved(path: Path) -> dict[str, Tensor]:
    (file,) = path.iterdir()
    found = load_torch_file(str(file))
    return {key: value.float().clone() for key, value in found.items()}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_saved_difference_is_that_of_the_decoded_weights(
    is_first: bool, twins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, model in zip(("coded", "plain"), twins):
        monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / name))
        pair = (model, twins[2]) if is_first else (twins[2], model)
        LoraSave.execute("x", 4, "full_diff", True, ModelSubtract().merge(*pair, 1.0)[0])
        found.append(saved(tmp_path / name))
    coded, plain = found
    assert coded.keys() == plain.keys()
    for key, value in plain.items():
        torch.testing.assert_close(coded[key], value, rtol=2e-3, atol=1e-6)


def test_a_control_lora_takes_the_numbers_of_a_models_weights(twins: Any) -> None:
    config = {**tiny_checkpoint.UNET, "hint_channels": 3}
    for name in ("out_channels", "transformer_depth_output"):
        config.pop(name)
    built = controlnet.ControlNet(**config, dtype=torch.float32, device="meta")
    own = ("input_hint_block.", "zero_convs.", "middle_block_out.")
    differences = {
        k: torch.zeros(v.shape) for k, v in built.state_dict().items() if k.startswith(own)
    }
    coded, plain = (
        low_rank_patches(model.model, differences, built, torch.float32)[0] for model in twins[:2]
    )
    assert coded.keys() == plain.keys()
    assert all(torch.equal(coded[key], value) for key, value in plain.items())


def test_differences_of_a_controlnet_are_added_to_the_numbers_of_a_models_weights(
    twins: Any,
) -> None:
    weights = network_weights()
    differences = {f"control_model.{key}": torch.ones(v.shape) for key, v in weights.items()}
    differences["control_model.zero_convs.0.0.bias"] = torch.ones(3)
    coded, plain = (control_loading._add_base(differences, model) for model in twins[:2])
    assert coded.keys() == plain.keys() == differences.keys()
    assert all(torch.equal(coded[key], value) for key, value in plain.items())
    assert torch.equal(coded["control_model.zero_convs.0.0.bias"], torch.ones(3))


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_what_is_trained_has_the_sizes_of_the_numbers(algorithm: str, twins: Any) -> None:
    plan = AdapterPlan(algorithm, 2, torch.float32, 0, {})
    coded, plain = (TrainedParts(model.clone(), plan).file_tensors() for model in twins[:2])
    assert {k: v.shape for k, v in coded.items()} == {k: v.shape for k, v in plain.items()}


def test_a_model_in_a_code_is_mixed_with_a_plain_one(twins: Any) -> None:
    found = []
    for model in twins[:2]:
        view = ModelMergeSimple().merge(model, twins[2], 0.25)[0]
        view.patch_model(torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        latent, text = (torch.randn(s, generator=generator) for s in ((1, 4, 8, 8), (1, 7, 32)))
        found.append(view.model.apply_model(latent, torch.tensor([1.0]), c_crossattn=text))
        view.unpatch_model()
    # Float8 takes the mix in again.
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


def test_a_controlnet_in_a_code_is_that_of_its_decoded_weights(tmp_path: Path) -> None:
    config = {k: v for k, v in tiny_checkpoint.UNET.items() if not k.startswith("out_")}
    config.pop("transformer_depth_output")
    built = controlnet.ControlNet(**config, hint_channels=3, dtype=torch.float32, device="meta")
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"control_model.{key}": torch.randn(value.shape, generator=generator) * 0.05
        for key, value in built.state_dict().items()
    }
    coded = control_loading.load_controlnet(network_file(tmp_path, "gguf", weights, "coded"))
    network = coded.control_model
    decoded = {key: decoded_tensor(network, key.removeprefix("control_model.")) for key in weights}
    whole = {key: value.contiguous().clone() for key, value in decoded.items() if value is not None}
    plain = control_loading.load_controlnet(network_file(tmp_path, "plain", whole, "plain"))
    inputs = {
        "x": torch.randn(1, 4, 8, 8, generator=generator), "timesteps": torch.ones(1),
        "hint": torch.rand(1, 3, 64, 64, generator=generator),
        "context": torch.randn(1, 7, 32, generator=generator),
    }  # fmt: skip
    coded._check_text(inputs["context"])
    with pytest.raises(ValueError, match=r"texts of width 64, .*found one for 32"):
        coded._check_text(torch.zeros(1, 7, 64))
    outputs = [one.control_model(**inputs)["output"] for one in (coded, plain)]
    assert all(torch.equal(first, second) for first, second in zip(*outputs))


def test_a_whole_checkpoint_may_be_a_gguf_file(tmp_path: Path) -> None:
    weights = tiny_checkpoint.weights()
    paths = (
        gguf_files.write(
            tmp_path / "coded.gguf",
            weights,
            lambda _, weight: "Q8_0" if weight.ndim > 1 and weight.numel() % 32 == 0 else "F32",
            tiny_checkpoint.HEADER,
        ),
        tiny_checkpoint.write(tmp_path / "plain.safetensors"),
    )
    image = torch.rand(1, 32, 32, 3, generator=torch.Generator().manual_seed(1))
    found = []
    for path in paths:
        parts = loading.load_checkpoint_guess_config(str(path))
        assert parts.clip is not None
        assert parts.vae is not None
        text = parts.clip.encode_from_tokens(parts.clip.tokenize("a red cat"))
        latent = parts.vae.encode(image)
        found.append((text, latent))
        networks = (parts.model.model, parts.clip.cond_stage_model, parts.vae.first_stage_model)
        coded = [sum(isinstance(m, EncodedWeight) for m in one.modules()) for one in networks]
        assert all(coded) == any(coded) == (path is paths[0])
    for small, whole in zip(*found):
        assert 0 < (small - whole).norm() < 0.05 * whole.norm()
