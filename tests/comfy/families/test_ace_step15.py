"""ACE-Step 1.5: its network beside recorded figures, codes, and small files from text to sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

import folder_paths
from comfy import loading, lora, text_loading
from comfy.families.ace_step15 import ACEStep15, read_ace_step15_config
from comfy.families.family import BrokenModelError
from comfy.ldm.ace.conditions15 import CODES, Quantizer
from comfy.ldm.ace.layers15 import near_mask
from comfy.ldm.ace.model15 import AceStep15
from comfy.ldm.audio.autoencoder import AudioOobleckVAE
from comfy.ldm.llm.model import DecoderLLM
from comfy.ops import disable_weight_init, manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders import codes15
from comfy.text_encoders.ace15 import QWEN3_4B, SMALL, WIDTH, Song
from comfy.text_encoders.codes15 import CodeChoice, next_code
from comfy.vae.vae import VAE
from comfy.weights.weight_norm import parted
from comfy_extras.audio.latents import VAEDecodeAudio
from comfy_extras.nodes_ace import (
    EmptyAceStep15LatentAudio,
    TextEncodeAceStepAudio15,
    read_silence,
)
from comfy_nodes.conditioning import ConditioningZeroOut
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.small_files import PREFIX, prefixed, write
from tests.comfy.families.test_transformers import random_like

HEADS = {"heads": 4, "groups": 2, "head": 8, "inner": 40}
SIZES: dict[str, Any] = {
    "in_channels": 192, "out_channels": 64, "patch_size": 2, "text_dim": 24, "quantized": 32,
    "cells_of_code": 5,
    "decoder": {**HEADS, "width": 48, "layers": 3},
    "lyrics": {**HEADS, "width": 32, "layers": 3},
    "timbre": {**HEADS, "width": 32, "layers": 2},
    "tokenizer": {**HEADS, "width": 32, "layers": 1},
    "detokenizer": {**HEADS, "width": 32, "layers": 2},
}  # fmt: skip
FIRST, KNOWN = 120, 200  # of the small language model's words, the codes
VAE_SIZES: dict[str, Any] = {
    "in_channels": 2, "channels": 4, "latent_dim": 64, "c_mults": [1, 2, 2, 2, 2],
    "strides": [2, 4, 4, 6, 10],
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network(**sizes: Any) -> dict[str, Tensor]:
    """Weights of which none is one or turns a channel off."""
    weights = random_like(AceStep15(**{**SIZES, **sizes}), 4)
    return {
        key: value + 0.3 * rand(*value.shape, seed=len(key)) if value.ndim == 1 else value
        for key, value in weights.items()
    }


def loaded() -> AceStep15:
    model = AceStep15(**SIZES).eval()
    model.load_state_dict(network())
    return model


def inputs(length: int) -> dict[str, Any]:
    return {
        "x": rand(2, 64, length, seed=2),
        "timestep": torch.tensor([0.9, 0.13]),
        "context": rand(2, 9, 24, seed=3),
        "lyric_embed": rand(2, 300, 24, seed=5),
        "silence": rand(1, 64, 800, seed=6).expand(2, -1, -1),
        "audio_codes": torch.tensor([[0, 63999, 123, 4567], [1, 2, 3, 50000]]),
    }


# Velocities at channel 7 of the second latent and some cells, made by diffusers 0.42.1
# (AceStepTransformer1DModel, AceStepConditionEncoder, AceStepAudioTokenDetokenizer) in float32 from
# `network` and `inputs`. (cells, which inputs are left out or set) -> figures.
PLACES = [0, 5, 10, -3, -2, -1]
RECORDED: dict[tuple[int, str], list[float]] = {
    (601, "codes"): [14.166718, 16.795435, -9.224442, -3.716266, 31.126928, -0.272847],
    (601, "silence"): [19.605595, 11.059525, -22.423777, -3.894986, 31.249075, -0.753328],
    (601, "nothing"): [13.743559, 14.923581, -10.139645, -3.352076, 30.057835, 0.717137],
    (19, "codes"): [30.756985, 21.670263, 20.679529, 33.260426, 43.73082, 3.190068],
    (19, "silence"): [7.216758, 10.249416, -8.673982, -1.644435, 26.527304, 37.021023],
    (19, "nothing"): [27.792406, 21.414677, 21.570122, 32.656025, 44.21946, 4.279364],
}


@pytest.mark.parametrize(("length", "case"), RECORDED)
def test_the_network_makes_the_recorded_velocity(length: int, case: str) -> None:
    given = inputs(length)
    if case == "silence":
        del given["audio_codes"]
    if case == "nothing":
        given["is_told_nothing"] = True
    made = loaded()(**given)
    assert made.shape == (2, 64, length)
    wanted = torch.tensor(RECORDED[length, case])
    torch.testing.assert_close(made[1, 7, PLACES], wanted, rtol=1e-4, atol=1e-5)


def test_every_other_layer_sees_near_cells_only() -> None:
    assert near_mask(129, rand(1)) is None
    mask = near_mask(131, rand(1))
    assert mask is not None
    hidden = mask[0, 0] < 0
    assert hidden.nonzero().tolist() == [[0, 129], [0, 130], [1, 130], [129, 0], [130, 0], [130, 1]]


def test_digits_of_codes_are_places_between_minus_one_and_one() -> None:
    quantizer = Quantizer(6, disable_weight_init)
    quantizer.project_out.weight.copy_(torch.eye(6))
    quantizer.project_out.bias.zero_()
    made = quantizer.vectors(torch.tensor([[0, CODES - 1, 1, 8, 8 * 8 * 8 * 5 * 5 * 2]]))[0]
    torch.testing.assert_close(made[0], -torch.ones(6))
    torch.testing.assert_close(made[1], torch.ones(6))
    torch.testing.assert_close(made[2], torch.tensor([-5 / 7, -1, -1, -1, -1, -1]))
    torch.testing.assert_close(made[3], torch.tensor([-1, -5 / 7, -1, -1, -1, -1]))
    torch.testing.assert_close(made[4], torch.tensor([-1.0, -1, -1, -1, -1, 0]))


@pytest.mark.parametrize("name", ["attn1_output_patch", "attn2_output_patch"])
def test_patches_see_the_output_of_an_attention_of_each_layer(name: str) -> None:
    model, seen = loaded(), []

    def patch(attn: Tensor, told: dict[str, Any]) -> Tensor:
        seen.append((tuple(attn.shape), told["n_heads"], told["block_index"]))
        return attn * 0

    given = inputs(5)
    patched = model(**given, transformer_options={"patches": {name: [patch]}})
    assert seen == [((2, 3, 32), 4, number) for number in range(3)]
    assert not torch.allclose(patched, model(**given))


# -- the family and its files ---------------------------------------------------------------------


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    assert read_ace_step15_config(weights) == {"audio_model": "ace1.5", **SIZES}
    assert read_ace_step15_config({"genre_embedder.weight": rand(1)}) is None
    del weights["detokenizer.special_tokens"]
    with pytest.raises(BrokenModelError, match=r"ACE-Step 1\.5, but detokenizer\.special_tokens"):
        read_ace_step15_config(weights)


def pieces(folder: Path) -> None:
    """A vocabulary of Qwen's kind that has words for codes."""
    words = [*"abcdefghijklmnopqrstuvwxyz0123456789", "<unk>", "\u0120", ":", "#", "-", "\u010a"]
    words += [f"w{n}" for n in range(len(words), FIRST - 3)]
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", codes15.FIRST_WORD]
    made.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    assert made.token_to_id(codes15.FIRST_WORD) == FIRST
    made.save(str(folder / "qwen_tokenizer.json"))


