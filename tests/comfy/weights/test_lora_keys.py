"""Every spelling of every weight that LoRA files of a family use is recognised, and no other."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy.weights import diffusers_transformers
from comfy.weights.diffusers_unet import unet_to_diffusers
from comfy.weights.errors import NoMatchingWeightsError
from comfy.weights.lora import (
    convert_lora,
    load_lora,
    model_lora_keys_clip,
    model_lora_keys_unet,
    require_match,
)
from tests.conftest import SHARED

RECORD = SHARED / "golden" / "lora_keys.json"
RECORDED: dict[str, Any] = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
NETWORKS = list(RECORDED.get("diffusion_models", {}))
ENCODERS = {
    "SD1 clip_l": "sd1_clip.SD1ClipModel",
    "SD2 clip_h": "text_encoders.sd2_clip.SD2ClipModel",
    "SDXL clip_l+clip_g": "sdxl_clip.SDXLClipModel",
    "SDXL refiner / Cascade clip_g only": "sdxl_clip.SDXLRefinerClipModel",
    "SD3 l+g+t5": "sd3_clip(l,g,t5)",
    "Flux l+t5": "text_encoders.flux.FluxClipModel_",
    "HunyuanDiT": "text_encoders.hydit.HyditModel",
    "Z-Image qwen3": "text_encoders.z_image.ZImageTEModel_",
}
TO_DIFFUSERS = {
    "SD3 medium": diffusers_transformers.mmdit_to_diffusers,
    "SD3.5 large": diffusers_transformers.mmdit_to_diffusers,
    "Flux dev": diffusers_transformers.flux_to_diffusers,
    "Flux2 dev": diffusers_transformers.flux_to_diffusers,
    "AuraFlow 0.3": diffusers_transformers.auraflow_to_diffusers,
    "PixArt alpha 1024": diffusers_transformers.pixart_to_diffusers,
    "Z-Image": diffusers_transformers.z_image_to_diffusers,
    "SD1.5": unet_to_diffusers,
    "SDXL base": unet_to_diffusers,
}


class Weightless:
    """A model that has only names and shapes."""

    def __init__(self, shapes: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.model_config = SimpleNamespace(unet_config=config)
        self._tensors = {k: torch.empty(s, device="meta") for k, s in shapes.items()}

    def state_dict(self, **_: Any) -> dict[str, torch.Tensor]:
        return self._tensors


def expanded(patterns: list[dict[str, Any]]) -> dict[str, Any]:
    """Names and shapes from recorded patterns, in which # stands for an index."""
    out: dict[str, Any] = {}
    for entry in patterns:
        parts = entry["key"].split("#")
        ranges = [
            range(int(r.split("-")[0]), int(r.split("-")[1]) + 1) if isinstance(r, str) else r
            for r in entry.get("indices_per_hash", [])
        ]
        for indices in entry.get("index_tuples") or itertools.product(*ranges):
            name = parts[0] + "".join(f"{i}{p}" for i, p in zip(indices, parts[1:]))
            out[name] = entry["shape"]
    return out


def as_json(target: Any) -> str:
    if isinstance(target, str):
        return json.dumps(target)
    if len(target) > 2 and target[2] is not None:
        assert target[2](torch.arange(6)).tolist() == [3, 4, 5, 0, 1, 2]
        return json.dumps([target[0], None, "function(swap_scale_shift)"])
    return json.dumps([target[0], list(target[1])])


