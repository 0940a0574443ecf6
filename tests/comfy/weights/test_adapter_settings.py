"""Scales of adapters that a file's header or the file of settings beside it gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from comfy.weights.arithmetic import calculate_weight
from comfy.weights.lora import load_lora
from comfy.weights.state_dict import load_torch_file

UP, DOWN = torch.arange(12.0).reshape(6, 2), torch.arange(8.0).reshape(2, 4) - 3
PAIR = {"lora_B.weight": UP, "lora_A.weight": DOWN}


def layers(*names: str, parts: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    return {f"{n}.{part}": t.clone() for n in names for part, t in (parts or PAIR).items()}


def scale_of(folder: Path, layer: str, tensors: dict[str, Any], settings: Any) -> float:
    """By how much the product of a layer's factors is multiplied."""
    path = folder / "a.safetensors"
    text = settings if isinstance(settings, str) else json.dumps(settings)
    save_file(tensors, path, metadata={"format": "pt", "lora_adapter_metadata": text})
    return read(path, layer)


def read(path: Path, layer: str) -> float:
    patches = load_lora(load_torch_file(path), {layer: "w"})
    made = calculate_weight([(1.0, patches["w"], 1.0, None, None)], torch.zeros(6, 4), "w")
    return float((made / (UP @ DOWN)).median())


@pytest.mark.parametrize("down", ["lora_A.weight", "lora.down.weight", "lora_down.weight"])
def test_alpha_of_the_header_scales_the_product(tmp_path: Path, down: str) -> None:
    up = down.replace("lora_A", "lora_B").replace("down", "up")
    tensors = layers("unet.a", parts={up: UP, down: DOWN})
    assert scale_of(tmp_path, "unet.a", tensors, {"unet.r": 2, "unet.lora_alpha": 7}) == 3.5


def test_each_part_of_a_pipeline_has_its_own_settings(tmp_path: Path) -> None:
    tensors = layers("transformer.a", "text_encoder.a", "text_encoder_2.a", "vae.a")
    settings = {"transformer.lora_alpha": 4, "text_encoder.lora_alpha": 1,
                "text_encoder_2.lora_alpha": 6}  # fmt: skip
    scales = [scale_of(tmp_path, f"{p}.a", tensors, settings)
              for p in ("transformer", "text_encoder", "text_encoder_2", "vae")]  # fmt: skip
    assert scales == [2.0, 0.5, 3.0, 1.0]


def test_rank_stabilised_adapters_divide_by_the_root_of_the_rank(tmp_path: Path) -> None:
    found = scale_of(tmp_path, "a", layers("a"), {"lora_alpha": 5, "use_rslora": True})
    assert math.isclose(found, 5 / math.sqrt(2), rel_tol=1e-5)


@pytest.mark.parametrize(
    ("layer", "scale"),
    [("t.blocks.0.q", 1.5), ("t.blocks.1.q", 2.5), ("t.blocks.10.q", 1.0), ("t.noq", 1.0),
     ("t.out.k", 4.0)],
)  # fmt: skip
def test_patterns_give_layers_an_alpha_of_their_own(
    tmp_path: Path, layer: str, scale: float
) -> None:
    patterns = {"blocks.0.q": 3, r"blocks\.[12]\.q": 5, "k": 8, "(a+)+$": 9}
    settings = {"t.lora_alpha": 2, "t.alpha_pattern": patterns}
    assert scale_of(tmp_path, layer, layers(layer), settings) == scale


def test_a_pattern_made_to_be_slow_is_not_tried(tmp_path: Path) -> None:
    layer = "a" * 60
    patterns = {"(a+)+b": 9, "a*a*a*a*a*a*a*a*b": 9, "(": 9, "[": 9}
    settings = {"lora_alpha": 2, "alpha_pattern": patterns}
    assert scale_of(tmp_path, layer, layers(layer), settings) == 1.0


