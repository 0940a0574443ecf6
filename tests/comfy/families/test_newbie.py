"""NewBie: Jina's tower beside its authors' numbers, and small files from text to picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.qwen_layout import read_lumina2_config
from comfy.ldm.jina.model import JinaTextModel
from comfy.ldm.lumina.model import NextDiT
from comfy.text_encoders.jina_clip_2 import NAME as JINA
from comfy.text_encoders.jina_clip_2 import JinaPieces
from comfy.text_encoders.lumina2 import GEMMA3_4B
from comfy.text_encoders.newbie import NewBieTEModel
from tests.comfy.families import key_shapes, test_lumina2
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_lumina2 import SHAPE
from tests.comfy.families.test_transformers import random_like
from tests.comfy.text_encoders.test_lumina2 import VOCABULARY, gemma
from tests.comfy.text_encoders.test_sentencepiece_file import counted, varint

POOLED = 64
SIZES = {**test_lumina2.SIZES, "clip_text_dim": POOLED}
WORDS = ["\u2581", "\u2581a", "\u2581red", "\u2581cat", "c", "a", "t", "x"]
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "vocab_size": 50,
}  # fmt: skip

# What JinaEmbeddingsV3Model of the transformers library (5.24) answers: the mean of the states that
# are no padding, every fifth channel; and the second token's states, every seventh.
MEANS = [
    [1.694620, 1.449033, 0.796221, 0.773984, 1.766136, 1.052552, -1.874885],
    [1.711189, 1.449638, 0.805498, 0.797748, 1.699755, 1.024277, -1.813996],
]
SECOND = [
    [1.671885, 1.994508, 1.820072, 2.195082, 1.150397],
    [1.732513, 1.987948, 1.752852, 2.190233, 1.126339],
]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def piece_file(marks: list[str]) -> bytes:
    """The bytes of a file of SentencePiece that begins with these marks."""
    content = b""
    for number, word in enumerate([*marks, *WORDS]):
        kind = 1 if word not in marks else 2 if word == "<unk>" else 3
        score = torch.tensor(-float(number)).numpy().tobytes()
        piece = counted(1, word.encode()) + varint(2 << 3 | 5) + score
        content += counted(1, piece + varint(3 << 3) + varint(kind))
    return content + counted(2, varint(3 << 3) + varint(1))


TRAINED = piece_file(["<unk>", "<s>", "</s>"])


def network() -> dict[str, Tensor]:
    return random_like(NextDiT(**SIZES), 4)


def jina(width: int = POOLED) -> dict[str, Tensor]:
    sizes = {**TOWER, "hidden_size": width, "num_attention_heads": 1}
    vocabulary = torch.tensor(list(TRAINED)).byte()
    return {**random_like(JinaTextModel(sizes), 6), "spiece_model": vocabulary}


def gemma3() -> dict[str, Tensor]:
    return {**gemma(GEMMA3_4B), "spiece_model": torch.tensor(list(VOCABULARY)).byte()}


def clip_of(folder: Path) -> Any:
    paths = [write(gemma3(), folder / "g.safetensors"), write(jina(), folder / "j.safetensors")]
    return text_loading.load_clip(paths, clip_type=text_loading.CLIPType.NEWBIE)


def test_the_tower_answers_as_the_library_does() -> None:
    generator = torch.Generator().manual_seed(1)
    model = JinaTextModel(TOWER).eval()
    weights = {}
    for key, empty in sorted(model.state_dict().items()):
        if empty.ndim > 1:
            weight = torch.randn(empty.shape, generator=generator) / empty.shape[-1] ** 0.5
        else:
            weight = 0.7 + 0.6 * torch.rand(empty.shape, generator=generator)
        weights[key] = weight
    model.load_state_dict(weights)
    ids = torch.tensor([[0, 7, 9, 11, 2], [0, 5, 2, 1, 1]])
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    states, between, mean = model(ids, mask, intermediate_output=-1)
    torch.testing.assert_close(mean[:, ::5], torch.tensor(MEANS), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[:, 1, ::7], torch.tensor(SECOND), rtol=1e-4, atol=1e-5)
    assert torch.equal(between, states)
    every = model(ids, mask, intermediate_output="all")[1]
    assert torch.equal(every[:, -1], states)
    assert torch.equal(every[:, 1], model(ids, mask, intermediate_output=0)[1])


def test_the_recorded_encoder_has_these_weights(golden_folder: Path) -> None:
    recorded = key_shapes.expand(
        key_shapes.recorded(golden_folder)["text_encoders"]["newbie gemma3_4b + jina"]["keys"]
    )
    prefix = "jina.transformer."
    shapes = {k.removeprefix(prefix): v.shape for k, v in recorded.items() if k.startswith(prefix)}
    whole = JinaTextModel({}, device="meta")
    assert {key: value.shape for key, value in whole.state_dict().items()} == shapes


def test_both_orders_of_marks_give_the_encoders_ids(tmp_path: Path) -> None:
    used = piece_file(["<s>", "<pad>", "</s>", "<unk>"])
    for source in (TRAINED, used):
        pieces = JinaPieces.from_pretrained(source)
        assert pieces("a cat")["input_ids"] == [0, 5, 7, 2]  # behind four marks
        assert pieces("")["input_ids"] == [0, 2]
        assert 3 in pieces("\u00e9")["input_ids"]
    file = tmp_path / "jina_tokenizer.json"
    pieces.pieces.save(str(file))
    with pytest.raises(ValueError, match="no word pieces of Jina CLIP v2: they begin with"):
        JinaPieces.from_pretrained(str(file))  # its marks have hidden names
    with pytest.raises(ValueError, match=r"begin with \['a', 'b', 'c', .*no|begin with"):
        JinaPieces.from_pretrained(piece_file(["<pad>", "</s>", "<unk>"]))
    with pytest.raises(FileNotFoundError, match="word pieces of Jina CLIP v2 were not found"):
        JinaPieces.from_pretrained(None)


def test_the_network_is_lumina_twos_with_pooled_text_beside_the_time() -> None:
    model = NextDiT(**SIZES).eval()
    weights = random_like(model, 4)
    weights["clip_text_pooled_proj.0.weight"] = torch.linspace(0.5, 1.5, POOLED)
    model.load_state_dict(weights)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 16, 6, 8, generator=generator)
    context = torch.randn(2, 5, test_lumina2.TEXT, generator=generator)
    pooled, t = torch.randn(2, POOLED, generator=generator), torch.tensor([0.3, 0.9])
    plain = NextDiT(**test_lumina2.SIZES).eval()
    plain.load_state_dict({k: v for k, v in weights.items() if k in plain.state_dict()})

    def with_pooled(told: Tensor) -> Tensor:
        """Lumina 2's network whose time is put together by hand."""

        def joined(module: Any, args: Any, time: Tensor) -> Tensor:
            both = torch.cat([time, told], dim=1)
            layer = "time_text_embed.1"
            return torch.nn.functional.silu(both) @ weights[f"{layer}.weight"].T + 1.0

        hook = plain.t_embedder.register_forward_hook(joined)
        made: Tensor = plain(x, t, context)
        hook.remove()
        return made

    scale = weights["clip_text_pooled_proj.0.weight"]
    normed = pooled / (pooled.square().mean(1, keepdim=True) + 1e-5).sqrt() * scale
    told = normed @ weights["clip_text_pooled_proj.1.weight"].T + 1.0  # biases are ones
    close = {"rtol": 1e-4, "atol": 1e-5}
    made = model(x, t, context, clip_text_pooled=pooled)
    torch.testing.assert_close(made, with_pooled(told), **close)
    torch.testing.assert_close(model(x, t, context), with_pooled(told * 0), **close)


