"""LTX-2's text encoding: Gemma 3 12B with its connectors, from the files people have, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import folder_paths
from comfy import loading, text_loading
from comfy.devices import residency
from comfy.families.text_sizes import text_model_configs
from comfy.ldm.lightricks.connectors import Connectors, ConnectorsConfig
from comfy.ldm.llm.gemma_vl import Gemma3VL
from comfy.ldm.llm.model import DecoderLLM
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders import lt
from comfy.text_encoders.lumina2 import GEMMA3_CONFIG
from comfy.weights.errors import WeightFileError
from comfy_extras.nodes_lt_audio import LTXAVTextEncoderLoader
from comfy_extras.nodes_model_merging import CLIPSave
from comfy_extras.nodes_textgen import TextGenerateLTX2Prompt
from comfy_nodes.loaders import DualCLIPLoader
from tests.comfy.families import test_ltxav
from tests.comfy.families.small_files import prefixed
from tests.comfy.families.test_transformers import random_like
from tests.comfy.ldm.test_gemma_vl import TOWER
from tests.comfy.text_encoders.test_lumina2 import VOCABULARY
from tests.support.accelerator import simulated_accelerator

WIDTH = 32
GEMMA: dict[str, Any] = {
    **GEMMA3_CONFIG, "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48,
    "num_hidden_layers": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
SIZES = ConnectorsConfig(states=49 * WIDTH, width=WIDTH, heads=1, layers=2, registers=128)
# Of LTX-2.3: as wide as the streams of the network, each with a projection of its own.
OF_SOUND = ConnectorsConfig(
    states=49 * WIDTH, width=64, heads=4, layers=1, registers=64, is_gated=True
)
LATER = replace(OF_SOUND, width=128, heads=8, layers=2, registers=128, sound=OF_SOUND)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def softened(weights: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Smaller biases and norms, of which no two are alike."""
    made = {}
    for number, (key, value) in enumerate(weights.items()):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(value.shape, generator=generator)
        made[key] = value if value.ndim > 1 else factor * noise
    return made


def gemma() -> dict[str, Tensor]:
    return softened(random_like(DecoderLLM(GEMMA, None, "cpu", manual_cast), 7), 0.2)


def connectors(sizes: ConnectorsConfig = SIZES) -> dict[str, Tensor]:
    return softened(random_like(Connectors(sizes), 8), 0.5)


