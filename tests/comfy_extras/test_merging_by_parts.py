"""The merging nodes of single architectures, on the recorded weight names of each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy_extras import nodes_model_merging as merging
from comfy_extras.merging import NETWORK
from comfy_extras.nodes_model_merging_model_specific import NODE_CLASS_MAPPINGS, PARTS
from tests.comfy.families import key_shapes

NETWORKS = {
    "ModelMergeSD1": "SD1.5",
    "ModelMergeSD2": "SD2.x 768/512",
    "ModelMergeSDXL": "SDXL base",
    "ModelMergeSD3_2B": "SD3 medium",
    "ModelMergeAuraflow": "AuraFlow 0.1",
    "ModelMergeFlux1": "Flux dev",
    "ModelMergeSD35_Large": "SD3.5 large",
    "ModelMergeMochiPreview": "Mochi preview",
    "ModelMergeLTXV": "LTXV 2B",
    "ModelMergeCosmos7B": "Cosmos 1 7B T2V",
    "ModelMergeCosmos14B": "Cosmos 1 14B T2V",
    "ModelMergeWAN2_1": "Wan2.1 I2V 14B",
    "ModelMergeCosmosPredict2_2B": "Cosmos Predict2 2B T2I",
    "ModelMergeCosmosPredict2_14B": "Cosmos Predict2 14B T2I",
    "ModelMergeQwenImage": "Qwen-Image",
}
RELATIVES = [
    ("SD1.5", "SD1.5 inpaint"), ("SDXL base", "SSD-1B"), ("SD3 medium", "SD3.5 medium"),
    ("Flux dev", "Flux schnell"), ("Flux dev", "Flux fill (inpaint)"), ("Flux dev", "Chroma"),
    ("Wan2.1 T2V 14B", "Wan2.1 I2V 14B"), ("HunyuanVideo T2V", "SkyReels I2V"),
]  # fmt: skip
STRANGERS = [
    ("SD1.5", "SD2.x 768/512"), ("SD1.5", "SDXL base"), ("SDXL base", "SDXL refiner"),
    ("SD3 medium", "SD3.5 large"), ("Wan2.1 T2V 1.3B", "Wan2.1 T2V 14B"), ("SD1.5", "Flux dev"),
    ("HunyuanVideo T2V", "HunyuanVideo 1.5"), ("Qwen-Image", "Flux dev"),
]  # fmt: skip


class Weights:
    """A model of recorded weights that notes how another is mixed in."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = self.cond_stage_model = weights
        self.model: Any = None
        self.mixed: dict[str, tuple[float, float]] = {}

    def clone(self) -> Weights:
        return Weights(self.weights)

    def get_key_patches(self, prefix: str = "") -> dict[str, Any]:
        return {key: [(value,)] for key, value in self.weights.items() if key.startswith(prefix)}

    def add_patches(self, patches: dict[str, Any], second: float, first: float) -> None:
        self.mixed.update(dict.fromkeys(patches, (second, first)))


def recorded(folder: Path, name: str) -> Weights:
    return Weights(key_shapes.network(folder, name, NETWORK))


@pytest.mark.parametrize("node", PARTS)
def test_each_part_takes_its_ratio_and_all_else_the_first(node: str, golden_folder: Path) -> None:
    model = recorded(golden_folder, NETWORKS[node])
    merge = NODE_CLASS_MAPPINGS[node]().merge
    ratios = {part: n / len(PARTS[node]) for n, part in enumerate(PARTS[node])}
    mixed = merge(model, model, **ratios)[0].mixed
    assert mixed.keys() == model.weights.keys()
    blocks = [part for part in ratios if part.rstrip(".")[-1].isdigit()]
    for key, (second, first) in mixed.items():
        name = key.removeprefix(NETWORK)
        fitting = [part for part in ratios if name.startswith(part)]
        assert first == ratios[max(fitting, key=len, default=PARTS[node][0])], key
        assert second == 1.0 - first
    used = {first for _, first in mixed.values()}
    assert used >= {ratios[part] for part in blocks}