def language_model(width: int, words: int) -> dict[str, Tensor]:
    sizes = {
        "vocab_size": words, "hidden_size": width, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "qk_norm": True,
    }  # fmt: skip
    return random_like(DecoderLLM(sizes, None, "cpu", manual_cast), width)


def autoencoder() -> dict[str, Tensor]:
    return parted(random_like(AudioOobleckVAE(**VAE_SIZES), 5))


@pytest.fixture
def silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of silence among the models."""
    path = tmp_path / "silence_latent.pt"
    torch.save(rand(1, 64, 90, seed=8), path)
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda _kind: [str(tmp_path)])
    return path


def checkpoint(folder: Path) -> str:
    pieces(folder)
    tensors = prefixed(network(text_dim=WIDTH), PREFIX) | prefixed(autoencoder(), "vae.")
    for name, width in ((SMALL, WIDTH), (QWEN3_4B, 32)):
        model = language_model(width, FIRST + KNOWN)
        tensors |= prefixed(model, f"text_encoders.{name}.transformer.")
    path = str(folder / "ace_step15.safetensors")
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return path


def write_parts(models: Path) -> None:
    """Files of single parts in a server's folders, the encoders with their vocabulary apart."""
    encoders = models / "text_encoders" / "ace15"
    encoders.mkdir()
    pieces(encoders)
    write(network(text_dim=WIDTH), models / "diffusion_models" / "ace15.safetensors")
    write(autoencoder(), models / "vae" / "ace15.safetensors")
    torch.save(rand(1, 64, 90, seed=8), models / "vae" / "silence_latent.pt")
    write(language_model(WIDTH, FIRST + KNOWN), encoders / "small.safetensors")
    write(language_model(2048, FIRST + KNOWN), encoders / "writer.safetensors")


