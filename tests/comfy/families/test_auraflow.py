"""AuraFlow: the recorded network, and small files from text to picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.auraflow import read_auraflow_config
from comfy.families.family import BrokenModelError
from comfy.ldm.aura.mmdit import MMDiT
from comfy.ldm.t5.model import T5
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders.pile_t5 import WIDTH
from comfy.weights.diffusers_transformers import auraflow_to_diffusers
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_transformers import random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

SIZES: dict[str, Any] = {
    "dim": 512, "n_layers": 3, "n_double_layers": 1, "n_heads": 2, "cond_seq_dim": WIDTH,
    "max_seq": 16, "inner_dim": 64,
}  # fmt: skip
PREFIX = "model.diffusion_model."
ENCODER = "text_encoders.pile_t5xl.transformer."


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network() -> dict[str, Tensor]:
    return random_like(MMDiT(**SIZES), 4)


def text_encoder() -> dict[str, Tensor]:
    """Told from other T5s by its width, so that is the real one."""
    sizes = {
        "d_model": WIDTH, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2,
        "vocab_size": 12, "model_type": "umt5",
    }  # fmt: skip
    return random_like(T5(sizes, None, "cpu", manual_cast), 7)


def pieces(folder: Path) -> None:
    """A vocabulary of Llama's kind, where the end is token 2 and 1 pads."""
    words = ["<unk>", "<s>", "</s>", "\u2581a", "\u2581red", "\u2581cat", "a", "c", "t"]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(folder / "pile_t5_tokenizer.json"))


def write(tensors: dict[str, Tensor], path: Path) -> str:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


def checkpoint(folder: Path) -> str:
    tensors = {PREFIX + key: value for key, value in network().items()}
    tensors |= {ENCODER + key: value for key, value in text_encoder().items()}
    return write(tensors, folder / "auraflow.safetensors")


def sampled(model: Any, clip: Any, rows: int = 7, columns: int = 10) -> Tensor:
    positive = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    negative = clip.encode_from_tokens_scheduled(clip.tokenize(""))
    latent = {"samples": torch.zeros(1, 4, rows, columns)}
    made = common_ksampler(model, 3, 2, 2.0, "euler", "normal", positive, negative, latent)
    samples: Tensor = made[0]["samples"]
    return samples


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/auraflow.safetensors")
    model = MMDiT(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    assert_close_to_golden(model(given.pop("x"), given.pop("t"), **given), net.outputs["a"])


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_auraflow_config(weights)
    assert config is not None
    assert {key: config.get(key) for key in SIZES} == SIZES
    del weights["positional_encoding"]
    with pytest.raises(BrokenModelError, match="layout of AuraFlow, but positional_encoding"):
        read_auraflow_config(weights)


def test_text_becomes_a_latent_and_survives_saving(tmp_path: Path) -> None:
    pieces(tmp_path)
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path), output_vae=False)
    assert type(found.model.model.model_config).__name__ == "AuraFlow"
    latent = sampled(found.model, found.clip)
    assert latent.shape == (1, 4, 7, 10)
    assert latent.isfinite().all()
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, found.clip, None)
    again: Any = loading.load_checkpoint_guess_config(again_path, output_vae=False)
    assert torch.equal(sampled(again.model, again.clip), latent)


def test_single_files_load_and_padding_is_hidden_and_zero(tmp_path: Path) -> None:
    pieces(tmp_path)
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    clip = text_loading.load_clip([write(text_encoder(), tmp_path / "t5.safetensors")])
    tokens = clip.tokenize("a red cat")["pile_t5xl"][0]
    assert [token for token, _ in tokens[:6]] == [3, 4, 5, 2, 1, 1]
    [[cond, _]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    assert cond.shape == (1, 256, WIDTH)
    assert cond[:, :4].abs().min() > 0
    assert not cond[:, 4:].any()
    assert sampled(model, clip, rows=20).isfinite().all()  # larger than its table of places


def test_without_a_vocabulary_the_error_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Pile-T5 were not found.*pile_t5_tokenizer\.json"):
        text_loading.load_clip([write(text_encoder(), tmp_path / "t5.safetensors")])


def test_a_file_of_the_diffusers_library_loads(tmp_path: Path) -> None:
    pieces(tmp_path)
    clip = text_loading.load_clip([write(text_encoder(), tmp_path / "t5.safetensors")])
    weights = network()
    theirs = {}
    for name, target in auraflow_to_diffusers(SIZES).items():
        if isinstance(target, str):
            theirs[name] = weights[target]
        else:  # the two halves of the last modulation change places
            theirs[name] = weights[target[0]].roll(SIZES["dim"], 0)
    assert len(theirs) == len(weights)
    plain = loading.load_diffusion_model(write(weights, tmp_path / "model.safetensors"))
    other = loading.load_diffusion_model(write(theirs, tmp_path / "theirs.safetensors"))
    assert torch.equal(sampled(plain, clip), sampled(other, clip))
