"""Text encoders that write: conversations, the choice of words, memory, cancelling, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from comfy import interrupt, progress, text_loading
from comfy.devices import accelerators, memory, residency
from comfy.ldm.llm.delta import DeltaSizes
from comfy.ldm.llm.qwen3_vl import Qwen3VL
from comfy.ldm.llm.qwen35 import Qwen35
from comfy.ldm.llm.qwen_vl import QwenVL
from comfy.ops import manual_cast
from comfy.text_encoders import conversations, generation, qwen, qwen35
from comfy.text_encoders.clip import CLIP
from comfy.text_encoders.generation import Choice, next_word
from tests.comfy.families.test_transformers import random_like
from tests.support import gguf_files
from tests.support.accelerator import simulated_accelerator

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>",
         "<|vision_start|>", "<|vision_end|>")  # fmt: skip
LETTERS = pre_tokenizers.ByteLevel.alphabet()
TOWER = {
    "hidden_size": 80, "intermediate_size": 24, "depth": 1, "num_heads": 1, "out_hidden_size": 128,
}  # fmt: skip
SIZES = {
    "vocab_size": 280, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
}  # fmt: skip
QWEN25 = {"qkv_bias": True, "qk_norm": False, "rope_dims": (16, 24, 24)}


DEEP_TOWER = {
    "hidden_size": 64, "intermediate_size": 24, "depth": 24, "num_heads": 1,
    "out_hidden_size": 128, "num_position_embeddings": 16,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "head_dim": 256, "delta": DeltaSizes(1, 2, 128, 16, 4),
    "delta_layers": (0, 1, 2), "lm_head": True,
    "vision_config": {**DEEP_TOWER, "depth": 2, "deepstack_visual_indexes": ()},
}  # fmt: skip


def pieces_file(folder: Path) -> None:
    """A vocabulary of single bytes and the marks of Qwen."""
    words = {letter: number for number, letter in enumerate(sorted(LETTERS))}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    made.add_tokens(["<think>", "</think>"])
    made.save(str(folder / "qwen_tokenizer.json"))


def weights(sizes: dict[str, Any], kind: type[QwenVL] = QwenVL) -> dict[str, Tensor]:
    made = random_like(kind({**SIZES, **sizes}, None, "cpu", manual_cast), 5)
    return {key: value * (4.0 if "proj.weight" in key else 1.0) for key, value in made.items()}


def published(key: str) -> str:
    """A key of Qwen 3 VL as its publisher's files have it."""
    if key.startswith("model."):
        return key.replace("model.", "model.language_model.", 1)
    return f"model.{key}" if key.startswith("visual.") else key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("writers")
    pieces_file(made)
    save_file(weights({}), made / "qwen3.safetensors")
    own_head = {**QWEN25, "lm_head": True, "vision_config": TOWER}
    save_file(weights(own_head), made / "qwen25.safetensors")
    save_file(weights(QWEN25), made / "headless.safetensors")
    deep = weights({"lm_head": True, "vision_config": DEEP_TOWER}, Qwen3VL)
    save_file(deep, made / "qwen3vl.safetensors")
    shutil.copy(made / "qwen_tokenizer.json", made / "qwen35_tokenizer.json")
    delta = {published(key): value for key, value in weights(DELTA, Qwen35).items()}
    save_file({**delta, "mtp.norm.weight": torch.ones(128)}, made / "qwen35.safetensors")
    save_file({published(key): value for key, value in deep.items()}, made / "hub.safetensors")
    cut = {key: value for key, value in weights({}).items() if key != "model.norm.weight"}
    save_file(cut, made / "cut.safetensors")
    return made


def loaded(folder: Path, name: str, **options: Any) -> CLIP:
    path = str(folder / f"{name}.safetensors")
    return text_loading.load_clip([path], model_options=options or None)


def said(clip: CLIP, text: str, length: int = 24, **options: Any) -> list[int]:
    with torch.inference_mode():
        tokens = clip.tokenize(text, skip_template=True)
        return clip.generate(tokens, max_length=length, **options)


GREEDY = {"do_sample": False}
CPU = torch.device("cpu")