def told(clip: Any, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "tags": "a red cat", "lyrics": "la la", "seed": 3, "bpm": 90, "duration": 1.0,
        "timesignature": "4", "language": "en", "keyscale": "E minor",
        "generate_audio_codes": True, "cfg_scale": 2.0, "temperature": 0.85, "top_p": 0.9,
        "top_k": 0, "min_p": 0.0,
    }  # fmt: skip
    return TextEncodeAceStepAudio15.execute(clip, **{**options, **changes})[0]


def sampled(found: Any, positive: Any, cfg: float = 2.0) -> Tensor:
    (negative,) = ConditioningZeroOut().zero_out(positive)
    latent = EmptyAceStep15LatentAudio.execute(1.2, 1)[0]
    assert latent["samples"].shape == (1, 64, 30)
    made = common_ksampler(found.model, 3, 2, cfg, "euler", "simple", positive, negative, latent)
    samples: Tensor = made[0]["samples"]
    return samples


@pytest.mark.usefixtures("silence")
def test_text_and_lyrics_become_a_sound_and_survive_saving(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    found: Any = loading.load_checkpoint_guess_config(path)
    assert isinstance(found.model.model.model_config, ACEStep15)
    positive = told(found.clip)
    made = sampled(found, positive)
    assert made.isfinite().all()
    assert not torch.allclose(made, sampled(found, told(found.clip, lyrics="lo")))
    assert not torch.allclose(made, sampled(found, told(found.clip, generate_audio_codes=False)))
    assert not torch.allclose(made, sampled(found, positive, cfg=1.0))
    sound = VAEDecodeAudio.execute(found.vae, {"samples": made})[0]
    assert sound["waveform"].shape == (1, 2, 30 * 1920)
    assert sound["sample_rate"] == 48000
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, found.clip, found.vae)
    assert set(load_file(path)) - set(load_file(again_path)) == set()
    again: Any = loading.load_checkpoint_guess_config(again_path)
    assert torch.equal(sampled(again, told(again.clip)), made)