def test_sizes_are_read_from_the_weights() -> None:
    config = read_lumina2_config(NextDiT(**SIZES).state_dict())
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES


def test_each_text_is_told_in_its_encoders_words(tmp_path: Path) -> None:
    clip = clip_of(tmp_path)
    tokens = clip.tokenize("a (red:1.5) cat")
    assert tokens.keys() == {"gemma", "jina"}
    assert [token[0] for token in tokens["jina"][0]] == [0, 5, 6, 7, 2]
    assert {token[1] for token in tokens["gemma"][0]} == {1.0}  # weights are Jina's alone
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    assert told["pooled_output"].shape == (1, POOLED)
    alone = text_loading.load_clip([str(tmp_path / "j.safetensors")])
    [[states, other]] = alone.encode_from_tokens_scheduled(alone.tokenize("a red cat"))
    assert torch.equal(other["pooled_output"], told["pooled_output"])
    torch.testing.assert_close(states.mean(dim=1), told["pooled_output"])
    assert cond.shape[-1] == test_lumina2.TEXT


def test_text_becomes_a_latent_and_survives_saving(tmp_path: Path) -> None:
    path = write(network(), tmp_path / "model.safetensors")
    model, clip = loading.load_diffusion_model(path), clip_of(tmp_path)
    assert type(model.model.model_config).__name__ == "Lumina2"
    latent = sampled(model, clip, SHAPE)
    other = sampled(model, clip, SHAPE, pooled_output=torch.ones(1, POOLED))
    assert not torch.allclose(latent, other, atol=1e-4)
    with pytest.raises(ValueError, match=f"clip_text_pooled.*{POOLED}"):
        sampled(model, clip, SHAPE, pooled_output=torch.ones(1, POOLED + 1))
    again = loaded_again(loading.Checkpoint(model, clip, None, None), tmp_path)
    assert torch.equal(sampled(again.model, again.clip, SHAPE), latent)


def test_checkpoints_name_the_encoders_shortly(tmp_path: Path) -> None:
    tensors = prefixed(network(), PREFIX)
    for name, encoder in (("gemma", gemma3()), ("jina", jina())):
        pieces = encoder.pop("spiece_model")
        tensors |= prefixed(encoder, f"text_encoders.{name}.transformer.")
        tensors[f"text_encoders.{name}.spiece_model"] = pieces
    path = write(tensors, tmp_path / "newbie.safetensors")
    found: Any = loading.load_checkpoint_guess_config(path, output_vae=False)
    assert isinstance(found.clip.cond_stage_model, NewBieTEModel)
    separate = clip_of(tmp_path)
    for clip in (found.clip, separate):
        assert {JINA, GEMMA3_4B} <= set(dict(clip.cond_stage_model.named_children()))
    ours, theirs = (clip.encode_from_tokens(clip.tokenize("a cat"), True) for clip in
                    (found.clip, separate))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