def test_a_question_stands_in_the_conversation_of_its_model() -> None:
    qwen = conversations.QWEN3
    assert qwen.around("Why?") == (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert qwen.around("Why?", "Be kind.", thinking=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert conversations.QWEN25_VL.around("{}", pictures=2) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        + "<|vision_start|><|image_pad|><|vision_end|>" * 2
        + "{}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert conversations.QWEN3_VL.around("{}", pictures=1, thinking=False) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert conversations.QWEN35.around("Why?").endswith("assistant\n<think>\n\n</think>\n\n")
    assert conversations.QWEN35.around("Why?", thinking=True).endswith("assistant\n<think>\n")
    assert conversations.GEMMA3.around("Why?", "Be kind.") == (
        "<start_of_turn>user\nBe kind.\n\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert conversations.MISTRAL.around("Why?", "Be kind.") == (
        "[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]Why?[/INST]"
    )
    assert conversations.LLAMA3.around("Why?").startswith(
        "<|start_header_id|>user<|end_header_id|>"
    )


def test_the_likeliest_words_are_those_of_the_whole_text(folder: Path) -> None:
    clip = loaded(folder, "qwen3")
    ids = said(clip, "a cat", **GREEDY)
    assert len(ids) == 24
    assert len(set(ids)) > 5
    network = clip.cond_stage_model.qwen3_4b.transformer
    (tokens,) = clip.tokenize("a cat", skip_template=True)["qwen3_4b"]
    text = [token for token, _ in tokens]
    with torch.inference_mode():
        states = network(torch.tensor([text + ids]))[0]
        again = network.scores(states[0, len(text) - 1 : -1]).argmax(-1)
    assert again.tolist() == ids


def test_the_same_seed_writes_the_same_and_another_another(folder: Path) -> None:
    clip = loaded(folder, "qwen3")
    one, two, other = (said(clip, "a cat", seed=seed) for seed in (7, 7, 2**64 - 1))
    assert one == two != other
    assert said(clip, "a cat", seed=7, top_k=1) == said(clip, "a cat", **GREEDY)


def test_an_answer_ends_at_its_mark_and_its_text_is_given(folder: Path) -> None:
    clip = loaded(folder, "qwen3")
    ids = said(clip, "a cat", **GREEDY)
    words = clip.tokenizer.qwen3_4b.tokenizer.get_vocab()
    table = clip.cond_stage_model.qwen3_4b.transformer.model.embed_tokens.weight.data
    ninth = ids[9]
    at = ids.index(ninth)
    table[[ninth, words["<|im_end|>"]]] = table[[words["<|im_end|>"], ninth]]  # they swap places
    assert said(clip, "a cat", **GREEDY) == ids[:at]
    text = "größer 猫 cat"
    spelled = [t for t, _ in clip.tokenize(text, skip_template=True)["qwen3_4b"][0]]
    assert clip.decode([*spelled, words["<|im_end|>"]]) == text
    cut = [t for t, _ in clip.tokenize("a 猫", skip_template=True)["qwen3_4b"][0]][:-1]
    assert clip.decode(cut) == "a "  # a letter was not finished
    shown = clip.decode([*spelled, words["<|im_end|>"]], skip_special_tokens=False)
    assert shown == f"{text}<|im_end|>"


def test_a_vocabulary_without_an_end_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clip = loaded(folder, "qwen3")
    said(clip, "a", 1, **GREEDY)
    assert "end an answer" not in caplog.text
    endless = replace(conversations.QWEN3, ends=("<|none|>",))
    monkeypatch.setattr(type(clip.tokenizer.qwen3_4b), "conversation", endless)
    said(clip, "a", 1, **GREEDY)
    assert "qwen3_4b has none of the tokens that end an answer (<|none|>)" in caplog.text


def test_a_layer_of_its_own_turns_states_into_words_and_pictures_are_seen(folder: Path) -> None:
    clip = loaded(folder, "qwen25")
    assert "qwen25_7b.transformer.lm_head.weight" in clip.get_sd()
    answers = []
    for shade in (0.0, 1.0):
        image = torch.full((2, 56, 84, 3), shade)
        tokens = clip.tokenize("What?", image=image, thinking=False)
        (chunk,) = tokens["qwen25_7b"]
        assert sum(isinstance(token, dict) for token, _ in chunk) == 2
        answers.append(clip.generate(tokens, max_length=16, do_sample=False))
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", ["qwen3vl", "hub"])
def test_qwen3_vl_sees_pictures_in_both_layouts_of_its_file(folder: Path, name: str) -> None:
    clip = loaded(folder, name)
    encoder = clip.cond_stage_model.qwen3vl
    config = encoder.transformer.visual.config
    assert (config.num_heads, config.deepstack_visual_indexes) == (1, (5, 11, 17))
    assert encoder.transformer.config.rope_theta == 5e6
    image = torch.ones(2, 256, 288, 3)
    answers = []
    for shade in (0.0, 1.0):
        tokens = clip.tokenize("What?", image=image * shade, thinking=False)
        answers.append(clip.generate(tokens, max_length=8, do_sample=False))
    assert answers[0] != answers[1]
    assert answers[0] != said(clip, "What?", 8, **GREEDY)
    plain = clip.encode_from_tokens(clip.tokenize("a cat"))
    seen = clip.encode_from_tokens(clip.tokenize("a cat", images=[image[:1]]))
    assert seen.shape[1] == plain.shape[1] + 72 + 2  # its rows, and the marks around them


def test_qwen35_writes_and_sees_from_its_file(folder: Path) -> None:
    clip = loaded(folder, "qwen35")
    network = clip.cond_stage_model.qwen35.transformer
    config = network.config
    assert (config.delta, config.delta_layers) == (DELTA["delta"], (0, 1, 2))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 256)
    answers = []
    for shade in (0.0, 1.0):
        tokens = clip.tokenize("What?", image=torch.full((1, 256, 256, 3), shade), thinking=False)
        answers.append(clip.generate(tokens, max_length=8, do_sample=False))
    assert answers[0] != answers[1]
    assert said(clip, "a cat", seed=7) == said(clip, "a cat", seed=7)
    (text,) = clip.tokenize("a cat", skip_template=True)["qwen35"]
    ids = said(clip, "a cat", **GREEDY)
    with torch.inference_mode():
        states = network(torch.tensor([[token for token, _ in text] + ids]))[0]
        again = network.scores(states[0, len(text) - 1 : -1]).argmax(-1)
    assert again.tolist() == ids
    assert clip.encode_from_tokens(clip.tokenize("a cat")).shape[-1] == 128


def test_qwen35_takes_no_vocabulary_of_another_qwen(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "qwen35.safetensors", tmp_path)
    shutil.copy(folder / "qwen_tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"Qwen 3\.5 were not found.*qwen35_tokenizer"):
        loaded(tmp_path, "qwen35")
    assert qwen.find_qwen_pieces([str(tmp_path)]) == str(tmp_path / "tokenizer.json")
    made = json.loads((folder / "qwen_tokenizer.json").read_text())
    for number, token in enumerate(made["added_tokens"]):
        token["id"] = 248044 + number
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert qwen35.find_pieces([str(tmp_path)]) == str(tmp_path / "tokenizer.json")
    assert qwen.find_qwen_pieces([str(tmp_path)]) != str(tmp_path / "tokenizer.json")


def test_memory_of_fixed_size_is_counted_once(folder: Path) -> None:
    encoder: Any = loaded(folder, "qwen35").cond_stage_model.qwen35
    few, many = (generation.memory_needed(encoder, 5, length, CPU) for length in (100, 200))
    one_layer_and_its_copy = 2 * 2 * 256 * 100 * 4
    assert many - few == one_layer_and_its_copy


@pytest.mark.parametrize("name", ["qwen3vl", "qwen35"])
def test_a_part_of_the_weights_of_a_model_that_sees_writes_the_same(
    folder: Path, name: str
) -> None:
    image = torch.rand(1, 256, 288, 3, generator=torch.Generator().manual_seed(1))
    with simulated_accelerator() as accelerator:
        clip = loaded(folder, name)
        tokens = clip.tokenize("What?", image=image, thinking=False)
        expected = clip.generate(tokens, max_length=6, do_sample=False)
        whole = torch.accelerator.max_memory_allocated(0)
        residency.unload_all_models()
        size = sum(value.nbytes for value in clip.cond_stage_model.state_dict().values())
        accelerator.set_capacity(int(whole - 0.4 * size), 0)
        assert clip.generate(tokens, max_length=6, do_sample=False) == expected
        assert 0 < clip.patcher.loaded_size() < size


def test_a_picture_tower_of_unknown_depth_and_experts_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    pieces_file(tmp_path)
    shallow = weights({"vision_config": {**DEEP_TOWER, "depth": 18}}, Qwen3VL)
    save_file(shallow, tmp_path / "shallow.safetensors")
    with pytest.raises(Exception, match=r"shallow.*18 layers; towers with 24 and 27"):
        loaded(tmp_path, "shallow")
    experts = {**weights({}), "model.layers.0.mlp.gate.weight": torch.zeros(2, 128)}
    save_file(experts, tmp_path / "experts.safetensors")
    with pytest.raises(Exception, match=r"language model with experts.*cannot run yet"):
        loaded(tmp_path, "experts")


@pytest.mark.parametrize(
    ("name", "size"), [("qwen25", (56, 140)), ("qwen3vl", (256, 384)), ("qwen35", (256, 384))]
)
def test_words_behind_a_picture_have_its_places(
    folder: Path, name: str, size: tuple[int, int]
) -> None:
    """Word by word and at once: a picture counts as its longer side, not as its rows."""
    clip = loaded(folder, name)
    _, encoder = generation.writer_in(clip.cond_stage_model)
    tokens = [1, 2, {"type": "image", "data": torch.rand(1, *size, 3)}, 3]
    written = generation.write(encoder, tokens, Choice(do_sample=False), 4, ())
    again = [
        generation.write(encoder, tokens + written[:n], Choice(do_sample=False), 1, ())[0]
        for n in range(4)
    ]
    assert again == written


@pytest.mark.parametrize(
    ("name", "message"),
    [("headless", "lacks lm_head.weight"), ("cut", "lacks its last layers")],
)
def test_a_file_without_its_end_is_refused(folder: Path, name: str, message: str) -> None:
    clip = loaded(folder, name)
    with pytest.raises(ValueError, match=rf"{message}.*load a file of Qwen 2\.5"):
        said(clip, "a cat")


def test_pictures_are_refused_where_none_are_seen(folder: Path) -> None:
    clip = loaded(folder, "qwen3")
    with pytest.raises(ValueError, match="image: this text encoder sees no pictures"):
        clip.tokenize("What?", image=torch.zeros(1, 56, 56, 3), thinking=False)
    seeing = loaded(folder, "qwen25")
    with pytest.raises(ValueError, match=r"places for 1 of 2 pictures.*use_default_template"):
        seeing.tokenize("<|image_pad|>", image=torch.zeros(2, 56, 56, 3), skip_template=True)


def test_nothing_cannot_be_continued(folder: Path) -> None:
    clip = loaded(folder, "qwen3")
    with pytest.raises(ValueError, match=r"prompt: it is empty.*switch use_default_template on"):
        clip.tokenize("", skip_template=True)
    assert clip.tokenize("", skip_template=False)["qwen3_4b"][0]


def test_progress_counts_words_and_cancelling_takes_effect_at_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, int]] = []

    def hook(value: float, total: int, *_: Any, **__: Any) -> None:
        seen.append((value, total))
        if value == 5 and len(seen) > 20:
            interrupt.interrupt_current_processing()

    monkeypatch.setattr(progress, "PROGRESS_BAR_HOOK", hook)
    clip = loaded(folder, "qwen3")
    said(clip, "a cat", 20, **GREEDY)
    assert [value for value, _ in seen[:20]] == list(range(1, 21))
    seen[20:] = []
    with pytest.raises(interrupt.InterruptProcessingException):
        said(clip, "a cat", 20, **GREEDY)
    assert seen[-1] == (5, 20)