def test_files_of_single_parts_are_loaded_together(tmp_path: Path, silence: Path) -> None:
    pieces(tmp_path)
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in ("net", "vae", "small", "lm")}
    save_file(network(text_dim=WIDTH), paths["net"])
    save_file(autoencoder(), paths["vae"])
    save_file(language_model(WIDTH, FIRST + KNOWN), paths["small"])
    save_file(language_model(32, FIRST + KNOWN), paths["lm"])
    model = loading.load_diffusion_model(paths["net"])
    vae = VAE(sd=load_file(paths["vae"]))
    assert vae.latent_channels == 64
    kind = text_loading.CLIPType.ACE
    clip = text_loading.load_clip([paths["small"], paths["lm"]], clip_type=kind)
    [[states, options]] = told(clip, duration=2.4)
    assert states.shape[2] == WIDTH
    assert options["audio_codes"].shape == (1, 12)
    assert 0 <= int(options["audio_codes"].min()) <= int(options["audio_codes"].max()) < KNOWN
    table = load_file(paths["small"])["model.embed_tokens.weight"]
    ids = [token for token, _ in clip.tokenize("", song=Song("", "la la"))["lyrics"][0]]
    torch.testing.assert_close(options["conditioning_lyrics"][0], table[ids])
    alone = text_loading.load_clip([paths["small"]], clip_type=kind)
    assert "audio_codes" not in told(alone, generate_audio_codes=False)[0][1]
    with pytest.raises(ValueError, match=r"no language model.*DualCLIPLoader.*generate_audio_code"):
        told(alone)
    reader = text_loading.load_clip([paths["small"]])
    assert reader.encode("a cat").shape[2] == WIDTH
    base = model.model
    given = {"noise": rand(1, 64, 30), "device": "cpu", "cross_attn": states}
    with pytest.raises(ValueError, match=r"with lyrics.*TextEncodeAceStepAudio1\.5"):
        base.extra_conds(**given)
    given["conditioning_lyrics"] = options["conditioning_lyrics"]
    with pytest.raises(ValueError, match=r"no latent of silence.*TextEncodeAceStepAudio1\.5"):
        base.extra_conds(**given)
    with pytest.raises(ValueError, match=r"\[1, 64, cells\] was expected, found shape \[1, 8, 3\]"):
        base.extra_conds(**given, silence_latent=rand(1, 8, 3))
    given["silence_latent"] = options["silence_latent"]
    made = base.extra_conds(**given, audio_codes=torch.tensor([[5]]))
    assert made["silence"].cond.shape == (1, 64, 750)
    assert not made["is_told_nothing"].cond
    assert base.extra_conds(**{**given, "cross_attn": states * 0})["is_told_nothing"].cond
    with pytest.raises(ValueError, match=r"0\.\.63999, found 5\.\.64000"):
        base.extra_conds(**given, audio_codes=torch.tensor([[5, CODES]]))


def test_a_song_without_a_file_of_silence_is_refused_before_codes_are_written(
    tmp_path: Path, silence: Path
) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    silence.unlink()
    with pytest.raises(FileNotFoundError, match=r"silence_latent\.pt was not found.*Ace-Step1\.5"):
        told(found.clip)
    torch.save(rand(1, 64, 90), silence)  # it may come later
    assert told(found.clip)[0][1]["silence_latent"].shape == (1, 64, 90)


def test_a_damaged_file_of_silence_is_named(tmp_path: Path) -> None:
    path = tmp_path / "silence_latent.pt"
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"silence_latent\.pt cannot be read"):
        read_silence(path)
    for held in ({"a": rand(1)}, rand(1, 64), torch.empty(1, 64, 0)):
        torch.save(held, path)
        with pytest.raises(ValueError, match="holds no latent of silence"):
            read_silence(path)


