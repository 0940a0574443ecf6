"""Whole files in codes of few bits load, are small, and compute with the numbers they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading
from comfy.ldm.flux.model import Flux
from comfy.weights.errors import WeightFileError
from comfy.weights.low_bit import four_bit
from tests.comfy.weights.test_gguf import WIDE, coded, prediction
from tests.comfy.weights.test_low_bit import NF4

PREFIX = "model.diffusion_model."
FORMS = ("nvfp4 per layer", "nvfp4 in metadata", "mxfp8 per layer", "nf4")


def settings(told: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)


def tiles(shape: tuple[int, int], block: int) -> int:
    """How many scales hardware reads for a matrix."""
    return -(-shape[0] // 128) * 128 * (-(-shape[1] // block // 4) * 4)


def layer(shape: tuple[int, int], form: str, generator: Any) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a layer below its name, its weight), of noise with the size of usual weights."""

    def noise(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator).to(torch.uint8)

    if form == "nf4":
        stored = noise(0, 256, shape[0] * shape[1] // 2, 1)
        parts = {
            "absmax": noise(0, 256, shape[0] * shape[1] // 64),
            "quant_map": torch.tensor(NF4),
            "nested_absmax": torch.full((-(-shape[0] * shape[1] // 64 // 256),), 0.05),
            "nested_quant_map": torch.linspace(-1, 1, 256),
        }
        told = {"shape": list(shape), "blocksize": 64, "nested_blocksize": 256,
                "nested_offset": 0.06, "quant_type": "nf4", "dtype": "bfloat16"}  # fmt: skip
        state = settings(told)
        code = four_bit.bitsandbytes("nf4", stored, parts, state)
        file = {f".{name}": part for name, part in parts.items()}
        file[".quant_state.bitsandbytes__nf4"] = state
        return {"": stored, **file}, code.decode(stored, parts, torch.float32)
    if form.startswith("nvfp4"):
        stored = noise(0, 256, shape[0], shape[1] // 2)
        scales = noise(40, 60, tiles(shape, 16)).view(torch.float8_e4m3fn)
        parts = {"_scale": scales, "_scale_2": torch.tensor(0.02)}
        named = {"weight_scale": scales, "weight_scale_2": parts["_scale_2"]}
        code = four_bit.nvfp4(stored, named)
    else:
        stored = noise(0, 120, *shape).view(torch.float8_e4m3fn)
        parts = {"_scale": noise(110, 114, tiles(shape, 32))}
        named = {"weight_scale": parts["_scale"]}
        code = four_bit.mxfp8(stored, named)
    return {"": stored, **parts}, code.decode(stored, named, torch.float32)


def written(form: str, folder: Path) -> tuple[str, str, int]:
    """Paths of a FLUX in a code and of the same decoded; how many matrices are in the code."""
    generator = torch.Generator().manual_seed(3)
    file, plain, layers = {}, {}, {}
    for key, value in Flux(**WIDE, device="meta").state_dict().items():
        is_inner = any(part in key for part in ("_attn.", "_mlp.", "linear"))
        if not (is_inner and value.ndim == 2):
            noise = torch.randn(value.shape, generator=generator)
            noise *= value.shape[-1] ** -0.5 if value.ndim > 1 else 0.1
            file[PREFIX + key] = plain[PREFIX + key] = noise
            continue
        shape = (int(value.shape[0]), int(value.shape[1]))
        tensors, plain[PREFIX + key] = layer(shape, form, generator)
        file.update({PREFIX + key + name: tensor for name, tensor in tensors.items()})
        name = (PREFIX + key).removesuffix(".weight")
        layers[name] = {"format": form.split()[0]}
        if form.endswith("per layer"):
            file[f"{name}.comfy_quant"] = settings(layers[name])
    told = {"_quantization_metadata": json.dumps({"layers": layers})}
    paths = str(folder / "coded.safetensors"), str(folder / "plain.safetensors")
    save_file(file, paths[0], told if form.endswith("metadata") else None)
    save_file(plain, paths[1])
    return *paths, len(layers)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_file_in_a_code_is_the_network_of_its_decoded_weights(form: str, tmp_path: Path) -> None:
    path, plain_path, count = written(form, tmp_path)
    one, two = loading.load_diffusion_model(path), loading.load_diffusion_model(plain_path)
    layers = coded(one.model)
    assert len(layers) == count > 8
    assert all(layer.weight.element_size() == 1 for layer in layers.values())
    bare = sum(t.nbytes for k, t in two.model.state_dict().items()
               if k.removesuffix(".weight") not in layers)  # fmt: skip
    bits = {"nvfp4": 4.5, "mxfp8": 8.25, "nf4": 4.16}[form.split()[0]]
    numbers = sum(layer.weight.numel() * (2 if bits < 8 else 1) for layer in layers.values())
    assert one.model_size() - bare < numbers * bits / 8 * 1.02 + 2000 * count
    torch.testing.assert_close(prediction(one.model), prediction(two.model), rtol=1e-5, atol=1e-5)


def test_a_file_with_a_scale_of_another_size_is_an_error_that_names_file_and_layer(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    path = written("nvfp4 per layer", tmp_path)[0]
    tensors = load_file(path)
    key = f"{PREFIX}double_blocks.0.img_attn.qkv.weight_scale"
    tensors[key] = tensors[key].view(torch.uint8)[:100]
    save_file(tensors, path)
    with pytest.raises(WeightFileError, match=r"coded\.safetensors.*img_attn\.qkv.*100 scales"):
        loading.load_diffusion_model(path)