def test_weights_of_few_bits_write(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces_file(tmp_path)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    theirs = {}
    for key, value in weights({}).items():
        name = key.replace("model.layers.", "blk.")
        for long, short in names.items():
            name = name.replace(long, short)
        theirs[name] = value
    facts = {"general.architecture": "qwen3"}
    path = gguf_files.write(tmp_path / "q8.gguf", theirs, "Q8_0", facts)
    few = text_loading.load_clip([str(path)])
    said_by_few, said_by_all = (
        said(one, "a", 4, **GREEDY) for one in (few, loaded(folder, "qwen3"))
    )
    assert (len(said_by_few), said_by_few[0]) == (4, said_by_all[0])
    monkeypatch.setattr(accelerators, "cpu_multiplies_bf16", lambda: True)
    network = few.cond_stage_model.qwen3_4b.transformer
    assert generation.computing_dtype(network, CPU) == torch.bfloat16


def test_a_device_that_holds_a_part_of_the_weights_writes_the_same(folder: Path) -> None:
    with simulated_accelerator() as accelerator:
        clip = loaded(folder, "qwen3")
        expected = said(clip, "a cat", 8, **GREEDY)
        whole = torch.accelerator.max_memory_allocated(0)
        residency.unload_all_models()
        size = sum(value.nbytes for value in clip.cond_stage_model.state_dict().values())
        accelerator.set_capacity(int(whole - 0.4 * size), 0)
        assert said(clip, "a cat", 8, **GREEDY) == expected
        assert 0 < clip.patcher.loaded_size() < size


def test_more_words_than_the_machine_can_hold_are_refused(folder: Path) -> None:
    clip = loaded(folder, "qwen3")
    with pytest.raises(memory.NotEnoughMemory, match="writing 1000000000 words behind 5 tokens"):
        said(clip, "a cat", 10**9)


def test_the_table_of_words_counts_where_it_is_cast_for_every_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "cpu_multiplies_bf16", lambda: False)
    encoder: Any = loaded(folder, "qwen3", dtype=torch.float32).cond_stage_model.qwen3_4b
    whole = generation.memory_needed(encoder, 5, 8, CPU)
    table = encoder.transformer.model.embed_tokens
    table.weight.data = table.weight.data.to(torch.bfloat16)
    cast = 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    assert generation.memory_needed(encoder, 5, 8, CPU) == whole + cast