def test_an_alpha_among_the_tensors_wins(tmp_path: Path) -> None:
    tensors = {**layers("a"), "a.alpha": torch.tensor(6.0)}
    assert scale_of(tmp_path, "a", tensors, {"lora_alpha": 2}) == 3.0


@pytest.mark.parametrize(
    "settings",
    ["no json", "[]", "[" * 100_000, "{}", {"lora_alpha": "8"}, {"lora_alpha": None},
     {"lora_alpha": True}, '{"lora_alpha": NaN}', {"lora_alpha": 8e400}, {"alpha_pattern": []},
     {"t.lora_alpha": 8}],
)  # fmt: skip
def test_settings_that_say_nothing_of_a_layer_leave_its_product(
    tmp_path: Path, settings: Any
) -> None:
    assert scale_of(tmp_path, "a", layers("a"), settings) == 1.0


def test_settings_lie_beside_a_file_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file(layers("base_model.model.a"), path)
    assert read(path, "base_model.model.a") == 1.0
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8, "alpha_pattern": {"^a": 3}}')
    assert read(path, "base_model.model.a") == 1.5
    other = tmp_path / "other.safetensors"
    save_file(layers("base_model.model.a"), other)
    assert read(other, "base_model.model.a") == 1.0


@pytest.mark.parametrize("factorised", [False, True])
def test_kronecker_factors_are_scaled_by_the_rank_that_was_asked_for(
    tmp_path: Path, factorised: bool
) -> None:
    w1, a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(3, 1), torch.full((1, 2), 2.0)
    second = {"lokr_w2_a": a, "lokr_w2_b": b} if factorised else {"lokr_w2": a @ b}
    path = tmp_path / "adapter_model.safetensors"
    save_file({f"x.{name}": t for name, t in {"lokr_w1": w1, **second}.items()}, path)
    (tmp_path / "adapter_config.json").write_text('{"alpha": 6, "r": 4, "rank_pattern": {"y": 2}}')
    patches = load_lora(load_torch_file(path), {"x": "w"})
    made = calculate_weight([(1.0, patches["w"], 1.0, None, None)], torch.zeros(6, 4), "w")
    assert torch.allclose(made, torch.kron(w1, a @ b) * 1.5)


@pytest.mark.parametrize("lengths", [False, True])
def test_an_embedding_table_is_changed_by_factors_that_are_turned_round(lengths: bool) -> None:
    weight, a, b = torch.randn(9, 4), torch.randn(2, 9), torch.randn(4, 2)
    file = {"e.lora_embedding_A": a, "e.lora_embedding_B": b, "e.alpha": torch.tensor(3.0)}
    changed = weight.double() + 1.5 * (b.double() @ a.double()).T
    if lengths:  # of the columns of the changed table
        file["e.lora_magnitude_vector"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        changed *= file["e.lora_magnitude_vector"] / changed.pow(2).sum(0).sqrt()
    patches = load_lora(file, {"e": "w"})
    made = calculate_weight([(1.0, patches["w"], 1.0, None, None)], weight.clone(), "w")
    assert torch.allclose(made.double(), changed, rtol=1e-5, atol=1e-5)


def test_factors_of_outputs_scale_the_bias_too_and_those_of_inputs_do_not() -> None:
    weight, bias, out = torch.randn(6, 4), torch.randn(6), torch.rand(6, 1)
    patches = load_lora({"a.ia3_l": out}, {"a": "a.weight"})
    made = calculate_weight([(1.0, patches["a.weight"], 1.0, None, None)], weight.clone(), "w")
    assert torch.allclose(made, weight * out)
    made = calculate_weight([(1.0, patches["a.bias"], 1.0, None, None)], bias.clone(), "b")
    assert torch.allclose(made, bias * out[:, 0])
    columns = torch.rand(1, 4)
    patches = load_lora({"a.ia3_l": columns}, {"a": "a.weight"})
    assert list(patches) == ["a.weight"]
    made = calculate_weight([(1.0, patches["a.weight"], 1.0, None, None)], weight.clone(), "w")
    assert torch.allclose(made, weight * columns)