@pytest.mark.parametrize("node", PARTS)
def test_models_without_the_blocks_of_a_node_are_refused(node: str, golden_folder: Path) -> None:
    other = "Flux dev" if PARTS[node][0] == "time_embed." else "SD1.5"
    model = recorded(golden_folder, other)
    ratios = dict.fromkeys(PARTS[node], 0.5)
    with pytest.raises(ValueError, match=rf"model1: {node} mixes models with blocks such as"):
        NODE_CLASS_MAPPINGS[node]().merge(model, model, **ratios)


@pytest.mark.parametrize("pair", RELATIVES)
def test_models_of_one_architecture_for_other_inputs_can_be_mixed(
    pair: tuple[str, str], golden_folder: Path
) -> None:
    first, second = (recorded(golden_folder, name) for name in pair)
    assert merging.ModelMergeSimple().merge(first, second, 0.5)[0].mixed
    assert merging.ModelSubtract().merge(second, first, 0.5)[0].mixed


@pytest.mark.parametrize("pair", STRANGERS)
@pytest.mark.parametrize("turned", [False, True])
def test_models_of_two_architectures_are_refused_with_their_numbers(
    pair: tuple[str, str], turned: bool, golden_folder: Path
) -> None:
    first, second = (recorded(golden_folder, name) for name in pair[:: -1 if turned else 1])
    counts = rf"{len(first.weights)} weights.* {len(second.weights)} weights"
    for merge, options in (
        (merging.ModelMergeSimple().merge, {"ratio": 0.5}),
        (merging.ModelSubtract().merge, {"multiplier": 1.0}),
        (merging.ModelAdd().merge, {}),
        (merging.ModelMergeBlocks().merge, {"input": 0.5, "middle": 0.5, "out": 0.5}),
    ):
        with pytest.raises(ValueError, match=rf"model1 .*{counts}.*cannot be mixed"):
            merge(first, second, **options)


def encoder(*parts: str) -> Weights:
    """A text encoder of some parts, as the loader of checkpoints names them."""
    names = [f"{part}.layers.{n}.weight" for part in parts for n in range(9)]
    return Weights({name: torch.empty(2, 2, device="meta") for name in names})


def test_text_encoders_with_a_part_in_common_can_be_mixed_and_others_not() -> None:
    small, large = encoder("clip_l"), encoder("clip_l", "clip_g")
    mixed = merging.CLIPMergeSimple().merge(large, small, 0.25)[0].mixed
    assert mixed.keys() == small.weights.keys()
    assert set(mixed.values()) == {(0.75, 0.25)}
    for merge, options in (
        (merging.CLIPMergeSimple().merge, {"ratio": 0.5}),
        (merging.CLIPSubtract().merge, {"multiplier": 1.0}),
        (merging.CLIPAdd().merge, {}),
    ):
        with pytest.raises(ValueError, match=r"clip1 .*9 weights.*clip2 .*cannot be mixed: 0 "):
            merge(small, encoder("t5xxl"), **options)


class Base(torch.nn.Module):
    """A network."""


class Derived(Base):
    """One of its kind for other inputs."""


class Stranger(torch.nn.Module):
    """A network of another architecture with the same names."""


@pytest.mark.parametrize(("kind", "fits"), [(Base, True), (Derived, True), (Stranger, False)])
def test_networks_of_two_kinds_are_refused_however_alike_their_names(kind: Any, fits: bool) -> None:
    models = []
    for network in (Base, kind):
        model = Weights({f"{NETWORK}a.{n}.weight": torch.empty(2, 2) for n in range(9)})
        model.model = SimpleNamespace(diffusion_model=network())
        models.append(model)
    for first, second in (models, models[::-1]):
        if fits:
            assert merging.ModelMergeSimple().merge(first, second, 0.5)[0].mixed
            continue
        with pytest.raises(ValueError, match=r"cannot be mixed: 9 .*compute other things.*family"):
            merging.ModelMergeSimple().merge(first, second, 0.5)
