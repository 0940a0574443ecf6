"""Each recorded network is claimed by the right family, whatever its size, and by no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy.families import MODEL_FAMILIES, detection, dit_layout, unsupported
from comfy.vae import unsupported as vae_unsupported
from comfy.vae.kinds import detect_autoencoder
from comfy.vae.vae import VAE
from comfy.weights.fill import IncompleteWeightsError
from comfy.weights.header_hints import read_hints
from tests.comfy.families import key_shapes

PREFIX = "model.diffusion_model."
SUPPORTED = {family.__name__ for family in MODEL_FAMILIES}
LATER = {"ACEStep15"}  # families of later versions than the recorded one


def all_variants(golden_json: Callable[[str], Any]) -> dict[str, Any]:
    return golden_json("model_families.json")["variants"]


def class_table(golden_json: Callable[[str], Any]) -> dict[str, Any]:
    table = golden_json("model_families.json")["class_table_in_match_order"]
    return {row["class"]: row for row in table}


def test_every_recorded_network_is_claimed_by_its_family_or_by_none(
    golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    claimed = {}
    expected = {}
    rows = class_table(golden_json)
    for name, variant in all_variants(golden_json).items():
        if name not in key_shapes.recorded(golden_folder)["nets"]:
            continue
        wanted = variant["expected_class"]
        expected[name] = wanted if wanted in SUPPORTED else None
        state_dict = key_shapes.network(golden_folder, name, PREFIX)
        for key in rows[wanted]["required_state_dict_keys"]:
            state_dict[key] = torch.empty(1, device="meta")
        family = detection.model_config_from_unet(state_dict, PREFIX)
        claimed[name] = type(family).__name__ if family is not None else None
    assert claimed == expected


def test_one_layout_alone_takes_a_recorded_network_for_its_own(
    golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    layouts = dict.fromkeys(family.read_config for family in MODEL_FAMILIES)
    recorded = key_shapes.recorded(golden_folder)["nets"]
    claims = {}
    for name in all_variants(golden_json).keys() & recorded.keys():
        state_dict = key_shapes.network(golden_folder, name, PREFIX)
        claims[name] = sum(layout(state_dict, PREFIX) is not None for layout in layouts)
    assert {name: count for name, count in claims.items() if count != 1} == {}


def test_families_have_the_recorded_facts(golden_json: Callable[[str], Any]) -> None:
    rows = class_table(golden_json)
    assert SUPPORTED - rows.keys() == LATER
    for family in MODEL_FAMILIES:
        if family.__name__ in LATER:
            continue
        row = rows[family.__name__]
        assert family.latent_format.__name__ == row["latent_format"]
        assert family.vae_key_prefix == row["vae_key_prefix"]
        assert family.text_encoder_key_prefix == row["text_encoder_key_prefix"]
        assert family.memory_usage_factor == row["memory_usage_factor_class_attr"]
        names = [str(dtype).split(".")[1] for dtype in family.supported_inference_dtypes]
        assert names == row["supported_inference_dtypes"]
        heads = row["unet_extra_config_overrides"]
        for count in ("num_heads", "num_head_channels"):
            assert family.unet_extra_config.get(count) == heads.get(count)
        assert family.clip_vision_prefix == row["clip_vision_prefix"]
        assert family.sampling_settings == row["sampling_settings"]
        assert family.noise_aug_config == row["noise_aug_config"]
        assert sorted(family.required_keys) == sorted(row["required_state_dict_keys"])


# The reader of the record leaves these to defaults.
NOT_IN_THE_RECORD = {
    "num_blocks", "mlp_ratio", "text_dim", "image_dim", "n_refiner_layers", "out_channels",
    "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope",
    "image_model", "num_heads", "patch_size", "in_channels", "text_states_dim",
    "text_states_dim_t5", "text_len", "text_len_t5", "crossattn_emb_channels",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "SD3 medium",
        "SD3.5 medium",
        "SD3.5 large",
        "Flux dev",
        "Flux schnell",
        "Flux fill (inpaint)",
        "Flux depth/canny full",
        "SVD img2vid",
        "SD x4 upscaler",
        "SD2.1 unCLIP-L",
        "Wan2.1 T2V 1.3B",
        "Wan2.1 I2V 14B",
        "Wan2.2 I2V 14B (no img_emb)",
        "Wan2.1 FLF2V 14B",
        "Wan2.1 Fun Control 1.3B v1.1 (ref_conv)",
        "Wan2.1 VACE 14B",
        "Wan2.2 Animate 14B",
        "HuMo 17B",
        "Wan2.2 S2V 14B",
        "Wan2.2 TI2V 5B",
        "Qwen-Image",
        "Qwen-Image layered",
        "Z-Image",
        "Flux2 dev",
        "PixArt alpha 1024",
        "PixArt sigma 1024",
        "LTXV 2B",
        "LTXV 13B",
        "LTXAV (LTX-2)",
        "HunyuanVideo T2V",
        "HunyuanVideo I2V",
        "SkyReels I2V",
        "Hunyuan3D 2",
        "Hunyuan3D 2 mini",
        "Stable Audio open 1.0",
        "Lumina2",
        "NewBie",
        "Omnigen2",
        "HiDream I1",
        "Stable Cascade C",
        "Stable Cascade C lite",
        "Stable Cascade B",
        "Kandinsky5 lite video",
        "Kandinsky5 pro video",
        "Kandinsky5 lite image",
        "Cosmos Predict2 2B T2I",
        "Cosmos Predict2 14B T2I",
        "Cosmos Predict2 2B I2V",
        "Cosmos 1 7B T2V",
        "Cosmos 1 7B I2V",
        "Cosmos 1 14B T2V",
        "Mochi preview",
        "HunyuanDiT 1.1",
        "HunyuanDiT 1.2",
        "AuraFlow 0.1",
        "AuraFlow 0.3",
        "ACE-Step",
    ],
)
def test_full_size_networks_have_the_recorded_configuration(
    name: str, golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    expected = all_variants(golden_json)[name]["detected_unet_config"]
    state_dict = key_shapes.network(golden_folder, name, PREFIX)
    found = detection.detect_unet_config(state_dict, PREFIX)
    assert found is not None
    wanted = {key: found.get(key) for key in expected}
    assert wanted == expected
    assert found.keys() - expected.keys() <= NOT_IN_THE_RECORD
    if "num_blocks" in found and "depth" in found:
        assert found["num_blocks"] == found["depth"]


def test_the_prefix_is_the_candidate_with_the_most_keys(golden_json: Callable[[str], Any]) -> None:
    for case, expected in golden_json("model_families.json")["unet_prefix_detection"].items():
        count, prefix = int(case.split()[0]), json.loads(case.split("prefix ")[1])
        state_dict = {f"{prefix}{number}.weight": None for number in range(count)}
        assert detection.unet_prefix_from_state_dict(state_dict) == expected


def test_text_encoder_keys_are_renamed_as_recorded(golden_json: Callable[[str], Any]) -> None:
    recorded = golden_json("model_families.json")["single_file_text_encoder_key_renames"]
    for family in MODEL_FAMILIES:
        for case in recorded.get(family.__name__, []):
            row = family({})
            renamed = row.process_clip_state_dict({case["in"]: torch.zeros(case["shape"])})
            shapes = {key: list(value.shape) for key, value in renamed.items()}
            assert shapes == dict(case["out"]), case["in"]


def small_unet() -> dict[str, torch.Tensor]:
    from comfy.ldm.unet.model import UNetModel

    network = UNetModel(
        in_channels=4,
        out_channels=4,
        model_channels=16,
        num_res_blocks=[1, 1],
        channel_mult=[1, 2],
        transformer_depth=[0, 1],
        transformer_depth_output=[0, 0, 1, 1],
        transformer_depth_middle=1,
        context_dim=24,
        num_heads=2,
        norm_num_groups=4,
        device="meta",
    )
    return {PREFIX + key: value for key, value in network.state_dict().items()}


def test_a_small_network_of_the_layout_belongs_to_the_family() -> None:
    header = {"unet_config": '{"num_heads": 2, "norm_num_groups": 4}'}
    family = detection.model_config_from_unet(small_unet(), PREFIX, metadata=header)
    assert type(family).__name__ == "SD15"
    assert family.unet_config["context_dim"] == 24
    assert family.unet_config["num_heads"] == 2
    assert family.unet_config["norm_num_groups"] == 4


def test_without_a_header_the_family_supplies_the_usual_head_count() -> None:
    family = detection.model_config_from_unet(small_unet(), PREFIX)
    assert family is not None
    assert family.unet_config["num_heads"] == 8
    assert "norm_num_groups" not in family.unet_config


@pytest.mark.parametrize("value", ["0", "-3", "true", '"8"', "1.5"])
def test_an_impossible_hint_is_refused_with_its_name(value: str) -> None:
    with pytest.raises(IncompleteWeightsError, match=r"unet_config\.num_heads"):
        read_hints({"unet_config": f'{{"num_heads": {value}}}'}, "unet_config")


@pytest.mark.parametrize("text", ["not json", "[]", '{"something": "else"}'])
def test_header_entries_of_other_programs_are_ignored(text: str) -> None:
    assert read_hints({"unet_config": text}, "unet_config") == {}


def test_a_family_without_a_network_here_is_told_by_name(
    golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    """Everything on record that no row claims has a name in the message."""
    nameless = []
    for name, variant in all_variants(golden_json).items():
        if name not in key_shapes.recorded(golden_folder)["nets"]:
            continue
        state_dict = key_shapes.network(golden_folder, name, PREFIX)
        is_unet = PREFIX + "input_blocks.0.0.weight" in state_dict
        if variant["expected_class"] in SUPPORTED or is_unet:
            continue
        if unsupported.name_of(state_dict, PREFIX) is None:
            nameless.append(name)
    assert not nameless


def test_no_recorded_autoencoder_is_taken_for_another(
    golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    """Each is built with the recorded facts, or refused with a name of its own."""
    refused = {}
    facts = golden_json("vae_detection.json")
    recorded = key_shapes.recorded(golden_folder)["vaes"]
    for name, fact in facts.items():
        if "error" in fact:  # the recorder could not build it
            continue
        weights = key_shapes.expand(recorded[name]) if name in recorded else {}
        for key, shape in fact["identified_by"].items():
            weights.setdefault(key, torch.empty(shape, device="meta"))
        spec = detect_autoencoder(weights)
        if spec is not None:
            assert spec.latent_channels == fact["latent_channels"], name
            assert spec.latent_dim == fact["latent_dim"], name
            assert spec.output_channels == fact["output_channels"], name
            continue
        told = vae_unsupported.name_of(weights)
        assert told is not None, name
        refused[name] = told
        with pytest.raises(IncompleteWeightsError, match=f"the autoencoder of {told}, which"):
            VAE(sd=weights)
    assert "SD/SDXL KL f8 (4ch)" not in refused
    assert "HunyuanImage 2.1 f32 64ch" not in refused
    assert refused["HunyuanImage refiner / 3d 32ch plain conv"].startswith("HunyuanImage 2.1, ref")


def test_an_autoencoder_with_holes_is_known_unknown_or_says_what_it_lacks(
    golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    """No other exception, whichever of the weights that decide is missing."""
    recorded = key_shapes.recorded(golden_folder)["vaes"]
    told = set()
    for name, fact in golden_json("vae_detection.json").items():
        marks = {k: torch.zeros(shape) for k, shape in fact["identified_by"].items()}
        holes = [marks]
        if name in recorded:
            whole = key_shapes.expand(recorded[name])
            holes += [{k: v for k, v in whole.items() if k != gone} for gone in list(whole)[::61]]
        for weights in holes:
            try:
                detect_autoencoder(weights)
            except IncompleteWeightsError as error:
                told.add(str(error).partition(" lacks ")[0])
    assert told == {"the autoencoder"}


def test_the_size_of_a_head_decides_the_position_axes() -> None:
    assert dit_layout.position_axes(128) == [16, 56, 56]
    for head_size in range(8, 257, 8):
        axes = dit_layout.position_axes(head_size)
        assert sum(axes) == head_size
        assert all(axis > 0 and axis % 2 == 0 for axis in axes)


@pytest.mark.parametrize("key", ["img_in.weight", "double_blocks.0.img_mlp.0.weight"])
def test_a_flux_file_with_a_hole_is_refused_or_unknown(key: str, golden_folder: Path) -> None:
    state_dict = key_shapes.network(golden_folder, "Flux dev", PREFIX)
    del state_dict[PREFIX + key]
    if key == "img_in.weight":
        assert detection.detect_unet_config(state_dict, PREFIX) is None
    else:
        with pytest.raises(IncompleteWeightsError, match=r"img_mlp\.0\.weight is missing"):
            detection.detect_unet_config(state_dict, PREFIX)


@pytest.mark.parametrize(
    "name",
    ["Flux2 dev", "HunyuanVideo T2V", "HunyuanVideo I2V", "SkyReels I2V",
     "HunyuanImage 2.1", "HunyuanImage 2.1 distilled", "HunyuanImage 2.1 refiner",
     "HunyuanVideo 1.5", "HunyuanVideo 1.5 SR distilled", "LTXV 2B", "LTXV 13B",
     "PixArt alpha 1024", "PixArt sigma 1024", "Hunyuan3D 2", "Hunyuan3D 2 mini",
     "HunyuanDiT 1.1", "HunyuanDiT 1.2", "Cosmos 1 7B T2V", "Cosmos 1 7B I2V",
     "Cosmos 1 14B T2V", "Mochi preview", "Chroma", "Chroma Radiance", "Hunyuan3D 2.1",
     "NewBie", "ACE-Step"],
)  # fmt: skip
def test_a_full_size_network_has_exactly_the_recorded_weights(
    name: str, golden_folder: Path
) -> None:
    state_dict = key_shapes.network(golden_folder, name)
    family = detection.model_config_from_unet(state_dict, "")
    assert family is not None
    network = family.get_model(state_dict, "", device="meta").diffusion_model
    shapes = {key: value.shape for key, value in network.state_dict().items()}
    assert shapes == {key: value.shape for key, value in state_dict.items()}
