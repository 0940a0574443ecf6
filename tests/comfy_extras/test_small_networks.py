"""Small networks beside the model: hypernetworks, PhotoMaker, extracted LoRAs, merges by part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import folder_paths
from comfy.patching.patcher import ModelPatcher
from comfy.weights.errors import WeightFileError
from comfy_extras import (
    nodes_hypernetwork,
    nodes_lora_extract,
    nodes_photomaker,
)
from comfy_extras import nodes_model_merging_model_specific as specific

# -- hypernetworks -------------------------------------------------------------------------------


def stack(width: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"linear.0": (2 * width, width), "linear.1": (width, 2 * width)}
    made = {}
    for name, shape in shapes.items():
        made[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
        made[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    return made


def hypernetwork_file(path: Path, **facts: Any) -> str:
    content = {8: [stack(8, 1), stack(8, 2)], "activation_func": "relu", **facts}
    torch.save(content, path)
    return str(path)


def test_a_hypernetwork_adds_to_keys_and_values_of_its_width(tmp_path: Path) -> None:
    patch = nodes_hypernetwork.load_hypernetwork_patch(hypernetwork_file(tmp_path / "h.pt"), 0.5)
    q, k, v = (torch.rand(1, 3, 8) for _ in range(3))
    new_q, new_k, new_v = patch(q, k, v, {})
    assert new_q is q

    def by_hand(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        hidden = torch.relu(x @ weights["linear.0.weight"].T + weights["linear.0.bias"])
        return hidden @ weights["linear.1.weight"].T + weights["linear.1.bias"]

    assert torch.allclose(new_k, k + 0.5 * by_hand(k, stack(8, 1)), atol=1e-6)
    assert torch.allclose(new_v, v + 0.5 * by_hand(v, stack(8, 2)), atol=1e-6)
    other = torch.rand(1, 3, 6)
    assert patch(other, other, other, {})[1] is other


def test_norms_and_a_last_activation_are_part_of_a_hypernetwork(tmp_path: Path) -> None:
    weights = {**stack(8, 1)}
    ordered = {
        "linear.0.weight": weights["linear.0.weight"],
        "linear.0.bias": weights["linear.0.bias"],
        "linear.1.weight": torch.full((16,), 2.0),
        "linear.1.bias": torch.zeros(16),
    }
    facts = {"activation_func": "tanh", "is_layer_norm": True, "activate_output": True}
    layers = nodes_hypernetwork.stack_of_layers(ordered, facts)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Tanh, nn.LayerNorm]
    assert float(layers[2].weight[0]) == 2.0
    del tmp_path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": torch.zeros(1), "b": torch.zeros(1)}, r"no hypernetwork: it holds 2 keys \(a, b\)"),
        ({8: [stack(8, 1), stack(8, 2)], "activation_func": "magic"}, "unknown activation 'magic'"),
        ({8: [{"x.weight": torch.zeros(2, 2)}] * 2, "step": 1}, "width 8 do not fit"),
    ],
)
def test_files_that_are_no_hypernetwork_are_refused(
    content: dict[Any, Any], words: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "h.pt")
    with pytest.raises(WeightFileError, match=words):
        nodes_hypernetwork.load_hypernetwork_patch(str(tmp_path / "h.pt"), 1.0)


def patcher_of_attention(width: int) -> ModelPatcher:
    model = nn.Module()
    model.diffusion_model = nn.ModuleDict({"attn": nn.ModuleDict({"to_k": nn.Linear(width, 4)})})
    cpu = torch.device("cpu")
    return ModelPatcher(model, load_device=cpu, offload_device=cpu)


def test_a_hypernetwork_for_other_widths_is_said_to_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = hypernetwork_file(tmp_path / "h.pt")
    monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda folder, name: path)
    model = patcher_of_attention(8)
    nodes_hypernetwork.HypernetworkLoader.execute(model, "h.pt", 1.0)
    assert not caplog.text
    other = patcher_of_attention(6)
    nodes_hypernetwork.HypernetworkLoader.execute(other, "h.pt", 1.0)
    assert "h.pt has no effect on this model: it changes attentions of width 8" in caplog.text


# -- PhotoMaker ----------------------------------------------------------------------------------

VISION = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_channels": 3,
    "patch_size": 4,
    "image_size": 8,
    "hidden_act": "quick_gelu",
    "projection_dim": 6,
}


def id_encoder() -> nodes_photomaker.PhotoMakerIDEncoder:
    encoder = nodes_photomaker.PhotoMakerIDEncoder(dict(VISION), 4)
    torch.manual_seed(3)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    return encoder.eval()


def test_an_identity_encoder_is_loaded_with_the_sizes_of_its_file(tmp_path: Path) -> None:
    encoder = id_encoder()
    path = tmp_path / "photomaker.bin"
    torch.save({"id_encoder": encoder.state_dict(), "lora_weights": {}}, path)
    loaded = nodes_photomaker.load_id_encoder(str(path))
    pixels, text = torch.rand(1, 3, 8, 8), torch.rand(1, 5, 10)
    places = torch.tensor([False, False, True, False, False])
    with torch.no_grad():
        made = loaded(pixels, text, places)
        assert torch.allclose(made, encoder(pixels, text, places), atol=1e-6)
    assert torch.equal(made[:, ~places], text[:, ~places])
    assert not torch.allclose(made[:, 2], text[:, 2])
    torch.save({"some": torch.zeros(1), "thing": torch.zeros(1)}, path)
    with pytest.raises(WeightFileError, match="no PhotoMaker encoder"):
        nodes_photomaker.load_id_encoder(str(path))


class Words:
    """A text encoder whose states are the numbers of its tokens."""

    def tokenize(self, text: str, return_word_ids: bool = False) -> dict[str, Any]:
        assert return_word_ids
        ids = [0] + [len(word) for word in text.split(" ")] + [99]
        return {"l": [[(token, 1.0, place) for place, token in enumerate(ids)]]}

    def encode_from_tokens(self, tokens: dict[str, Any], return_pooled: bool) -> tuple[Tensor, Any]:
        assert return_pooled
        states = torch.tensor([float(token) for token, _ in tokens["l"][0]])
        return states[None, :, None].repeat(1, 1, 10), "pooled"


def test_the_word_before_the_trigger_becomes_the_person() -> None:
    image = torch.rand(2, 8, 8, 3)
    encode = nodes_photomaker.PhotoMakerEncode.execute
    plain = encode(id_encoder(), image, Words(), "photo of me")[0]
    assert plain[0][0][0, :, 0].tolist() == [0.0, 5.0, 2.0, 2.0, 99.0]
    changed = encode(id_encoder(), image, Words(), "photo of photomaker")[0][0][0]
    # The trigger's own token is gone, and the person stands where "of" stood.
    assert changed[0, :, 0].tolist()[:2] == [0.0, 5.0]
    assert changed[0, 3:, 0].tolist() == [99.0, 99.0]
    assert not torch.allclose(changed[0, 2], torch.full((10,), 2.0))


# -- extracted LoRAs -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 8), (12, 8, 3, 3), (12, 8, 1, 1)])
def test_two_factors_come_as_near_as_the_rank_allows(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    flat_in = int(torch.tensor(shape[1:]).prod())
    low = torch.randn(12, 3, generator=generator) @ torch.randn(3, flat_in, generator=generator)
    up, down = nodes_lora_extract.extract_lora(low.reshape(shape), 12)
    assert up.shape[:2] == (12, min(12, flat_in))
    assert down.shape[1:] == shape[1:]
    product = up.flatten(1) @ down.flatten(1)
    assert (product - low).norm() / low.norm() < 1e-5
    up, down = nodes_lora_extract.extract_lora(low.reshape(shape), 1)
    best = torch.linalg.svdvals(low)[1:].norm()
    assert (up.flatten(1) @ down.flatten(1) - low).norm() == pytest.approx(float(best), rel=1e-4)


# -- merges by part ------------------------------------------------------------------------------


class Weights:
    """A model of named weights that records how another is mixed in."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.mixed: dict[str, tuple[float, float]] = {}

    def clone(self) -> Weights:
        return Weights(self.keys)

    def get_key_patches(self, prefix: str) -> dict[str, Any]:
        return {key: "patch" for key in self.keys if key.startswith(prefix)}

    def add_patches(self, patches: dict[str, Any], second: float, first: float) -> None:
        self.mixed.update(dict.fromkeys(patches, (second, first)))