def in_checkpoint(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As published checkpoints name them: the projection stands outside the network."""
    return {
        key if key.startswith("text_") else f"model.diffusion_model.{key}": value
        for key, value in weights.items()
    }


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("text_encoders", "checkpoints"):
        (tmp_path / name).mkdir()
        entry = ([str(tmp_path / name)], folder_paths.supported_pt_extensions)
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, entry)
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    held = {"spiece_model": torch.tensor(list(VOCABULARY)).byte()}
    save_file({**gemma(), **held}, tmp_path / "text_encoders/gemma.safetensors")
    save_file(in_checkpoint(connectors()), tmp_path / "checkpoints/ltx2.safetensors")
    return tmp_path


def loaded() -> Any:
    return LTXAVTextEncoderLoader.execute("gemma.safetensors", "ltx2.safetensors")[0]


def test_the_node_joins_gemma_with_a_checkpoint(folders: Path) -> None:
    clip = loaded()
    tokens = clip.tokenize("(cat:2) cat")
    assert tokens[lt.GEMMA3_12B][0][0] == (2, 1.0)
    assert {weight for _, weight in tokens[lt.GEMMA3_12B][0]} == {1.0}
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("cat cat"))
    assert cond.shape == (1, 1024, 2 * WIDTH)
    assert cond.isfinite().all()
    assert told.get("attention_mask") is None
    assert not torch.equal(cond[..., :WIDTH], cond[..., WIDTH:])
    assert not torch.allclose(cond, clip.encode("cat"))


def test_all_of_it_gives_what_other_implementations_give(folders: Path) -> None:
    """Gemma of the transformers library, connectors of diffusers, on the same weights."""
    clip = loaded()
    encoder = clip.cond_stage_model
    chunk = [(token, 1.0) for token in (2, 11, 5, 11, 30, 7)]
    cond = encoder.encode_token_weights({lt.GEMMA3_12B: [chunk]})[0]
    expected = {
        "word": [0.0178, -0.6124, -1.5254, 0.7701],
        "register": [1.4306, -0.6255, -0.0987, -1.3263],
    }
    found = {"word": cond[0, 3, 4:8], "register": cond[0, 700, 40:44]}
    for name, value in found.items():
        torch.testing.assert_close(value, torch.tensor(expected[name]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("split", [[1.1555, -1.0969, -0.7344], [-0.825, -2.0199, 1.368],
                   [1.8503, -0.8462, 0.1395], [-1.1602, -1.121, 0.8939]]),
        ("interleaved", [[1.1442, -1.1005, -0.732], [-0.8182, -2.0295, 1.378],
                         [1.8523, -0.8437, 0.1335], [-1.1614, -1.1222, 0.8946]]),
    ],
)  # fmt: skip
def test_connectors_of_their_own_give_what_another_implementation_gives(
    kind: str, expected: list[list[float]]
) -> None:
    """The implementation of the diffusers library, on the same weights."""
    sizes: dict[str, Any] = {"layers": 2, "is_gated": True, "rope_type": kind}
    sound = ConnectorsConfig(49 * WIDTH, width=24, heads=3, registers=64, **sizes)
    config = ConnectorsConfig(49 * WIDTH, width=48, heads=4, sound=sound, **sizes)
    network = Connectors(config)
    network.load_state_dict(connectors(config))
    made = network(5 * test_ltxav.noise(1, 49, 6, WIDTH, seed=9))
    assert made.shape == (1, 1024, 48 + 24)
    found = [made[0, place, first : first + 3] for place in (3, 700) for first in (4, 52)]
    torch.testing.assert_close(torch.stack(found), torch.tensor(expected), rtol=0, atol=2e-4)


def test_each_connector_has_its_sizes_by_its_weights_and_heads_by_its_gates() -> None:
    weights = prefixed(connectors(LATER), f"{lt.CONNECTORS}.transformer.")
    told = {"connector_num_attention_heads": 5}
    found = text_model_configs(weights, {}, told)[f"{lt.CONNECTORS}_model_config"]
    assert ConnectorsConfig.from_options(found) == LATER


def test_registers_stand_behind_the_text_in_whole_rounds() -> None:
    network = Connectors(SIZES)
    network.load_state_dict(connectors())
    connector = network.video_embeddings_connector
    registers = connector.learnable_registers
    for length, whole in ((5, 1024), (1024, 1024), (1030, 1152)):
        text = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))
        filled = connector.filled_up(text)
        assert filled.shape == (2, whole, WIDTH)
        assert torch.equal(filled[:, :length], text)
        for place in range(length, whole, 97):
            assert torch.equal(filled[1, place], registers[place % 128])


def test_a_saved_encoder_means_the_same(folders: Path) -> None:
    clip = loaded()
    CLIPSave().save(clip, "ltx")
    for file in (folders / "output").rglob("*.safetensors"):
        name = "gemma" if "gemma" in file.name else "connectors"
        file.rename(folders / f"text_encoders/saved_{name}.safetensors")
    assert "spiece_model" in load_file(folders / "text_encoders/saved_gemma.safetensors")
    names = ("saved_connectors.safetensors", "saved_gemma.safetensors")
    again = DualCLIPLoader().load_clip(*names, "ltxv")[0]
    assert torch.equal(again.encode("cat cat"), clip.encode("cat cat"))


def test_a_checkpoint_saved_with_its_text_encoder_holds_both(folders: Path) -> None:
    model, clip = test_ltxav.load(folders), loaded()
    path = str(folders / "checkpoints/whole.safetensors")
    save_checkpoint(path, model, clip)
    again = loading.load_checkpoint_guess_config(path, output_vae=False).clip
    assert again is not None
    assert torch.equal(again.encode("cat cat"), clip.encode("cat cat"))
    apart = LTXAVTextEncoderLoader.execute("gemma.safetensors", "whole.safetensors")[0]
    assert torch.equal(apart.encode("cat cat"), clip.encode("cat cat"))


def test_the_header_tells_heads_and_turns(folders: Path) -> None:
    told = {"connector_num_attention_heads": 4, "rope_type": "interleaved"}
    header = {"config": json.dumps({"transformer": told})}
    plain = loaded().encode("cat")
    path = folders / "checkpoints/ltx2.safetensors"
    save_file(in_checkpoint(connectors()), path, metadata=header)
    clip = loaded()
    config = clip.cond_stage_model.ltx2_connectors.transformer.config
    assert (config.heads, config.rope_type) == (4, "interleaved")
    assert not torch.allclose(clip.encode("cat"), plain)


def test_a_small_device_gives_the_same(folders: Path) -> None:
    with simulated_accelerator() as accelerator:
        clip = loaded()
        want = clip.encode("cat cat")
        peak = torch.accelerator.max_memory_allocated(0)
        residency.unload_all_models()
        size = sum(v.nbytes for v in clip.cond_stage_model.state_dict().values())
        accelerator.set_capacity(int(peak - 0.4 * size), 0)
        torch.testing.assert_close(clip.encode("cat cat"), want)


def test_it_writes_with_a_picture_before_its_eyes(folders: Path) -> None:
    seeing = Gemma3VL({**GEMMA, "vision_config": TOWER}, None, "cpu", manual_cast)
    held = {"spiece_model": torch.tensor(list(VOCABULARY)).byte()}
    weights = softened(random_like(seeing, 7), 0.2)
    save_file({**weights, **held}, folders / "text_encoders/gemma.safetensors")
    clip = loaded()
    config = clip.cond_stage_model.gemma3_12b.transformer.vision_model.config
    assert {name: getattr(config, name) for name in TOWER} == TOWER
    answers = []
    for shade in (0.0, 1.0):
        tokens = clip.tokenize("cat", image=torch.full((1, 9, 9, 3), shade), thinking=False)
        answers.append(clip.generate(tokens, max_length=12, do_sample=False))
    assert answers[0] != answers[1]
    text = TextGenerateLTX2Prompt.execute(clip, "a cat", 3, {"sampling_mode": "off"})[0]
    assert isinstance(text, str)
    assert text


def test_what_is_missing_is_told(folders: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, folders / "checkpoints/ltx2.safetensors")
    with pytest.raises(WeightFileError, match=r"ltx2.safetensors: no known text encoder.*LTX-2"):
        loaded()
    path = str(folders / "text_encoders/gemma.safetensors")
    with pytest.raises(ValueError, match="gemma3_12b with ltx2_connectors for type ltxv"):
        text_loading.load_clip([path], clip_type=text_loading.CLIPType.LTXV)
    short = {k: v for k, v in connectors().items() if "audio" not in k}
    save_file(prefixed(short, ""), folders / "checkpoints/ltx2.safetensors")
    with pytest.raises(WeightFileError, match=r"lacks .*audio_embeddings_connector"):
        loaded()


def test_the_later_connectors_have_a_place_for_their_keys() -> None:
    sizes: dict[str, Any] = {"heads": 32, "layers": 8, "is_gated": True}
    config = ConnectorsConfig(width=4096, sound=ConnectorsConfig(width=2048, **sizes), **sizes)
    own = {k: tuple(v.shape) for k, v in Connectors(config, device="meta").state_dict().items()}
    assert own["text_embedding_projection.video_aggregate_embed.weight"] == (4096, 188160)
    assert own["text_embedding_projection.audio_aggregate_embed.bias"] == (2048,)
    gates = "transformer_1d_blocks.7.attn1.to_gate_logits.weight"
    assert own[f"audio_embeddings_connector.{gates}"] == (32, 2048)
    assert own[f"video_embeddings_connector.{gates}"] == (32, 4096)


def test_the_published_connectors_have_a_place_for_every_key() -> None:
    own = {
        k: tuple(v.shape)
        for k, v in Connectors(ConnectorsConfig(), device="meta").state_dict().items()
    }
    root = "video_embeddings_connector.transformer_1d_blocks.1."
    assert own["text_embedding_projection.aggregate_embed.weight"] == (3840, 188160)
    assert own["audio_embeddings_connector.learnable_registers"] == (128, 3840)
    assert own[f"{root}attn1.to_out.0.weight"] == (3840, 3840)
    assert own[f"{root}attn1.k_norm.weight"] == (3840,)
    assert own[f"{root}ff.net.0.proj.weight"] == (15360, 3840)
    assert len(own) == 1 + 2 * (1 + 2 * 14)