def digest(names: Mapping[str, Any]) -> str:
    lines = sorted(f"{key}\t{as_json(target)}" for key, target in names.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.fixture(scope="module")
def state_dicts(golden_folder: Path) -> Any:
    with gzip.open(golden_folder / "model_state_dicts.json.gz") as file:
        return json.load(file)


@pytest.fixture(scope="module")
def configs(golden_json: Any) -> Any:
    variants = golden_json("model_families.json")["variants"]
    return {name: v["detected_unet_config"] for name, v in variants.items()}


@pytest.mark.parametrize("family", NETWORKS)
def test_a_network_accepts_exactly_the_recorded_keys(
    family: str, state_dicts: Any, configs: Any
) -> None:
    shapes = expanded(state_dicts["nets"][family])
    network = {f"diffusion_model.{key}": shape for key, shape in shapes.items()}
    names = model_lora_keys_unet(Weightless(network, configs[family]))
    recorded = RECORDED["diffusion_models"][family]
    for sample in recorded["representatives"]:
        spelled = sorted(k for k, t in names.items() if json.loads(as_json(t)) == sample["target"])
        assert spelled == sorted(sample["accepted_keys"])
    assert len(names) == recorded["n_keys"]
    assert digest(names) == recorded["sha256_of_sorted_lines"]


@pytest.mark.parametrize("family", ENCODERS)
def test_a_text_encoder_accepts_exactly_the_recorded_keys(family: str, state_dicts: Any) -> None:
    shapes = expanded(state_dicts["text_encoders"][ENCODERS[family]]["keys"])
    names = model_lora_keys_clip(Weightless(shapes, {}))
    recorded = RECORDED["text_encoders"][family]
    assert len(names) == recorded["n_keys"]
    assert digest(names) == recorded["sha256_of_sorted_lines"]


@pytest.mark.parametrize("family", TO_DIFFUSERS)
def test_library_names_map_to_the_recorded_weights(
    family: str, configs: Any, golden_json: Any
) -> None:
    recorded = golden_json("diffusers_key_maps.json")[family]
    names = TO_DIFFUSERS[family](configs[family])
    assert len(names) == recorded["n"]
    assert digest(names) == recorded["sha256_of_sorted_lines"]


def test_only_families_with_the_key_get_hunyuan_video_names(state_dicts: Any, configs: Any) -> None:
    for family, expected in (("HunyuanVideo 1.5", True), ("HunyuanImage 2.1", False)):
        shapes = expanded(state_dicts["nets"][family])
        network = {f"diffusion_model.{key}": shape for key, shape in shapes.items()}
        names = model_lora_keys_unet(Weightless(network, configs[family]))
        assert ("transformer.double_blocks.0.img_attn_qkv" in names) is expected


@pytest.mark.parametrize("name", list(RECORDED.get("whole_file_conversions", {})))
def test_files_with_foreign_names_are_rewritten_as_a_whole(name: str) -> None:
    recorded = RECORDED["whole_file_conversions"][name]
    shapes = {
        "img_in.lora_A.weight": (4, 128),
        "img_in.lora_B.weight": (3072, 4),
    }
    lora = {key: torch.zeros(shapes.get(key, (4, 8))) for key in recorded["in"]}
    assert set(convert_lora(lora)) == set(recorded["out"])
    if name == "BFL control lora":
        grown = convert_lora(lora)["diffusion_model.img_in.reshape_weight"]
        assert grown.tolist() == [3072, 128]


def test_an_ordinary_file_is_not_rewritten() -> None:
    lora = {"lora_unet_conv_in.lora_up.weight": torch.zeros(1)}
    assert convert_lora(lora) is lora


def test_unused_tensors_are_counted_and_named(caplog: Any) -> None:
    lora = {"a.lora_up.weight": torch.ones(2, 1), "a.lora_down.weight": torch.ones(1, 2)}
    patches = load_lora({**lora, "stray.alpha": torch.ones(())}, {"a": "net.a.weight"})
    assert list(patches) == ["net.a.weight"]
    assert "1 of 3" in caplog.text
    assert "stray.alpha" in caplog.text


def test_a_file_that_fits_nothing_is_an_error_that_names_it() -> None:
    lora = {"foreign.lora_up.weight": torch.ones(1)}
    with pytest.raises(NoMatchingWeightsError, match=r"other\.safetensors.*foreign") as caught:
        require_match([], lora, "other.safetensors")
    assert "family" in caught.value.mend


def test_an_alpha_that_is_no_number_costs_its_own_change_only(caplog: Any) -> None:
    lora = {
        "a.lora_up.weight": torch.ones(2, 1), "a.lora_down.weight": torch.ones(1, 2),
        "a.alpha": torch.ones(3),
        "b.lora_up.weight": torch.ones(2, 1), "b.lora_down.weight": torch.ones(1, 2),
        "b.alpha": torch.ones(1),
    }  # fmt: skip
    assert list(load_lora(lora, {"a": "a.weight", "b": "b.weight"})) == ["b.weight"]
    assert "'a.alpha'" in caplog.text