def test_what_only_writing_needs_gives_way_first(folder: Path) -> None:
    with simulated_accelerator():
        clip = loaded(folder, "qwen25")
        expected = clip.encode("a cat")
        network = clip.cond_stage_model.qwen25_7b.transformer
        size = sum(value.nbytes for value in clip.cond_stage_model.state_dict().values())
        clip.patcher.detach()
        clip.patcher.load(clip.patcher.load_device, size - network.lm_head.weight.nbytes)
        places = {name: value.device.type for name, value in network.named_parameters()}
        assert [name for name, place in places.items() if place == "cpu"] == ["lm_head.weight"]
        assert torch.equal(clip.encode("a cat"), expected)
        said_so = said(clip, "a cat", 4, **GREEDY)
    assert said_so == said(loaded(folder, "qwen25"), "a cat", 4, **GREEDY)


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        (Choice(top_k=2, top_p=1.0), {0, 1}),
        (Choice(top_k=0, top_p=0.6), {0, 1}),
        (Choice(top_k=0, top_p=0.0), {0}),
        (Choice(top_k=0, top_p=1.0, min_p=0.3), {0, 1, 2}),
        (Choice(top_k=0, top_p=1.0), {0, 1, 2, 3}),
        (Choice(top_k=0, top_p=0.6, temperature=100.0), {0, 1, 2}),
    ],
)
def test_unlikely_words_are_left_out(choice: Choice, allowed: set[int]) -> None:
    scores = torch.tensor([0.5, 0.25, 0.2, 0.05]).log()
    chance = torch.Generator().manual_seed(1)
    assert {next_word(scores, choice, [], chance) for _ in range(150)} == allowed