def test_loras_reach_the_decoder_under_the_trainers_and_the_library_s_names(tmp_path: Path) -> None:
    path = str(tmp_path / "net.safetensors")
    save_file(network(), path)
    model: Any = loading.load_diffusion_model(path)
    names = lora.model_lora_keys_unet(model.model, {})
    at = "diffusion_model.decoder.layers.1."
    for name, key in {
        "base_model.model.layers.1.self_attn.q_proj": "self_attn.q_proj.weight",
        "base_model.model.decoder.layers.1.cross_attn.o_proj": "cross_attn.o_proj.weight",
        "diffusion_model.decoder.layers.1.mlp.up_proj": "mlp.up_proj.weight",
        "transformer.layers.1.self_attn.to_k": "self_attn.k_proj.weight",
        "transformer.layers.1.cross_attn.to_out.0": "cross_attn.o_proj.weight",
    }.items():
        assert names[name] == at + key


# -- codes ----------------------------------------------------------------------------------------


def test_what_the_encoders_read_is_told_of_the_song() -> None:
    song = Song("pop", "la", 95, 120.7, "4", "de", "E minor")
    assert song.style_text("Do:") == (
        "# Instruction\nDo:\n\n# Caption\npop\n\n# Metas\n- bpm: 95\n- timesignature: 4\n"
        "- keyscale: E minor\n- duration: 120 seconds\n<|endoftext|>\n<|endoftext|>"
    )
    assert song.lyrics_text() == "# Languages\nde\n\n# Lyric\nla<|endoftext|><|endoftext|>"
    facts = "<think>\nbpm: 95\nduration: 120\nkeyscale: E minor\ntimesignature: 4\n</think>"
    assert facts in song.codes_text(True)
    assert "<think>\n\n</think>" in song.codes_text(False)


def test_codes_are_those_of_the_guided_scores(tmp_path: Path) -> None:
    pieces(tmp_path)
    weights = language_model(32, FIRST + KNOWN)
    path = str(tmp_path / "lm.safetensors")
    small = str(tmp_path / "small.safetensors")
    save_file(weights, path)
    save_file(language_model(WIDTH, FIRST + KNOWN), small)
    clip = text_loading.load_clip([small, path], clip_type=text_loading.CLIPType.ACE)
    tokens = clip.tokenize("", song=Song("cat", duration=1.0), choice=CodeChoice(3.0, 0.0))
    asked, less = (
        [token for token, _ in tokens[name][0]] for name in ("codes_prompt", "codes_negative")
    )
    made = clip.encode_from_tokens(tokens, return_dict=True)["audio_codes"][0].tolist()
    network = clip.cond_stage_model.qwen3_4b.transformer
    expected: list[int] = []
    for _ in range(5):  # without a cache: all is read anew for each code
        behind = [FIRST + code for code in expected]
        cond, uncond = (
            network.scores(network(torch.tensor([ids + behind]))[0][0, -1])[FIRST:]
            for ids in (asked, less)
        )
        expected.append(int((uncond + 3.0 * (cond - uncond)).argmax()))
    assert made == expected


def test_chance_is_narrowed_before_it_is_spread() -> None:
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0])

    def drawn(**options: Any) -> set[int]:
        choice = CodeChoice(temperature=50.0, **{"top_p": 1.0, **options})
        chance = torch.Generator().manual_seed(1)
        return {next_code(scores, choice, chance) for _ in range(80)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.7) == {0, 1}
    assert drawn(min_p=0.1) == {0, 1, 2}
    assert next_code(scores, CodeChoice(temperature=0.0), torch.Generator()) == 0
    with pytest.raises(ValueError, match="not finite"):
        next_code(scores * torch.nan, CodeChoice(), torch.Generator())


@pytest.mark.usefixtures("silence")
def test_a_language_model_without_words_for_codes_is_refused(tmp_path: Path) -> None:
    pieces(tmp_path)
    paths = [str(tmp_path / name) for name in ("small.safetensors", "lm.safetensors")]
    save_file(language_model(WIDTH, FIRST + KNOWN), paths[0])
    save_file(language_model(32, FIRST), paths[1])
    clip = text_loading.load_clip(paths, clip_type=text_loading.CLIPType.ACE)
    with pytest.raises(ValueError, match=rf"knows {FIRST} words.*begin at {FIRST}.*ace15"):
        told(clip)