def test_each_part_of_an_architecture_takes_its_own_ratio() -> None:
    keys = [
        "diffusion_model.img_in.weight",
        "diffusion_model.double_blocks.1.img_mlp.0.weight",
        "diffusion_model.double_blocks.18.img_mlp.0.weight",
        "diffusion_model.single_blocks.10.linear1.weight",
        "diffusion_model.guidance_in.in_layer.weight",
    ]
    node = specific.ModelMergeFlux1()
    ratios = dict.fromkeys(node.PARTS, 1.0)
    ratios.update({"double_blocks.1.": 0.25, "single_blocks.10.": 0.0, "guidance_in": 0.5})
    merged = node.merge(Weights(keys), Weights(keys), **ratios)[0]
    assert [merged.mixed[key] for key in keys] == [
        (0.0, 1.0),
        (0.75, 0.25),
        (0.0, 1.0),
        (1.0, 0.0),
        (0.5, 0.5),
    ]


def test_nodes_of_architectures_are_classes_of_their_own() -> None:
    classes = specific.NODE_CLASS_MAPPINGS
    assert len(set(classes.values())) == len(classes) == 15
    for name, node in classes.items():
        assert node.__name__ == name
        assert list(node.INPUT_TYPES()["required"])[2:] == list(specific.PARTS[name])
    assert SimpleNamespace(**classes).ModelMergeSDXL is specific.ModelMergeSDXL


def test_another_models_text_encoder_is_refused() -> None:
    encoder = id_encoder()
    encoder.text_width = 12
    with pytest.raises(ValueError, match=r"clip: expected .* of width 12 together, found 10"):
        nodes_photomaker.PhotoMakerEncode.execute(
            encoder, torch.rand(1, 8, 8, 3), Words(), "photo of photomaker"
        )