def test_chance_has_the_probabilities_of_the_words() -> None:
    scores = torch.tensor([0.5, 0.25, 0.2, 0.05]).log()
    chance, choice = torch.Generator().manual_seed(1), Choice(top_k=0, top_p=1.0)
    drawn = torch.tensor([next_word(scores, choice, [], chance) for _ in range(600)])
    shares = drawn.bincount(minlength=4) / 600
    torch.testing.assert_close(shares, scores.exp(), atol=0.06, rtol=0)


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (Choice(False), 0),
        (Choice(False, repetition_penalty=2.0), 1),
        (Choice(False, presence_penalty=1.5), 1),
        (Choice(False, repetition_penalty=0.5), 0),
    ],
)
def test_words_that_were_written_become_unlikelier(choice: Choice, word: int) -> None:
    scores = torch.tensor([3.0, 2.0, -1.0])
    assert next_word(scores, choice, [0, 2, 0], torch.Generator()) == word
    assert scores.tolist() == [3.0, 2.0, -1.0]


def test_scores_that_are_no_numbers_are_told() -> None:
    with pytest.raises(ValueError, match="not finite numbers"):
        next_word(torch.tensor([1.0, float("nan")]), Choice(), [], torch.Generator())


def test_a_tokens_dict_of_another_encoder_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="tokens of qwen3_4b were expected, found those of l"):
        loaded(folder, "qwen3").generate({"l": [[(1, 1.0)]]})
